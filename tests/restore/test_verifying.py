"""Verification: samples, mending, whom damage concerns, and the deep look."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, opened, policy, scratch, tensors, tier
from support.damage import objects, saved, two

import tierstate as ts
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Chunk
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import ShardRow, Version
from tierstate.manifest.history.log import Log


@pytest.mark.slow
@settings(max_examples=12)
@given(hits=st.lists(st.tuples(st.sampled_from(["nvme", "file"]), st.integers(0, 9), st.floats(0, 1)), max_size=4))
def test_what_is_whole_in_one_tier_is_mended_in_the_other(hits: list[tuple[str, int, float]]) -> None:
    with scratch() as place:
        spec = two(place)
        truth = saved(spec)
        for name, which, where in hits:
            packs = objects(place, name, "packs")
            path = packs[which % len(packs)]
            data = bytearray(path.read_bytes())
            data[int(where * (len(data) - 1))] ^= 1
            path.write_bytes(data)
        with ts.Checkpointer(spec, "run") as ckpt:
            before = ckpt.verify(data=True)
            report = ckpt.verify(mend=True)
            assert [(p.tier, p.seq, p.leaf, p.whole) for p in report.problems] == [
                (p.tier, p.seq, p.leaf, p.whole) for p in before.problems
            ]
            assert all(p.mended == p.whole for p in report.problems)
            again = ckpt.verify(data=True)
            assert [p for p in again.problems if p.whole] == []
            lost = {bad.step for bad in again.lost}
            assert lost == {p.step for p in again.problems}, "both tiers have every version"
            for step, was in enumerate(truth):
                if step in lost:
                    with pytest.raises(ts.Damaged):
                        ckpt.load(step=step)
                else:
                    assert alike(was, ckpt.load(step=step))
        if not lost:
            shutil.rmtree(place / "object")
            with ts.Checkpointer(spec, "run") as ckpt:
                assert all(alike(was, ckpt.load(step=step)) for step, was in enumerate(truth))


def test_damage_is_told_of_every_version_and_leaf_that_it_concerns(place: Path) -> None:
    state = tensors(8000, 300)
    state["c"] = state["a"].clone()  # the same chunks under two names
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            state["b"] += 1
            ckpt.save(state, step=step).wait()
        first = objects(place, "nvme", "packs")[0]
        place_of = Log(opened(spec, "nvme"), "run").read(1).layout.place(0)
        assert place_of is not None
        data = bytearray(first.read_bytes())
        data[place_of.offset] ^= 1
        first.write_bytes(data)
        report = ckpt.verify(data=True, mend=True)
        assert {(p.seq, p.leaf) for p in report.problems} == {(seq, leaf) for seq in (1, 2, 3) for leaf in "ac"}
        assert all((p.whole, p.mended, p.chunks) == (False, False, 1) for p in report.problems)
        assert [(bad.seq, bad.step, bad.leaves, bad.first) for bad in report.lost] == [
            (3, 2, 2, "a"), (2, 1, 2, "a"), (1, 0, 2, "a")
        ]  # fmt: skip
        assert not report.ok
        objects(place, "nvme", "versions")[1].write_bytes(b"")
        first.unlink()
        assert [(bad.seq, bad.leaves) for bad in ckpt.verify().lost] == [(3, 2), (2, 0), (1, 3)], "by lengths alone"


@pytest.mark.slow
@settings(max_examples=8)
@given(share=st.floats(0.01, 1), seed=st.integers(0, 2**32))
def test_a_sample_is_of_the_share_and_the_same_for_the_same_seed(share: float, seed: int) -> None:
    with scratch() as place:
        spec = two(place)
        saved(spec, 2)
        with ts.Checkpointer(spec, "run") as ckpt:
            whole, report = ckpt.verify(data=True), ckpt.verify(sample=share, seed=seed)
            assert report.held == whole.held == whole.read
            for name, held in report.held.items():
                assert share * held <= report.read[name] + 1e-6
                assert report.read[name] <= share * held + 4096
            assert (report.sample, report.seed, report.nbytes) == (share, seed, sum(report.read.values()))
            again = ckpt.verify(sample=share, seed=seed)
            assert (again.chunks, again.read) == (report.chunks, report.read)


def test_a_sample_of_everything_finds_damage_and_half_of_it_mends_what_it_finds(place: Path) -> None:
    spec = two(place)
    saved(spec, 1)
    (pack,) = objects(place, "nvme", "packs")
    pack.write_bytes(bytes(pack.stat().st_size))
    with ts.Checkpointer(spec, "run") as ckpt:
        assert not ckpt.verify(sample=1.0).ok
        chunks = ckpt.verify(data=True).chunks // 2
        report = ckpt.verify(sample=0.5, seed=4, mend=True)
        assert 0 < report.mended["nvme"] < chunks
        assert report.ok, "what was found was mended"
        assert ckpt.verify(mend=True).mended["nvme"] == chunks - report.mended["nvme"]
        assert ckpt.verify(data=True).ok


@pytest.mark.parametrize("how", [{"sample": 2}, {"sample": -0.5}, {"sample": 0.5, "data": True}])
def test_a_depth_that_makes_no_sense_is_refused(place: Path, how: dict[str, Any]) -> None:
    with (
        ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt,
        pytest.raises(ValueError, match=r"share|sample"),
    ):
        ckpt.verify(**how)


# Deep


class Picky(ts.Provider):
    """A provider of a kind that does not take back what it saved."""

    kind = "picky"

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, shape=(4,))

    def chunks(self, size: int) -> Any:
        def fill(out: Any) -> None:
            out.fill_(7)

        yield Chunk(0, 4, fill)

    @classmethod
    def fresh(cls, spec: Spec, device: Any = None) -> Picky:
        return cls(None)

    def load(self, start: int, data: Any) -> None:
        return None

    def done(self) -> Any:
        raise KeyError("a part is missing")


class Thing:
    """What it is for."""


def test_a_deep_look_opens_every_leaf_but_pickles(place: Path) -> None:
    ts.register_provider(Thing, Picky)
    spec = policy({"nvme": tier("nvme", place)}, rules=[{"match": "trust", "pickle": True}])
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({**tensors(9000, 40), "lr": 0.1, "trust": object}, step=0).wait()
        report = ckpt.verify(deep=True)
        assert (report.ok, report.unopened) == (True, 1)
        assert report.nbytes == ckpt.verify(data=True).nbytes
        ckpt.save({"thing": Thing(), "lr": 0.1}, step=1).wait()
        assert ckpt.verify(data=True).ok
        (problem,) = ckpt.verify(deep=True).problems
        assert (problem.tier, problem.step, problem.leaf) == ("", 1, "thing")
        assert problem.what == "KeyError: 'a part is missing'"


def again(place: Path, change: Callable[[Record], Record]) -> None:
    """Write the record of version 1 anew."""
    (path,) = objects(place, "nvme", "versions")
    record = change(Record.decode(memoryview(path.read_bytes())))
    path.write_bytes(record.encode())


def test_a_deep_look_finds_states_that_are_no_tree_and_values_that_are_none(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({"a": torch.ones(5), "b": {"c": 1}}, step=0).wait()

    def orphaned(record: Record) -> Record:
        v = record.version
        leaves = [Leaf((*leaf.path[:-1], "x", "y"), leaf.spec) if leaf.name == "b.c" else leaf for leaf in v.leaves]
        return Record(rebuilt(v, leaves), record.layout, record.commit)

    def mistaken(record: Record) -> Record:
        v = record.version
        leaves = [Leaf(leaf.path, Spec("value", shape=(20,))) if leaf.name == "a" else leaf for leaf in v.leaves]
        return Record(rebuilt(v, leaves), record.layout, record.commit)

    (path,) = objects(place, "nvme", "versions")
    sound = path.read_bytes()
    for change, leaf in ((orphaned, ""), (mistaken, "a")):
        path.write_bytes(sound)
        again(place, change)
        with ts.Checkpointer(spec, "run") as ckpt:
            assert ckpt.verify(data=True).ok
            (problem,) = ckpt.verify(deep=True).problems
            assert (problem.tier, problem.leaf) == ("", leaf)


def rebuilt(version: Version, leaves: list[Leaf]) -> Version:
    shards = [ShardRow(i, 0, Box.whole(leaves[i].spec.shape)) for i in version.shard_leaf.tolist()]
    return Version.build(version.head, leaves, shards, version.digests)


def test_a_deep_look_compares_footers_with_records(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    state = tensors(8192, 40)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({"a": torch.zeros(1024), "b": torch.zeros(1024)}, step=0).wait()
        (pack,) = objects(place, "nvme", "packs")
        data = bytearray(pack.read_bytes())
        data[-40] ^= 1
        pack.write_bytes(data)
        assert ckpt.verify(data=True).ok
        (problem,) = ckpt.verify(deep=True).problems
        assert "footer" in problem.what

    def shifted(record: Record) -> Record:
        old = record.layout
        columns = old.object, old.offset + np.uint64(1), old.stored, old.codec
        return Record(record.version, Layout(old.objects, old.object_sizes, old.codecs, *columns), record.commit)

    data[-40] ^= 1
    pack.write_bytes(data)
    again(place, shifted)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert any("its footer has another chunk at byte 1" in p.what for p in ckpt.verify(deep=True).problems)
        ckpt.save(state, step=1).wait()
