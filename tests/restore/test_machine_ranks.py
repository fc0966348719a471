"""The proof for many ranks: any history of worlds that save and restore one state, beside a model of what is whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.checkpointer_worlds import policy, scratch
from support.leaks import idle, temporary
from support.mesh_states import Job, OnMesh, Part, Tensor, Truth, check_filled, check_loaded, lying, state_of
from support.scaled_thresholds import RANKS, Crossings
from support.storage_sites import Power, Site, known, tried
from support.thread_ranks import as_ranks
from support.tier_claims import Look, claimed, newest, unmended, whole

import tierstate as ts
from tierstate.engine.publish import backlog
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import RankFailed
from tierstate.manifest.format.layout import holds_chunks
from tierstate.tiers.backoff import Backoff

CALM = Timeouts(timeout=100.0, silence=20.0)
HOSTS = ("host0", "host1")
SITE = "site"
TENSORS = [
    Tensor(torch.float32, (64, 64), False, 0),
    Tensor(torch.bfloat16, (3000,), False, 0),
    Tensor(torch.uint8, (7, 33), False, 0),
    Tensor(torch.complex64, (), False, 0),
]
"""What changes hands: a tensor of several chunks, one whose chunks no mesh divides evenly, and short ones."""

SECONDS = 100.0
"""After which a wait is taken for one that never ends."""

STRIDE = 3
"""Steps between saves: what states say of their steps is then mostly of one length, and they are cut alike."""

OTHER = 1000
"""Of the contents before a restore."""

KEYS = st.fixed_dictionaries(
    {"codec": st.sampled_from(["raw", "raw", "delta", "auto", "fast"])}, optional={"keep": st.just({"last": 2})}
)
HITS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from(["flip", "flip", "truncate", "delete", "swap"]),
        st.integers(0, 99).map(lambda percent: percent / 100),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def worlds(draw: st.DrawFn) -> Part:
    """Ranks on one host or two, and how each tensor lies on them."""
    size = draw(st.integers(1, 4))
    hosts = tuple(sorted(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))))
    return Part(hosts, tuple(draw(lying(tensor.shape, size)) for tensor in TENSORS), ())


def cut(dim: int, ways: int) -> Part:
    """The long tensor cut along one dimension, and what else there is on all ranks of one host."""
    alone = OnMesh((ways, 1, 1), (None, None, None))
    mesh = OnMesh((ways, 1, 1), ((dim, 1), None, None))
    return Part((0,) * ways, (mesh, *[alone] * (len(TENSORS) - 1)), ())


class Ranks(RuleBasedStateMachine):
    """Worlds of ranks that come one after the other, and what happens to tiers between them.

    Attributes:
        truths: by number of the save, what it was of.
        calm: nothing has been damaged, lost or killed so far, so that nothing may fail.
        missed: the site is not the one that records name, so that no restore may take an older version for the newest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.place = self.stack.enter_context(scratch())
        self.job = Job(TENSORS, [])
        self.truths: list[Truth] = []
        self.contents = tuple(range(len(TENSORS)))
        self.emptied: set[str] = set()
        self.calm, self.missed = True, False

    @initialize(local=KEYS, site=KEYS)
    def begin(self, local: dict[str, Any], site: dict[str, Any]) -> None:
        made = {
            "host0": Site("nvme", self.place / "host0", io="buffered"),
            "host1": Site("nvme", self.place / "host1", io="threads"),
            SITE: Site("lustre", self.place, io="auto"),
        }
        self.sites = self.stack.enter_context(known(made))
        self.keys = {"host0": {"codec": "raw"}, "host1": local, SITE: site}
        # Columns, by which the state's rows are no runs of what is stored; then rows, of other ranks.
        self.run(cut(1, 2), [set(range(len(TENSORS))), set()])
        self.run(cut(1, 2), [{2}])
        self.run(cut(0, 3), [])

    def _policy(self, names: Sequence[str], **other: str) -> ts.Policy:
        """Over these places, some under another name."""
        tiers = {other.get(name, name): self.sites[name].keys(**self.keys[name]) for name in names}
        return policy(tiers, chunk="4KiB", arena={"size": "64KiB"})

    def _looks(self, names: Sequence[str] = (*HOSTS, SITE)) -> list[Look]:
        return [self.sites[name].look() for name in names]

    # Worlds

    @rule(part=worlds(), changes=st.lists(st.sets(st.integers(0, 3)), max_size=3))
    def run(self, part: Part, changes: list[set[int]]) -> None:
        """A world restores the newest version, and saves some more."""
        self._run(part, changes, None)
        if self.calm:
            self._check_whole()

    @rule(part=worlds(), changes=st.lists(st.sets(st.integers(0, 3)), max_size=3), after=st.integers(0, 80))
    def crash(self, part: Part, changes: list[set[int]], after: int) -> None:
        """A world of which all ranks die at once."""
        self.calm = False
        self._run(part, changes, after)

    def _run(self, part: Part, changes: Sequence[set[int]], after: int | None) -> None:
        power = Power()
        power.left = after
        for site in self.sites.values():
            site.power = power
        hosts = [HOSTS[host] for host in sorted(set(part.hosts))]
        right = newest(self._looks([*hosts, SITE]), None, False) if after is None and not self.missed else None
        first = len(self.truths)
        for which in changes:
            self.contents = tuple(c + 10 * (i in which) for i, c in enumerate(self.contents))
            self.truths.append(Truth(STRIDE * len(self.truths), self.contents, part.size, False))

        def rank(team: Team) -> int | None:
            spec = self._policy([HOSTS[part.hosts[team.rank]], SITE], host0="local", host1="local")
            ckpt, error = tried(lambda: ts.Checkpointer(spec, "run", team if part.size > 1 else None))
            self._expect(error)
            return None if ckpt is None else self._live(ckpt, team.rank, part, first)

        found = as_ranks(part.hosts, rank, timeouts=CALM)
        for one in sorted(found, key=lambda one: isinstance(one, RankFailed)):  # which is what others caused
            if isinstance(one, BaseException):
                raise one
        if after is None:
            restored = set(found)
            assert right is None or (None not in restored and min(restored) >= right), f"{found}, and not {right}"
            assert not self.calm or len(restored) == 1, found

    def _live(self, ckpt: ts.Checkpointer, rank: int, part: Part, first: int) -> int | None:
        """What one rank does; the number of the save that it restored."""
        into = state_of(self.job, part, rank, [97] * len(TENSORS), OTHER, late=True)
        _, error = tried(lambda: ckpt.restore(into))
        restored = None
        if error is None:
            assert ckpt.restored is not None
            restored = int(ckpt.restored.metadata["n"])
            assert ckpt.restored.step == STRIDE * restored
            check_filled(self.job, part, rank, into, self.truths[restored])
        for n in range(first, len(self.truths)):
            step = self.truths[n].step
            state = state_of(self.job, part, rank, self.truths[n].contents, step, late=True)
            how = {"step": step, "metadata": {"n": n}}
            save, error = tried(lambda state=state, how=how: ckpt.save(state, **how))  # type: ignore[misc]
            self._expect(error)
            if save is not None and n % 2 == 0:
                self._settle(ckpt, save)
        _, error = tried(ckpt.close)
        self._expect(error)
        return restored

    def _settle(self, ckpt: ts.Checkpointer, save: ts.Save) -> None:
        """Wait until a save is wherever it goes, and nothing is under way: then the next one looks for what is new."""
        for name in save.tiers:
            _, error = tried(lambda name=name: save.wait(name, SECONDS))  # type: ignore[misc]
            self._expect(error)
        end = time.monotonic() + SECONDS
        while not all(map(idle, ckpt._pipeline.queues.values())):
            assert time.monotonic() < end, "it never gets quiet"
            time.sleep(0.0005)

    def _expect(self, error: ts.TierstateError | None) -> None:
        """A failure is right only where something is amiss."""
        assert error is None or not self.calm, error

    def _check_whole(self) -> None:
        """Where nothing was amiss, all is there: of what is kept, nothing is missing or is too much."""
        looks = self._looks()
        versions = {claim.n: claim.record.version for look in looks for claim in claimed(look)}
        kept = len(self.truths) if "keep" not in self.keys[SITE] else 2
        assert set(versions) >= {n for n in range(len(self.truths))[-kept:]}
        for n in range(len(self.truths))[-kept:]:
            assert whole(versions[n], looks, None), n
        for look in looks:
            assert all(holds_chunks(key) for key in look.packs)

    # What happens to tiers

    @rule(which=st.integers(0, 2), hits=HITS, records=st.booleans())
    def damage(self, which: int, hits: list[tuple[int, str, float, int]], records: bool) -> None:
        site = self.sites[[*HOSTS, SITE][which]]
        for number, how, where, other in hits:
            if keys := site.objects("versions/run/" if records else "packs/run/"):
                self.calm = False
                site.damage(keys[number % len(keys)], how, where, keys[other % len(keys)])

    @rule(which=st.integers(0, 2))
    def lose(self, which: int) -> None:
        self.calm = False
        name = [*HOSTS, SITE][which]
        self.sites[name].lose(folders=True)
        # Records on hosts name it, and so its marker is missed: it may have a newer version, until somebody adopts
        # what stands in its place.
        self.missed = self.missed or name == SITE

    # One process that sees all

    @rule()
    def prune(self) -> None:
        with self._alone() as ckpt:
            report, error = tried(lambda: ckpt.prune(grace=0))
            self._expect(error)
        for told in report.tiers if report is not None else ():
            self.emptied |= set(told.repacked.packs)
            look = self.sites[told.tier].look()
            if self.calm:
                assert look.packs - self.emptied == look.named()

    @rule()
    def verify(self) -> None:
        looks = {name: site.look() for name, site in self.sites.items()}
        with self._alone() as ckpt:
            report = ckpt.verify(deep=True)
        told = {problem.tier for problem in report.problems}
        for name, look in looks.items():
            hit = unmended(look)
            assert name in told or not hit, f"{hit} of {name} are damaged, and verify does not see it"
            assert name not in told or self.sites[name].hits or not self.calm, report.problems

    @rule()
    def load_all(self) -> None:
        looks = self._looks()
        versions = {claim.record.version.id: claim for look in looks for claim in claimed(look)}
        with self._alone() as ckpt:
            for name, claim in versions.items():
                got, error = tried(lambda name=name: ckpt.load(version=name))  # type: ignore[misc]
                if error is None:
                    check_loaded(self.job, got, self.truths[claim.n])
                else:
                    assert not whole(claim.record.version, looks, None), f"save {claim.n} is whole: {error}"

    def _alone(self) -> ts.Checkpointer:
        for site in self.sites.values():
            site.power = Power()
        return ts.Checkpointer(self._policy([*HOSTS, SITE]), "run")

    def teardown(self) -> None:
        with self.stack:
            if hasattr(self, "sites"):
                self.load_all()
                self.verify()
                assert temporary(self.place) == []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is down is not tried again by itself, so that time decides nothing."""
    monkeypatch.setattr(backlog, "TIER_BACKOFF", Backoff(600.0, 600.0, 0.5))


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(Ranks, settings=settings(max_examples=examples, stateful_step_count=steps))


@pytest.mark.slow
def test_any_history_of_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = Crossings(monkeypatch)
    run(max(4, settings().max_examples // 12), 5)
    assert RANKS - set(+crossings.counts) == set(), crossings.counts


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_long_histories_of_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    crossings = Crossings(monkeypatch)
    run(max(200, settings().max_examples // 2), 20)
    assert RANKS - set(+crossings.counts) == set(), crossings.counts
