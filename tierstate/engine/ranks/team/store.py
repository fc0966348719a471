"""A client of the job's key-value store (`torch.distributed.Store`): a timeout for each call, and heartbeats.

A call to a store may hang (its server is stopped, the network is gone) and cannot be interrupted. So one thread makes
all calls and may be abandoned; callers wait for a bounded time. All calls are short: no call waits inside the store,
which would delay the heartbeats and print warnings.
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
"""A ``torch.distributed.Store``, or an object with its ``set``, ``multi_get``, ``check``, ``compare_set`` and
``delete_key``."""


CLOSE_WAIT = 5.0
"""Seconds that a closing rank waits until its last heartbeat is stored."""


LOOK_INTERVAL = 1.0
"""Seconds between two looks of a caller that waits for the store. If more time passes, as when this process is
suspended, it counts as twice that at most."""


NOTHING = b"?"
"""What `StoreClient.look` returns for a key without a value; no key ever has it as its value."""


CLOSED = b"closed"
"""The last heartbeat of a rank that has closed its team in the ordinary way."""


BROKEN_OFF = b"broken off"
"""The last heartbeat of a rank that others can count on no more, though it has neither closed nor died."""


class StoreClient:
    """Calls to one store, made one after the other by one thread; each call is given up after a timeout.

    Args:
        store: is cloned, so that other callers that wait in it do not delay this one.
        patience: seconds without an answer after which the store counts as lost, for good.
        beat: the key of this rank's heartbeat, a counter that rises as long as this process lives; empty for none.
        interval: seconds between two heartbeats.
    """

    def __init__(self, store: Store, patience: float, beat: str = "", interval: float = 1.0) -> None:
        self._store = store.clone()
        self._patience, self._beat, self._interval = patience, beat, interval
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._beats = 0
        self._lost = ""
        self.silent: dict[int, bytes] = {}
        """By rank found dead, its last heartbeat; written by `HeartbeatMonitor`, for later waits."""
        self.when_silent: Callable[[str], None] | None = None
        """Called with words about it when a rank is found dead; once, unless it comes back."""
        self._thread = threading.Thread(target=self._run, name="tierstate-store", daemon=True)
        self._thread.start()
        if beat:
            self._ask(self._send_beat)

    def set(self, entries: Mapping[str, bytes]) -> None:
        """Set values, in this order; each shorter than what a store takes at once (8 MiB).

        Raises:
            RankFailed: the store is lost. All other methods raise it, too.
        """
        for key, data in entries.items():
            self._ask(lambda key=key, data=data: self._store.set(key, data))  # type: ignore[misc]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that exist and will not be deleted: for a missing key the store would wait."""
        return list(map(bytes, self._ask(lambda: self._store.multi_get(list(keys)))))

    def look(self, key: str) -> bytes:
        """The value of a key that may be deleted at any moment; `NOTHING` where there is none."""
        # For a key without a value, `compare_set` returns the expected value and sets nothing.
        word = NOTHING.decode()
        return bytes(self._ask(lambda: self._store.compare_set(key, word, word)))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The keys that do not exist, found by bisection: few calls where few are missing."""
        if not keys or self.has(keys):
            return []
        half = len(keys) // 2
        return [*self.missing(keys[:half]), *self.missing(keys[half:])] if half else list(keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys, whether they exist or not."""
        for key in keys:
            self._ask(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    @property
    def lost(self) -> bool:
        """Whether the store is known to be lost."""
        return bool(self._lost)

    def close(self, last: bytes = CLOSED) -> None:
        """Store the last heartbeat, if the store still answers, and end the thread."""
        try:
            beat, self._beat = self._beat, ""  # so that no later heartbeat overwrites it
            if beat:
                self._ask(lambda: self._store.set(beat, last), min(self._patience, CLOSE_WAIT))
        except RankFailed as error:
            log.info("%s", error)
        self.end()

    def end(self) -> None:
        """End the thread without a last heartbeat."""
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
                item = (self._send_beat, Future())
            if item is None:
                return
            call, answer = item
            try:
                answer.set_result(call())
            except BaseException as error:  # raised in the thread that made the call
                answer.set_exception(error)
                if call == self._send_beat:
                    self._lose(error)
            if self._beat and time.monotonic() >= due:
                due = time.monotonic() + self._interval
                if call != self._send_beat:
                    self._queue.put((self._send_beat, Future()))

    def _send_beat(self) -> None:
        self._beats += 1
        if self._beat:
            self._store.set(self._beat, str(self._beats))


def _within(answer: Future[T], patience: float) -> T:
    """The result of a call, or TimeoutError after ``patience`` seconds; a pause of this process hardly counts."""
    waited, glance = 0.0, min(LOOK_INTERVAL, patience / 8)
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
