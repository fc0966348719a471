"""Encoding: results come in order and in bounded numbers, slabs are let go of, and no thread is left."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import engine_threads

from tierstate.engine.codecs.pool import Encoded, EncoderPool, workers_here
from tierstate.tiers import concurrency
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena

CHUNK = torch.arange(64, dtype=torch.uint8)


def encoders() -> list[str]:
    """Names of the threads that encode and are alive."""
    return [name for name in engine_threads() if name.startswith("tierstate-encode")]


class Taken:
    """What was handed on, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, number: int, encoded: Encoded) -> None:
        assert encoded.codec == str(number)
        self.numbers.append(number)


class Gauge:
    """Work that counts how much of it is done at once."""

    def __init__(self) -> None:
        self.lock, self.running, self.peak, self.begun = threading.Lock(), 0, 0, 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, number: int, fails: bool = False) -> Encoded:
        with self.lock:
            self.begun += 1
            self.running += 1
            self.peak = max(self.peak, self.running)
        try:
            assert self.gate.wait(30)
            if fails:
                raise RuntimeError(f"chunk {number} cannot be encoded")
            return Encoded(str(number), CHUNK)
        finally:
            with self.lock:
                self.running -= 1


@given(count=st.integers(0, 40), workers=st.integers(1, 4), bad=st.none() | st.integers(0, 40), halt=st.booleans())
def test_chunks_are_handed_on_in_order_up_to_the_first_that_fails(
    count: int, workers: int, bad: int | None, halt: bool
) -> None:
    taken, gauge, arena = Taken(), Gauge(), Arena(1 << 16, 4096)
    encoding = EncoderPool(taken, workers=workers)
    failed = None
    try:
        for number in range(count):
            slab = arena.acquire()
            try:
                encoding.add(number, lambda number=number: gauge(number, number == bad), slab)
            finally:
                slab.release()
            assert len(encoding._entries) <= workers + 1
        if not halt:
            encoding.finish()
    except RuntimeError as error:
        failed = error
    encoding.abort()
    assert encoders() == []
    assert arena.in_flight == 0, "a slab is still leased"
    assert gauge.peak <= workers
    assert taken.numbers == list(range(len(taken.numbers)))
    if bad is not None and bad < count and not halt:
        assert str(failed) == f"chunk {bad} cannot be encoded"
        assert len(taken.numbers) == bad
    elif not halt:
        assert len(taken.numbers) == count
    arena.close()


def test_threads_begin_when_there_is_something_to_do_and_end_with_it() -> None:
    encoding = EncoderPool(Taken())
    assert encoders() == []
    encoding.add(0, lambda: Encoded("0", CHUNK))
    assert [name.rpartition("-")[0] for name in engine_threads()] == ["tierstate-encode"]
    encoding.finish()
    assert encoders() == []
    assert workers_here() >= 1


def held_up(count: int, workers: int) -> tuple[EncoderPool[Encoded], Gauge, Arena]:
    """A pool with so many chunks, each in a slab, of which none is done before the gauge's gate opens."""
    gauge, arena = Gauge(), Arena(1 << 16, 4096)
    encoding = EncoderPool(Taken(), workers=workers)
    gauge.gate.clear()
    for number in range(count):
        slab = arena.acquire()
        encoding.add(number, lambda number=number: gauge(number), slab)
        slab.release()
    return encoding, gauge, arena


def test_what_was_not_begun_is_cancelled_and_its_slab_let_go() -> None:
    encoding, gauge, arena = held_up(3, workers=2)
    assert arena.in_flight == 3
    threading.Timer(0.05, gauge.gate.set).start()
    encoding.abort()
    assert (arena.in_flight, engine_threads()) == (0, [])
    assert gauge.begun <= 3
    arena.close()


def test_what_cannot_be_begun_for_lack_of_memory_lets_its_slab_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> Latch:
        monkeypatch.undo()
        raise MemoryError

    encoding, gauge, arena = held_up(2, workers=1)
    monkeypatch.setattr(concurrency, "Latch", no_memory)
    gauge.gate.set()
    with pytest.raises(MemoryError):
        encoding.finish()
    encoding.abort()
    assert (gauge.begun, arena.in_flight) == (1, 0)
    arena.close()


def test_what_stays_as_it_is_is_copied_out_of_its_slab() -> None:
    arena, found = Arena(1 << 16, 4096), []
    encoding: EncoderPool[int] = EncoderPool(lambda _, encoded: found.append(encoded.stored))
    slab = arena.acquire()
    slab.buffer[:64] = CHUNK
    raw = slab.buffer[:64]
    encoding.add(0, lambda: Encoded("raw", raw), slab)
    slab.release()
    encoding.finish()
    slab.buffer.zero_()
    assert torch.equal(found[0], CHUNK)
    assert arena.in_flight == 0
    arena.close()


def test_who_is_behind_is_told_only_when_the_tier_has_nothing_to_do() -> None:
    gauge, taken, stirred = Gauge(), Taken(), threading.Event()
    encoding = EncoderPool(taken, stirred, workers=1)
    gauge.gate.clear()
    assert not encoding.behind(lambda: True), "there is room"
    for number in range(2):
        encoding.add(number, lambda number=number: gauge(number))
    assert encoding.behind(lambda: True)
    busy = threading.Event()
    busy.set()

    def ends() -> None:
        busy.clear()
        stirred.set()

    threading.Timer(0.05, ends).start()
    assert encoding.behind(lambda: not busy.is_set()), "the tier had something to do, and then had not"
    threading.Timer(0.05, gauge.gate.set).start()
    assert not encoding.behind(lambda: False), "the tier was busy until there was room"
    encoding.finish()
    assert taken.numbers == [0, 1]


def test_what_takes_results_may_fail_too() -> None:
    def put(number: int, _: Encoded) -> None:
        raise OSError(f"no room for {number}")

    encoding = EncoderPool(put, workers=1)
    encoding.add(0, lambda: Encoded("0", CHUNK))
    with pytest.raises(OSError, match="no room for 0"):
        encoding.finish()
    encoding.abort()
    assert encoders() == []
