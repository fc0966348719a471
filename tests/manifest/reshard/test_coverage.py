"""Whether versions are whole, against counting each element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.manifest_strategies import cuts

from tierstate.manifest.boxes import Box, Boxes
from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.version import Head, Shards, Version
from tierstate.manifest.reshard.coverage import check_complete

HEAD = Head("run", 1, 10, 0.0, chunk=16)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def version(leaves):
    """A version of leaves a, b, ... of these shapes and boxes; shard k is of rank k."""
    named = [Leaf((chr(97 + i),), Spec("tensor", shape=shape)) for i, (shape, _) in enumerate(leaves)]
    boxes = Boxes.of(box for _, found in leaves for box in found)
    leaf = np.repeat(np.arange(len(leaves)), [len(found) for _, found in leaves]).astype("<u4")
    shards = Shards(leaf, np.arange(len(leaf)).astype("<u4"), boxes)
    count = sum(-(-box.volume // 16) for box in boxes)
    return Version.build(HEAD, named, shards, np.zeros((count, 2), "u8"))


@st.composite
def anyhow(draw, shape):
    """Boxes inside a shape, mostly some that tile it, with a few moved, left out or there twice."""
    found = list(draw(cuts(shape, 6)))
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["drop", "twice", "move", "more"]))
        at = draw(st.integers(0, len(found) - 1)) if found else 0
        if change == "drop" and found:
            found.pop(at)
        elif change == "twice" and found:
            found.append(found[at])
        elif change == "move" and found:
            offset = tuple(draw(st.integers(0, n - m)) for n, m in zip(shape, found[at].shape, strict=True))
            found[at] = Box(offset, found[at].shape)
        elif change == "more":
            offset = tuple(draw(st.integers(0, n)) for n in shape)
            found.append(Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))))
    return found


@given(st.lists(shapes.flatmap(lambda shape: st.tuples(st.just(shape), anyhow(shape))), min_size=1, max_size=4))
def test_a_version_is_whole_where_each_element_is_there_once(leaves):
    wrong = {}
    for i, (shape, boxes) in enumerate(leaves):
        times = np.zeros(shape, int)
        for box in boxes:
            times[box.slices()] += 1
        if not (times == 1).all():
            few = sum(b.volume for b in boxes) < times.size
            wrong[chr(97 + i)] = f"elements are there{', of rank' if boxes else ''}" if few else "shards overlap: "
    if not wrong:
        check_complete(version(leaves))
        return
    with pytest.raises(StateMismatch) as caught:
        check_complete(version(leaves))
    lines = str(caught.value).splitlines()[1:]
    assert [line[2] for line in lines] == list(wrong)
    for line, (name, words) in zip(lines, wrong.items(), strict=True):
        assert line.startswith(f"  {name}: ")
        assert words.partition(", of")[0] in line


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), cuts(shape, 6))), st.data())
def test_overlaps_are_told_with_ranks(leaf, data):
    shape, boxes = leaf
    solid = [i for i, box in enumerate(boxes) if box.volume]
    assume(solid)
    twice = data.draw(st.sampled_from(solid))
    with pytest.raises(StateMismatch) as caught:
        check_complete(version([(shape, [*boxes, boxes[twice]])]))
    assert f"of rank {twice} and {boxes[twice]} of rank {len(boxes)}" in str(caught.value)


def many(shape, offset, size):
    """A version of one leaf with a shard of this size at each offset."""
    offset = np.asarray(offset)
    flat = np.broadcast_to(size, offset.shape).reshape(-1).astype("<i8")
    boxes = Boxes(np.full(len(offset), len(shape)), offset.reshape(-1).astype("<i8"), flat)
    shards = Shards(np.zeros(len(offset), "<u4"), np.arange(len(offset), dtype="<u4"), boxes)
    chunks = int((-(-boxes.volumes // 16)).sum())
    return Version.build(HEAD, [Leaf(("a",), Spec("tensor", shape=shape))], shards, np.zeros((chunks, 2), "u8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "count", "size"),
    [
        ((100_000, 3), (100_000, 1), (1, 3)),
        ((3, 100_000), (1, 100_000), (3, 1)),
        ((600, 900), (300, 300), (2, 3)),
        ((20, 20, 20), (20, 20, 20), (1, 1, 1)),
        ((3,) * 8, (3,) * 8, (1,) * 8),
        ((2,) * 12, (2,) * 12, (1,) * 12),
    ],
)
def test_many_shards_of_one_leaf(shape, count, size):
    """In any order. Nothing here is compared with all others: that would take hours."""
    at = np.stack(np.unravel_index(np.random.default_rng(0).permutation(np.prod(count)), count), axis=1) * size
    check_complete(many(shape, at, size))
    axis = int(np.argmax(count))
    moved = at.copy()
    moved[-1] = moved[-2]  # one is there twice and another not at all: as many elements as are right
    with pytest.raises(StateMismatch, match="a: shards overlap"):
        check_complete(many(shape, moved, size))
    shifted = at[at[:, axis] > 0]
    with pytest.raises(StateMismatch, match=f"a: {len(shifted) * int(np.prod(size))} of .* are there, of ranks 0, 1"):
        check_complete(many(shape, shifted, size))


def test_sums_that_go_round_do_not_count():
    """Elements without bytes, so that there may be more than anybody can count."""
    leaf = Leaf(("a",), Spec("tensor", itemsize=0, shape=(2**62, 2**62)))

    def of(*boxes):
        rows = Shards(np.zeros(len(boxes), "<u4"), np.arange(len(boxes), dtype="<u4"), Boxes.of(boxes))
        return Version.build(HEAD, [leaf], rows, np.zeros((0, 2), "u8"))

    half = (2**61, 2**62)
    check_complete(of(Box.whole((2**62, 2**62))))
    check_complete(of(Box((0, 0), half), Box((2**61, 0), half)))
    with pytest.raises(StateMismatch, match=r"shards overlap: .* of rank 0 and .* of rank 1"):
        check_complete(of(Box((0, 0), half), Box((0, 0), half)))
    with pytest.raises(StateMismatch, match=f"{2**123} of {2**124} elements are there, of rank 0"):
        check_complete(of(Box((0, 0), half)))
    with pytest.raises(StateMismatch, match=f"0 of {2**124} elements are there"):
        check_complete(of())


def test_each_axis_has_lengths_of_its_own():
    """One element is missing and one is there twice, and each is where the other is if the axes are swapped."""
    with pytest.raises(StateMismatch, match="a: shards overlap"):
        check_complete(many((2, 2), [[0, 0], [0, 1], [0, 1], [1, 1]], (1, 1)))
