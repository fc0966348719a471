"""The landing: every element of every chunk comes to every place that wants it, however both are cut."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import cuts, random_digests
from support.sharded_versions import chunk_of, meshes

from tierstate.engine.restore.scatter import Destination, ScatterTargets
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.tiers.testing import random_bytes

shapes = st.lists(st.sampled_from([2, 3, 1, 5, 7, 4, 0]), max_size=4).map(tuple)


class Room:
    """Takes bytes of a box into an array of bytes, and counts how often each came."""

    def __init__(self, box: Box, itemsize: int) -> None:
        self.box, self.cells = box, np.zeros((*box.shape, itemsize), np.uint8)
        self.times = np.zeros(self.cells.shape, int)

    def load(self, start, data):
        part = slice(start, start + data.numel())
        self.cells.reshape(-1)[part] = data.numpy()
        self.times.reshape(-1)[part] += 1

    def scatter(self, at, data, part):
        assert part == part.intersect(at) == part.intersect(self.box)
        here = part.slices(self.box.offset)
        self.cells[here] = data.numpy().reshape(*at.shape, self.cells.shape[-1])[part.slices(at.offset)]
        self.times[here] += 1


@st.composite
def cases(draw):
    """A version of a few leaves in shards, each leaf's bytes, and boxes that are wanted."""
    leaves = [
        Leaf((i,), Spec("tensor", itemsize=draw(st.sampled_from([1, 2, 4, 8, 16, 3, 12, 20, 50])), shape=draw(shapes)))
        for i in range(draw(st.integers(1, 3)))
    ]
    boxes = [draw(st.one_of(cuts(leaf.spec.shape), meshes(leaf.spec.shape).map(distinct))) for leaf in leaves]
    rows = [ShardRow(i, 0, box) for i, some in enumerate(boxes) for box in some]
    head = Head("run", 1, 1, 0.0, chunk=draw(st.sampled_from([16, 32, 48, 1 << 20])))
    count = sum(-(-r.box.volume * leaves[r.leaf].spec.itemsize // head.chunk) for r in rows)
    version = Version.build(head, leaves, rows, random_digests(count, 7))
    wants = [(i, box) for i, leaf in enumerate(leaves) for box in draw(meshes(leaf.spec.shape))]
    return version, {i: bytes(random_bytes(leaf.spec.nbytes).tolist()) for i, leaf in enumerate(leaves)}, wants


def distinct(boxes):
    """Each box once; of those without elements none."""
    return [box for box in dict.fromkeys(boxes) if box.volume] or boxes[:1]


@given(cases(), st.randoms(use_true_random=False), st.booleans())
def test_everything_wanted_arrives_once(case, random, by_memory):
    version, data, wants = case
    rooms = [Room(box, version.leaves[i].spec.itemsize) for i, box in wants]
    memories = [as_buffer(room.cells.data.cast("B")) if by_memory and room.cells.size else None for room in rooms]
    to = [Destination(i, box, room, m) for (i, box), room, m in zip(wants, rooms, memories, strict=True)]
    landing = ScatterTargets(version, to)
    rows = landing.rows.tolist()
    random.shuffle(rows)
    for row in rows:
        raw = as_buffer(chunk_of(version, data, row))
        if landing.address[row]:
            memory = landing.memory(row)
            assert (memory.data_ptr(), memory.numel()) == (landing.address[row], raw.numel())
        assert landing.give(row, raw) is None
    for (i, box), room, memory in zip(wants, rooms, memories, strict=True):
        leaf = version.leaves[i].spec
        whole = np.frombuffer(data[i], np.uint8).reshape(*leaf.shape, leaf.itemsize)
        assert np.array_equal(room.cells, whole[box.slices()])
        assert memory is not None or (room.times == 1).all()
    assert not landing._scatter._torn._parts


def test_a_chunk_that_nobody_wants_is_let_go():
    version = Version.build(
        Head("run", 1, 1, 0.0, chunk=16),
        [Leaf((), Spec("tensor", shape=(40,)))],
        [ShardRow(0, 0, Box.whole((40,)))],
        np.zeros((3, 2), "u8"),
    )
    room = Room(Box((18,), (4,)), 1)
    landing = ScatterTargets(version, [Destination(0, room.box, room)])
    assert landing.rows.tolist() == [1]
    for row in (0, 2):
        assert landing.give(row, random_bytes(int(version.chunk_nbytes[row]))) is None
    assert not room.times.any()
    with pytest.raises(RuntimeError, match="chunk 1 has 16 bytes, and 15 were verified"):
        landing.give(1, random_bytes(15))


def test_copies_under_way_are_one_event_that_holds_what_they_copy():
    version = Version.build(
        Head("run", 1, 1, 0.0, chunk=64),
        [Leaf((), Spec("tensor", shape=(8, 8)))],
        [ShardRow(0, 0, Box.whole((8, 8)))],
        np.zeros((1, 2), "u8"),
    )
    seen = []

    class Late:
        def __init__(self, copy):
            self._copy = copy

        def synchronize(self):
            self._copy()
            seen.append(self)

    class LateRoom(Room):
        def load(self, start, data):
            return Late(lambda: Room.load(self, start, data))

        def scatter(self, at, data, part):
            return Late(lambda: Room.scatter(self, at, data, part))

    rooms = [LateRoom(box, 1) for box in (Box((0, 0), (2, 8)), Box((2, 0), (6, 3)), Box((2, 3), (6, 5)))]
    data = random_bytes(64)
    event = ScatterTargets(version, [Destination(0, room.box, room) for room in rooms]).give(0, data)
    assert event is not None
    assert not any(room.times.any() for room in rooms)
    event.synchronize()
    assert len(seen) == 3
    assert all(np.array_equal(r.cells[..., 0], data.numpy().reshape(8, 8)[r.box.slices()]) for r in rooms)


def test_parts_of_an_element_come_from_several_threads():
    shape, size = (3, 50), 50
    leaf = Leaf((), Spec("array", itemsize=size, shape=shape))
    version = Version.build(
        Head("run", 1, 1, 0.0, chunk=16), [leaf], [ShardRow(0, 0, Box.whole(shape))], np.zeros((469, 2), "u8")
    )
    data = {0: bytes(random_bytes(leaf.spec.nbytes).tolist())}
    rooms = [Room(Box((0, at), (3, 25)), size) for at in (0, 25)]
    landing = ScatterTargets(version, [Destination(0, room.box, room) for room in rooms])

    def give(rows):
        for row in rows:
            landing.give(row, as_buffer(chunk_of(version, data, row)))

    threads = [threading.Thread(target=give, args=(landing.rows.tolist()[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = np.frombuffer(data[0], np.uint8).reshape(*shape, size)
    assert all(np.array_equal(room.cells, whole[room.box.slices()]) for room in rooms)
    assert all((room.times == 1).all() for room in rooms)
    assert not landing._scatter._torn._parts
