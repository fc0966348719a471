"""The arena's memory: given back when it is closed, and shared with a process that is handed it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import own_threads
from support.leaks import open_files, resident
from support.outcomes import until

from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.tiers.memory import arena as arena_room
from tierstate.tiers.memory import pages as pages_room
from tierstate.tiers.memory.arena import Arena, Slab
from tierstate.tiers.memory.host import Host
from tierstate.tiers.memory.pages import PAGE

MIB = 1 << 20
BIG = 4 * MIB


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether big slabs are shared, whatever this system does."""
    monkeypatch.setattr(pages_room, "shares_huge_pages", lambda: request.param)
    return bool(request.param)


@pytest.fixture(autouse=True)
def no_arenas_of_earlier_tests() -> None:
    """Those in cycles of references keep their descriptors until they are collected, at any moment of a later test."""
    gc.collect()


def descriptors() -> list[str]:
    """The open files in memory of this process."""
    return [n for n in os.listdir("/proc/self/fd") if "tierstate-arena" in _target(n)]


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""


def holds(buffer: torch.Tensor, value: int) -> bool:
    """Whether all bytes are this value; told without memory of its own, and without threads."""
    array = buffer.numpy()
    return bool(array.min() == array.max() == value)


def preparing() -> list[threading.Thread]:
    return [t for t in own_threads() if t.name == "tierstate-arena"]


@pytest.mark.slow
def test_close_gives_memory_back_at_once_and_the_rest_when_it_comes_back(shared: bool) -> None:
    before, files = resident(), len(descriptors())
    arena = Arena(16 * BIG, BIG)
    assert (arena.shared is not None) == shared
    slabs = [arena.acquire() for _ in range(12)]
    for slab in slabs:
        slab.buffer.fill_(7)
    views = [slab.buffer[PAGE:] for slab in slabs[:4]]
    assert resident() - before > 11 * BIG
    for slab in slabs[4:]:
        slab.release()
    arena.close()
    assert 3 * BIG < resident() - before < 5 * BIG
    assert all(holds(view, 7) for view in views), "what is on loan is left alone"
    views.clear()
    for slab in slabs[:4]:
        slab.release()
    assert resident() - before < BIG
    assert len(descriptors()) == files
    assert (arena.in_flight, arena.kept, arena.peak) == (0, 0, 12)


@pytest.mark.slow
def test_a_kept_slab_is_given_back_when_its_tier_lets_go(shared: bool) -> None:
    arena = Arena(4 * BIG, BIG)
    host = Host(arena=arena)
    for i in range(6):
        slab = arena.acquire()
        slab.buffer.fill_(i)
        with host.writer(f"packs/{i}") as writer:
            slab.lease()
            writer.append(slab.buffer, slab.release)
        slab.release()
    assert (arena.in_flight, arena.kept, arena.peak) == (0, 6, 6)
    before = resident()
    arena.close()
    assert all(holds(host.get(f"packs/{i}"), i) for i in range(6)), "a closed arena takes nothing from a tier"
    host.delete("packs/5")
    assert arena.kept == 5
    host.close()
    del writer  # it has the last piece
    assert before - resident() > 5 * BIG
    assert (arena.in_flight, arena.kept, arena.peak) == (0, 0, 6)


@pytest.mark.slow
def test_a_new_version_gets_the_memory_of_the_old_one_that_a_tier_drops(shared: bool) -> None:
    arena = Arena(4 * BIG, BIG)

    def version(value: int) -> list[Slab]:
        slabs = []
        for _ in range(8):
            slabs.append(arena.acquire())
            arena.keep(slabs[-1].buffer)
        was = {int(slab.buffer[0]) for slab in slabs}
        assert len(was) == 1 or value < 4, was
        for slab in slabs:
            slab.buffer.fill_(value)
        held.append(was.pop())
        return slabs

    held: list[int] = []
    versions = [version(1), version(2), version(3)]
    for value in (4, 5, 6):
        until(lambda: not arena._preparing)
        while arena._free:  # a slab too many, which would be taken as well
            arena._free.pop().discard()
        for slab in versions.pop(0):
            slab.release()
        before = resident()
        versions.append(version(value))
        assert resident() - before < BIG
    assert held == [0, 0, 0, 1, 2, 3]
    for slab in [slab for one in versions for slab in one]:
        slab.release()
    assert len(arena._free) == 4, "and when all is dropped, no more than the budget"
    arena.close()


