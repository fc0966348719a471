"""Runs a signal handler of the test's choice at each moment of a call at which the interpreter could run one.

CPython handles signals only at the beginning of a function, after a call of a C function, and at a jump backwards; so
a raise between two other instructions, such as before the end of a ``with lock:``, never comes.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

CHECKED = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}
"""Instructions after which CPython looks for signals; besides these, all conditional jumps backwards."""

ROOMS = ("/tierstate/", "/tiers/", "/manifest/", "/providers/", "/threading.py", "/contextlib.py", "/queue.py")
"""Where to interrupt: this package, and the parts of the standard library that hold locks and contexts for it."""

Moment = tuple[CodeType, int, CodeType | None]
"""Where a handler runs: a function, an offset in it, and the function that called it."""


@cache
def checks(code: CodeType) -> Mapping[int, tuple[bool, int | None]]:
    """For all offsets of a function, whether the interpreter looks for signals after the instruction, and what handles
    its errors."""
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return {
        one.offset: (
            one.opname in CHECKED or one.opname.startswith("POP_JUMP_BACKWARD"),
            next((entry.target for entry in handlers if entry.start <= one.offset < entry.end), None),
        )
        for one in dis.get_instructions(code)
    }


class Interruption:
    """Runs a call and notes the moments of the main thread at which a signal could be handled.

    Args:
        at: the moment at which the handler is run, when it comes first; None only notes all of them.
    """

    def __init__(self, handler: Callable[[], object], at: Moment | None = None) -> None:
        self._handler, self._at = handler, at
        self._returned = False
        self.moments: dict[Moment, None] = {}
        self.done = False

    def run(self, call: Callable[[], object]) -> None:
        """Make the call; the handler's error leaves it as it would leave an interrupted call."""
        sys._getframe().f_trace_opcodes = True  # CPython 3.12 has such events only if asked for them before `settrace`
        sys.settrace(self._entered)
        try:
            call()
        finally:
            sys.settrace(None)

    def _entered(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if self.done or not any(room in frame.f_code.co_filename for room in ROOMS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._reached(frame)
        before, offsets = frame.f_lasti, checks(frame.f_code)

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                checked, handler = offsets.get(before, (False, None))
                # No look for signals after a call of a Python function: its own last call was the last one. And what is
                # raised here comes from the next instruction, so this must be in the same ``try`` and ``with``.
                if checked and not self._returned and offsets[frame.f_lasti][1] == handler:
                    self._reached(frame)
                before, self._returned = frame.f_lasti, False
            elif event == "return":
                self._returned = True
            return trace

        return trace

    def _reached(self, frame: FrameType) -> None:
        moment = (frame.f_code, frame.f_lasti, frame.f_back.f_code if frame.f_back is not None else None)
        self.moments[moment] = None
        if moment == self._at and not self.done:
            self.done = True
            sys.settrace(None)
            self._handler()


def described(moment: Moment) -> str:
    """A moment in words, the same in every process."""
    code, offset, caller = moment
    line = next((line for start, end, line in code.co_lines() if start <= max(offset, 0) < end), None)
    return f"{code.co_qualname}:{line}+{offset} from {caller.co_qualname if caller else ''}"


def moments(call: Callable[[], object]) -> Sequence[Moment]:
    """All moments of a call at which a signal could be handled."""
    noted = Interruption(lambda: None)
    noted.run(call)
    return [*noted.moments]
