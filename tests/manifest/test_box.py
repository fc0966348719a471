"""Boxes against NumPy's own indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.manifest.boxes import Box, row_major_runs

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def spans(draw):
    shape = draw(shapes)
    count = Box.whole(shape).volume
    start = draw(st.integers(0, count))
    return shape, start, draw(st.integers(start, count))


@st.composite
def pairs_of_boxes(draw):
    ndim = draw(st.integers(0, 3))
    axis = st.integers(0, 5)
    one = st.builds(Box, st.tuples(*[axis] * ndim), st.tuples(*[axis] * ndim))
    return draw(one), draw(one)


def cells(box):
    """All indices of a box, by brute force."""
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@given(spans())
@example(((3, 4, 5), 3, 57))
@example(((), 0, 1))
def test_runs_tile_the_row_major_order(span):
    shape, start, stop = span
    order = np.arange(Box.whole(shape).volume).reshape(shape)
    at = start
    for flat, box in row_major_runs(shape, start, stop):
        assert flat == at
        assert box.within(shape)
        assert box.volume > 0
        assert order[box.slices()].ravel().tolist() == list(range(at, at + box.volume))
        at += box.volume
    assert at == stop


@given(spans())
def test_runs_are_few(span):
    shape, start, stop = span
    assert len(list(row_major_runs(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_the_bound_on_runs_is_reached_and_not_passed(ndim):
    shape = (4,) * ndim
    assert len(list(row_major_runs(shape, 1, 4**ndim - 1))) == 2 * ndim - 1


@given(spans())
def test_neighbouring_runs_could_not_be_one_box(span):
    shape, start, stop = span
    found = [box for _, box in row_major_runs(shape, start, stop)]
    for a, b in itertools.pairwise(found):
        joined = cells(a) | cells(b)
        around = Box(
            tuple(map(min, zip(*joined, strict=True))),
            tuple(max(c) - min(c) + 1 for c in zip(*joined, strict=True)),
        )
        assert around.volume > len(joined)


@given(pairs_of_boxes())
def test_intersection_is_the_common_cells(boxes):
    a, b = boxes
    common, found = cells(a) & cells(b), a.intersect(b)
    assert found == b.intersect(a)
    assert (cells(found) if found is not None else set()) == common
    assert (found is None) == (not common)


@given(pairs_of_boxes(), shapes)
def test_within_is_a_subset_of_the_cells(boxes, shape):
    box = boxes[0]
    inside = len(box.shape) == len(shape) and all(
        o + n <= whole for o, n, whole in zip(box.offset, box.shape, shape, strict=True)
    )
    assert box.within(shape) == inside
    if inside:
        assert cells(box) <= cells(Box.whole(shape))


def test_negative_and_foreign_boxes_are_not_within():
    assert not Box((-1,), (1,)).within((3,))
    assert not Box((1,), (-1,)).within((3,))
    assert not Box((0,), (1,)).within((3, 3))
    assert not Box((0, 0), (1,)).within((3,))
    assert Box((2,), (1,)).within((3,))
    assert not Box((2,), (2,)).within((3,))


@given(pairs_of_boxes())
def test_slices_are_relative_to_an_origin(boxes):
    a, b = boxes
    if common := a.intersect(b):
        whole = np.arange(10 ** a.shape.__len__()).reshape((10,) * len(a.shape))
        part = whole[a.slices()]
        assert np.array_equal(part[common.slices(a.offset)], whole[common.slices()])
