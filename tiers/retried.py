"""A tier around a tier that tries again what failed for a moment."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tierstate.manifest.chunk import Buffer, empty_buffer, spans, view
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import AlreadyExists, NotFound, TierstateError

from .base import ObjectWriter, Range, Release, Tier
from .wrapping import Wrapping, WrappingWriter

log = logging.getLogger("tierstate")

FIRST, LONGEST = 0.2, 20.0
"""Seconds: the longest wait before the second try, and before any later one; it doubles from try to try."""

LOOK = 16 << 20
"""Bytes of an object that are read back at once to compare them."""

T = TypeVar("T")


def backoff(attempt: int, draw: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds to wait after the try of that number, from 1: anything between none and a bound that doubles.

    With full jitter, so that many ranks that failed at once do not come back at once (M. Brooker, "Exponential backoff
    and jitter", AWS Architecture Blog, 2015).
    """
    return draw(0.0, min(LONGEST, FIRST * 2.0 ** min(attempt - 1, 30)))


class Retried(Wrapping):
    """Another tier, whose transient errors (``error.transient``) are tried again after a pause.

    * ``read``, ``list``, ``size``, ``age``, ``delete``, ``discard`` and opening a writer change nothing by being
      repeated, and are.
    * A ``put`` that failed so may have taken effect all the same. Before it is sent again the tier is asked: an object
      of these very bytes is this put's, which then succeeds; one of other bytes is another's, and is `AlreadyExists`;
      none, and the bytes are sent once more. So a put is never reported as a conflict with itself.
    * ``append`` is not repeated: a writer gives its object up at the first failure, and the bytes before are gone.
    * A writer's ``close`` is never sent again either, but after a failure the tier is asked whether it took effect: if
      the object is there, with all that was appended, the close succeeds; otherwise its error stands.

    Other errors pass at once. A call that waits ends when the tier is closed.

    Args:
        inner: the tier.
        retries: how often a call is tried again, at most.
    """

    def __init__(self, inner: Tier, retries: int) -> None:
        super().__init__(inner)
        self.retries = retries
        self._closed = threading.Event()

    def put(self, key: str, data: Buffer) -> None:
        uncertain = False

        def send() -> None:
            nonlocal uncertain
            if uncertain and self.holds(key, data.numel(), checksum(view(data))):
                return
            try:
                self.inner.put(key, data)
            except TierstateError as error:
                uncertain = uncertain or error.transient
                raise

        self.again(send, f"put {key}")

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.again(lambda: self.inner.read(key, ranges), f"read {key}")

    def list(self, prefix: str) -> Iterator[str]:
        # Drawn out here, since a tier may fail while it lists.
        return iter(self.again(lambda: [*self.inner.list(prefix)], f"list {prefix}"))

    def size(self, key: str) -> int:
        return self.again(lambda: self.inner.size(key), f"size {key}")

    def delete(self, key: str) -> None:
        self.again(lambda: self.inner.delete(key), f"delete {key}")

    def discard(self, keys: Iterable[str]) -> None:
        some = list(keys)
        self.again(lambda: self.inner.discard(some), f"delete {len(some)} objects")

    def age(self, key: str) -> float | None:
        return self.again(lambda: self.inner.age(key), f"age of {key}")

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return RetriedWriter(self, key, self.again(lambda: self.inner.writer(key, size_hint), f"write {key}"))

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    def again(self, call: Callable[[], T], what: str) -> T:
        """What the call returns, if it does not fail more often than it may.

        Raises:
            TierError: the last failure, or one that is not transient.
        """
        for attempt in range(1, self.retries + 1):
            try:
                return call()
            except TierstateError as error:
                if not error.transient:
                    raise
                pause = backoff(attempt)
                log.info("%s: %s: retry %d of %d in %.2f s: %s", self.name, what, attempt, self.retries, pause, error)
                if self._closed.wait(pause):
                    raise
        return call()

    def holds(self, key: str, nbytes: int, digest: bytes) -> bool:
        """Whether a create whose answer was lost took effect: read back, and compared by length and xxh3-128.

        Raises:
            AlreadyExists: there is something else under that key.
        """
        import xxhash

        found = xxhash.xxh3_128()
        try:
            same = self.inner.size(key) == nbytes
            for start, length in spans(nbytes if same else 0, LOOK):
                piece = empty_buffer(length)
                self.inner.read(key, [Range(start, piece)])
                found.update(view(piece))
        except NotFound:
            return False
        if not same or found.digest() != digest:
            raise AlreadyExists(
                f"{self.name}: {key}: exists already with other bytes, nothing was changed", tier=self.name, key=key
            )
        return True


class RetriedWriter(WrappingWriter):
    """Another writer, which finds out whether a close that failed took effect."""

    def __init__(self, tier: Retried, key: str, inner: ObjectWriter) -> None:
        import xxhash

        super().__init__(inner)
        self._tier, self._key = tier, key
        self._digest = xxhash.xxh3_128()
        self._nbytes = 0
        self._done = False

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        # Before it is handed on: once released, the buffer may hold something else.
        self._digest.update(view(buffer))
        self._nbytes += buffer.numel()
        self.inner.append(buffer, release)

    def close(self) -> None:
        if self._done:
            return
        try:
            self.inner.close()
        except TierstateError as error:
            if not (error.transient and self._took_effect(error)):
                raise
        self._done = True

    def abort(self) -> None:
        if not self._done:
            self.inner.abort()

    def _took_effect(self, error: TierstateError) -> bool:
        def look() -> bool:
            return self._tier.holds(self._key, self._nbytes, self._digest.digest())

        try:
            return self._tier.again(look, f"look for {self._key}")
        except AlreadyExists:
            raise
        except TierstateError as second:
            error.add_note(f"and whether it took effect could not be found out: {second}")
            return False
