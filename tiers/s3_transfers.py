"""Transfers: bytes between memory and an S3 server, without a copy on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any

from tierstate.manifest.errors import AlreadyExists, NotFound

from .object_errors import code_of, kind
from .s3_answers import LONGEST, Broken, NotConnected, Refused, refusal
from .s3_checksums import Checksum
from .s3_connections import Connections, Midway
from .s3_reading import Get
from .s3_retries import Patience, is_transient
from .s3_signing import Signer

_NOT_DONE = frozenset({"SlowDown", "BadDigest", "RequestTimeout", "IncompleteBody", "429", "TooManyRequests"})
"""Answers after which nothing has been created."""

PIECE = 256 << 10
"""Bytes that are received at once: what has arrived of the last of them is asked for again after an error."""


class Transfers:
    """The requests that carry data. Safe to use from many threads; each call blocks until it is done.

    Args:
        signer, connections: what the requests go by.
        patience: how long they are tried.
    """

    def __init__(self, signer: Signer, connections: Connections, patience: Patience) -> None:
        self._signer, self._connections, self._patience = signer, connections, patience

    def fill(self, where: Mapping[str, str], get: Get) -> None:
        """Fill the pieces of a request. A body that breaks off is continued where it ended.

        Raises:
            Refused: also with the code ``InvalidRange`` where the object ends too early.
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
        """Send one part, numbered from 1; what completing the upload needs of it. Raises as `fill` does."""
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
        """Create an object in one piece, if there is none.

        Once an answer is lost the object may be there, and would be in the way of another attempt. So each attempt
        after that looks first: where the object has the bytes that were sent, it has been created.

        Args:
            sums: parameters with its checksum.
            final: codes of answers after which it is not tried again.
            midway: called when the first piece of the body has been sent.

        Raises:
            FileExistsError: an answer was lost, and the object has other bytes than these.
            as `fill` does.
        """
        lost = False

        def attempt(left: float) -> None:
            nonlocal lost
            if lost and self._holds(where, body, left):
                return
            try:
                # On a new connection: one that was idle may be closed just now, which looks like a lost answer.
                params = {**where, "IfNoneMatch": "*", **sums}
                with self._asked("put_object", params, body, left=left, new=True, midway=midway) as answer:
                    _drain(answer)
            except Exception as error:
                if lost and kind(error) is AlreadyExists and self._holds(where, body, left):
                    return
                lost = lost or not _created_nothing(error)
                raise

        self._patience.run(attempt, again=lambda error: is_transient(error) and code_of(error) not in final)

    def _holds(self, where: Mapping[str, str], body: Sequence[memoryview], left: float) -> bool:
        """Whether the object is there.

        Raises:
            FileExistsError: with other bytes.
            Broken: or it cannot be told.
        """
        try:
            with self._asked("get_object", where, left=left) as answer:
                right = answer.headers.get("Content-Length") == str(sum(map(len, body)))
                if right and all(_is_next(answer, view) for view in body):
                    return True
        except Refused as error:
            if kind(error) is NotFound:
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
        """The good answer to one request; its connection is kept if all of it has been read."""
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
    # A 5xx without a name may be a proxy's, whose server went on.
    return isinstance(error, NotConnected) or (isinstance(error, Refused) and code_of(error) in _NOT_DONE)


def _check_range(answer: HTTPResponse, start: int, end: int) -> None:
    """Nothing, if the answer is the range that was asked for, whole."""
    found, nbytes = answer.headers.get("Content-Range", ""), answer.headers.get("Content-Length", "")
    first, _, total = found.partition("/")
    if answer.status == 206 and first == f"bytes {start}-{end - 1}" and nbytes == str(end - start):
        return
    if answer.status == 200 and start == 0 and nbytes == str(end) and not found:
        return  # some do not call the whole a range
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
        count = answer.readinto(out[at : at + PIECE])
        if not count:
            raise Broken(f"the body ended {len(out) - at} bytes too early")
        at += count
        moved(count)


def _is_next(answer: HTTPResponse, view: memoryview) -> bool:
    """Whether these bytes are what follows in a body."""
    for at in range(0, len(view), PIECE):
        wanted = bytes(view[at : at + PIECE])
        found = answer.read(len(wanted))
        if len(found) < len(wanted):
            raise Broken("the body of an object that is compared ended too early")
        if found != wanted:
            return False
    return True


def _drain(answer: HTTPResponse) -> None:
    """Read an answer of which only the head matters, so that the connection can be used again."""
    try:
        answer.read(LONGEST)
        if not answer.isclosed():
            answer.read(0)
    except HTTPException as error:
        raise Broken(f"the answer broke off: {error}") from error
