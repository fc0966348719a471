"""What one rank cannot do, or does otherwise than the others, fails or is left out on all, and holds up nobody."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.global_arrays import read
from support.saving_ranks import CALM, at, nvme, ranks, saved_alike, told
from support.thread_teams import together

import tierstate as ts
from tierstate.engine.ranks.save.save import SharedPipeline
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import RankFailed
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("big", [10, 1 << 18])
def test_a_structure_that_changes_on_one_rank_alone_holds_up_nobody(place: Path, big: int) -> None:
    def state(rank: int, step: int) -> dict[str, Any]:
        more = {i: torch.full((big,), float(i)) for i in range(step)} if rank == 1 else {}
        return {"w": torch.full((4096,), float(step)), "v": torch.ones(4096), "more": more}

    assert saved_alike(place, state, 4) == [[""] * 4] * 2
    for seq in (1, 2, 3, 4):
        _, found = read([at(place / "host0", "nvme")], "run", seq)
        assert np.all(found["w"] == seq - 1)
        assert all(np.all(found[f"more.{i}"] == i) for i in range(seq - 1))


def test_a_leaf_that_vanishes_on_its_owner_fails_that_save_everywhere_and_no_later_one(place: Path) -> None:
    """Whoever else has it saves it from then on."""
    names = ["a", "b", "c", "d"]

    def state(rank: int, step: int) -> dict[str, Any]:
        gone = ["a", "b"] if step >= 1 and rank == 0 else []  # of which rank 0 owns one at least
        return {name: torch.full((2048,), float(step)) for name in names if name not in gone}

    assert saved_alike(place, state, 4) == [["", "StateMismatch", "", ""]] * 2
    for seq in (3, 4):
        _, found = read([at(place / "host0", "nvme")], "run", seq)
        assert set(found) == set(names)


def test_values_that_are_not_alike_are_told_on_every_rank(place: Path) -> None:
    def state(rank: int, step: int) -> dict[str, Any]:
        return {"w": torch.ones(8), "n": rank if step == 1 else 7}

    assert saved_alike(place, state, 3) == [["", "StateMismatch", ""]] * 2


class Odd:
    """A value that cannot be saved."""


def test_a_rank_that_cannot_plan_fails_that_save_on_all(place: Path) -> None:
    def rank(team: Team) -> list[str]:
        found = []
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            for step in range(4):
                state = {"w": torch.full((4096,), float(step)), "odd": Odd() if (team.rank, step) == (1, 1) else 1}
                try:
                    found.append(told(ckpt.save(state, step=step)))
                except ts.CaptureError:
                    found.append("not begun")
        return found

    assert ranks(2, rank) == [["", "RankFailed", "", ""], ["", "not begun", "", ""]]
    assert Log(at(place), "run").seqs() == [1, 3, 4]


def test_where_a_rank_cannot_plan_the_first_save_of_all_the_others_get_its_error(place: Path) -> None:
    """And do not wait for the marker of a new tier, which it creates."""
    spec = policy({"nvme": tier("nvme", place)})

    def rank(team: Team) -> list[str]:
        found = []
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for odd in (Odd(), 1):
                try:
                    found.append(told(ckpt.save({"odd": odd if team.rank == 0 else 1}, step=0)))
                except ts.CaptureError:
                    found.append("not begun")
        return found

    assert ranks(2, rank) == [["not begun", ""], ["RankFailed", ""]]


def test_a_rank_whose_arena_is_full_leaves_the_save_out_for_all(place: Path) -> None:
    spec = policy(
        {"nvme": tier("nvme", place / "host0"), "lustre": tier("lustre", place)},
        arena={"size": "64KiB", "on_full": "skip"},
    )

    def rank(team: Team) -> Any:
        with ts.Checkpointer(spec, "run", team) as ckpt:
            ckpt.save({team.rank: torch.zeros(1024)}, step=0).wait()
            arena = ckpt._arena
            slabs = [arena.acquire() for _ in range(arena.slots - 1)] if team.rank == 1 else []
            save = ckpt.save({team.rank: torch.ones(1024)}, step=1)
            assert save.skipped == (team.rank == 1)
            if team.rank == 0:
                with pytest.raises(ts.NotFound, match="left"):
                    save.wait("lustre")
            for slab in slabs:
                slab.release()
            ckpt.save({team.rank: torch.full((1024,), 2.0)}, step=2).wait("lustre")
        return True

    assert ranks(2, rank) == [True, True]
    assert Log(at(place), "run").seqs() == [1, 3]
    assert Log(at(place / "host0", "nvme"), "run").seqs() == [1, 3]


def state_of(step: int) -> dict[str, Any]:
    """Something of which each rank has to write its own part."""
    return {"w": torch.full((4096,), float(step)), "own": ts.PerRank(torch.full((4096,), float(step)))}


def test_a_tier_that_fails_on_one_rank_fails_on_all_and_is_tried_again(place: Path, own_sites: Any) -> None:
    both = threading.Barrier(2, timeout=60)

    def rank(team: Team) -> list[Any]:
        spec = policy({"nvme": tier("nvme", place / "host0"), "site": own_sites[team.rank].keys(retries=0)})
        found = []
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for step in range(4):
                if team.rank == 1:
                    own_sites[1].away = step == 1
                both.wait()
                save = ckpt.save(state_of(step), step=step)
                save.wait()
                try:
                    save.wait("site")
                    found.append(None)
                except ts.TierstateError as error:
                    found.append(type(error))
                both.wait()
        return found

    first, second = ranks(2, rank)
    assert first == [None, RankFailed, None, None]
    assert second == [None, ts.TierUnavailable, None, None]
    # What did not arrive was brought later by one rank alone, from where it finds the whole.
    assert Log(at(place), "run").seqs() == [1, 2, 3, 4]
    _, found = read([at(place)], "run", 2)
    assert np.all(found["w"] == 1)


def test_a_memory_tier_without_room_on_one_rank_beside_a_durable_tier_ends_no_job(place: Path) -> None:
    """One rank has more than its own memory tier may hold, so none has a version there. All close without an error."""

    def rank(team: Team) -> str:
        spec = policy({"host": tier("host", place, capacity="32KiB"), "nvme": tier("nvme", place)})
        value = torch.arange(20_000 if team.rank == 1 else 1000)
        with ts.Checkpointer(spec, "run", team) as ckpt:
            save = ckpt.save({f"rank{team.rank}": value}, step=1)
            save.wait()
            while "host" not in save.errors():
                time.sleep(0.01)
            return type(save.errors()["host"]).__name__

    assert ranks(3, rank) == ["RankFull", "TierFull", "RankFull"]


def test_an_error_is_told_once_to_each_rank_and_saves_go_on(place: Path, own_sites: Any) -> None:
    """A save without a durable copy is told at a later save of each rank, which is made all the same."""
    both = threading.Barrier(2, timeout=60)

    def rank(team: Team) -> list[str]:
        spec = policy({"site": own_sites[team.rank].keys(retries=0)})
        found: list[str] = []
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for step in range(6):
                if team.rank == 1:
                    own_sites[1].away = step == 1
                both.wait()
                try:
                    save = ckpt.save(state_of(step), step=step)
                except ts.TierstateError as error:
                    found.append(type(error).__name__)
                while not save.done() and not save.errors():
                    time.sleep(0.002)
                both.wait()
        return found

    assert ranks(2, rank) == [["RankFailed"], ["TierUnavailable"]]
    assert Log(at(place), "run").seqs() == [1, 3, 4, 5, 6]


class Shut(Memory):
    """Memory that lets some in, and others not."""

    def __init__(self, *, to: int) -> None:
        super().__init__()
        if to:
            raise ts.AccessDenied(f"rank {to} may not come in")


def test_a_rank_that_cannot_open_a_tier_keeps_nobody_waiting(place: Path) -> None:
    ts.register_tier("shut", Shut)

    def rank(team: Team) -> Any:
        ts.Checkpointer(policy({"nvme": tier("nvme", place), "shut": {"type": "shut", "to": team.rank}}), "run", team)

    first, second = together(2, rank, timeouts=CALM)
    assert (type(first), type(second)) == (RankFailed, ts.AccessDenied)


@pytest.mark.parametrize("other", [0, 1])
def test_a_rank_that_is_interrupted_before_it_plans_a_save_keeps_nobody_waiting(
    place: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """As by Ctrl-C where all ranks wait for each other to find new agents."""
    prepare = SharedPipeline.prepare
    seqs: list[int] = []

    def interrupted(pipeline: SharedPipeline, seq: int) -> None:
        prepare(pipeline, seq)
        if pipeline.rank == other:
            seqs.append(seq)
            if len(seqs) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(SharedPipeline, "prepare", interrupted)

    def rank(team: Team) -> list[str]:
        found = []
        with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run", team) as ckpt:
            for step in range(3):
                try:
                    ckpt.save({"w": torch.full((4096,), float(step))}, step=step).wait()
                    found.append("")
                except (KeyboardInterrupt, ts.TierstateError) as error:
                    found.append(str(error))
        return found

    found = together(2, rank, timeouts=CALM)
    assert found[other] == ["", "", ""]  # an interrupt has no text
    assert [text.partition(":")[0] for text in found[1 - other]] == ["", f"rank {other} failed", ""]
    assert "KeyboardInterrupt" in found[1 - other][1], "it is not one that was waited for in vain"


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize(
    ("of_tier", "keys", "found"),
    [
        ({"every": 2}, {}, "every 2"),
        ({"encrypt": {"key": "${TEST_KEY}"}}, {}, "encrypted"),
        ({}, {"seal": {"key": "${TEST_KEY}"}}, "seal"),
        ({}, {"chunk": "8KiB"}, "chunk"),
        ({}, {"digest": "sha256"}, "digest"),
        ({}, {"agent": {"mode": "auto"}}, "agent"),
        ({}, {"preemption": {}}, "preemption"),
        ({}, {}, "lustre"),
    ],
)
def test_ranks_whose_policies_differ_are_told_at_once(
    place: Path, other: int, of_tier: Any, keys: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits for a vote, or a meeting of a tier, that another rank never comes to; no host saves in plain what
    another one encrypts."""
    monkeypatch.setenv("TEST_KEY", "5a" * 32)

    def rank(team: Team) -> Any:
        if team.rank != other:
            return ts.Checkpointer(policy({"nvme": tier("nvme", place)}, digest="blake3"), "run", team)
        more = {} if of_tier or keys else {"lustre": tier("lustre", place)}
        own = policy({"nvme": tier("nvme", place, **of_tier)} | more, **{"digest": "blake3"} | keys)
        return ts.Checkpointer(own, "run", team)

    errors = together(2, rank, timeouts=CALM)
    assert [type(error) for error in errors] == [ts.PolicyError] * 2
    assert "the policy of rank 1 is not that of rank 0" in str(errors[0])
    assert str(errors[0]) == str(errors[1])
    assert found in str(errors[0])


