"""Another host's memory, as its keeper gives access to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import Any

from tierstate.manifest.chunk import view
from tierstate.manifest.errors import Damaged, TierstateError, TierUnavailable

from .base import Range, is_key
from .limited import batches
from .peer_greeting import introduce
from .peer_members import Member
from .peer_wire import LENGTH, LENT, PIECE, SECONDS, SPAN, TERMS, Ask, Foreign, Line

SPARE = 8
"""Connections that are kept for later."""

CONNECT = 5.0
"""Seconds that making a connection may take."""

AGAIN = 10.0
"""Seconds for which a host that did not answer in time is not asked again; one that refuses is asked each time."""

AHEAD = 3
"""Pieces that are sent before the one before them is answered."""

SPANS = 4096
"""Ranges that are asked for at once."""


class Far:
    """One other host's memory. Safe to use from many threads.

    Args:
        member: where it is.
        seconds: in which a message must come or go as a whole.
        name: the tier's, for messages.
    """

    def __init__(self, member: Member, seconds: float, name: Callable[[], str]) -> None:
        self.member, self._seconds, self._name = member, seconds, name
        self._spare: list[Line] = []
        self._lock = threading.Lock()
        self._away = float("-inf")
        self._closed = False

    def connect(self) -> Line:
        """A new connection.

        Raises:
            TierUnavailable: the keeper is not there, is too slow, or is another.
        """
        member = self.member
        with self._explained():
            if time.monotonic() - self._away < AGAIN:
                raise OSError("it did not answer a moment ago")
            line = Line(socket.create_connection((member.address, member.port), min(CONNECT, self._seconds)), CONNECT)
            try:
                introduce(line, bytes.fromhex(member.token))
            except BaseException:
                line.close()
                raise
            line.seconds = self._seconds
            return line

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Foreign) as error:
            if isinstance(error, TimeoutError):
                self._away = time.monotonic()
            raise TierUnavailable(
                f"{self._name()}: the keeper of peer memory at {self.member.place} does not answer: {error}",
                tier=self._name(),
            ) from error

    def _ask(self, talk: Callable[[Line], Any]) -> Any:
        """Ask over a spare connection or a new one; what may be asked twice without harm."""
        with self._lock:
            line = self._spare.pop() if self._spare else None
        with self._explained():
            if line is not None:
                # It may be closed since we last used it: the keeper is a new one, or was left alone for long.
                with suppress(ConnectionError):
                    return self._over(line, talk)
            return self._over(self.connect(), talk)

    def _over(self, line: Line, talk: Callable[[Line], Any]) -> Any:
        good = False
        try:
            found = talk(line)
            good = True
            return found
        except TierstateError as error:
            good = True
            raise self._told(error) from None
        finally:
            with self._lock:
                good = good and len(self._spare) < SPARE and not self._closed
                if good:
                    self._spare.append(line)
            if not good:
                line.close()

    def _told(self, error: TierstateError) -> TierstateError:
        """An error of the keeper's, with the tier's name and the place."""
        text = f"{self._name()}: at {self.member.place}: {error}"
        return Damaged(text) if isinstance(error, Damaged) else type(error)(text, tier=self._name())  # type: ignore[call-arg]

    # Questions

    def size(self, key: str) -> int:
        """Length of an object; `NotFound` where there is none."""
        (size,) = LENGTH.unpack(self._ask(lambda line: line.ask(Ask.SIZE, key)))
        return int(size)

    def age(self, key: str) -> float | None:
        """Seconds since an object was made, by that host's clock."""
        (age,) = SECONDS.unpack(self._ask(lambda line: line.ask(Ask.AGE, key)))
        return None if age < 0 else float(age)

    def list(self, prefix: str) -> list[str]:
        """The keys of all objects with a prefix."""
        found: list[str] = []
        while True:
            after = found[-1].encode() if found else b""
            page = self._ask(methodcaller("ask", Ask.LIST, prefix, after))
            keys = page[1:].decode("ascii", "replace").split("\n") if len(page) > 1 else []
            found += (key for key in keys if is_key(key))
            if page[:1] != b"+" or not keys:
                return found

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Fill every range, straight into its memory."""
        for batch in batches(ranges, LENT):
            for at in range(0, max(1, len(batch)), SPANS):
                some = batch[at : at + SPANS]
                spans = b"".join(SPAN.pack(offset, out.numel()) for offset, out in some)
                outs = [view(out) for _, out in some]
                self._ask(methodcaller("ask_into", Ask.READ, key, spans, outs))

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        per = PIECE // 1024
        for at in range(0, len(keys), per):
            self._ask(methodcaller("ask", Ask.DELETE, "", "\n".join(keys[at : at + per]).encode()))

    def status(self) -> dict[str, Any]:
        """What the keeper says of itself."""
        found: dict[str, Any] = json.loads(self._ask(lambda line: line.ask(Ask.STATUS)))
        return found

    def terms(self, capacity: int | None, idle: float) -> None:
        """Tell the keeper what the policy says."""
        self._ask(lambda line: line.ask(Ask.TERMS, "", TERMS.pack(capacity or 0, idle)))

    def stop(self) -> None:
        """Have the keeper give its memory back, and end."""
        self._ask(lambda line: line.ask(Ask.STOP))

    def stage(self, key: str, nbytes: int) -> Staging:
        """Begin an object of known length there."""
        return Staging(self, self.connect(), key, nbytes)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            self._closed = True
            lines, self._spare = self._spare, []
        for line in lines:
            line.close()


class Staging:
    """An object on its way to one other host. Nobody there sees it before `commit`, or at all if we die before.

    Args:
        far: that host's memory.
        line: a connection of its own, which belongs to it.
        key: the object's.
        nbytes: its length.

    Raises:
        AlreadyExists, TierFull, TierUnavailable: it cannot be kept there.
    """

    def __init__(self, far: Far, line: Line, key: str, nbytes: int) -> None:
        self.far, self._line, self._key = far, line, key
        self._unanswered = 0
        self._ask(Ask.STAGE, LENGTH.pack(nbytes))

    def _ask(self, ask: Ask, body: bytes = b"") -> None:
        with self._talking():
            self._hear(0)
            self._line.ask(ask, self._key, body)

    def _hear(self, left: int) -> None:
        """Have the answers to all pieces but so many."""
        while self._unanswered > left:
            self._unanswered -= 1
            self._line.reply()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            with self.far._explained():
                yield
        except BaseException as error:
            self._line.close()
            if isinstance(error, TierstateError) and not isinstance(error, TierUnavailable):
                raise self.far._told(error) from None
            raise

    def send(self, piece: memoryview) -> None:
        """Add bytes, `PIECE` at most; they are on their way then, and the other host has all but the last few."""
        with self._talking():
            self._line.post(Ask.PIECE, self._key, piece)
            self._unanswered += 1
            self._hear(AHEAD)

    def commit(self) -> None:
        """Make the object visible there."""
        self._ask(Ask.COMMIT)

    def undo(self) -> None:
        """Have the object removed again.

        Raises:
            TierUnavailable: nobody can tell whether it is.
        """
        self._ask(Ask.UNDO)

    def close(self) -> None:
        """Close the connection; what was not committed is forgotten there."""
        self._line.close()
