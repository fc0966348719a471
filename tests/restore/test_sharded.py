"""Versions in the shards of many ranks, restored by one process: whole, or into any boxes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import opened, policy, tier
from support.equality import bits, difference
from support.sharded_versions import Cuts, Held, along, keep, merged, meshes, volume
from support.state_strategies import ARRAY_DTYPES, DTYPES, make

import tierstate as ts
from tierstate.cli.output.versions import show_leaves
from tierstate.engine.restore.restore import RestoreSpec, restore
from tierstate.engine.store.catalog import RunCatalog
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.leaf_locations import locate_leaves
from tierstate.files.export import export
from tierstate.files.importing import open_source
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import Damaged, FormatError, StateMismatch
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.providers.tree.rename import unwrapped
from tierstate.providers.tree.unflatten import NEW
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.wrappers.measure import Measured

shapes = st.lists(st.sampled_from([3, 2, 5, 1, 7, 4, 0]), max_size=4).map(tuple)


def restored(tier: Tier, into: Any = NEW, **wanted: Any) -> Any:
    """The state of the newest version in a tier."""
    with arena() as room:
        return restore(RunCatalog([TierRun(tier, "run")]), room, "run", RestoreSpec(into=into, **wanted)).state


@contextmanager
def arena(slab: int = PAGE) -> Iterator[Arena]:
    made = Arena(8 * slab, slab)
    try:
        yield made
        assert made.in_flight == 0
    finally:
        made.close()


@st.composite
def cut_states(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Sequence[Box]], dict[str, Sequence[Box]]]:
    """Tensors of any dtype and arrays, how ranks hold them when they are saved, and when they are restored."""
    state: dict[str, Any] = {"text": "x" * draw(st.integers(0, 200)), "step": 7}
    for i in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
        state[f"t{i}"] = make(dtype, shape, draw(st.integers(0, 1 << 32)))
    dtype = draw(st.sampled_from([d for d in ARRAY_DTYPES if d.names is None]))
    shape = draw(shapes)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    state["a"] = np.frombuffer(np.random.default_rng(1).bytes(nbytes), np.uint8).view(dtype).reshape(shape).copy()
    cuts = [{k: draw(meshes(tuple(v.shape))) for k, v in state.items() if hasattr(v, "shape")} for _ in range(2)]
    return state, cuts[0], cuts[1]


def rooms(tensor: torch.Tensor, boxes: Sequence[Box], random: Any) -> Held:
    """Boxes of a tensor, in memory of other content and of any strides."""
    return Held(tensor.dtype, tensor.shape, [(box, room(tensor.dtype, box.shape, random)) for box in set(boxes)])


def room(dtype: torch.dtype, shape: Sequence[int], random: Any) -> torch.Tensor:
    order = random.choice(["dense", "turned", "stepped", "windowed", "lazy"])
    if order == "turned" and shape:
        return make(dtype, tuple(reversed(shape)), 1).permute(*reversed(range(len(shape))))
    if order == "stepped" and shape:
        return make(dtype, (*shape[:-1], 2 * shape[-1]), 2)[..., ::2]
    if order == "windowed":
        return make(dtype, tuple(n + 1 for n in shape), 3)[tuple(slice(1, n + 1) for n in shape)]
    made = make(dtype, tuple(shape), 4)
    return made.conj() if order == "lazy" and made.is_complex() else made


@given(
    cut_states(), st.randoms(use_true_random=False), st.sampled_from([16, 64, 4096]), st.sampled_from(["raw", "fast"])
)
def test_any_boxes_are_restored_into_any_others(case: Any, random: Any, chunk: int, codec: str) -> None:
    state, saved, wanted = case
    memory = Memory()
    memory.name = "memory"
    keep(memory, state, saved, chunk=chunk, codec=codec)
    assert difference(state, restored(memory)) == ""
    into = {
        name: rooms(value, wanted[name], random) if isinstance(value, torch.Tensor) else _other(value)
        for name, value in state.items()
    }
    out = restored(memory, into)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            for box, tensor in out[name].parts:
                assert bits(tensor) == bits(value[box.slices()])
        else:
            assert difference(value, out[name]) == ""


@given(cut_states(), st.randoms(use_true_random=False), st.booleans())
def test_any_boxes_are_restored_under_other_names(case: Any, random: Any, wrapped: bool) -> None:
    state, saved, wanted = case
    memory = Memory()
    memory.name = "memory"
    there = {f"module.{name}": value for name, value in state.items()} if wrapped else state
    keep(
        memory,
        there,
        {f'"{name}"' if "." in name else name: saved[n] for name, n in zip(there, state, strict=True) if n in saved},
    )
    into = {
        name if wrapped else f"_orig_mod.{name}": rooms(value, wanted[name], random)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    out = restored(memory, into, rename=unwrapped, only=list(into))
    for name, held in out.items():
        for box, tensor in held.parts:
            assert bits(tensor) == bits(state[name.removeprefix("_orig_mod.")][box.slices()])


def _other(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return type(value)()
    turned = np.empty_like(value, order="F")
    turned.view(f"V{value.dtype.itemsize}")[...] = np.zeros((), f"V{value.dtype.itemsize}")
    return turned


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 3), (8, 2), (3, 8)])
def test_row_wise_resharding_reads_what_is_needed_and_the_edges_of_chunks(
    before: int, after: int, tmp_path: Path
) -> None:
    """Every rank of the new world reads for itself: the shards that it needs a part of end in midst of chunks."""
    chunk = 64 << 10
    state = {f"w{i}": torch.randn(1000 + 37 * i, 512) for i in range(2)} | {"bias": torch.randn(512)}
    there = Measured(Nvme(path=tmp_path))
    there.name = "nvme"
    keep(there, state, {name: rows(t.shape, before) for name, t in state.items()}, chunk=chunk)
    figures: list[str] = []
    record = there.size(TierRun(there, "run").log.key(1))
    for rank in range(after):
        mine = {name: rows(t.shape, after)[rank] for name, t in state.items()}
        into = {n: Held(t.dtype, t.shape, [(mine[n], torch.zeros(mine[n].shape))]) for n, t in state.items()}
        had = there.operations["read"].nbytes if "read" in there.operations else 0
        with arena(16 * chunk) as room:
            restore(RunCatalog([TierRun(there, "run")]), room, "run", RestoreSpec(into=into))
        asked = there.operations["read"].nbytes - had - record
        needed = sum(volume(box, 4) for box in mine.values())
        edges = 2 * chunk * sum(1 for box in mine.values() if box.volume)
        figures.append(f"{asked / needed:.3f}")
        assert asked <= 1.1 * needed + edges, f"{asked / needed:.3f} times what is needed"
        for name, box in mine.items():
            assert torch.equal(into[name].parts[0][1], state[name][box.slices()])
    print(before, "->", after, *figures)


class Told(Memory):
    """A tier in memory that notes to which addresses it is asked to read, and how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.told = "memory", list[tuple[int, int]]()

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.told += [(out.data_ptr(), out.numel()) for _, out in ranges]
        super().read(key, ranges)


