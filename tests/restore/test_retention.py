"""Retention: what is kept is whole, and of the rest nothing is left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import difference
from worlds import alike, arena_of, faulty, names, opened, policy, scratch, tensors, tier, unreferenced, wrapped

import tierstate as ts
from tierstate.tiers.memory import Memory
from tierstate.tiers.nvme import Nvme
from tierstate.tiers.testing import Fault


@given(
    last=st.integers(1, 4),
    every=st.one_of(st.none(), st.integers(2, 6)),
    changes=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=10),
    process=st.integers(0, 10),
    kind=st.sampled_from(["memory", "host", "nvme", "file"]),
)
def test_what_is_kept_restores_and_nothing_else_is_left(
    last: int, every: int | None, changes: list[set[int]], process: int, kind: str
) -> None:
    """Versions share chunks; whatever is dropped, the others are whole, and no pack is left that nobody names."""
    with scratch() as place:
        keep = {"last": last} if every is None else {"last": last, "every": every}
        spec = policy({kind: tier(kind, place, keep=keep), "all": tier("lustre", place)})
        state, truth = tensors(9000, 4096, 100, 12_000), []
        ckpt = ts.Checkpointer(spec, "run")
        for step, leaves in enumerate(changes):
            for leaf in leaves:
                state[chr(97 + leaf)] += 1.0
            if step == process and kind not in ("memory", "host"):
                ckpt.close()
                ckpt = ts.Checkpointer(spec, "run")
            truth.append({name: t.clone() for name, t in state.items()})
            # Waited for, since what a slower tier still reads is not dropped yet.
            ckpt.save(state, step=step).wait("all")
        with ckpt:
            ckpt._flow.close()
            steps = range(len(changes))
            kept = [s for s in steps if s in steps[-last:] or (every is not None and s % every == 0)]
            assert [v.step for v in ckpt.versions() if kind in v.tiers] == kept
            assert unreferenced(ckpt._shelves[0].tier, "run") == set()
            assert ckpt.verify(deep=True).ok
            for step, was in enumerate(truth):
                assert alike(was, ckpt.load(step=step))


def test_runs_in_one_tier_do_not_keep_each_other_from_being_dropped(place):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1})})
    with ts.Checkpointer(spec, "one") as one, ts.Checkpointer(spec, "a-mend-2") as two:
        for step in range(3):
            one.save(tensors(9000, seed=step), step=step).wait()
            two.save(tensors(9000, seed=10 + step), step=step).wait()
    where = opened(spec, "nvme")
    assert len(names(where, "packs/one/")) == len(names(where, "packs/a-mend-2/")) == 1
    with ts.Checkpointer(spec, "a-mend-2") as two:
        assert torch.equal(two.load()["a"], tensors(9000, seed=12)["a"])


def test_packs_that_could_not_be_deleted_are_deleted_later(place):
    with wrapped(Memory()) as keys:
        spec = policy({"only": {**keys, "keep": {"last": 1}}})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(5000), step=0).wait()
            where = faulty(keys)
            # The record goes, then its pack does not.
            where.add(Fault("delete", 2, ts.TierUnavailable("no answer")))
            ckpt.save(tensors(5000, seed=1), step=1).wait()
            ckpt.save(tensors(5000, seed=2), step=2).wait()
            ckpt._flow.close()
            assert unreferenced(where.inner, "run") == set()
            assert ckpt.verify(deep=True).ok


def test_an_unreadable_record_stops_the_deleting_of_packs(place):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 2})})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2):
            ckpt.save(tensors(9000, seed=step), step=step)
    record = place / "nvme/versions/run/000000000001"
    record.write_bytes(record.read_bytes()[:-1] + b"\0")
    before = set(names(opened(spec, "nvme"), "packs/"))
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2, 6):
            ckpt.save(tensors(9000, seed=step), step=step)
    assert before <= set(names(opened(spec, "nvme"), "packs/"))
    assert record.exists()


def test_a_version_that_a_slower_tier_still_reads_is_not_dropped(place):
    with wrapped(Memory()) as slow:
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow})
        with ts.Checkpointer(spec, "run") as ckpt:
            gate = faulty(slow).shut("writer")
            saves = [ckpt.save(tensors(9000, seed=step), step=step) for step in range(3)]
            for save in saves:
                save.wait("nvme")
            assert [v.step for v in ckpt.versions()] == [0, 1, 2]
            gate.set()
            for save in saves:
                save.wait("slow")
            ckpt.save(tensors(9000, seed=3), step=3).wait("nvme")
        with ts.Checkpointer(spec, "run") as ckpt:
            assert [v.step for v in ckpt.versions() if "nvme" in v.tiers] == [3]
            assert [v.step for v in ckpt.versions() if "slow" in v.tiers] == [0, 1, 2, 3]
            assert ckpt.verify(deep=True).ok


def test_a_host_tier_lets_go_of_its_slabs(place):
    spec = policy({"host": tier("host", place, keep={"last": 2}), "nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(6):
            ckpt.save(tensors(80_000, seed=step), step=step)
        ckpt._flow.close()
        arena = arena_of(ckpt)
        assert arena.in_flight == 0
        assert 0 < arena.kept <= 2 * 20
        assert ckpt.stats().arena_peak <= 256 * 1024 + 3 * 20 * 4096
        assert difference(tensors(80_000, seed=5), ckpt.load()) == ""
    assert arena.kept == 0


def test_two_tiers_of_one_place_are_one_log_and_the_second_is_told(place):
    """A policy that names a place twice: nothing is lost, and the conflict is said."""
    spec = policy({"one": tier("nvme", place), "two": tier("nvme", place)})
    with pytest.raises(ts.AlreadyExists), ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000), step=1)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert difference(tensors(9000), ckpt.load()) == ""
        assert ckpt.verify(deep=True).ok
    assert len(names(Nvme(path=place / "nvme"), "packs/")) == 1


def test_what_a_lagging_tier_held_back_is_dropped_at_close(place):
    with wrapped(Memory()) as slow:
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow})
        with ts.Checkpointer(spec, "run") as ckpt:
            gate = faulty(slow).shut("put")
            for step in range(4):
                ckpt.save(tensors(9000, seed=step), step=step).wait("nvme")
            assert [v.step for v in ckpt.versions() if "nvme" in v.tiers] == [0, 1, 2, 3], (
                "the slow tier reads them yet"
            )
            gate.set()
        where = opened(spec, "nvme")
        assert len(names(where, "versions/run/")) == len(names(where, "packs/run/")) == 1
        assert len(names(faulty(slow).inner, "versions/run/")) == 4
