"""What is appended becomes parts: all bytes in order, none held for longer than its part, every lease ended once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.object.s3 import multipart
from tierstate.tiers.object.s3.multipart import PartBuilder, SharedLease, UploadPart

SMALL, PART, LONG = 5, 16, 64


@pytest.fixture(autouse=True)
def _bytes_for_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MIN_PART", SMALL), ("PART_SIZE", PART), ("MAX_LENT_PART", LONG)):
        monkeypatch.setattr(multipart, name, value)


class Ended:
    """Counts how often a lease ended."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def append(parts: PartBuilder, data: bytes, leased: bool, ended: Ended) -> list[tuple[bytes, UploadPart]]:
    """As the writer does; what each part held when it was made."""
    lease = SharedLease(ended) if leased else None
    made = [(b"".join(part.views), part) for part in parts.add(memoryview(data), lease)]
    if lease is not None:
        lease.done()
    return made


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=30), st.randoms())
def test_parts_are_the_bytes_in_order(appends: list[tuple[int, bool]], order) -> None:
    parts, made, ends = PartBuilder(), [], []
    whole = np.random.default_rng(0).bytes(sum(n for n, _ in appends))
    at = 0
    for nbytes, leased in appends:
        ends.append(Ended())
        now = append(parts, whole[at : at + nbytes], leased, ends[-1])
        made += now
        at += nbytes
        if leased and not any(part.after for _, part in now):
            assert ends[-1].count == 1, "what was copied is given back at once"
        if leased and nbytes >= SMALL:
            assert not parts._filled, "nothing waits behind a buffer that is sent as it is"
        if now and order.random() < 0.5:
            order.choice(now)[1].done()
    rest = [(b"".join(part.views), part) for part in parts.rest()]
    assert b"".join(data for data, _ in made + rest) == whole
    assert all(len(data) >= SMALL for data, _ in made)
    assert all(len(data) <= PART + LONG for data, _ in made)
    for _, part in made + rest:
        part.done()
        part.done()
        assert not part.views
    assert [one.count for one in ends] == [int(leased) for _, leased in appends]


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=30), st.integers(0, 500_000))
def test_parts_of_one_length(appends: list[tuple[int, bool]], hint: int) -> None:
    """All but the last; what is lent is not held for what has to wait."""
    parts, made, ends = PartBuilder(hint, fixed=True), [], []
    whole = np.random.default_rng(0).bytes(sum(n for n, _ in appends))
    at, length = 0, parts.size
    for nbytes, leased in appends:
        ends.append(Ended())
        for data, part in append(parts, whole[at : at + nbytes], leased, ends[-1]):
            part.done()
            made.append(data)
        at += nbytes
        assert ends[-1].count == int(leased)
    made += [b"".join(part.views) for part in parts.rest()]
    assert b"".join(made) == whole
    assert all(len(data) == length for data in made[:-1])
    assert not made or 0 < len(made[-1]) <= length
    assert length * (multipart.MAX_PARTS - 1000) >= hint


def test_parts_of_one_length_are_sent_from_where_they_are() -> None:
    data, ended, parts = bytes(3 * PART + 4), Ended(), PartBuilder(fixed=True)
    assert not append(parts, b"abc", False, Ended())
    made = [part for _, part in append(parts, data, True, ended)]
    assert [[len(view) for view in part.views] for part in made] == [[3, PART - 3], [PART], [PART]]
    where = [np.frombuffer(part.views[-1], np.uint8).ctypes.data for part in made]
    assert where == [np.frombuffer(data, np.uint8).ctypes.data + n for n in (0, PART - 3, 2 * PART - 3)]
    assert [bytes(view) for part in parts.rest() for view in part.views] == [bytes(7)]


def test_a_long_buffer_goes_as_it_is() -> None:
    """Not a byte is copied, and its lease ends with the last of its parts."""
    data, ended, parts = bytes(150), Ended(), PartBuilder()
    made = [part for _, part in append(parts, data, True, ended)]
    assert [part.nbytes for part in made] == [50, 50, 50]
    where = [np.frombuffer(part.views[0], np.uint8).ctypes.data for part in made]
    assert where == [np.frombuffer(data, np.uint8).ctypes.data + n for n in (0, 50, 100)]
    for part in reversed(made):
        assert ended.count == 0
        part.done()
    assert ended.count == 1


def test_small_pieces_join_the_long_one_behind_them() -> None:
    parts = PartBuilder()
    assert not append(parts, b"abc", False, Ended())
    ((data, part),) = append(parts, bytes(20), True, Ended())
    assert data == b"abc" + bytes(20)
    assert len(part.views) == 2
    assert not list(parts.rest())


def test_memory_is_used_again() -> None:
    parts, rooms = PartBuilder(), set()
    for _ in range(8):
        for _, part in append(parts, bytes(PART + 1), False, Ended()):
            rooms.add(np.frombuffer(part.views[0], np.uint8).ctypes.data)
            part.done()
    assert len(rooms) <= 2


@pytest.mark.parametrize("hint", [0, 10**6])
def test_ten_thousand_parts_hold_very_much(hint: int) -> None:
    parts, sizes = PartBuilder(hint), []
    for parts.count in range(multipart.MAX_PARTS):
        sizes.append(parts.size)
    assert all(one <= other for one, other in pairwise(sizes))
    assert sum(sizes) >= max(hint, 60_000 * PART)
    assert sizes[0] * 9_000 >= hint


def test_a_lease_that_was_disowned_is_not_ended() -> None:
    ended = Ended()
    lease = SharedLease(ended)
    lease.share()
    lease.done()
    lease.disown()
    lease.done()
    assert ended.count == 0