def test_ranks_of_which_only_some_watch_for_signals_are_told_at_once(place: Path) -> None:
    """Else those that do would wait for the others when a signal comes, until the grace is over, and all would stand.
    What counts is what the program says, where it differs from the policy."""
    spec = policy({"nvme": tier("nvme", place)}, preemption={})

    def rank(team: Team) -> Any:
        return ts.Checkpointer(spec, "run", team, preemption=None if team.rank else False)

    errors = together(2, rank, timeouts=CALM)
    assert [type(error) for error in errors] == [ts.PolicyError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "preemption True where rank 0 has False" in str(errors[0])


def test_ranks_that_share_a_tier_otherwise_are_told_at_once(place: Path) -> None:
    """Else one of two waits for its record to be created, and the other one for its acknowledgement."""

    def rank(team: Team) -> Any:
        kind = ("lustre", "nvme")[team.rank]
        ts.Checkpointer(policy({"only": {"type": kind, "path": str(place)}}), "run", team)

    errors = together(2, rank, hosts=[0, 1], timeouts=CALM)
    assert [type(error) for error in errors] == [ts.PolicyError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "on rank 1 it is shared by the ranks of one host, and on rank 0 by all ranks" in str(errors[0])


def test_a_coordinator_that_cannot_save_keeps_nobody_waiting_where_time_decides(place: Path) -> None:
    saved = threading.Barrier(2)

    def rank(team: Team) -> list[str]:
        found = []
        with ts.Checkpointer(policy({"nvme": tier("nvme", place, every="1h")}), "run", team) as ckpt:
            for step in (0, 1):
                wrong = step == 1 and team.coordinator
                try:
                    ckpt.save({"w": torch.full((9,), float(step))}, step=-1 if wrong else step).wait()
                    found.append("")
                except (ts.TierstateError, ValueError) as error:
                    found.append(f"{type(error).__name__}: {error}")
                saved.wait(60)  # before anybody closes, of which the other would learn, too
        return found

    first, second = ranks(2, rank)
    assert (first[0], second[0]) == ("", "")
    assert first[1].startswith("ValueError: step -1")
    assert second[1].startswith("RankFailed: rank 0 failed: ValueError: step -1")
