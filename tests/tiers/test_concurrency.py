"""Calls in threads: their results in order, the first error, and none that goes on once they were waited for."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.interrupts import Interrupted, in_a_thread_of_its_own, interrupt_at
from support.outcomes import until

from tierstate.tiers import concurrency
from tierstate.tiers.concurrency import Cancelled, WorkerPool, results_ahead, run_concurrently, start_thread
from tierstate.tiers.latch import Latch


class Writers:
    """Calls that write for a while, as a transfer into a tensor does."""

    def __init__(self) -> None:
        self.running = self.begun = 0
        self._lock = threading.Lock()

    def write(self, _item: int) -> None:
        """Be seen running for some time."""
        with self._lock:
            self.running += 1
            self.begun += 1
        time.sleep(0.001)
        with self._lock:
            self.running -= 1


@given(st.lists(st.integers(), max_size=20), st.integers(1, 5))
def test_results_are_in_the_order_of_the_items(items: list[int], threads: int) -> None:
    assert run_concurrently(lambda item: item * 2, items, threads) == [item * 2 for item in items]


@given(st.integers(1, 12), st.data())
def test_the_first_error_is_raised_and_nothing_goes_on(count: int, data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    writers = Writers()

    def call(item: int) -> None:
        if item in wrong:
            raise ValueError(item)
        writers.write(item)

    with pytest.raises(ValueError, match=r"\d") as caught:
        run_concurrently(call, range(count), 3, "of-this-test")
    assert caught.value.args[0] in wrong
    assert writers.running == 0
    assert not names("of-this-test")


@given(st.integers(0, 20), st.integers(1, 4), st.integers(0, 21), st.sets(st.integers(0, 19)))
def test_results_come_in_order_and_few_calls_are_ahead_of_them(
    count: int, threads: int, taken: int, wrong: set[int]
) -> None:
    """Whether all of them are taken, or the iteration is given up, or a call fails."""
    writers, begun, used = Writers(), [], []

    def call(item: int) -> int:
        begun.append(item)
        if item in wrong:
            raise ValueError(item)
        writers.write(item)
        return item

    results = results_ahead(call, range(count), threads, "of-this-test")
    with suppress(ValueError):
        for item in itertools.islice(results, taken):
            used.append(item)
            assert len(begun) <= len(used) + threads
    results.close()
    assert writers.running == 0
    assert not names("of-this-test")
    right = min([count, *wrong])
    assert used == list(range(min(taken, right)))
    if taken > right and right < count:
        with pytest.raises(ValueError, match=str(right)):
            list(results_ahead(call, range(count), threads))


def test_calls_wait_together() -> None:
    together = threading.Barrier(4, timeout=60)
    assert len(list(results_ahead(lambda _: together.wait(), range(8), 4))) == 8


CALLS = {
    "at-once": lambda writers: run_concurrently(writers.write, range(6), 2, "tierstate-any"),
    "ahead": lambda writers: list(results_ahead(writers.write, range(6), 2, "tierstate-any")),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", CALLS)
@in_a_thread_of_its_own
def test_nothing_runs_after_an_interrupt_at_any_step(how: str) -> None:
    """Also one in the middle of the start of a thread, which then runs without having been seen to start."""
    for step in itertools.count(1):
        writers = Writers()
        with interrupt_at(step) as steps, suppress(Interrupted, RuntimeError):
            # RuntimeError: `Condition.wait` says that its lock is not locked, where it is interrupted as it ends.
            CALLS[how](writers)
        running, begun = writers.running, writers.begun
        assert running == 0, f"a call runs after an interrupt at step {step}"
        time.sleep(0.002)
        assert (writers.running, writers.begun) == (0, begun), f"a call began after an interrupt at step {step}"
        if steps() < step:
            break
    assert step > 40
    assert begun == 6
    deadline = time.monotonic() + 60
    while names("tierstate-any") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not names("tierstate-any")


def test_a_single_call_has_a_thread_only_if_asked_for() -> None:
    here = threading.current_thread()
    assert run_concurrently(lambda _: threading.current_thread(), [1]) == [here]
    assert run_concurrently(lambda _: threading.current_thread(), [1], apart=True) != [here]


def test_calls_that_were_not_begun_are_cancelled() -> None:
    gate, ended = threading.Event(), []
    pool = WorkerPool(1, "tierstate-any")
    first = pool.submit(gate.wait)
    while not first.begun:
        time.sleep(0.001)
    second = pool.submit(lambda: None, ended.append)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool.stopped:
        time.sleep(0.001)
    gate.set()
    closing.join()
    assert first.result() is True
    assert (second.begun, ended) == (False, [second])
    with pytest.raises(Cancelled):
        second.result()
    with pytest.raises(Cancelled):
        pool.submit(lambda: None)


def test_a_call_that_cannot_be_begun_for_lack_of_memory_fails_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> Latch:
        monkeypatch.undo()
        raise MemoryError

    gate = threading.Event()
    with WorkerPool(1, "tierstate-any") as pool:
        first = pool.submit(gate.wait)
        second, third = pool.submit(lambda: 2), pool.submit(lambda: 3)
        monkeypatch.setattr(concurrency, "Latch", no_memory)
        gate.set()
        until(lambda: third.done(), within=10)
    assert first.result() is True
    with pytest.raises(MemoryError):
        second.result()
    assert third.result() == 3


def test_where_no_thread_can_be_started_calls_run_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    here = threading.current_thread()
    assert run_concurrently(lambda _: threading.current_thread(), range(3)) == [here] * 3


class Hesitant(threading.Thread):
    """A thread whose start takes until it is let go."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun, self.gate = threading.Event(), threading.Event()

    def start(self) -> None:
        self.begun.set()
        self.gate.wait()
        super().start()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_while_a_thread_was_being_started_can_start_its_own() -> None:
    thread = Hesitant()
    starting = threading.Thread(target=start_thread, args=(thread,), daemon=True)
    starting.start()
    thread.begun.wait()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # it hangs
        os._exit(7 if run_concurrently(lambda item: item + 1, range(3)) == [1, 2, 3] else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    thread.gate.set()
    starting.join()
    assert code == 7


def names(prefix: str) -> list[str]:
    """Names of the threads of a pool that run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
