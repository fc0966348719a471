"""The arena: one budget, whatever happens in whatever order, and from however many threads."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.outcomes import until

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.tiers.memory.arena import RESERVED_SLABS, Arena, Slab
from tierstate.tiers.memory.pages import PAGE

SLOTS = 5


class ArenaMachine(RuleBasedStateMachine):
    """Slabs are leased, kept and released in any order; the counts are a model's."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(SLOTS * PAGE, 1000)
        self.out: list[tuple[Slab, int]] = []
        self.kept: set[int] = set()
        self.peak = 0

    @property
    def flying(self) -> int:
        return len(self.out) - len(self.kept)

    @precondition(lambda self: self.flying < SLOTS - RESERVED_SLABS)
    @rule()
    def acquire(self) -> None:
        self.taken(self.arena.acquire())

    @precondition(lambda self: self.flying < SLOTS)
    @rule()
    def acquire_the_last(self) -> None:
        self.taken(self.arena.acquire(last=True))

    @rule()
    def acquire_if_there_is_one(self) -> None:
        full = self.flying >= SLOTS - RESERVED_SLABS
        got = [self.arena.try_acquire()]
        if (
            got == [None] and not full
        ):  # no memory has been touched yet; that is being done, or begins with the next try
            until(lambda: got.append(self.arena.try_acquire()) or got[-1])
        slab = got[-1]
        assert (slab is None) == full
        if slab is not None:
            self.taken(slab)

    def taken(self, slab: Slab) -> None:
        assert all(slab is not other for other, _ in self.out)
        assert slab.buffer.data_ptr() % PAGE == 0
        assert slab.buffer.numel() == PAGE
        slab.buffer.fill_(len(self.out))
        self.out.append((slab, 1))
        self.peak = max(self.peak, len(self.out))

    @precondition(lambda self: self.flying >= SLOTS - RESERVED_SLABS)
    @rule(last=st.booleans())
    def wait_for_a_full_one(self, last: bool) -> None:
        if not last or self.flying >= SLOTS:
            with pytest.raises(CaptureError, match="gave up"):
                self.arena.acquire(lambda: True, last=last)

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0))
    def lease(self, which: int) -> None:
        i = which % len(self.out)
        slab, leases = self.out[i]
        slab.lease()
        self.out[i] = slab, leases + 1

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0))
    def release(self, which: int) -> None:
        i = which % len(self.out)
        slab, leases = self.out[i]
        slab.release()
        self.out[i] = slab, leases - 1
        if leases == 1:
            del self.out[i]
            self.kept.discard(id(slab))

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0), start=st.integers(0, PAGE - 1))
    def keep(self, which: int, start: int) -> None:
        slab, _ = self.out[which % len(self.out)]
        pinned = self.arena.keep(slab.buffer[start:])
        assert pinned == (0 if id(slab) in self.kept else PAGE)
        self.kept.add(id(slab))

    @rule()
    def keep_what_is_not_ours(self) -> None:
        assert self.arena.keep(empty_buffer(PAGE)) == 0

    @invariant()
    def counts_are_right(self) -> None:
        assert (self.arena.in_flight, self.arena.kept, self.arena.peak) == (self.flying, len(self.kept), self.peak)
        room = max(0, SLOTS - RESERVED_SLABS - self.flying)
        for nbytes in (0, 1, PAGE, 3 * PAGE, 99 * PAGE):
            assert self.arena.lacks(nbytes) == (room * PAGE < min(nbytes, (SLOTS - RESERVED_SLABS) * PAGE))

    @invariant()
    def no_more_memory_is_held_than_there_must_be(self) -> None:
        ready = self.flying + len(self.arena._free) + len(self.arena._raw)
        assert ready <= max(SLOTS, len(self.kept))
        assert ready + len(self.kept) <= max(self.peak, SLOTS + len(self.kept))

    def teardown(self) -> None:
        """Closed in whatever state it is in; what is on loan comes back later, and all counts come to rest."""
        self.arena.close()
        self.arena.close()
        for ask in (self.arena.acquire, self.arena.try_acquire):
            with pytest.raises(TierstateError, match="closed"):
                ask()
        for slab, leases in self.out:
            slab.buffer.fill_(1)
            for _ in range(leases):
                slab.release()
            assert slab.buffer.numel() == 0
        assert (self.arena.in_flight, self.arena.kept, self.arena.peak) == (0, 0, self.peak)
        assert self.arena._free == self.arena._raw == []


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(stateful_step_count=40, deadline=None)


def test_too_little_for_two_slabs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least twice"):
        Arena(PAGE, PAGE)
    assert Arena(2 * PAGE, 1).slab_size == PAGE


def test_releasing_too_often_is_a_bug_that_is_told() -> None:
    slab = Arena(2 * PAGE, PAGE).acquire()
    slab.release()
    with pytest.raises(RuntimeError, match="more often"):
        slab.release()


def test_memory_is_used_again() -> None:
    arena = Arena(4 * PAGE, PAGE)
    seen = set()
    for _ in range(20):
        slabs = [arena.acquire() for _ in range(3)]
        seen |= {slab.buffer.data_ptr() for slab in slabs}
        for slab in slabs:
            slab.release()
    assert len(seen) <= 4


def test_a_waiter_gets_the_slab_that_is_released_or_gives_up() -> None:
    arena, got = Arena(2 * PAGE, PAGE), []
    held, stop = arena.acquire(), threading.Event()
    waiter = threading.Thread(target=lambda: got.append(arena.acquire()))
    waiter.start()
    time.sleep(0.05)
    assert not got
    held.release()
    waiter.join(60)
    assert len(got) == 1

    def give_up() -> None:
        try:
            arena.acquire(stop.is_set)
        except CaptureError as error:
            got.append(error)

    waiter = threading.Thread(target=give_up)
    waiter.start()
    stop.set()
    arena.wake()
    waiter.join(60)
    assert len(got) == 2


def test_many_threads_never_go_over_the_budget_and_never_share_a_slab() -> None:
    arena = Arena(4 * PAGE, PAGE)
    over, lock, out = [], threading.Lock(), set()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            slab = arena.acquire(last=chance.random() < 0.5)
            with lock:
                if id(slab) in out or len(out) >= 4:
                    over.append(len(out))
                out.add(id(slab))
            slab.buffer.fill_(seed)
            if chance.random() < 0.5:
                slab.lease()
                slab.release()
            if not bool((slab.buffer == seed).all()):
                over.append(-1)
            with lock:
                out.discard(id(slab))
            slab.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert over == []
    assert arena.in_flight == 0
    assert arena.peak <= 4
