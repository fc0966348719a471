"""A rank loses the store by which ranks speak at any of its requests: nobody hangs, and what was told is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import thread_teams
from support.checkpointer_worlds import policy, scratch
from support.rank_jobs import check_versions, state_of
from support.thread_teams import Mortal, together

import tierstate as ts
from tierstate.engine.ranks.team.team import Team

pytestmark = pytest.mark.slow

HOSTS, STEPS = [0, 1, 1], [1, 2]

Told = list[tuple[int, str, ts.TierstateError | None]]
"""By step and tier, what a rank was told of its save."""


def save_all(place: Path, team: Team) -> Told:
    """Save all steps, whatever becomes of each."""
    told: Told = []
    tiers = {
        "near": {"type": "nvme", "path": str(place / f"host{HOSTS[team.rank]}")},
        "far": {"type": "lustre", "path": str(place / "all")},
    }
    ckpt = ts.Checkpointer(policy(tiers), "run", team)
    try:
        for step in STEPS:
            saved = ckpt.save(state_of(step, team.rank, team.size), step=step)
            for name in tiers:
                try:
                    saved.wait(name)
                except ts.TierstateError as error:
                    told.append((step, name, error))
                else:
                    told.append((step, name, None))
    except ts.TierstateError as error:
        told.append((0, "", error))
    finally:
        try:
            ckpt.close()
        except ts.TierstateError as error:
            told.append((0, "", error))
    return told


def steps_in(place: Path, kind: str) -> list[int]:
    """The steps in one tier, of which each is exact if all ranks share it."""
    with ts.Checkpointer(policy({"only": {"type": kind, "path": str(place)}}), "run") as ckpt:
        steps = [info.step for info in ckpt.versions()]
        if kind == "lustre":
            check_versions(ckpt, steps)
    return steps


def lose(place: Path, cut: dict[int, int]) -> None:
    """These ranks lose the store after so many requests each."""
    found = together(len(HOSTS), lambda team: save_all(place, team), hosts=HOSTS, cut=cut)
    assert all(isinstance(one, (list, ts.TierstateError)) for one in found), found
    far = steps_in(place / "all", "lustre") if (place / "all").exists() else []
    near = [steps_in(place / f"host{host}", "nvme") if (place / f"host{host}").exists() else [] for host in (0, 1)]
    for told in found:
        for step, name, error in told if isinstance(told, list) else ():
            if error is None:
                assert step in far if name == "far" else all(step in steps for steps in near), (found, far, near)


class Resets(Mortal):
    """A store that fails at once, with or without having done what was asked, where a `Mortal` never answers."""

    before = True

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            if self.left is None or self.calls <= self.left:
                return call(*args)
            if self.calls == self.left + 1 and not self.before:
                call(*args)
            raise RuntimeError("Connection reset by peer")

        return counted


class ResetsAfter(Resets):
    """One that has done it."""

    before = False


def lose_at_any(kind: type[Mortal], data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_teams, "Mortal", kind)
    with scratch() as place:
        # All goes well with about 90 requests; a rank that waits makes more.
        lose(place, {data.draw(st.integers(0, 2)): data.draw(st.integers(1, 120))})


KINDS = pytest.mark.parametrize("kind", [Mortal, Resets, ResetsAfter])
PATCHED = [HealthCheck.function_scoped_fixture]  # the same for all examples


@KINDS
@settings(max_examples=4, deadline=None, suppress_health_check=PATCHED)
@given(data=st.data())
def test_a_rank_that_loses_the_store_at_any_request_is_told_what_is_true(
    kind: type[Mortal], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    lose_at_any(kind, data, monkeypatch)


@pytest.mark.soak
@KINDS
@settings(max_examples=150, deadline=None, suppress_health_check=PATCHED)
@given(data=st.data())
def test_many_ranks_that_lose_the_store_at_any_request(
    kind: type[Mortal], monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    lose_at_any(kind, data, monkeypatch)
