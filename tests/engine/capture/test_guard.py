"""The list of saves for which steps wait: none is forgotten, whenever it comes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from tierstate.engine.capture.guard import Guard


class Captured:
    """A capture that is over once somebody has waited for it."""

    def __init__(self) -> None:
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def exception(self) -> None:
        self.waited = True


class Watched:
    """A save that is being captured, from a device: a step does not wait for its end, and other waits do."""

    def __init__(self) -> None:
        self.captured: Any = Captured()

    def release_state(self) -> None:
        pass


def comes_before(number: int) -> bool:
    """Let a save come before one of the instructions of a step's wait, as from another thread, and wait again.

    Returns:
        Whether there are so many instructions.
    """
    guard, left = Guard(), number
    guard.watch(Watched())
    guard.watch(done := Watched())
    done.captured.exception()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code is not Guard._wait.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                guard.watch(late)
        return trace

    late, before = Watched(), sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 has such events only if it was asked for before `settrace`
    sys.settrace(trace)
    try:
        guard.before_step()
    finally:
        sys.settrace(before)
    if left <= 0:
        guard.wait()
        assert late.captured.waited, f"a save that came before instruction {number} is not waited for"
    return left <= 0


def test_a_save_that_comes_during_a_wait_is_waited_for_by_the_next_one() -> None:
    number = 1
    while comes_before(number):
        number += 1
    assert number > 20