@pytest.mark.slow
def test_more_slabs_than_slots_are_given_back_without_a_close(shared: bool) -> None:
    arena = Arena(4 * BIG, BIG)
    slabs = []
    for _ in range(9):
        slab = arena.acquire()
        slab.buffer.fill_(1)
        arena.keep(slab.buffer)
        slabs.append(slab)
    before = resident()
    for slab in slabs:
        slab.release()
    assert BIG * 4 < before - resident() < BIG * 6
    again = [arena.acquire(last=True) for _ in range(4)]
    more = Arena(4 * BIG, BIG)
    assert all(holds(slab.buffer, 1) for slab in again), "these were kept for the next save"
    for slab in again:
        arena.keep(slab.buffer)
    fresh = arena.acquire()
    assert not fresh.buffer.any(), "a hole in the file is zeroed memory"
    more.close()
    arena.close()


@pytest.mark.slow
def test_closing_while_memory_is_prepared_leaves_no_thread_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before, touch = resident(), arena_room.fault_in

    def slowly(buffer: torch.Tensor) -> None:
        """Most of it is touched after the close has begun, on a slow host too."""
        if len(arena._free) >= 3:
            until(lambda: arena.closed)
        touch(buffer)

    monkeypatch.setattr(arena_room, "fault_in", slowly)
    for _ in range(5):
        arena = Arena(64 * BIG, BIG)
        arena.prepare(64 * BIG)
        assert len(preparing()) == 1
        arena.close()
        assert preparing() == []
        arena.prepare(64 * BIG)
        assert preparing() == []
    assert resident() - before < 4 * BIG


def test_who_waits_for_a_slab_is_told_of_the_close() -> None:
    arena, told = Arena(2 * PAGE, PAGE), []
    held = arena.acquire()

    def wait() -> None:
        try:
            arena.acquire()
        except TierstateError as error:
            told.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)
    arena.close()
    waiter.join(60)
    assert told == ["this arena is closed, as its Checkpointer is; make a new Checkpointer"]
    held.release()


