"""Any range of any leaf, however ranks have cut it: the bytes that were saved, from the chunks that hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sharded_versions import keep, merged, meshes
from support.state_strategies import ARRAY_DTYPES, DTYPES, make

from tierstate.engine.restore.restore import RestoreSpec, find_version
from tierstate.engine.store.catalog import RunCatalog, VersionCopies
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.files.ranges import ChunkCache, LeafRange, RangeReader, VirtualFile
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.manifest.format.version import Head
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.wrappers.measure import Measured, operations_of

SHAPES = st.lists(st.sampled_from([3, 2, 5, 1, 7, 4, 0]), max_size=4).map(tuple)


@st.composite
def saved_states(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, list[Box]]]:
    """Tensors of any dtype, arrays and a value, and how ranks hold them."""
    state: dict[str, Any] = {"text": "x" * draw(st.integers(0, 200))}
    for i in range(draw(st.integers(1, 3))):
        state[f"t{i}"] = make(draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.integers(0, 1 << 32)))
    dtype, shape = draw(st.sampled_from([d for d in ARRAY_DTYPES if d.names is None])), draw(SHAPES)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    state["a"] = np.frombuffer(np.random.default_rng(1).bytes(nbytes), np.uint8).view(dtype).reshape(shape).copy()
    return state, {k: draw(meshes(tuple(v.shape))) for k, v in state.items() if hasattr(v, "shape")}


def find(tier: Tier) -> VersionCopies:
    return find_version(RunCatalog([TierRun(tier, "run")]), "run", RestoreSpec())


@given(
    saved_states(),
    st.sampled_from([16, 48, 64, PAGE]),
    st.sampled_from(["raw", "fast"]),
    st.integers(0, 300),
    st.data(),
)
def test_any_range_of_any_leaf_is_what_was_saved(
    saved: tuple[dict[str, Any], dict[str, list[Box]]], chunk: int, codec: str, kept: int, data: st.DataObject
) -> None:
    state, cuts = saved
    tier, arena = Memory(), Arena(8 * PAGE, PAGE)
    try:
        version = keep(tier, state, cuts, chunk=chunk, codec=codec)
        _, truth = merged(state, cuts, Head("run", 1, 10, 2.0, chunk=chunk))
        reader = RangeReader(lambda: find(tier), arena, ChunkCache(kept))
        file = VirtualFile.of(b"head", *((i, version.leaves[i].spec.nbytes) for i in truth))
        whole = b"head" + b"".join(truth.values())
        assert file.size == len(whole)
        for _ in range(5):
            start, stop = (data.draw(st.integers(0, len(whole))) for _ in range(2))
            assert file.read(reader, start, stop) == whole[start:stop]
            leaf = data.draw(st.sampled_from(sorted(truth)))
            start, stop = sorted(data.draw(st.integers(0, len(truth[leaf]))) for _ in range(2))
            out = empty_buffer(stop - start)
            reader.read([LeafRange(leaf, start, out)])
            assert to_bytes(out) == truth[leaf][start:stop]
        assert arena.in_flight == 0
    finally:
        arena.close()


CHUNK = 16 * PAGE


@pytest.mark.parametrize(("start", "stop", "chunks"), [
    (5, 6, 1), (CHUNK - 1, CHUNK + 1, 2), (CHUNK, 2 * CHUNK, 1), (3 * CHUNK + 1, 6 * CHUNK - 1, 3), (0, 20 * CHUNK, 20),
])  # fmt: skip
def test_a_read_touches_only_the_chunks_that_it_overlaps(start: int, stop: int, chunks: int) -> None:
    tier, arena = Measured(Memory()), Arena(32 * CHUNK, CHUNK)
    try:
        state = {"w": torch.randint(0, 255, (20 * CHUNK,), dtype=torch.uint8)}
        keep(tier, state, {}, chunk=CHUNK)
        reader, out = RangeReader(lambda: find(tier), arena, ChunkCache()), empty_buffer(stop - start)
        leaf = next(i for i, leaf in enumerate(reader.entry.version.leaves) if leaf.path == ("w",))
        before = operations_of(tier)["read"].nbytes
        reader.read([LeafRange(leaf, start, out)])
        assert to_bytes(out) == state["w"].numpy()[start:stop].tobytes()
        assert operations_of(tier)["read"].nbytes - before <= chunks * (CHUNK + PAGE), "at most a block beside each"
    finally:
        arena.close()


def test_reading_on_reads_each_chunk_once() -> None:
    """Blocks of a file end within chunks; the rest of such a chunk is wanted next."""
    tier, arena = Measured(Memory()), Arena(32 * CHUNK, CHUNK)
    try:
        state = {"w": torch.randint(0, 255, (20 * CHUNK,), dtype=torch.uint8)}
        keep(tier, state, {}, chunk=CHUNK)
        reader = RangeReader(lambda: find(tier), arena, ChunkCache(2 * CHUNK))
        leaf = next(i for i, leaf in enumerate(reader.entry.version.leaves) if leaf.path == ("w",))
        file, before = VirtualFile.of((leaf, 20 * CHUNK)), operations_of(tier)["read"].nbytes
        step = CHUNK // 3 + 7
        read = b"".join(file.read(reader, at, at + step) for at in range(0, file.size, step))
        assert read == state["w"].numpy().tobytes()
        assert operations_of(tier)["read"].nbytes - before <= 20 * (CHUNK + PAGE)
    finally:
        arena.close()


def test_kept_chunks_are_bounded() -> None:
    tier = Memory()
    version = keep(tier, {"w": torch.arange(100, dtype=torch.uint8)}, {}, chunk=16)
    cache = ChunkCache(40)
    for row in range(3):
        cache.put(version, row, torch.full((16,), row, dtype=torch.uint8))
    assert [cache.get(version, row) is not None for row in range(3)] == [False, True, True]
    cache.put(version, 0, torch.zeros(41, dtype=torch.uint8))
    assert cache.get(version, 0) is None, "longer than all that may be kept"
