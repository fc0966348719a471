"""System calls that are interrupted, fall short or fail, under whole saves and restores."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, scratch, tensors
from support.leaks import at_rest, nothing_left, objects
from support.outcomes import until

import tierstate as ts
from tierstate.tiers.libc import libc
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.posix import io_engine
from tierstate.tiers.posix import io_engine as engine_room

pytestmark = pytest.mark.slow

MIB = 1 << 20


@contextmanager
def storm() -> Iterator[list[int]]:
    """Signals every millisecond to the process, and as fast as can be to each thread of the engine."""
    caught: list[int] = []
    over = threading.Event()
    send = libc().tgkill

    def bother() -> None:
        while not over.wait(0.0005):
            for thread in threading.enumerate():
                if thread.name.startswith("tierstate") and thread.native_id:
                    # By the kernel's number, which is safe also if the thread has just ended.
                    send(os.getpid(), thread.native_id, signal.SIGUSR1)

    before = {
        s: signal.signal(s, lambda number, _frame: caught.append(number)) for s in (signal.SIGALRM, signal.SIGUSR1)
    }
    for number in before:
        # As a C library's handler would have it: calls return EINTR and are not begun again by the kernel.
        signal.siginterrupt(number, True)
    botherer = threading.Thread(target=bother)
    botherer.start()
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield caught
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        over.set()
        botherer.join()
        # A thread may not have run since, and without a handler the signal that it has still to get ends the process.
        until(lambda: not waiting_for(before))
        for number, handler in before.items():
            signal.signal(number, handler)


def waiting_for(numbers: Iterable[signal.Signals]) -> list[str]:
    """The threads of this process that have still to get one of these signals, by their numbers."""
    mask, found = sum(1 << number - 1 for number in numbers), []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = [line.split() for line in (task / "status").read_text().splitlines()]
            found += [
                task.name for name, *value in lines if name in ("SigPnd:", "ShdPnd:") and int(value[0], 16) & mask
            ]
    return found


def test_a_storm_of_signals_changes_no_byte(world, place):
    with nothing_left(place), storm() as caught, ts.Checkpointer(world.policy(place / "ckpt"), "run") as ckpt:
        for step in range(2):
            state = tensors(9 * MIB + 4 * step, 70_000, seed=step)
            save = ckpt.save(state, step=step)
            save.wait()
            assert alike(ckpt.load(), state)
            into = tensors(9 * MIB + 4 * step, 70_000, seed=99)
            assert alike(ckpt.restore(into=into), state)
        assert len(caught) > 20
        world.check(ckpt)
        assert ckpt.verify(deep=True).ok
        assert at_rest(ckpt)


class Kernel:
    """Stands between the engines and the kernel, whichever way bytes go: shortens transfers and lets some fail.

    Attributes:
        fail: numbers of calls, from 1, that fail with EIO; reads and writes are counted together.
        calls: calls so far.
    """

    def __init__(self, seed: int = 0, fail: frozenset[int] = frozenset(), short: bool = True) -> None:
        self._dice, self.fail, self.short, self.calls = random.Random(seed), fail, short, 0
        self._lock = threading.Lock()

    def length(self, nbytes: int) -> int:
        """How much of it the kernel moves this time; whole blocks, as in direct I/O."""
        with self._lock:
            self.calls += 1
            if self.calls in self.fail:
                return -errno.EIO
            blocks = nbytes // PAGE
            return self._dice.randint(1, blocks) * PAGE if self.short and blocks > 1 else nbytes

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Stand there."""
        patch.setattr(engine_room, "_call", self._moving(engine_room._call))
        patch.setattr(io_engine, "_open_ring", self._ringing(io_engine._open_ring))
        patch.setattr(os, "pwrite", self._calling(os.pwrite))

    def _moving(self, call: Callable[..., int]) -> Callable[..., int]:
        def moving(transfer: engine_room.Transfer) -> int:
            length = self.length(transfer.left)
            if length < 0:
                return length
            part = engine_room.Transfer(
                transfer.write,
                transfer.descriptor,
                transfer.buffer[transfer.moved : transfer.moved + length],
                transfer.offset + transfer.moved,
            )
            return call(part)

        return moving

    def _calling(self, call: Callable[..., int]) -> Callable[..., int]:
        def calling(descriptor: int, memory: memoryview, offset: int) -> int:
            length = self.length(len(memory))
            if length < 0:
                raise OSError(errno.EIO, "the disk says no")
            return call(descriptor, memory[:length], offset)

        return calling

    def _ringing(self, open_ring: Callable[[int], object]) -> Callable[[int], object]:
        def ringing(depth: int) -> object:
            return Ring(open_ring(depth), self)

        return ringing