def test_chunks_that_lie_in_one_run_are_read_straight_into_it() -> None:
    """Saved by four ranks, restored by one, and by the first of two: all but what lies across an edge."""
    chunk, shape = 512 << 10, (1024, 1024)
    there, state = Told(), {"w": torch.randn(shape)}
    keep(there, state, {"w": rows(shape, 4)}, chunk=chunk)
    for box, inside in ((Box.whole(shape), 8), (Box((0, 0), (640, 1024)), 5), (Box((100, 0), (600, 1024)), 4)):
        into = Held(torch.float32, shape, [(box, torch.zeros(box.shape))])
        there.told.clear()
        with arena(chunk) as room:
            restore(RunCatalog([TierRun(there, "run")]), room, "run", RestoreSpec(into={"w": into}))
        tensor = into.parts[0][1]
        assert torch.equal(tensor, state["w"][box.slices()])
        end = tensor.data_ptr() + volume(box, 4)
        assert sum(tensor.data_ptr() <= at < end and n == chunk for at, n in there.told) == inside


def test_chunks_longer_than_a_slab() -> None:
    memory, state = Memory(), {"w": torch.randn(200, 128)}
    memory.name = "memory"
    keep(memory, state, {"w": [Box((0, 32 * i), (200, 32)) for i in range(4)]}, chunk=4 * PAGE)
    assert difference(state, restored(memory)) == ""


