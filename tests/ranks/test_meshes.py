"""Pairs of meshes: what any ranks saved together, any other ranks have again, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier, unreferenced
from support.mesh_states import Job, Part, Truth, check_filled, check_loaded, jobs, state_of
from support.thread_ranks import as_ranks

import tierstate as ts
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.history.log import Log
from tierstate.tiers.registry import open_tier

pytestmark = [pytest.mark.slow, pytest.mark.clock_numbers]

CALM = Timeouts(timeout=100.0, silence=20.0)


class Tiers(NamedTuple):
    """The tiers of a job: what stands before a disk per host and a folder for all, or in their place.

    Attributes:
        front: a tier before all others, if there is one.
        site: keys of the one for all; None for none.
        chunk: bytes.
    """

    front: str | None
    local: dict[str, Any]
    site: dict[str, Any] | None
    chunk: str

    def of(self, place: Path, host: int) -> ts.Policy:
        """The policy on one host."""
        tiers = {"front": {"type": self.front}} if self.front else {}
        tiers["local"] = tier("nvme", place / f"host-{host}", **self.local)
        if self.site is not None:
            tiers["site"] = tier("lustre", place, **self.site)
        return policy(tiers, chunk=self.chunk, arena={"size": "256KiB"})

    def all(self, place: Path) -> ts.Policy:
        """That of a process to which every host's disk is at hand."""
        tiers = {f"host{h}": tier("nvme", place / f"host-{h}", **self.local) for h in range(3)}
        if self.site is not None:
            tiers["site"] = tier("lustre", place, **self.site)
        return policy(tiers, chunk=self.chunk, durable="host0")


@st.composite
def tiers(draw: st.DrawFn) -> Tiers:
    keys = st.sampled_from([{}, {}, {"codec": "auto"}, {"codec": "delta"}, {"codec": "fast"}])
    site = draw(st.one_of(st.none(), keys.flatmap(lambda k: st.sampled_from([k, {**k, "every": 2}]))))
    return Tiers(
        draw(st.sampled_from([None, "memory", "host"])), draw(keys), site, draw(st.sampled_from(["4KiB", "16KiB"]))
    )


class Story:
    """A job that goes from world to world, with every Checkpointer real and ranks as threads."""

    def __init__(self, job: Job, where: Tiers, place: Path) -> None:
        self.job, self.where, self.place = job, where, place
        self.truth: list[Truth] = []

    def run(self) -> None:
        """All of it."""
        for part in self.job.parts:
            hosts = sorted(set(part.hosts))
            known = self._whole(hosts)
            ranks(part, lambda team, part=part, known=known: self._rank(team, part, known))
            for contents in part.saves:
                self.truth.append(Truth(len(self.truth), contents, part.size, not self.truth))
            self._look()

    def _rank(self, team: Team, part: Part, known: Sequence[int]) -> None:
        host = part.hosts[team.rank]
        with ts.Checkpointer(self.where.of(self.place, host), "run", team if part.size > 1 else None) as ckpt:
            if known:
                self._restore(ckpt, team.rank, part, known)
            for step, contents in enumerate(part.saves, len(self.truth)):
                save = ckpt.save(state_of(self.job, part, team.rank, contents, step, late=step > 0), step=step)
                save.wait("local")
        # Which waits until all is where it is to be.

    def _restore(self, ckpt: ts.Checkpointer, rank: int, part: Part, known: Sequence[int]) -> None:
        named = known[-1 - min(part.back or 0, len(known) - 1)]
        if part.back is None and named == len(self.truth) - 1:  # a newer one may be whole for some states
            named = None
        truth = self.truth[known[-1] if named is None else named]
        late = not truth.first
        into = state_of(self.job, part, rank, [97] * len(self.job.tensors), 1000, late=late)
        assert ckpt.restore(into, step=named) is into
        assert ckpt.restored is not None
        assert ckpt.restored.step == truth.step
        check_filled(self.job, part, rank, into, truth)
        if part.only is not None:
            into = state_of(self.job, part, rank, [97] * len(self.job.tensors), 1000, late=late)
            ckpt.restore(into, step=named, only=part.only)
            check_filled(self.job, part, rank, into, truth, part.only)
        check_loaded(self.job, ckpt.load(step=named, only=part.only), truth, part.only)

    def _tiers(self) -> list[tuple[str, Any]]:
        spec = self.where.all(self.place)
        return [(t.name, open_tier(t.name, t.type, t.options)) for t in spec.tiers]

    def _whole(self, hosts: Sequence[int]) -> list[int]:
        """Steps that ranks on these hosts find whole."""
        found: dict[int, Any] = {}
        for name, where in self._tiers():
            if name == "site" or int(name[4:]) in hosts:
                log = Log(where, "run")
                for record in map(log.read, log.seqs()):
                    step, present = record.version.head.step, record.layout.present
                    found[step] = found[step] | present if step in found else present
            where.close()
        return sorted(step for step, present in found.items() if bool(np.all(present)))

    def _look(self) -> None:
        """One process finds all that was saved, and nothing else."""
        with ts.Checkpointer(self.where.all(self.place), "run") as alone:
            assert [v.step for v in alone.versions()] == [truth.step for truth in self.truth]
            alone.prune(grace=0)  # a pack of which another rank's copies were kept is named by no record
            report = alone.verify(deep=True)
            assert report.ok, report
            for truth in self.truth:
                check_loaded(self.job, alone.load(step=truth.step), truth)
        for _, where in self._tiers():
            assert unreferenced(where, "run") == set()
            where.close()
        assert not [path for path in self.place.rglob("*") if "-part-" in path.name or path.name.startswith(".tmp")]


def ranks(part: Part, function: Any) -> list[Any]:
    """What each rank gave; errors are raised."""
    found = as_ranks(part.hosts, function, timeouts=CALM)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


@settings(max_examples=10)
@given(job=jobs(most=4), where=tiers())
def test_any_ranks_have_again_what_any_others_saved(job: Job, where: Tiers) -> None:
    with scratch() as place:
        Story(job, where, place).run()


@pytest.mark.soak
@settings(max_examples=1000)
@given(job=jobs(), where=tiers())
def test_any_ranks_have_again_what_any_others_saved_a_thousand_times(job: Job, where: Tiers) -> None:
    with scratch() as place:
        Story(job, where, place).run()
