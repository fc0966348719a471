"""Calls functions that may fail, in this or another thread, and distinguishes our error types from all others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.tiers.base import Tier
from tierstate.tiers.thread_stacks import thread_stacks


def tried(call: Callable[[], object]) -> TierstateError | None:
    """The typed error of a call, or None where it went well. Any other error is raised."""
    try:
        call()
    except TierstateError as error:
        return error
    return None


def until(holds: Callable[[], object], within: float = 60, pause: float = 0.01) -> float:
    """Wait for something that must come to be.

    Args:
        holds: tells whether it has come to be.
        within: seconds after which the test fails.
        pause: seconds between two looks.

    Returns:
        The seconds it took.
    """
    start = time.monotonic()
    while not holds():
        assert time.monotonic() < start + within, "it never came to be"
        time.sleep(pause)
    return time.monotonic() - start


def in_function(thread: int, name: str) -> bool:
    """Whether a thread is in a function of this name now."""
    return any(code.co_name == name for code, _ in thread_stacks(sys.getrecursionlimit())[thread])


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._outcome: TierstateError | BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = tried(self._call)
        except BaseException as error:
            self._outcome = error

    def outcome(self) -> TierstateError | None:
        """Wait for it; as `tried`."""
        self._thread.join()
        if self._outcome is None or isinstance(self._outcome, TierstateError):
            return self._outcome
        raise self._outcome


def write(tier: Tier, key: str, data: Buffer, step: int = 3 << 20) -> None:
    """An object written in pieces."""
    with tier.writer(key, data.numel()) as writer:
        for at in range(0, data.numel(), step):
            writer.append(data[at : at + step])


def is_there(observer: Tier, key: str, data: Buffer) -> bool:
    """Whether another client finds the object; it finds all of it, or nothing anywhere."""
    if key in list(observer.list("")):
        assert observer.size(key) == data.numel()
        assert observer.get(key).equal(data)
        return True
    assert isinstance(tried(lambda: observer.size(key)), NotFound)
    return False
