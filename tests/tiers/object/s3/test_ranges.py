"""Requests for ranges: together they fill every byte that is wanted, wherever they are broken off."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import as_buffer, empty_buffer, to_bytes
from tierstate.tiers.base import Range
from tierstate.tiers.object.s3 import transfers
from tierstate.tiers.object.s3.transfers import GetRequest, plan_gets

LENGTH, GAP = 16, 4


@pytest.fixture(autouse=True)
def _bytes_for_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "REQUEST_SIZE", LENGTH)
    monkeypatch.setattr(transfers, "JOIN_GAP", GAP)


def fill(get: GetRequest, whole: bytes, breaks: list[int]) -> None:
    """As the transfer does it, with a body that ends after so many bytes, again and again."""
    at = get.start
    while at < get.end:
        left = breaks.pop() if breaks else len(whole)
        body = memoryview(whole)[at : min(get.end, at + left)]
        for skip, out in get.rest(at):
            body, at = body[skip:], min(at + skip, at + skip if len(body) >= skip else at + len(body))
            count = min(len(body), len(out))
            out[:count] = body[:count]
            body, at = body[count:], at + count
            if count < len(out):
                break


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=20),
    st.lists(st.integers(1, 20), max_size=10),
)
def test_every_byte_is_filled(wanted: list[tuple[int, int]], breaks: list[int]) -> None:
    whole = np.random.default_rng(1).bytes(400)
    ranges = [Range(offset, empty_buffer(nbytes)) for offset, nbytes in wanted]
    plan = plan_gets(ranges)
    for get in plan:
        assert get.end - get.start <= LENGTH
        assert get.start == get.pieces[0][0]
        fill(get, whole, list(breaks))
    for offset, out in ranges:
        assert to_bytes(out) == whole[offset : offset + len(out)]


def test_neighbours_are_one_request() -> None:
    buffers = [empty_buffer(3) for _ in range(3)]
    (get,) = plan_gets([Range(offset, out) for offset, out in zip((10, 3, 6), buffers, strict=True)])
    assert (get.start, get.end, len(get.pieces)) == (3, 13, 3)
    assert len(plan_gets([Range(0, buffers[0]), Range(3 + GAP + 1, buffers[1])])) == 2


def test_long_ranges_are_split_evenly() -> None:
    plan = plan_gets([Range(7, as_buffer(bytearray(LENGTH * 2 + 4)))])
    assert [get.end - get.start for get in plan] == [12, 12, 12]
    assert plan[0].start == 7


def test_nothing_is_asked_for_nothing() -> None:
    assert plan_gets([]) == []
    assert plan_gets([Range(5, empty_buffer(0))]) == []
