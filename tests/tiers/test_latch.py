"""Latches and outcomes: every waiting thread is woken, and can be interrupted at any moment."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers import latch as latches
from tierstate.tiers.latch import Completion, Latch


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[None]:
    """A KeyboardInterrupt after so many instructions of latches, and of what they call, in this block."""
    left = at

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_globals["__name__"] in (latches.__name__, contextlib.__name__, "threading"):
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 has such events only if it was asked for before `settrace`
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def in_time(call: Any) -> None:
    """Another thread can do it without waiting for ever."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@given(at=st.integers(0, 120))
def test_an_interrupt_at_any_instruction_of_a_wait_harms_nobody(at: int) -> None:
    latch = Latch()
    try:
        with interrupted(at):
            assert not latch.wait(0.001)
    except KeyboardInterrupt:
        pass
    in_time(latch.set)
    in_time(latch.wait)
    assert latch.is_set()


@given(at=st.integers(0, 60))
def test_an_interrupt_at_any_instruction_of_a_set_can_be_made_up_for(at: int) -> None:
    latch = Latch()
    waiting = threading.Thread(target=latch.wait, daemon=True)
    waiting.start()
    try:
        with interrupted(at):
            latch.set()
    except KeyboardInterrupt:
        latch.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_all_that_wait_are_woken_and_a_wait_ends_in_time() -> None:
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.wait(0.01)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(latch.wait())) for _ in range(20)]
    for thread in threads:
        thread.start()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 20
    assert latch.wait(0)
    assert not latch._waiting


def test_an_outcome_is_told_once_and_to_all() -> None:
    good, bad, error = Completion(), Completion(), ValueError("no")
    with pytest.raises(TimeoutError):
        good.result(0)
    with pytest.raises(TimeoutError):
        bad.exception(0.01)
    assert not good.done()
    good.set_result(None)
    bad.set_exception(error)
    assert good.done()
    assert good.exception() is None
    good.result()
    assert bad.exception() is error
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            bad.result()
    for outcome in (good, bad):
        with pytest.raises(RuntimeError, match="twice"):
            outcome.set_result(None)
