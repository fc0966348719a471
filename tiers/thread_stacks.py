"""At which instructions the threads of this process are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter, call
from types import CodeType, FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

_COLLECTS_WITHIN = sys.version_info < (3, 12)
"""Whether garbage may be collected while an object is made, and not only between two instructions."""

_SWITCHES: dict[bool, Callable[[], None]] = {True: gc.enable, False: gc.disable}

_instruction = attrgetter("f_code", "f_lasti")


def thread_stacks(depth: int) -> dict[int, tuple[tuple[CodeType, int], ...]]:
    """The instructions at which the innermost ``depth`` functions of each thread are, innermost first, by its ident.

    An instruction is a code and its index in bytes (`f_lasti`). No frame is kept: it would keep the variables of its
    function alive, which may be large.
    """
    frames = _uncollected(sys._current_frames)
    return {
        ident: _uncollected(partial(tuple, map(_instruction, islice(_outwards(frame), depth))))
        for ident, frame in frames.items()
    }


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    """A frame, its caller, the caller's caller and so on."""
    links: Iterator[Any] = chain((frame,), repeat("f_back"))
    return iter(accumulate(links, getattr).__next__, None)


def _uncollected(function: Callable[[], Result]) -> Result:
    """What a function of C returns, with no garbage collected in it, and no other thread at work.

    CPython 3.11 may collect garbage while it makes the object of a frame of another thread. A finalizer can let that
    thread go on, its function return, and the object point at memory that is used for something else: Python crashes,
    also by `sys._current_frames` itself (https://github.com/getsentry/sentry-python/issues/6119 has it from a
    profiler). So collection is switched off around the call, and in one piece: other threads run between two
    instructions only, and all that is called here is called by one. Whoever switches it in another thread finds it as
    it was, and cannot switch it on within, as in a block with `gc_paused`.
    """
    if not _COLLECTS_WITHIN:
        return function()
    found: list[Callable[[], None]] = []
    note = map(found.append, map(_SWITCHES.__getitem__, map(call, (gc.isenabled,))))
    put_back = map(call, map(call, (found.pop,)))
    steps: tuple[Callable[[], Any], ...] = (note.__next__, gc.disable, function, put_back.__next__)
    result: Result
    try:
        _, _, result, _ = map(call, steps)
    finally:
        for switch in found:  # the function has failed
            switch()
    return result
