"""Calls that a thread may not make inside one another, as a signal handler would: an error instead of a deadlock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType, FunctionType
from typing import ParamSpec, TypeVar, cast

from tierstate.manifest.errors import Reentered

P = ParamSpec("P")
R = TypeVar("R")


def not_reentrant(call: Callable[P, R]) -> Callable[P, R]:
    """A function that raises Reentered where the thread is inside another such function, also of another object.

    They hold locks. A signal handler that has interrupted one of them would wait for these for ever, itself or through
    other threads. What they themselves call in this package is not refused.
    """

    @wraps(call)
    def outermost(*args: P.args, **kwargs: P.kwargs) -> R:
        refused: list[Reentered] = []
        try:
            refuse_inside(call.__name__)
            result = call(*args, **kwargs)
            if (left := next(filter(_left_its_handler, refused), None)) is not None:
                raise left
            return result
        finally:
            refused.clear()  # their tracebacks refer to this frame

    _GUARDED.add(cast(FunctionType, outermost).__code__)
    return outermost


_GUARDED: set[CodeType] = set()
"""The code of the functions that `not_reentrant` returns; they have it in common."""


def refuse_inside(call: str) -> None:
    """Raise Reentered where the thread is inside a `not_reentrant` function, but for calls by that function itself.

    Args:
        call: the function that asks, for the message.
    """
    # The stack tells, and not a mark that an interrupt could leave behind.
    frame: FrameType | None = sys._getframe(2)
    foreign = False
    while frame is not None and not (foreign and frame.f_code in _GUARDED):
        # Not its own call: a signal handler, or other code of the user, is between.
        foreign = foreign or not _is_ours(frame)
        frame = frame.f_back
    if frame is not None:
        inside = frame.f_locals["call"].__name__
        error = Reentered(
            f"{call} was called while this thread is inside {inside}, by a signal handler or by what {inside} runs. "
            f"Set a flag in the handler, and call {call} when {inside} has returned"
        )
        frame.f_locals.get("refused", []).append(error)
        try:
            raise error
        finally:
            # Its traceback refers to this frame. In a cycle, all that the interrupted call was about to end would be
            # ended only by the garbage collector, which may be what is paused.
            del error, frame


def _left_its_handler(error: Reentered) -> bool:
    """Whether the handler let the error out, so that the interrupted call took it for an error of a tier."""
    trace = error.__traceback__
    return trace is not None and _is_ours(trace.tb_frame)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("tierstate.")
