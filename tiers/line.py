"""A line to the store by which the ranks of a job speak: one thread that asks it, and tells it that this rank lives.

A call on a store may hang (its server is stopped, the network is gone) and cannot be interrupted. So all of them are
made by one thread, which may be left behind: whoever asks waits for a bounded time. All calls are short; nothing waits
inside the store, since that would hold up the beats, and a wait that runs out prints warnings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tierstate.manifest.errors import RankFailed

log = logging.getLogger("tierstate")

T = TypeVar("T")
Store = Any
"""A ``torch.distributed.Store``; or whatever has its ``set``, ``multi_get``, ``check`` and ``delete_key``."""

LEAVING = 5.0
"""Seconds for which one who leaves waits until that is known."""

GLANCE = 1.0
"""Seconds between two looks of one who waits for the store; what lies between counts for twice that at most."""

NOTHING = b"?"
"""What no key ever has as its value."""

CLOSED = b"closed"
"""The last beat of a rank that ended as it should."""


class Line:
    """Calls of one store, one after the other, each given up after a while.

    Args:
        store: it is cloned, so that whoever else waits in it does not hold us up.
        patience: seconds without an answer after which the store counts as lost, for good.
        beat: the key under which a count rises for as long as this process lives; none without it.
        interval: seconds between two beats.
    """

    def __init__(self, store: Store, patience: float, beat: str = "", interval: float = 1.0) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store  # torch has it from 2.8 on
        self._patience, self._beat, self._interval = patience, beat, interval
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._beats = 0
        self._lost = ""
        self.silent: dict[int, bytes] = {}
        """The last beat of each rank that was found dead; kept here by those who wait."""
        self._thread = threading.Thread(target=self._run, name="tierstate-line", daemon=True)
        self._thread.start()
        if beat:
            self._ask(self._tell)

    def set(self, entries: Mapping[str, bytes]) -> None:
        """Set values, in this order; each shorter than what a store takes at once (8 MiB).

        Raises:
            RankFailed: the store is lost. So for all other methods.
        """
        for key, data in entries.items():
            self._ask(lambda key=key, data=data: self._store.set(key, data))  # type: ignore[misc]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there and stay: the store waits for those that vanish."""
        return list(map(bytes, self._ask(lambda: self._store.multi_get(list(keys)))))

    def look(self, key: str) -> bytes:
        """The value of a key that may vanish at any moment; `NOTHING` where there is none."""
        word = NOTHING.decode()  # where there is no value, stores answer with what was expected, and set nothing
        return bytes(self._ask(lambda: self._store.compare_set(key, word, word)))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those that are not there; few calls where they are few."""
        if not keys or self.has(keys):
            return []
        half = len(keys) // 2
        return [*self.missing(keys[:half]), *self.missing(keys[half:])] if half else list(keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys that may be there or not."""
        for key in keys:
            self._ask(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def close(self) -> None:
        """Say that this rank ended as it should, if the store still answers, and end the thread."""
        try:
            beat, self._beat = self._beat, ""  # so that no later beat takes its place
            if beat:
                self._ask(lambda: self._store.set(beat, CLOSED), min(self._patience, LEAVING))
        except RankFailed as error:
            log.info("%s", error)  # nobody is left to be told
        self.end()

    def end(self) -> None:
        """End the thread without a word."""
        self._beat = ""
        self._lost = self._lost or "this rank has left the others: it speaks to them no more"
        self._queue.put(None)

    def _ask(self, call: Callable[[], T], patience: float | None = None) -> T:
        if self._lost:
            raise RankFailed(self._lost)
        answer: Future[T] = Future()
        self._queue.put((call, answer))
        try:
            return _within(answer, self._patience if patience is None else patience)
        except TimeoutError:
            self._lost = f"the store by which ranks speak has not answered for {self._patience:.0f} s: it is lost"
        except RuntimeError as error:
            self._lose(error)
        raise RankFailed(self._lost)

    def _lose(self, error: BaseException) -> None:
        self._beat = ""
        if not self._lost:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            self._lost = f"the store by which ranks speak is lost: {said[:200]}"

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, due - time.monotonic()) if self._beat else None)
            except Empty:
                item = (self._tell, Future())
            if item is None:
                return
            call, answer = item
            try:
                answer.set_result(call())
            except BaseException as error:  # told to whoever asked
                answer.set_exception(error)
                if call == self._tell:
                    self._lose(error)
            if self._beat and time.monotonic() >= due:
                due = time.monotonic() + self._interval
                if call != self._tell:
                    self._queue.put((self._tell, Future()))

    def _tell(self) -> None:
        self._beats += 1
        if self._beat:
            self._store.set(self._beat, str(self._beats))


def _within(answer: Future[T], patience: float) -> T:
    """The answer to a question, if it comes in time; a pause of this process counts for next to nothing."""
    waited, glance = 0.0, min(GLANCE, patience / 8)
    while True:
        began = time.monotonic()
        try:
            return answer.result(glance)
        except TimeoutError:
            if answer.done():
                return answer.result()
            waited += min(time.monotonic() - began, 2 * glance)
            if waited >= patience:
                raise
