"""States of many ranks for tests: which rank holds which shards, and the part of each rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from support.manifest_strategies import chunk_count, cuts

from tierstate.manifest.boxes import Box
from tierstate.manifest.digest import checksum
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.version import Head, ShardRow, Version

HEAD = Head("run", 1, 10, 0.0, chunk=16)


class Held(NamedTuple):
    """A shard, and the ranks that hold it."""

    leaf: int
    box: Box
    ranks: frozenset[int]


class World(NamedTuple):
    """A global state and who holds which part of it."""

    size: int
    leaves: list[Leaf]
    shards: list[Held]


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    values = [Spec("tensor", "float32", draw(st.sampled_from([1, 4, 16])), draw(shapes)) for _ in range(3)]
    paths = draw(st.permutations([("a",), ("d",), ("d", 0), (True,), (1,), (float("nan"),)]))
    leaves = [Leaf((), Spec("dict"))] + [Leaf(p, s) for p, s in zip(paths, [*values, Spec("dict")], strict=False)]
    shards = []
    for i, leaf in enumerate(leaves):
        if leaf.spec.has_bytes:
            for box in draw(cuts(leaf.spec.shape)):
                ranks = draw(st.frozensets(st.integers(0, size - 1), min_size=1))
                shards.append(Held(i, box, ranks))
    return World(size, leaves, shards)


def digests_of(leaf, box, chunk=HEAD.chunk):
    """Different digests for each chunk of each box of each leaf, the same on every rank."""
    count = chunk_count(leaf, box, chunk)
    names = [checksum(repr((leaf, box, k)).encode()) for k in range(count)]
    return np.frombuffer(b"".join(names), "u8").reshape(-1, 2)


def part(world, rank, leaves=None, head=HEAD):
    """What one rank gives: the leaves it holds, in the state's order, and its shards, in any."""
    leaves = world.leaves if leaves is None else leaves
    mine = [s for s in world.shards if rank in s.ranks]
    held = {s.leaf for s in mine}
    order = [i for i, leaf in enumerate(leaves) if i in held or not leaf.spec.has_bytes]
    mine.sort(key=lambda s: s.leaf)
    rows = [ShardRow(order.index(s.leaf), rank, s.box) for s in mine]
    digests = [np.zeros((0, 2), "u8"), *(digests_of(leaves[s.leaf], s.box, head.chunk) for s in mine)]
    return Version.build(head, [leaves[i] for i in order], rows, np.concatenate(digests))


def parts_of(world):
    return [part(world, rank) for rank in range(world.size)]


def chunks(version):
    """Per row: path, box and number of the chunk within its shard."""
    starts = version.chunk_start // version.head.chunk
    rows = zip(version.chunk_leaf.tolist(), version.chunk_shard.tolist(), starts.tolist(), strict=True)
    return [(version.leaves[leaf].name, version.boxes[shard], k) for leaf, shard, k in rows]