class Ring:
    """A ring whose completions fall short or fail; what fails has been moved all the same."""

    def __init__(self, ring, kernel: Kernel) -> None:
        self._ring, self._kernel, self._failed = ring, kernel, set()

    def write_async_ptr(self, *args):
        self._send(self._ring.write_async_ptr, *args)

    def read_async_ptr(self, *args):
        self._send(self._ring.read_async_ptr, *args)

    def _send(self, call, descriptor, address, nbytes, offset, number):
        length = self._kernel.length(nbytes)
        if length < 0:
            self._failed.add(number)
        call(descriptor, address, nbytes if length < 0 else length, offset, number)

    def wait_completion(self):
        number, result = self._ring.wait_completion()
        return number, -errno.EIO if number in self._failed else result

    def __getattr__(self, name):
        return getattr(self._ring, name)


@settings(max_examples=3)
@given(seed=st.integers(0, 1000), nbytes=st.integers(MIB, 6 * MIB))
def test_short_transfers_change_no_byte(world, seed, nbytes):
    state, kernel = tensors(nbytes // 4 * 4, 5000, seed=seed), Kernel(seed)
    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        kernel.patch(patch)
        with nothing_left(folder), ts.Checkpointer(world.policy(folder / "ckpt"), "run") as ckpt:
            ckpt.save(state, step=1).wait()
            assert alike(ckpt.load(), state)
            assert kernel.calls > 2
    with scratch() as folder, ts.Checkpointer(world.policy(folder), "run") as ckpt:
        ckpt.save(state, step=1).wait()
        assert alike(ckpt.load(), state)


@settings(max_examples=4)
@given(first=st.integers(1, 6), second=st.integers(1, 14))
def test_transfers_that_fail_are_told_and_leave_nothing(world, first, second):
    """EIO at any call: the save fails and leaves nothing, or is whole; the one after it is whole."""
    with scratch() as folder, pytest.MonkeyPatch.context() as patch:
        kernel = Kernel(short=False)
        kernel.patch(patch)
        with nothing_left(folder), ts.Checkpointer(world.policy(folder / "ckpt"), "run") as ckpt:
            ckpt.save(tensors(3 * MIB), step=0).wait()
            kernel.calls, kernel.fail = 0, frozenset({first, second})
            steps = [0, *(step for step in (1, 2) if saved_or_told(ckpt, folder, step))]
            kernel.fail = frozenset()
            assert at_rest(ckpt)
            assert [v.step for v in ckpt.versions()] == steps
            assert ckpt.verify(deep=True).ok
            state = tensors(2 * MIB, seed=3)
            ckpt.save(state, step=3).wait()
            assert alike(ckpt.load(), state)


def saved_or_told(ckpt: ts.Checkpointer, folder: Path, step: int) -> bool:
    """Whether a save came to be; if it did not, it was told why, and nothing is left of it."""
    before = objects(folder)
    save = ckpt.save(tensors(5 * MIB + 12, seed=step), step=step)
    with contextlib.suppress(ts.TierUnavailable):
        save.wait()
        return True
    (error,) = save.errors().values()
    assert "EIO" in str(error)
    # Where the record's own write has failed its packs stay, since it might take effect yet.
    assert objects(folder) == before or "versions/run" in str(error)
    return False
