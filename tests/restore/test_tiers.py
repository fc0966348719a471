"""Saves on their way through tiers: cascade, cadence, rules, order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, faulty, opened, policy, scratch, tensors, tier, unreferenced, wrapped
from support.equality import difference

import tierstate as ts
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory

FOUR = ("host", "nvme", "lustre", "file")


def four(place: Path, **keys: dict[str, Any]) -> ts.Policy:
    """A policy over four tiers, of which some have keys of their own."""
    return policy({kind: tier(kind, place, **keys.get(kind, {})) for kind in FOUR}, durable="nvme")


def test_a_save_reaches_every_tier_and_is_the_same_version_everywhere(place):
    state = tensors(50_000, 300)
    spec = four(place, lustre={"codec": "small"}, file={"codec": "auto"})
    with ts.Checkpointer(spec, "run") as ckpt:
        save = ckpt.save(state, step=7, metadata={"loss": 0.5})
        assert save.tiers == FOUR
        save.wait()
        assert save.done()
        assert save.done("nvme")
        for name in FOUR:
            save.wait(name)
        assert set(save.seconds) == set(FOUR)
        assert save.seconds["nvme"] <= save.seconds["lustre"]
        (info,) = ckpt.versions()
        assert (info.tiers, info.step, info.metadata, info.partial) == (FOUR, 7, {"loss": 0.5}, ())
        assert (save.run, save.version) == ("run", info.id)
        assert arena_of(ckpt).in_flight == 0
    for name in FOUR[1:]:
        assert Log(opened(spec, name), "run").read(1).version.id == info.id


@pytest.mark.slow
@given(
    every=st.lists(st.integers(1, 7), min_size=2, max_size=3),
    steps=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    processes=st.sets(st.integers(1, 11)),
)
def test_cadence_is_the_first_save_at_or_after_each_multiple(every: list[int], steps: list[int], processes: set[int]):
    with scratch() as place:
        spec = policy({k: tier(k, place, every=n) for k, n in zip(FOUR[1:], every, strict=False)})
        expected: dict[str, list[int]] = {t.name: [] for t in spec.tiers}
        ckpt, went = ts.Checkpointer(spec, "run"), []
        for i, step in enumerate(steps):
            if i in processes:
                ckpt.close()
                ckpt = ts.Checkpointer(spec, "run")
            due = [n for n, e in zip(expected, every, strict=True) if is_new(step, e, expected[n])]
            for name in due:
                expected[name].append(step)
            went += [i] if due else []
            assert ckpt.save(tensors(100, seed=i), step=step).tiers == tuple(due)
        ckpt.close()
        with ts.Checkpointer(spec, "run") as ckpt:
            for name, wanted in expected.items():
                assert [v.step for v in ckpt.versions() if name in v.tiers] == wanted
            assert torch.equal(ckpt.load()["a"], tensors(100, seed=went[-1])["a"])


def is_new(step: int, every: int, before: list[int]) -> bool:
    """Whether this step is the first at or after a multiple, or the first after the training went back."""
    return not before or step // every != before[-1] // every or step <= before[-1]


def test_what_is_not_due_says_so(place):
    with ts.Checkpointer(four(place, lustre={"every": 10}), "run") as ckpt:
        ckpt.save(tensors(100), step=10)
        save = ckpt.save(tensors(100), step=11)
        assert save.tiers == ("host", "nvme", "file")
        assert not save.done("lustre")
        with pytest.raises(ts.NotFound, match=r"does not go to tier 'lustre'.*every: 10.*not due"):
            save.wait("lustre")
        with pytest.raises(ts.NotFound, match=r"no such tier"):
            save.wait("tape")


def parted(place: Path, **late: Any) -> ts.Policy:
    """The model goes to two tiers, the optimizer to one of them and another."""
    rules = [{"match": "model.**", "tiers": ["nvme", "lustre"]}, {"match": "optimizer.**", "tiers": ["lustre", "file"]}]
    tiers = {"nvme": tier("nvme", place), "lustre": tier("lustre", place, **late), "file": tier("file", place)}
    return policy(tiers, rules=rules)


@pytest.mark.slow
def test_rules_part_a_state_and_restore_joins_it(place):
    state = {"model": tensors(30_000), "optimizer": tensors(60_000, 8000, seed=1), "step": 3}
    spec = parted(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=3)
    with ts.Checkpointer(spec, "run") as ckpt:
        (info,) = ckpt.versions()
        assert info.tiers == ("nvme", "lustre", "file")
        assert info.partial == ("nvme", "file")
        assert info.stored["nvme"] < info.stored["file"] < info.stored["lustre"]
        assert difference(state, ckpt.load()) == ""
        assert ckpt.verify(deep=True).ok
    for lost in ("lustre", "nvme"):
        with ts.Checkpointer(spec, "run") as ckpt:
            where = opened(spec, lost)
            where.delete("versions/run/000000000001")
            if lost == "lustre":
                assert difference(state, ckpt.load()) == ""
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.Damaged, match=r"not whole in file.*model\.a"):
            ckpt.load(step=3)
        assert difference(state["optimizer"], ckpt.load(only=["optimizer.**"])["optimizer"]) == ""


def test_the_newest_whole_version_is_restored_and_the_newest_part_where_that_is_wanted(place):
    spec = policy(
        {"nvme": tier("nvme", place), "file": tier("file", place, every=2)},
        rules=[{"match": "optimizer.**", "tiers": ["file"]}],
    )
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in (2, 3):
            ckpt.save({"model": tensors(9000, seed=step), "optimizer": tensors(9000, seed=-step)}, step=step)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert torch.equal(ckpt.load()["model"]["a"], tensors(9000, seed=2)["a"])
        assert ckpt.restored is not None
        assert ckpt.restored.step == 2
        assert torch.equal(ckpt.load(only=["model.**"])["model"]["a"], tensors(9000, seed=3)["a"])
        with pytest.raises(ts.Damaged, match=r"not whole in nvme.*optimizer"):
            ckpt.load(step=3)
        with pytest.raises(ts.NotFound, match=r"no version with step 9 in nvme, file"):
            ckpt.load(step=9)


@pytest.mark.slow
def test_versions_are_found_by_step_and_by_the_beginning_of_their_id(place):
    with ts.Checkpointer(four(place), "run") as ckpt:
        for step in range(3):
            ckpt.save(tensors(100, seed=step), step=step)
        ids = [v.id for v in ckpt.versions()]
        for step, name in enumerate(ids):
            assert torch.equal(ckpt.load(version=name[:12])["a"], tensors(100, seed=step)["a"])
            assert ckpt.info(step=step).id == name
        with pytest.raises(ts.NotFound, match="no version with id zz"):
            ckpt.load(version="zz")


def test_a_run_without_a_version_is_not_found(place):
    spec = four(place)
    with ts.Checkpointer(spec, "empty") as ckpt:
        for call in (ckpt.load, ckpt.info, lambda: ckpt.restore(into=tensors(8)), ckpt.leaves):
            with pytest.raises(ts.NotFound, match="'empty' has no version in host, nvme, lustre, file"):
                call()
        assert ckpt.versions() == []
        assert ckpt.verify(deep=True).ok
    assert not (place / "nvme").exists()


def test_every_tier_gets_its_versions_in_order(place):
    with wrapped(Memory()) as first, wrapped(Memory()) as second:
        spec = policy({"first": first, "second": second})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in range(20):
                ckpt.save(tensors(5000, seed=step % 3), step=step)
        for keys in (first, second):
            records = [key for operation, key in faulty(keys).log if key.startswith("versions/")]
            assert records == [f"versions/run/{n:012d}" for n in range(1, 21)]


def test_a_record_is_put_after_its_packs(place):
    """Seen from outside at every moment of a save: what a record names is there."""
    with wrapped(Memory()) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000), step=0).wait()
            where = faulty(keys)
            gate = where.shut("put")
            save = ckpt.save(tensors(9000, seed=1), step=1)
            with pytest.raises(ts.TierUnavailable, match=r"not on only after 0\.2 s"):
                save.wait(timeout=0.2)
            assert not save.done()
            assert Log(where.inner, "run").seqs() == [1]
            assert len(unreferenced(where.inner, "run")) == 1, "the pack is whole before its record is sent"
            gate.set()
            save.wait()
            assert unreferenced(where.inner, "run") == set()


def test_scalars_of_numpy_and_torch_are_numbers_in_metadata(place):
    given_ = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": torch.tensor(2.25),
        "d": np.array(True),
        "e": [np.float64(1)],
    }
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save({"w": 1}, step=1, metadata={"loss": torch.tensor(1.5, requires_grad=True), **given_}).wait()
        assert ckpt.info().metadata == {"loss": 1.5, "a": 0.5, "b": 3, "c": 2.25, "d": True, "e": [1.0]}
        for wrong in (torch.ones(1), np.ones(2), np.complex64(1), torch.tensor(1j), np.datetime64("2026-01-01")):
            with pytest.raises(ts.CaptureError, match=r"metadata\['x'\]: a .* is not a JSON value; write "):
                ckpt.save({"w": 1}, step=2, metadata={"x": wrong})
