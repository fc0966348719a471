"""Stragglers: who is late, and that nothing of what comes after that counts."""

from __future__ import annotations

import threading
import time
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.ranks.restore.stragglers import (
    LONGEST,
    MULTIPLE,
    SHORTEST,
    Gate,
    Passed,
    ReadTime,
    Stops,
    StragglerWatch,
    is_late,
)

seconds, nbytes = st.floats(0, 1e5), st.integers(0, 1 << 40)
reads, steps = st.builds(ReadTime, seconds, nbytes), st.integers(1, 3)


@given(nbytes.filter(bool), st.floats(LONGEST, 1e5), reads, steps)
def test_who_passes_nothing_on_is_late_within_ten_seconds(left: int, waited: float, read: ReadTime, steps: int) -> None:
    assert is_late(Passed(0, left), steps * waited, read, steps)
    assert 3 * LONGEST <= 10


@given(nbytes, nbytes, st.floats(0, SHORTEST, exclude_max=True), reads, steps)
def test_nobody_is_late_at_once_nor_when_all_has_come(
    arrived: int, left: int, waited: float, read: ReadTime, steps: int
) -> None:
    assert not is_late(Passed(arrived, left), waited, read, steps)
    assert not is_late(Passed(arrived, 0), 1e9, read, steps)


@given(st.integers(1 << 20, 1 << 40), st.floats(0.01, 1e4), st.floats(0, 1e4), st.floats(0.5, 1.9))
def test_who_reads_about_as_fast_is_not_late(share: int, took: float, waited: float, slower: float) -> None:
    """It has at most as much to read, and does so at half the speed of this rank, or faster."""
    arrived = min(share, int(share / took / slower * (took + waited)))
    assert not is_late(Passed(arrived, share - arrived), waited, ReadTime(took, share))


@given(nbytes, nbytes, st.floats(0, 1e4), reads, steps)
def test_more_that_has_come_makes_nobody_late(
    arrived: int, left: int, waited: float, read: ReadTime, steps: int
) -> None:
    if not is_late(Passed(arrived, left), waited, read, steps):
        assert not is_late(Passed(2 * arrived, left), waited, read, steps)
        assert not is_late(Passed(arrived, left), waited, read, steps + 1)


def test_a_rank_that_is_ten_times_as_slow_is_late() -> None:
    read = ReadTime(1.0, 1 << 30)
    assert read.patience == MULTIPLE
    assert not is_late(Passed(1 << 27, 7 << 27), 1.0, read)
    assert is_late(Passed(2 << 27, 6 << 27), 2.0, read)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.9) | st.floats(1.1, 1e5)), max_size=20), st.floats(0, 10))
def test_a_time_for_which_this_process_was_stopped_makes_nobody_late(
    looks: list[tuple[float, float]], waited: float
) -> None:
    """Each look may take as long as it should, and longer by a stop, which counts only if it is too short to tell."""
    now = 1e6
    with mock.patch.object(time, "monotonic", side_effect=lambda: now):
        stops = Stops()
        watch = StragglerWatch(ReadTime(1.0, 1 << 30), {0: 1}, stops, waited)
        for wait, stop in looks:
            with stops.looking(wait):
                now += wait + stop
        awake = waited + sum(wait + (stop if stop < SHORTEST else 0) for wait, stop in looks)
        assert abs(watch.waited - awake) < 1e-3
        assert abs(stops.seconds - sum(stop for _, stop in looks if stop > SHORTEST)) < 1e-3


def test_what_comes_after_the_end_is_ignored() -> None:
    gate, inside, go_on, came = Gate(), threading.Event(), threading.Event(), list[bool]()

    def deliver() -> None:
        with gate.entered() as may:
            inside.set()
            go_on.wait(20)
            came.append(may)

    thread = threading.Thread(target=deliver)
    thread.start()
    assert inside.wait(20)
    closing = threading.Thread(target=gate.close)
    closing.start()
    with gate.entered() as _:
        assert closing.is_alive()
    go_on.set()
    closing.join(20)
    thread.join(20)
    with gate.entered() as may:
        assert not may
    assert came == [True]
