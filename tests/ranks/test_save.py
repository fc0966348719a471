"""Ranks that save together: what they hold comes to be one version on every tier, or none; nobody waits for ever."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier
from support.global_arrays import Pieces, read
from support.saving_ranks import at, nvme, ranks, saved_alike, told
from support.storage_sites import AtSite

import tierstate as ts
from tierstate.engine.ranks.save.coordinator import Coordinator, unnamed_packs
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.boxes import Box
from tierstate.manifest.format.layout import ChunkPlace, LayoutBuilder
from tierstate.manifest.history.log import Log
from tierstate.tiers.testing import Fault
from tierstate.tiers.testing.faulty import FaultyCall

pytestmark = pytest.mark.slow


# What is saved


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[int], int, list[Any]]:
    """Ranks, their hosts, the rows of a sharded array that each of them holds, and what changes at each save."""
    size = draw(st.integers(2, 3))
    hosts = sorted(draw(st.integers(0, 1)) for _ in range(size))
    hosts = [host - hosts[0] for host in hosts]
    rows = draw(st.integers(1, 3)) * size
    steps = draw(st.lists(st.sampled_from(["same", "weights", "shards", "grow", "value"]), min_size=1, max_size=5))
    return size, hosts, rows, steps


class Job:
    """The state of a job, and what each rank holds of it."""

    def __init__(self, size: int, rows: int) -> None:
        self.size = size
        self.whole = torch.arange(rows * 700.0).reshape(rows, 700)
        self.weights = torch.arange(3000.0)
        self.more: list[float] = []

    def change(self, what: str, step: int) -> None:
        """One step of training."""
        if what == "weights":
            self.weights = self.weights + 1
        elif what == "shards":
            self.whole = self.whole + 1
        elif what == "grow":
            self.more.append(step)

    def held(self, rank: int, step: int) -> dict[str, Any]:
        """By one rank: two boxes of the sharded array, one of which the next rank holds, too."""
        rows = len(self.whole) // self.size
        mine = Box((rank * rows, 0), (rows, 700))
        return {
            "step": step,
            "weights": self.weights.clone(),
            "sharded": Pieces(self.whole, [mine]),
            "extra": {i: torch.full((1100,), float(n)) for i, n in enumerate(self.more)},
            f"of {rank}": torch.tensor([float(rank), step]),
        }


@settings(max_examples=15)
@given(job=jobs())
def test_what_ranks_hold_comes_to_be_one_version_on_every_tier(job: Any) -> None:
    size, hosts, rows, steps = job
    with scratch() as place:

        def rank(team: Team) -> None:
            mine = Job(size, rows)
            with ts.Checkpointer(nvme(place, hosts[team.rank]), "run", team) as ckpt:
                for step, what in enumerate(steps):
                    mine.change(what, step)
                    save = ckpt.save(mine.held(team.rank, step), step=step, metadata={"rank": team.rank})
                save.wait("nvme")

        ranks(size, rank, hosts=hosts)
        disks = [at(place / f"host{host}", "nvme") for host in sorted(set(hosts))]
        world = Job(size, rows)
        for step, what in enumerate(steps):
            world.change(what, step)
            expected = {"weights": world.weights, "sharded": world.whole}
            expected |= {f"extra.{i}": torch.full((1100,), float(n)) for i, n in enumerate(world.more)}
            expected |= {f'"of {r}"': torch.tensor([float(r), step]) for r in range(size)}
            for where in (disks, [at(place)]):
                record, found = read(where, "run", step + 1)
                head = record.version.head
                assert (head.step, head.world, head.metadata) == (step, size, {"rank": 0})
                for name, value in expected.items():
                    assert np.array_equal(found[name], value.numpy()), name
            # Nothing is kept twice.
            assert len(set(zip(record.version.shard_leaf.tolist(), record.version.boxes, strict=True))) == len(
                record.version.boxes
            )
            assert {one for one in record.layout.present.tolist()} == {True}
        with ts.Checkpointer(nvme(place), "run") as alone:
            found_by_one = alone.versions()
            assert [v.step for v in found_by_one] == list(range(len(steps)))
            assert [v.parent for v in found_by_one] == ["", *(v.id for v in found_by_one[:-1])]
            if len(disks) == 1:
                assert not alone.verify(deep=True).problems


def test_the_metadata_are_those_of_rank_0_also_where_it_has_no_shards(place: Path) -> None:
    def rank(team: Team) -> None:
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            for step in range(3):  # the later ones are merged by the plan of the first
                state = {f"of {team.rank}": torch.arange(10.0) + step} if team.rank else {}
                ckpt.save(state, step=step, metadata={"loss": step} if team.rank == 0 else None).wait()

    ranks(3, rank)
    with ts.Checkpointer(nvme(place), "run") as alone:
        assert [version.metadata for version in alone.versions()] == [{"loss": step} for step in range(3)]


def test_what_all_hold_is_written_once_and_spread_over_the_ranks(place: Path) -> None:
    state = {f"w{i}": torch.randn(2048) for i in range(8)}

    def rank(team: Team) -> int:
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            for step in range(3):
                ckpt.save({k: v + step for k, v in state.items()}, step=step).wait()
            return ckpt.stats().tiers["nvme"].raw

    assert ranks(2, rank) == [3 * 4 * 8192, 3 * 4 * 8192]


def test_what_did_not_change_is_not_written_again_not_even_after_a_start(place: Path) -> None:
    state = {f"w{i}": torch.randn(2048) for i in range(8)}

    def rank(team: Team) -> list[int]:
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            stored = []
            for step in range(2):
                ckpt.save(state, step=step).wait("lustre")
                stored.append(ckpt.stats().tiers["lustre"].stored)
            return stored

    assert ranks(2, rank) == [[4 * 8192] * 2] * 2
    assert ranks(2, rank) == [[0, 0]] * 2
    with ts.Checkpointer(nvme(place), "run") as ckpt:
        assert [v.seq for v in ckpt.versions()] == [1, 2, 3, 4]


# Structures that change


def test_a_structure_that_changes_everywhere_at_once_is_shared_out_anew(place: Path) -> None:
    def state(rank: int, step: int) -> dict[str, Any]:
        moments = {i: torch.full((2048,), float(i)) for i in range(8)} if step else {}
        return {"w": torch.ones(64), "optimizer": moments}

    assert saved_alike(place, state, 3) == [[""] * 3] * 2
    record, found = read([at(place / "host0", "nvme")], "run", 3)
    owners = record.version.shard_rank[record.version.shard_leaf >= len(record.version.leaves) - 8]
    assert np.bincount(owners).tolist() == [4, 4]
    assert all(np.all(found[f"optimizer.{i}"] == i) for i in range(8))


def test_a_restored_version_is_the_parent_of_the_saves_after_it_and_of_none_before(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, parts = threading.Event(), Coordinator._parts

    def late(self: Coordinator, keys: Any, messages: Any) -> Any:
        assert keys.seq != 3 or gate.wait(60)
        return parts(self, keys, messages)

    monkeypatch.setattr(Coordinator, "_parts", late)

    def run(team: Team) -> dict[int, int | None]:
        state = {"w": torch.arange(1000)}
        with ts.Checkpointer(policy({"lustre": tier("lustre", place)}), "run", team) as ckpt:
            for step in (1, 2):
                ckpt.save(state, step=step).wait()
            save = ckpt.save(state, step=3)
            ckpt.restore(into=state, step=1)
            if team.coordinator:
                assert not save.done()
                gate.set()
            ckpt.save(state, step=4).wait()
            steps = {version.id: version.step for version in ckpt.versions()}
            return {version.step: steps.get(version.parent) for version in ckpt.versions()}

    assert ranks(2, run) == [{1: None, 2: 1, 3: 2, 4: 1}] * 2


# Tiers that lag


class Slow(AtSite):
    """A site that lets nobody write to it as long as a test says so."""

    OPEN = threading.Event()

    def begin(self, operation: FaultyCall) -> Fault | None:
        if operation in ("writer", "put"):
            self.OPEN.wait(60)
        return super().begin(operation)


@pytest.mark.parametrize("on_lag", ["skip", "queue"])
def test_a_tier_that_lags_on_one_rank_is_in_step_on_all(place: Path, own_sites: Any, on_lag: str) -> None:
    ts.register_tier("slow", Slow)
    Slow.OPEN.clear()

    def rank(team: Team) -> list[str]:
        kind = {"type": "slow"} if team.rank == 1 else {}
        keys = own_sites[team.rank].keys(on_lag=on_lag) | kind
        spec = policy({"nvme": tier("nvme", place / "host0"), "there": keys})
        with ts.Checkpointer(spec, "run", team) as ckpt:
            saves = []
            for step in range(12):
                saves.append(ckpt.save({"w": torch.full((4096,), float(step)), team.rank: torch.ones(9)}, step=step))
                saves[-1].wait("nvme")
            Slow.OPEN.set()
            for save in saves:
                try:
                    save.wait("there")
                except ts.NotFound:
                    assert on_lag == "skip"
            return [save.step for save in saves if save.done("there")]

    first, second = ranks(2, rank)
    assert first == second == [seq - 1 for seq in Log(at(place), "run").seqs()]
    assert first[0] == 0
    assert first[-1] == 11
    assert on_lag == "skip" or first == list(range(12))


def test_what_only_a_process_sees_has_the_whole_version_and_its_own_chunks(place: Path) -> None:
    spec = policy({"memory": {"type": "memory"}, "nvme": tier("nvme", place)})

    def rank(team: Team) -> tuple[str, list[int]]:
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for step in range(3):
                save = ckpt.save({"w": torch.ones(5000), "v": torch.ones(5000), team.rank: torch.ones(9)}, step=step)
            save.wait("memory")
            record = ckpt._tier_runs[0].record(3)
            here = record.version.shard_rank[record.version.chunk_shard[record.layout.present]]
            return record.version.id, sorted(set(here.tolist()))

    (one, mine), (other, its) = ranks(2, rank)
    assert one == other
    assert (mine, its) == ([0], [1])


def test_a_version_is_the_same_wherever_it_comes_late(place: Path, own_sites: Any) -> None:
    """More versions wait for a slow tier than are remembered; each has one id, and the one before as its parent."""
    ts.register_tier("slow", Slow)
    Slow.OPEN.clear()

    def rank(team: Team) -> list[tuple[str, ...]]:
        keys = own_sites[team.rank].keys() | {"type": "slow"}
        spec = policy({"nvme": tier("nvme", place / "host0"), "there": keys})
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for step in range(10):
                ckpt.save({"w": torch.full((4096,), float(step)), team.rank: torch.ones(9)}, step=step).wait("nvme")
            Slow.OPEN.set()
        return []

    ranks(2, rank)
    here, there = Log(at(place / "host0", "nvme"), "run"), Log(at(place), "run")
    ids = [here.read(seq).version.id for seq in range(1, 11)]
    assert [there.read(seq).version.id for seq in range(1, 11)] == ids
    assert [there.read(seq).version.head.parent for seq in range(1, 11)] == ["", *ids[:-1]]


# Cadences


def test_ranks_agree_on_what_is_due(place: Path) -> None:
    def rank(team: Team) -> list[tuple[str, ...]]:
        spec = nvme(place, every=4)
        with ts.Checkpointer(spec, "run", team) as ckpt:
            return [ckpt.save({"w": torch.full((9,), float(step))}, step=step).tiers for step in range(0, 10, 3)]

    both, alone = ("nvme", "lustre"), ("nvme",)
    assert ranks(2, rank) == [[both, alone, both, both]] * 2
    assert ranks(2, rank) == [[both, alone, both, both]] * 2
    assert Log(at(place), "run").seqs() == [1, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("every", ["1h", {"min": "30min", "max": "1h"}])
def test_where_time_decides_the_coordinator_does(place: Path, every: object) -> None:
    def rank(team: Team) -> list[tuple[str, ...]]:
        with ts.Checkpointer(nvme(place, every=every), "run", team) as ckpt:
            return [ckpt.save({"w": torch.full((9,), float(step))}, step=step).tiers for step in range(3)]

    assert ranks(2, rank) == [[("nvme", "lustre"), ("nvme",), ("nvme",)]] * 2


def test_a_team_of_one_is_no_team(place: Path) -> None:
    def rank(team: Team) -> int:
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            ckpt.save({"w": torch.ones(9)}, step=0).wait()
            return ckpt.versions()[0].seq

    assert ranks(1, rank) == [1]


# Retention, formats, codecs


def test_one_rank_drops_what_need_not_be_kept(place: Path) -> None:
    def rank(team: Team) -> None:
        keep = {"last": 2}
        spec = policy({"nvme": tier("nvme", place / "host0", keep=keep), "lustre": tier("lustre", place, keep=keep)})
        with ts.Checkpointer(spec, "run", team) as ckpt:
            for step in range(6):
                ckpt.save({"w": torch.full((4096,), float(step)), team.rank: torch.full((99,), 1.0)}, step=step).wait()

    ranks(2, rank)
    for where in (at(place / "host0", "nvme"), at(place)):
        assert Log(where, "run").seqs() == [5, 6]
        named = {key for seq in (5, 6) for key in Log(where, "run").read(seq).layout.objects}
        assert set(where.list("packs/")) == named


@pytest.mark.parametrize("keys", [{"codec": "delta"}, {"codec": "auto"}, {"codec": "small"}])
def test_codecs_work_in_a_team(place: Path, keys: dict[str, Any]) -> None:
    saves_and_verifies(place, keys)


@pytest.mark.parametrize("format", ["safetensors", "hdf5"])
def test_formats_hold_whole_leaves_and_what_is_in_parts_lies_beside(place: Path, format: str) -> None:
    saves_and_verifies(place, {"format": format})
    suffix = {"safetensors": ".safetensors", "hdf5": ".h5"}[format]
    record = Log(at(place), "run").read(3)
    version, layout = record.version, record.layout
    names = [version.leaves[leaf].name for leaf in version.chunk_leaf.tolist()]
    for row, name in enumerate(names):
        in_file = layout.objects[layout.object[row]].endswith(suffix)
        assert in_file == (not name.startswith("sharded")) or not name.startswith(("sharded", "weights"))


def saves_and_verifies(place: Path, keys: dict[str, Any]) -> None:
    """Three saves to a disk, and on to a tier with these keys; all of it is sound there."""

    def rank(team: Team) -> None:
        mine = Job(2, 4)
        with ts.Checkpointer(nvme(place, **keys), "run", team) as ckpt:
            for step in range(3):
                mine.change("weights", step)
                mine.weights[:10] += step
                save = ckpt.save(mine.held(team.rank, step), step=step)
            save.wait("lustre")

    ranks(2, rank)
    with ts.Checkpointer(nvme(place, **keys), "run") as ckpt:
        assert [v.tiers for v in ckpt.versions()] == [("nvme", "lustre")] * 3
        report = ckpt.verify(deep=True)
        assert not report.problems
        assert report.read["lustre"]


def test_an_optimizer_that_is_guarded_waits_in_a_team_too(place: Path) -> None:
    def rank(team: Team) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(4096))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with ts.Checkpointer(nvme(place), "run", team) as ckpt:
            ckpt.guard(optimizer)
            for step in range(4):
                save = ckpt.save({"w": weight, "o": optimizer}, step=step)
                weight.grad = torch.ones(4096)
                optimizer.step()
            save.wait()
        return []

    ranks(2, rank)
    for seq in range(1, 5):
        _, found = read([at(place)], "run", seq)
        assert np.all(found["w"] == 1.0 - seq)


@pytest.mark.parametrize("kind", ["lustre", "nvme"])
def test_what_every_rank_has_is_saved_again_where_only_one_copy_counts(place: Path, kind: str) -> None:
    """A rank's pack goes with its version, though the rank has a value in it of which another rank's copy is kept."""
    spec = policy({"t": tier(kind, place, keep={"last": 1})})

    def job(team: Team) -> list[str]:
        with ts.Checkpointer(spec, "run", team) as ckpt:
            saves = []
            for step in range(1, 9):
                mine = torch.full((1000,), float(step + 100 * team.rank))
                shard = ts.Shard(mine, (1000 * team.rank,), (2000,))
                state = {"w": shard, "growing": [*range(step % 3)], "constant": "k" * 9000}
                saves.append(ckpt.save(state, step))
            return [told(save) for save in saves]

    assert ranks(2, job) == [[""] * 8] * 2
    with ts.Checkpointer(spec, "run") as ckpt:
        found = ckpt.load(step=8)
    assert found["constant"] == "k" * 9000
    assert found["growing"] == [0, 1]
    assert found["w"][[0, -1]].tolist() == [8.0, 108.0]


def test_packs_of_which_nothing_is_used() -> None:
    builder = LayoutBuilder(4)
    for row, key in enumerate("aabc"):
        builder.put(row, ChunkPlace(f"packs/run/{key}", 16 * row, 16, "raw"))
    layout = builder.build({f"packs/run/{key}": 64 for key in "abc"})
    assert unnamed_packs(layout, np.array([0, 1, 2, 3])) == []
    assert unnamed_packs(layout, np.array([0, -1, 2, -1])) == ["packs/run/c"]
    assert unnamed_packs(layout, np.array([-1, -1, -1, -1])) == ["packs/run/a", "packs/run/b", "packs/run/c"]