def rows(shape: Sequence[int], ranks: int) -> list[Box]:
    """A leaf cut along its first axis, as FSDP does it."""
    tail = tuple(shape[1:])
    return [Box((at, *(0 for _ in tail)), (n, *tail)) for at, n in along(shape[0], ranks)]


STATE: dict[str, Any] = {
    "rows": torch.randn(37, 64, generator=torch.Generator().manual_seed(1)),
    "columns": torch.randn(16, 48, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "both": torch.arange(24 * 24, dtype=torch.int16).view(24, 24),
    "array": np.arange(600.0).reshape(20, 30),
    "bias": torch.randn(5, generator=torch.Generator().manual_seed(3)),
    "text": "of all ranks",
}
CUTS: Cuts = {
    "rows": rows((37, 64), 4),
    "columns": [Box((0, 12 * i), (16, 12)) for i in range(4)],
    "both": [Box((12 * i, 12 * j), (12, 12)) for i in range(2) for j in range(2)],
    "array": rows((20, 30), 4),
    "bias": rows((5,), 4),
}


def two_tiers(place: Path) -> ts.Policy:
    return policy({"near": tier("nvme", place / "near"), "far": tier("file", place / "far")}, durable="far")


def kept(
    place: Path,
    chunk: int = 512,
    *,
    seq: int = 1,
    state: Any = STATE,
    cuts: Cuts = CUTS,
    where: Sequence[str] = ("near", "far"),
) -> Any:
    """A policy, in whose tiers a version lies in shards."""
    spec = two_tiers(place)
    for name in where:
        there = opened(spec, name)
        keep(there, state, cuts, seq=seq, chunk=chunk)
        there.close()
    return spec


def flip(spec: ts.Policy, place: Path, name: str, leaf: str, *, seq: int = 1) -> None:
    """Damage a byte of the last chunk of a leaf in one tier."""
    there = opened(spec, name)
    record = TierRun(there, "run").log.read(seq)
    there.close()
    index = next(i for i, found in enumerate(record.version.leaves) if found.name == leaf)
    lies = record.layout.place(int(record.version.rows_of([index])[-1]))
    assert lies is not None
    path = next(p for p in (place / name).rglob("*") if str(p).endswith(lies.object))
    data = bytearray(path.read_bytes())
    data[lies.offset] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("leaf", ["rows", "columns", "both", "array"])
def test_a_damaged_chunk_comes_from_the_next_tier_and_is_mended(place: Path, leaf: str) -> None:
    spec = kept(place)
    flip(spec, place, "near", leaf)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert difference(STATE, ckpt.load()) == ""
        parts = [
            (Box((0, 7), (24, 10)), torch.zeros(24, 10, dtype=torch.int16)),
            (Box((3, 0), (4, 7)), torch.zeros(4, 7, dtype=torch.int16)),
        ]
        out = ckpt.restore(into={"both": Held(torch.int16, (24, 24), parts)}, only=["both"])
        for box, tensor in out["both"].parts:
            assert torch.equal(tensor, STATE["both"][box.slices()])
        report = ckpt.verify(deep=True)
        assert report.ok, report
        assert report.unopened == 0
    for path in (place / "far").rglob("*"):
        if path.is_file() and "packs" in path.parts:
            path.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert difference(STATE, ckpt.load()) == "", "it was mended"


def test_damage_everywhere_leads_to_the_version_before(place: Path) -> None:
    older = {**STATE, "both": STATE["both"] + 1}
    kept(place, state=older)
    spec = kept(place, seq=2)
    for name in ("near", "far"):
        flip(spec, place, name, "both", seq=2)
    with ts.Checkpointer(spec, "run") as ckpt:
        parts = [(Box((0, 7), (24, 10)), torch.zeros(24, 10, dtype=torch.int16))]
        into = {"both": Held(torch.int16, (24, 24), parts)}
        sound = Box((0, 0), (12, 24))
        near = [(sound, torch.zeros(12, 24, dtype=torch.int16))]
        out = ckpt.restore(into={"both": Held(torch.int16, (24, 24), near)}, only=["both"])
        assert torch.equal(out["both"].parts[0][1], STATE["both"][sound.slices()]), "what is not wanted may be damaged"
        with pytest.raises(Damaged, match="leaf both of version 2"):
            ckpt.restore(into=into, only=["both"])
        ckpt.restore(into=into, only=["both"], on_damage="older")
        assert torch.equal(parts[0][1], older["both"][:, 7:17])
        assert not ckpt.verify(data=True).ok


def test_files_of_other_formats_hold_the_whole_tensors(place: Path) -> None:
    spec = kept(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        export(ckpt, place / "out.safetensors", skip_values=True)
        export(ckpt, place / "out.h5")
    found = safetensors.torch.load_file(place / "out.safetensors")
    with h5py.File(place / "out.h5") as file:
        for name, value in STATE.items():
            if isinstance(value, torch.Tensor):
                assert bits(found[name]) == bits(value)
                assert np.array_equal(file[name][()].astype("f8"), value.double().numpy())
        assert np.array_equal(file["array"][()], STATE["array"])
    other = policy({"there": tier("nvme", place / "there")})
    with ts.Checkpointer(other, "run") as ckpt:
        with open_source(place / "out.h5") as found_again:
            ckpt.save(found_again.state, step=1).wait()
        assert difference(STATE, ckpt.load()) == ""


@pytest.mark.parametrize("format", ["native", "safetensors", "hdf5"])
def test_copies_are_in_the_same_shards(place: Path, format: str) -> None:
    spec = kept(place, 4096, where=["near"])
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.copy(to="far")
    other = policy({"there": tier("nvme", place / "there", format=format)})
    with ts.Checkpointer(spec, "run") as ckpt:
        made = ckpt.copy(into=other)
        assert made.tiers == ("there",)
        assert ckpt.copy(into=other).tiers == (), "it is there already"
    with ts.Checkpointer(other, "run") as ckpt:
        assert difference(STATE, ckpt.load()) == ""
        assert ckpt.verify(deep=True).ok
    there = opened(other, "there")
    boxes = TierRun(there, "run").log.read(made.version.seq).version.boxes
    near = opened(spec, "near")
    assert tuple(boxes) == tuple(TierRun(near, "run").log.read(1).version.boxes)
    there.close()
    near.close()


def test_records_are_made_again_from_packs(place: Path) -> None:
    spec = kept(place, where=["near", "far"])
    records = [p for p in (place / "near").rglob("versions/**/*") if p.is_file()]
    assert records
    for path in records:
        path.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.rebuild("near")
        assert ckpt.info().tiers == ("near", "far")
    for path in (place / "far").rglob("*"):
        if path.is_file() and "packs" in path.parts:
            path.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert difference(STATE, ckpt.load()) == ""


def test_differences_by_value_where_both_are_cut_alike(place: Path) -> None:
    kept(place)
    after = {**STATE, "both": STATE["both"].clone(), "rows": STATE["rows"] + 0}
    after["both"][5, 13] += 7
    kept(place, seq=2, state=after)
    spec = kept(place, seq=3, state=after, cuts={**CUTS, "both": rows((24, 24), 3)})
    with ts.Checkpointer(spec, "run") as ckpt:
        found = {leaf.name: leaf for leaf in ckpt.diff(10, 20, values=True)}
        assert found["both"].numbers is not None
        assert (found["both"].numbers.changed, found["both"].numbers.largest) == (1, 7)
        assert found["rows"].change == "same"
        again = {leaf.name: leaf for leaf in ckpt.diff(20, 30, values=True)}
        assert again["both"].note == "cut into other shards"


def test_the_leaves_say_in_how_many_shards_they_are(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = kept(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        info, entry = ckpt.info(), ckpt._find(None, None, None)
    located = locate_leaves(entry)
    assert {one.leaf.name: one.shards for one in located if one.leaf and one.path} == {
        "rows": 4, "columns": 4, "both": 4, "array": 4, "bias": 4, "text": 1
    }  # fmt: skip
    show_leaves(info, located, None, False)
    head, *lines = capsys.readouterr().out.splitlines()[2:]
    assert head.split()[:6] == ["leaf", "kind", "dtype", "shape", "shards", "size"]
    assert {line.split()[0]: line.split()[4] for line in lines}["columns"] == "4"
    show_leaves(info, located, None, True)
    assert {leaf["path"]: leaf["shards"] for leaf in json.loads(capsys.readouterr().out)["leaves"]}["text"] == 1


def publish(there: Tier, version: Version) -> None:
    TierRun(there, "run").publish(Record(version, Layout.build([None] * len(version.digests), {}), {"id": "x"}))


def hostile(change: str) -> Version:
    """A version that no merge would have made."""
    whole, _ = merged({"w": torch.zeros(8, 8), "text": "abcdefghijklmnop"}, {}, Head("run", 1, 1, 1.0, chunk=16))
    at = next(i for i, leaf in enumerate(whole.leaves) if leaf.name == "w")
    text = next(i for i, leaf in enumerate(whole.leaves) if leaf.name == "text")
    nbytes = whole.leaves[text].spec.nbytes
    w = {
        "missing": [Box((0, 0), (4, 8))],
        "none": [],
        "twice": [Box((0, 0), (8, 8))] * 2,
        "overlap": [Box((0, 0), (8, 5)), Box((0, 3), (8, 3))],
        "text": [Box((0, 0), (8, 8))],
    }[change]
    words = [Box((0,), (4,)), Box((4,), (nbytes - 4,))] if change == "text" else [Box((0,), (nbytes,))]
    shards = sorted([ShardRow(at, 0, box) for box in w] + [ShardRow(text, 0, box) for box in words])
    count = sum(-(-s.box.volume * whole.leaves[s.leaf].spec.itemsize // 16) for s in shards)
    return Version.build(whole.head, whole.leaves, shards, np.zeros((count, 2), "u8"))


@pytest.mark.parametrize("change", ["missing", "none", "twice", "overlap", "text"])
def test_shards_that_are_no_whole_are_refused_before_anything_is_read(place: Path, change: str) -> None:
    memory, into = Memory(), {"w": torch.ones(8, 8), "text": "x"}
    memory.name = "memory"
    publish(memory, hostile(change))
    what = "holds text in shards; a value lies in one piece" if change == "text" else "every element once of w"
    with pytest.raises(FormatError, match=what):
        restored(memory, into)
    with pytest.raises(FormatError, match=what):
        restored(memory)
    assert into["w"].eq(1).all()
    assert into["text"] == "x"


def test_a_deep_look_tells_of_shards_that_are_no_whole(place: Path) -> None:
    spec = two_tiers(place)
    there = opened(spec, "near")
    keep(there, STATE, CUTS, chunk=512)
    record = TierRun(there, "run").log.read(1)
    number = next(i for i, leaf in enumerate(record.version.leaves) if leaf.name == "rows")
    shards = zip(
        record.version.shard_leaf.tolist(), record.version.shard_rank.tolist(), record.version.boxes, strict=True
    )
    # The second shard of the leaf is said to be the first one's box once more.
    first, _second = [s for s, leaf in enumerate(record.version.shard_leaf.tolist()) if leaf == number][:2]
    moved = [
        ShardRow(leaf, rank, record.version.boxes[first] if s == first + 1 else box)
        for s, (leaf, rank, box) in enumerate(shards)
    ]
    version = Version.build(record.version.head, record.version.leaves, moved, record.version.digests)
    there.delete(TierRun(there, "run").log.key(1))
    TierRun(there, "run").publish(Record(version, record.layout, {"id": "other"}))
    there.close()
    with ts.Checkpointer(spec, "run") as ckpt:
        (problem,) = ckpt.verify(deep=True).problems
        assert problem.leaf == "rows"
        assert "does not hold every element once of rows" in problem.what
        for path in ("out.safetensors", "out.h5"):
            with pytest.raises(FormatError, match="every element once of rows"):
                export(ckpt, place / path)


def test_a_box_that_is_no_part_of_the_leaf_is_refused() -> None:
    memory = Memory()
    memory.name = "memory"
    keep(memory, {"w": torch.zeros(8, 8)}, {})
    with pytest.raises(StateMismatch, match=r"w: PartProvider holds .* which is no part of \(8, 8\)"):
        restored(memory, {"w": Held(torch.float32, (8, 8), [(Box((4, 0), (5, 8)), torch.zeros(5, 8))])})


def test_a_rank_that_holds_nothing_of_a_leaf_reads_nothing_of_it() -> None:
    memory = Measured(Memory())
    memory.name = "memory"
    keep(memory, {"w": torch.zeros(64, 64)}, {"w": rows((64, 64), 4)})
    restored(memory, {"w": Held(torch.float32, (64, 64), [])})
    assert memory.operations["read"].nbytes == memory.size(TierRun(memory, "run").log.key(1))
