"""Ranks that are threads save one version through torch.distributed.checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpointer_worlds import faulty, opened, policy, tier, wrapped
from support.dcp_jobs import same, save_as_ranks
from support.equality import difference
from support.thread_ranks import QUICK

import tierstate as ts
from tierstate.dcp import TierReader, TierWriter, close
from tierstate.dcp.engine import _OPEN, DcpEngine
from tierstate.engine.ranks.team.heartbeat import read_beats
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import TierUnavailable
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.registry import open_tier
from tierstate.tiers.testing import Fault


def gangs(count: int) -> list[Team]:
    """The teams of ranks that are threads of this process."""
    store, secret = dist.HashStore(), JobSecret.random()
    return [Team(store, rank, count, [0] * count, timeouts=QUICK, secret=secret) for rank in range(count)]


def eventually(found: Callable[[], bool]) -> None:
    """Wait for what happens in the background."""
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def parts_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """By rank, its part: one entry of the state."""
    return [{key: value} for key, value in state.items()]


def two_ranks(place: Path, far: Tier, handles: Sequence[Any]) -> tuple[list[ts.Policy], list[Team], list[TierWriter]]:
    """Two ranks, each with a handle of its own on the tier ``far``, that have saved one version to it."""
    specs = [policy({"nvme": tier("nvme", place), "far": keys}) for keys in handles]
    teams = gangs(2)
    writers = [TierWriter(spec, "run", process_group=team) for spec, team in zip(specs, teams, strict=True)]
    save_as_ranks(writers, parts_of({"a": torch.ones(9), "b": torch.ones(9)}))
    eventually(lambda: len(Log(far, "run").seqs()) == 1)
    return specs, teams, writers


def test_containers_that_dcp_does_not_look_into_come_back_as_they_are(place: Path) -> None:
    """Also those that only another rank than the first has. DCP looks into lists for dicts and tensors, and no more."""
    far, teams = open_tier("far", "nvme", {"path": str(place / "far")}), gangs(2)
    state: dict[str, Any] = {
        "a": {"arrays": [np.arange(3.0)], "numbers": [1, {"x": 2}, {}]},
        "b": {"arrays": [np.arange(2.0), 1], "pair": ([np.ones(2)], [[torch.ones(1)]])},
    }
    with wrapped(far) as first, wrapped(far) as second:
        specs = [policy({"nvme": tier("nvme", place), "far": keys}) for keys in (first, second)]
        writers = [TierWriter(spec, "run", process_group=team) for spec, team in zip(specs, teams, strict=True)]
        save_as_ranks(writers, parts_of(state))
        close()
        with ts.Checkpointer(specs[0], "run") as ckpt:
            found = ckpt.load()
        into: dict[str, Any] = {
            "a": {"arrays": [0], "numbers": [0, {"x": 0}]},
            "b": {"arrays": [0], "pair": (0, 0)},
        }
        dcp.load(into, storage_reader=TierReader(specs[0], "run"))
    state["a"]["numbers"].pop()  # DCP has no key for an empty dict at the end of a list
    assert difference(found, state) == ""
    assert difference(into, state) == ""
    for team in teams:
        team.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_tier_did_not_get_from_one_rank_is_brought_later(place: Path, rank: int) -> None:
    far = open_tier("far", "nvme", {"path": str(place / "far")})
    with wrapped(far) as first, wrapped(far) as second:
        failing = (first, second)[rank]
        specs, teams, writers = two_ranks(place, far, (first, second))
        faulty(failing).add(Fault("writer", 1, TierUnavailable("no answer")))
        state = {"a": torch.randn(9), "b": torch.randn(9)}
        save_as_ranks(writers, parts_of(state))
        into = {name: torch.zeros(9) for name in state}
        dcp.load(into, storage_reader=TierReader(specs[0], "run"))
        same(into, state)
        close()  # finishes what is owed
        nvme, other = Log(opened(specs[0], "nvme"), "run"), Log(far, "run")
        assert nvme.seqs() == other.seqs()
        assert len(nvme.seqs()) == 2
        assert nvme.read(nvme.seqs()[1]).version.id == other.read(other.seqs()[1]).version.id
        for team in teams:
            team.close()


def test_a_rank_that_has_lost_another_one_ends_without_copying_its_part(place: Path) -> None:
    far = open_tier("far", "nvme", {"path": str(place / "far")})
    with wrapped(far) as first, wrapped(far) as second:
        specs, teams, writers = two_ranks(place, far, (first, second))
        gates = [faulty(keys).shut("writer") for keys in (first, second)]
        for step in range(3):  # the first one is being copied, the others wait
            save_as_ranks(writers, parts_of({"a": torch.full((9,), float(step)), "b": torch.randn(9)}))
        engines = [engine for kept in _OPEN.values() for engine in kept.engines]
        queues = [engine.checkpointer._pipeline.queues["far"] for engine in engines]
        assert len(queues) == 2
        eventually(lambda: all(queue.copying() is not None for queue in queues))
        for team in teams:
            team._client._beat = ""  # no heartbeats any more
        for rank in (0, 1):
            teams[rank]._client.silent[1 - rank] = read_beats(teams[rank]._client, [1 - rank])[1 - rank]
        closing = threading.Thread(target=close)
        closing.start()
        eventually(lambda: all(queue._ended for queue in queues))
        before = [faulty(keys).calls["writer"] for keys in (first, second)]  # those at the gates do not count yet
        for gate in gates:
            gate.set()
        closing.join()
        after = [faulty(keys).calls["writer"] for keys in (first, second)]
        assert [there - were for were, there in zip(before, after, strict=True)] == [1, 1]  # what was being copied
        assert len(Log(opened(specs[0], "nvme"), "run").seqs()) == 4
        for team in teams:
            team.close()


def test_ranks_with_different_steps_are_refused_before_anything_is_written(place: Path) -> None:
    specs = [policy({"nvme": tier("nvme", place)}, arena={"size": size}) for size in ("256KiB", "512KiB")]
    teams = gangs(2)
    writers = [TierWriter(specs[rank], "run", step=rank, process_group=teams[rank]) for rank in (0, 1)]
    with pytest.raises(ts.StateMismatch, match="ranks save different steps: 0, 1; give all the same checkpoint_id"):
        save_as_ranks(writers, parts_of({"a": torch.ones(3), "b": torch.ones(3)}))
    assert not (place / "nvme" / "packs").exists()


def test_plans_of_earlier_saves_which_dcp_reuses_say_nothing_of_this_one(place: Path) -> None:
    """Neither of which step, nor by how many ranks: it may be one of another kind of writer."""
    specs = [policy({"nvme": tier("nvme", place)}, arena={"size": size}) for size in ("256KiB", "512KiB")]
    teams, first = gangs(2), list[dcp.SavePlan]()

    def save(step: int, reuse: Callable[[list[dcp.SavePlan]], list[dcp.SavePlan]]) -> None:
        writers = [TierWriter(specs[rank], "run", step=step, process_group=teams[rank]) for rank in (0, 1)]
        save_as_ranks(writers, parts_of({"a": torch.full((3,), step), "b": torch.full((3,), step)}), reuse)

    save(1, lambda plans: first.extend(plans) or plans)
    save(2, lambda plans: [plans[0], first[1]])
    save(3, lambda plans: [replace(plan, storage_data="of another writer") for plan in plans])
    close()
    with ts.Checkpointer(specs[0], "run") as ckpt:
        for step in (1, 2, 3):
            same(ckpt.load(step=step), {"a": torch.full((3,), step), "b": torch.full((3,), step)})
    for team in teams:
        team.close()


def test_lists_of_many_ranks_are_one_value_and_the_order_is_the_states(place: Path) -> None:
    specs = [policy({"nvme": tier("nvme", place)}, arena={"size": size}) for size in ("256KiB", "512KiB")]
    teams = gangs(2)
    writers = [TierWriter(specs[rank], "run", process_group=teams[rank]) for rank in (0, 1)]
    whole = {"last": torch.ones(3), "groups": [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2}], "first": torch.zeros(2)}
    # DCP gives each item to one rank: here some are of rank 1 only, and the first rank knows the order of all.
    mine = {"last": whole["last"], "groups": [whole["groups"][0]], "first": whole["first"]}
    theirs = {"groups": [{"params": ["w"]}, whole["groups"][1]]}
    save_as_ranks(writers, [mine, theirs])
    close()
    with ts.Checkpointer(specs[0], "run") as ckpt:
        same(ckpt.load(), whole)
        assert {leaf.name: leaf.spec.kind for leaf in ckpt.leaves()}["groups"] == "value"
    for team in teams:
        team.close()


def test_a_node_local_tier_of_several_hosts_has_its_own_part_of_a_version(place: Path) -> None:
    """Durable is one that all see; each host's tier gets what the ranks of that host have."""
    store, secret = dist.HashStore(), JobSecret.random()
    teams = [Team(store, rank, 2, [0, 1], timeouts=QUICK, secret=secret) for rank in (0, 1)]
    specs = [
        policy({"local": tier("nvme", place / f"host-{host}"), "site": tier("lustre", place)}, durable="site")
        for host in (0, 1)
    ]
    writers = [TierWriter(spec, "run", process_group=team) for spec, team in zip(specs, teams, strict=True)]
    state = {"a": torch.randn(3000), "b": torch.randn(3000)}
    save_as_ranks(writers, parts_of(state))
    into = {name: torch.zeros(3000) for name in state}
    dcp.load(into, storage_reader=TierReader(specs[1], "run"))
    same(into, state)
    close()
    records = [Log(opened(spec, name), "run") for spec, name in ((specs[0], "local"), (specs[1], "local"))]
    site = Log(opened(specs[0], "site"), "run")
    found = [log.read(log.seqs()[0]) for log in (*records, site)]
    assert len({record.version.id for record in found}) == 1
    assert [int(record.layout.present.sum()) for record in found] == [3, 3, 6]
    for team in teams:
        team.close()


def test_whatever_keeps_a_host_from_its_tag_is_raised_by_the_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator waits for each host to say that it has its tag, for as long as that one lives."""
    tag = DcpEngine.tag

    def leave(engine: DcpEngine, name: str, seq: int) -> None:
        if threading.current_thread().name == "tierstate-committed":
            raise SystemExit(3)
        tag(engine, name, seq)

    monkeypatch.setattr(DcpEngine, "tag", leave)
    store, secret = dist.HashStore(), JobSecret.random()
    teams = [Team(store, rank, 2, [0, 1], timeouts=QUICK, secret=secret) for rank in (0, 1)]
    specs = [policy({"local": tier("nvme", place / f"host-{host}")}) for host in (0, 1)]
    writers = [TierWriter(s, "run", tag="good", process_group=team) for s, team in zip(specs, teams, strict=True)]
    with pytest.raises(ts.TierstateError, match="not marked everywhere: rank 1: SystemExit: 3"):
        save_as_ranks(writers, parts_of({"a": torch.randn(3000), "b": torch.randn(3000)}))
    close()
    for team in teams:
        team.close()
