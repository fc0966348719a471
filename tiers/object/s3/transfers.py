"""Data requests with retries: range reads into memory, and uploads of parts and whole objects from it, without copies.

`plan_gets` decides which GET requests fill which ranges: long ranges are split, ranges close together are joined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from tierstate.manifest.chunk import view
from tierstate.manifest.errors import AlreadyExists, NotFound
from tierstate.tiers.base import Range
from tierstate.tiers.concurrency import Cancelled
from tierstate.tiers.object.filesystem import store_error_class, store_error_code

from .http import ERROR_BODY_LIMIT, Broken, Connections, Midway, NotConnected, Refused, refusal
from .retry import RetryUntilDeadline, is_transient
from .signing import Checksum, Signer

REQUEST_SIZE = 8 << 20
"""Most bytes of one request; longer ranges are split into parallel requests."""


JOIN_GAP = 32 << 10
"""A gap of up to this many bytes between two ranges is read and discarded: cheaper than another request."""


_NOT_DONE = frozenset({"SlowDown", "BadDigest", "RequestTimeout", "IncompleteBody", "429", "TooManyRequests"})
"""Error codes that mean that nothing was created."""


RECEIVE_SIZE = 256 << 10
"""Bytes of one receive call. After an error, an incomplete one is requested again."""


@dataclass(frozen=True)
class GetRequest:
    """One GET request: the bytes from ``start`` to ``end`` of an object, and their destinations.

    Attributes:
        pieces: offsets in the object and the memory to fill; rising, without overlaps.
    """

    start: int
    end: int
    pieces: tuple[tuple[int, memoryview], ...]

    def rest(self, at: int) -> Iterator[tuple[int, memoryview]]:
        """What remains to be filled from an offset on: how many bytes to skip first, and the memory."""
        for offset, out in self.pieces:
            if offset + len(out) > at:
                done = max(0, at - offset)
                yield max(0, offset - at), out[done:]
                at = offset + len(out)


def plan_gets(ranges: Sequence[Range]) -> list[GetRequest]:
    """The requests that fill all ranges, in order of offsets: long ranges are split, close ones joined."""
    plan: list[GetRequest] = []
    for offset, out in sorted((piece for wanted in ranges for piece in _split(wanted)), key=lambda piece: piece[0]):
        last = plan[-1] if plan else None
        end = offset + len(out)
        if last is not None and 0 <= offset - last.end <= JOIN_GAP and end - last.start <= REQUEST_SIZE:
            plan[-1] = GetRequest(last.start, end, (*last.pieces, (offset, out)))
        else:
            plan.append(GetRequest(offset, end, ((offset, out),)))
    return plan


def _split(wanted: Range) -> Iterator[tuple[int, memoryview]]:
    """Split into equal pieces, so that parallel requests end at the same time."""
    out, total = view(wanted.out), wanted.out.numel()
    length = -(-total // max(1, -(-total // REQUEST_SIZE))) or 1
    for at in range(0, total, length):
        yield wanted.offset + at, out[at : at + length]


class Transfers:
    """Sends data requests. Thread-safe; each call blocks until it is done.

    Args:
        signer, connections: sign and send the requests.
        patience: repeats them until the deadline.
    """

    def __init__(self, signer: Signer, connections: Connections, patience: RetryUntilDeadline) -> None:
        self._signer, self._connections, self._patience = signer, connections, patience

    def fill(self, where: Mapping[str, str], get: GetRequest) -> None:
        """Fill the pieces of a request. After a broken connection, it continues where the body ended.

        Raises:
            Refused: also with the code ``InvalidRange`` if the object is too short.
            GaveUp, NotConnected, Broken, OSError, HTTPException
        """
        at = get.start

        def moved(count: int) -> None:
            nonlocal at
            at += count

        def attempt(left: float) -> None:
            params = {**where, "Range": f"bytes={at}-{get.end - 1}"}
            with self._asked("get_object", params, left=left) as answer:
                _check_range(answer, at, get.end)
                for skip, out in get.rest(at):
                    _skip(answer, skip, moved)
                    _receive(answer, out, moved)

        self._patience.run(attempt, moved=lambda: at)

    def send_part(
        self,
        upload: Mapping[str, str],
        number: int,
        body: Sequence[memoryview],
        checksum: Checksum,
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Send one part, numbered from 1; returns its entry for the completion of the upload. Raises as `fill` does."""
        if stop is not None and stop.is_set():
            raise Cancelled("the upload was given up")
        sums = checksum.of(body)

        def attempt(left: float) -> str:
            params = {**upload, "PartNumber": number, **sums}
            with self._asked("upload_part", params, body, left=left) as answer:
                _drain(answer)
                return str(answer.headers.get("ETag", ""))

        tag = self._patience.run(attempt, stop=stop)
        return {"PartNumber": number, "ETag": tag, **checksum.named(sums)}

    def create(
        self,
        where: Mapping[str, str],
        body: Sequence[memoryview],
        sums: Mapping[str, str],
        *,
        final: frozenset[str] = frozenset(),
        midway: Midway = None,
    ) -> None:
        """Create an object by one request, if it does not exist.

        If an answer is lost, the object may exist, and another attempt would fail. So each attempt after that first
        checks the object: if it has the bytes that were sent, the create has succeeded.

        Args:
            sums: parameters with its checksum.
            final: error codes after which it is not repeated.
            midway: called when the first piece of the body has been sent.

        Raises:
            FileExistsError: an answer was lost, and the object has other bytes.
            as `fill` does.
        """
        lost = False

        def attempt(left: float) -> None:
            nonlocal lost
            if lost and self._holds(where, body, left):
                return
            try:
                # On a new connection: the server may just close an idle one, which looks like a lost answer.
                params = {**where, "IfNoneMatch": "*", **sums}
                with self._asked("put_object", params, body, left=left, new=True, midway=midway) as answer:
                    _drain(answer)
            except Exception as error:
                if lost and store_error_class(error) is AlreadyExists and self._holds(where, body, left):
                    return
                lost = lost or not _created_nothing(error)
                raise

        self._patience.run(attempt, again=lambda error: is_transient(error) and store_error_code(error) not in final)

    def _holds(self, where: Mapping[str, str], body: Sequence[memoryview], left: float) -> bool:
        """Whether the object exists with these bytes.

        Raises:
            FileExistsError: it has other bytes.
            Broken: it could not be determined.
        """
        try:
            with self._asked("get_object", where, left=left) as answer:
                right = answer.headers.get("Content-Length") == str(sum(map(len, body)))
                if right and all(_is_next(answer, view) for view in body):
                    return True
        except Refused as error:
            if store_error_class(error) is NotFound:
                return False
            if is_transient(error):
                raise
            raise Broken(f"the answer to a create was lost, and the object cannot be read: {error}") from None
        raise FileExistsError("the answer to a create was lost, and an object with other bytes is there")

    @contextmanager
    def _asked(
        self,
        operation: str,
        params: Mapping[str, Any],
        body: Sequence[memoryview] = (),
        *,
        left: float,
        new: bool = False,
        midway: Midway = None,
    ) -> Iterator[HTTPResponse]:
        """The successful response to one request; its connection is kept if the response was read completely."""
        signed = self._signer.sign(operation, params)
        connection = (self._connections.open if new else self._connections.take)(signed.url, left)
        try:
            answer = self._connections.ask(connection, signed, body, midway)
            if answer.status >= 300:
                raise refusal(answer)
            yield answer
        except BaseException:
            connection.close()
            raise
        if answer.isclosed() and not answer.will_close:
            self._connections.keep(signed.url, connection)
        else:
            connection.close()