def test_memory_that_cannot_be_prepared_is_logged_and_had_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_buffer: torch.Tensor) -> None:
        raise OSError(12, "no memory")

    arena = Arena(4 * PAGE, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(arena_room, "fault_in", none)
        arena.prepare(4 * PAGE)
        for thread in preparing():
            thread.join(60)
        slab = arena.acquire()  # untouched, and the attempt is not made again for it
        assert not slab.ready
        slab.release()
    assert caplog.text.count("memory could not be prepared") == 1
    arena.prepare(4 * PAGE)
    for thread in preparing():
        thread.join(60)
    assert len(arena._free) == 4
    arena.close()


class Touches:
    """In place of what touches memory: it waits until it may, and notes which thread does it."""

    def __init__(self) -> None:
        self.begun, self.may, self.threads = threading.Event(), threading.Event(), list[str]()

    def __call__(self, buffer: torch.Tensor) -> None:
        self.begun.set()
        self.may.wait(60)
        self.threads.append(threading.current_thread().name)
        buffer.fill_(0)


@pytest.fixture
def touches(monkeypatch: pytest.MonkeyPatch) -> Touches:
    touches = Touches()
    monkeypatch.setattr(arena_room, "fault_in", touches)
    return touches


def test_a_capture_takes_memory_that_another_thread_has_touched(touches: Touches) -> None:
    touches.may.set()
    arena = Arena(8 * PAGE, PAGE)
    slabs = [arena.acquire() for _ in range(7)]
    assert all(slab.ready for slab in slabs)
    assert set(touches.threads) == {"tierstate-arena"}
    arena.close()


def test_a_capture_takes_what_comes_first_a_released_slab_or_prepared_memory(touches: Touches) -> None:
    arena, got = Arena(8 * BIG, BIG), []
    touches.may.set()
    held = arena.acquire()
    until(lambda: not arena._preparing)
    touches.may.clear()
    touches.threads.clear()
    waiter = threading.Thread(target=lambda: got.append(arena.acquire()))
    waiter.start()
    time.sleep(0.05)
    assert not got, "memory that nobody has touched was taken"
    assert arena.try_acquire() is None
    assert not arena.acquire(nbytes=PAGE).ready, "little is touched sooner than it is waited for"
    held.release()
    waiter.join(60)
    assert got == [held]
    assert not touches.threads
    touches.may.set()
    second = arena.acquire()
    assert second is not held
    assert second.ready
    assert arena.waited == 0, "the arena was never full"
    arena.close()


def test_slabs_given_back_while_one_is_prepared_are_within_the_budget_with_it(touches: Touches) -> None:
    arena = Arena(2 * PAGE, PAGE)
    arena.prepare(PAGE)
    assert touches.begun.wait(60)
    slabs = [arena.acquire(last=True) for _ in range(2)]
    for slab in slabs:
        slab.release()
    touches.may.set()
    until(lambda: not arena._preparing)
    assert (len(arena._free), len(arena._raw)) == (1, 1)
    arena.close()


def test_memory_that_was_never_written_does_not_count_as_touched(touches: Touches) -> None:
    arena = Arena(4 * BIG, BIG)
    slab = arena.acquire(nbytes=PAGE)
    slab.release()
    assert arena.acquire(nbytes=PAGE) is slab, "it is used again all the same"
    slab.release()
    touches.may.set()
    assert arena.acquire() is slab
    assert slab.ready
    arena.close()


def test_what_needs_little_leaves_touched_memory_to_what_needs_a_slab(touches: Touches) -> None:
    touches.may.set()
    arena = Arena(8 * BIG, BIG)
    arena.prepare(3 * BIG)
    until(lambda: not arena._preparing)
    few = [arena.acquire(nbytes=PAGE) for _ in range(2)]
    assert not any(slab.ready for slab in few)
    assert len(arena._free) == 3
    assert arena.has_ready([BIG] * 3)
    arena.close()


def test_where_all_of_a_slab_is_pinned_little_takes_what_was_prepared(touches: Touches) -> None:
    touches.may.set()
    arena = Arena(8 * BIG, BIG)
    arena.prepare(3 * BIG)
    until(lambda: not arena._preparing)
    arena.device = 0  # as in a process that uses CUDA
    assert not arena.has_ready([BIG, BIG, PAGE, PAGE])
    assert arena.has_ready([BIG, BIG, PAGE])
    slab = arena._take(arena._is_little(PAGE))
    assert slab.ready
    assert arena.little == 0
    slab.release()
    arena.close()


def test_slabs_of_which_little_is_used_are_no_prepared_memory(touches: Touches) -> None:
    touches.may.set()
    arena = Arena(8 * BIG, BIG)
    few = [arena.acquire(nbytes=PAGE) for _ in range(3)]
    arena.prepare_for([BIG] * 4 + [PAGE] * 3)
    until(lambda: not arena._preparing)
    assert len(arena._free) == 4
    arena.prepare_for([BIG] * 8)
    until(lambda: not arena._preparing)
    assert len(arena._free) == 5, "more than the budget"
    arena.keep(few[0].buffer)
    few[1].release()
    assert (arena.in_flight, arena.little) == (1, 1)
    arena.close()


def test_what_needs_little_maps_no_memory_beyond_the_budget(touches: Touches) -> None:
    touches.may.set()
    arena = Arena(8 * BIG, BIG)
    arena.prepare(8 * BIG)
    until(lambda: not arena._preparing)
    few = [arena.acquire(nbytes=PAGE) for _ in range(7)]
    assert all(slab.ready for slab in few), "more is pinned than the arena may hold"
    assert (arena.in_flight, arena.little, len(arena._free), len(arena._raw)) == (7, 7, 1, 0)
    for slab in few:
        slab.release()
    assert (arena.in_flight, arena.little, len(arena._free), len(arena._raw)) == (0, 0, 8, 0)
    arena.close()


def test_what_is_being_prepared_becomes_more(touches: Touches) -> None:
    arena = Arena(8 * BIG, BIG)
    arena.prepare(2 * BIG)
    arena.prepare(6 * BIG)
    touches.may.set()
    until(lambda: not arena._preparing)
    assert len(arena._free) == 6
    arena.close()


def test_as_many_threads_prepare_for_a_capture_as_there_are_cores_for(
    touches: Touches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_room, "usable_cores", lambda: 16)
    arena = Arena(8 * BIG, BIG)
    assert arena.try_acquire() is None
    assert len(preparing()) == 4
    touches.may.set()
    until(lambda: not arena._preparing)
    assert len(arena._free) == 4
    arena.close()


def test_a_capture_that_is_stopped_does_not_wait_for_memory_to_be_prepared(touches: Touches) -> None:
    arena = Arena(8 * PAGE, PAGE)
    with pytest.raises(CaptureError, match="cancelled"):
        arena.acquire(lambda: True)
    touches.may.set()
    arena.close()


def test_a_capture_gets_untouched_memory_where_none_can_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(arena_room, "start_thread", none)
    arena = Arena(4 * PAGE, PAGE)
    arena.prepare(2 * PAGE)
    slabs = [arena.acquire() for _ in range(3)]
    assert not any(slab.ready for slab in slabs)
    arena.close()


def test_nobody_waits_for_a_thread_whose_start_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    arena = Arena(4 * PAGE, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(arena_room, "start_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arena.acquire()
    assert arena.acquire().ready
    arena.close()


OTHER = """
import mmap, sys
descriptor, offset, length = map(int, sys.argv[1:])
memory = mmap.mmap(descriptor, length, offset=offset)
print(memory[0], memory[length - 1], flush=True)
sys.stdin.readline()
print(memory[0], memory[length - 1], flush=True)
memory[1] = 99
"""


@pytest.mark.parametrize("slab_size", [PAGE, BIG, BIG + PAGE])
def test_another_process_sees_the_bytes_by_the_descriptor(slab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_room, "shares_huge_pages", lambda: True)
    arena = Arena(4 * slab_size, slab_size)
    first, slab = arena.acquire(), arena.acquire()
    assert arena.shared is not None
    assert slab.offset not in (None, first.offset)
    first.buffer.fill_(200)
    slab.buffer.fill_(5)
    number = arena.shared.descriptor
    command = [sys.executable, "-c", OTHER, *map(str, (number, slab.offset, arena.slab_size))]
    with subprocess.Popen(command, pass_fds=[number], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "5 5\n"
        slab.buffer.fill_(6)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "6 6\n"
    assert slab.buffer[:3].tolist() == [6, 99, 6]
    assert bool((first.buffer == 200).all())
    arena.close()
    assert arena.shared.descriptor == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_an_arena_that_is_dropped_closes_its_descriptor() -> None:
    before = descriptors()
    arena = Arena(4 * PAGE, PAGE)
    slab = arena.acquire()
    assert len(descriptors()) == len(before) + 1
    slab.release()
    del slab, arena
    until(lambda: not preparing())
    gc.collect()
    assert descriptors() == before


def test_there_is_one_descriptor_however_many_slabs() -> None:
    before = open_files()
    arena = Arena(5000 * PAGE, PAGE)
    slabs = [arena.acquire() for _ in range(4000)]
    assert (open_files() - before).total() == 1
    for slab in slabs:
        slab.release()
    arena.close()


def child(work: object) -> int:
    """Exit status of a forked child that does some work."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert callable(work)
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(found[1])


@pytest.fixture
def loaned(shared: bool) -> Iterator[Arena]:
    """An arena with a free slab and one on loan that is all sevens."""
    arena = Arena(16 * BIG, BIG)
    slabs = [arena.acquire() for _ in range(8)]
    for slab in slabs:
        slab.buffer.fill_(7)
    for slab in slabs[1:]:
        slab.release()
    yield arena
    assert holds(slabs[0].buffer, 7)
    slabs[0].release()
    arena.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_closes_takes_nothing_from_its_parent(loaned: Arena) -> None:
    def close() -> None:
        loaned.close()
        loaned._free[0].discard()
        for slab in list(loaned._out.values()):
            slab.release()

    assert child(close) == 0
    assert holds(loaned.acquire().buffer, 7)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_works_with_memory_of_its_own(loaned: Arena) -> None:
    """Its parent may be writing from that which it has inherited, and a thread of the parent may hold the lock."""

    def use() -> None:
        loaned.prepare(12 * BIG)
        slabs = [loaned.acquire(last=True) for _ in range(loaned.slots)]
        assert all(holds(slab.buffer, 0) for slab in slabs)
        for slab in slabs:
            slab.buffer.numpy()[:] = 9  # not by torch, whose threads a child does not have
            slab.release()
        loaned.close()

    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        with loaned.lock:
            holding.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait(60)
    try:
        assert child(use) == 0
    finally:
        over.set()
        holder.join()
    assert len(loaned._free) == 7
    assert all(holds(slab.buffer, 7) for slab in loaned._free)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_drops_what_it_inherited_keeps_its_own_memory(loaned: Arena) -> None:
    """Were the ranges not inherited, the child's own arrays would lie there and be unmapped."""

    def drop() -> None:
        mine = [np.full(BIG - 5000, i, "u1") for i in range(12)]
        loaned._free.clear()
        loaned._out.clear()
        gc.collect()
        assert all(bool((array == i).all()) for i, array in enumerate(mine))

    assert child(drop) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_private_memory_is_not_inherited() -> None:
    memory = pages_room.map_pages(BIG)
    memory.fill_(3)

    def look() -> None:
        assert holds(memory, 0)

    assert child(look) == 0
    assert holds(memory, 3)
