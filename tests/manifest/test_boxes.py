"""Boxes as columns do what boxes as objects do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.arrays import expand_runs
from tierstate.manifest.boxes import MAX_ELEMENTS, Box, Boxes
from tierstate.manifest.errors import FormatError

axes = st.integers(0, 5) | st.sampled_from([2**31, 2**62, 2**63 - 1])
shapes = st.lists(axes, max_size=4).map(tuple)


@st.composite
def boxes(draw, axis=axes):
    ndim = draw(st.integers(0, 4))
    return draw(st.builds(Box, st.tuples(*[axis] * ndim), st.tuples(*[axis] * ndim)))


lists = st.lists(boxes(), max_size=6)


@given(lists, st.data())
def test_they_are_a_sequence(given_, data):
    found = Boxes(*(lambda b: (b.ndim, b.offset, b.shape))(Boxes.of(given_)))  # without the objects it was made of
    assert list(found) == given_ == [found[i] for i in range(len(given_))]
    assert len(found) == len(given_)
    assert found == tuple(given_)
    assert found == Boxes.of(given_)
    part = slice(*data.draw(st.tuples(st.integers(-7, 7), st.integers(-7, 7))))
    assert list(found[part]) == given_[part]
    rows = data.draw(st.lists(st.integers(0, len(given_) - 1), max_size=5)) if given_ else []
    assert list(found[np.array(rows, "i8")]) == [given_[i] for i in rows]
    with pytest.raises(IndexError):
        found[len(given_)]
    assert given_ == [found[i - len(given_)] for i in range(len(given_))]
    assert all(type(n) is int for box in found for part in box for n in part)


@given(lists, lists)
def test_they_are_equal_where_all_are(one, other):
    assert (Boxes.of(one) == Boxes.of(other)) == (one == other)
    assert (Boxes.of(one) != tuple(other)) == (one != other)
    assert list(Boxes.concat([Boxes.of(one), Boxes.of(other)])) == one + other
    assert not list(Boxes.concat([]))
    few = min(len(one), len(other))
    alike = Boxes.of(one)[:few].equal(Boxes.of(other)[:few])
    assert alike.tolist() == [a == b for a, b in zip(one, other, strict=False)]


@given(lists)
def test_their_bytes_are_those_of_boxes_one_after_another(given_):
    numbers = Boxes.of(given_).to_numbers()
    assert numbers.tolist() == [n for box in given_ for part in box for n in part]
    assert list(Boxes.from_numbers(np.array([len(b.shape) for b in given_], "u1"), numbers)) == given_


@given(lists)
def test_volumes_are_exact_or_many(given_):
    assert Boxes.of(given_).volumes.tolist() == [min(b.volume, MAX_ELEMENTS) for b in given_]


@given(st.lists(st.tuples(boxes(axes | st.just(-1)), shapes), max_size=6))
def test_within_is_what_it_is_of_one(pairs):
    found = Boxes.of(b for b, _ in pairs).within(Boxes.wholes([s for _, s in pairs]))
    assert found.tolist() == [b.within(s) for b, s in pairs]


def test_a_box_that_begins_before_or_ends_behind_the_array_is_not_within():
    given_ = [Box((-1,), (2,)), Box((0,), (3,)), Box((1,), (3,)), Box((2,), (-1,)), Box((0, 0), (3, 1))]
    assert Boxes.of(given_).within(Boxes.wholes([(3,)] * 5)).tolist() == [False, True, False, False, False]


@given(lists, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_mixture_is_the_same_for_the_same_box_and_number_only(given_, one, other):
    seed = np.array([one, other], "u8")
    numbers = np.arange(2 * len(given_)) % max(len(given_), 1)
    found = Boxes.of(given_ + given_).hashes(numbers, seed).tolist()
    assert found[: len(given_)] == found[len(given_) :]
    assert len(set(found)) == len(given_)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), max_size=6))
def test_runs_are_spread(runs):
    starts, lengths = np.array([a for a, _ in runs], "i8"), np.array([n for _, n in runs], "i8")
    assert expand_runs(starts, lengths).tolist() == [a + i for a, n in runs for i in range(n)]


@pytest.mark.parametrize("box", [Box((0,), (1, 1)), Box((0, 0), (1,)), Box((2**63,), (1,)), Box((0,), (-(2**64),))])
def test_what_is_no_box_is_refused(box):
    with pytest.raises(FormatError, match="a box has"):
        Boxes.of([box])
    with pytest.raises(FormatError, match="64 bits"):
        Boxes.wholes([(2**63,)])