def _created_nothing(error: BaseException) -> bool:
    # A 5xx without a code may come from a proxy, while the server has continued.
    return isinstance(error, NotConnected) or (isinstance(error, Refused) and store_error_code(error) in _NOT_DONE)


def _check_range(answer: HTTPResponse, start: int, end: int) -> None:
    """Check that the response is exactly the requested range."""
    found, nbytes = answer.headers.get("Content-Range", ""), answer.headers.get("Content-Length", "")
    first, _, total = found.partition("/")
    if answer.status == 206 and first == f"bytes {start}-{end - 1}" and nbytes == str(end - start):
        return
    if answer.status == 200 and start == 0 and nbytes == str(end) and not found:
        return  # some servers do not return the whole object as a range
    if total.isdigit() and int(total) < end:
        raise Refused(416, "InvalidRange", f"the object has {int(total)} bytes")
    raise Broken(
        f"bytes {start} to {end} were asked for, the answer is status {answer.status} with {nbytes or 'unknown'} bytes "
        f"of range {found[:80] or 'none'!r}"
    )


def _skip(answer: HTTPResponse, count: int, moved: Callable[[int], None]) -> None:
    if count:
        moved(len(data := answer.read(count)))
        if len(data) < count:
            raise Broken(f"the body ended {count - len(data)} bytes before what is wanted")


def _receive(answer: HTTPResponse, out: memoryview, moved: Callable[[int], None]) -> None:
    at = 0
    while at < len(out):
        count = answer.readinto(out[at : at + RECEIVE_SIZE])
        if not count:
            raise Broken(f"the body ended {len(out) - at} bytes too early")
        at += count
        moved(count)


def _is_next(answer: HTTPResponse, view: memoryview) -> bool:
    """Whether these are the next bytes of a response body."""
    for at in range(0, len(view), RECEIVE_SIZE):
        wanted = bytes(view[at : at + RECEIVE_SIZE])
        found = answer.read(len(wanted))
        if len(found) < len(wanted):
            raise Broken("the body of an object that is compared ended too early")
        if found != wanted:
            return False
    return True


def _drain(answer: HTTPResponse) -> None:
    """Read and discard the body of a response, so that the connection can be reused."""
    try:
        answer.read(ERROR_BODY_LIMIT)
        if not answer.isclosed():
            answer.read(0)
    except HTTPException as error:
        raise Broken(f"the answer broke off: {error}") from error
