"""The HTTP connections of botocore, with what S3 needs beside them: timeouts that hold for every MiB of a body, answers
of bounded length, and request bodies that are sent from where they lie.
"""

from __future__ import annotations

import io
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPResponse,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
)
from botocore.exceptions import SSLError
from botocore.httpsession import URLLib3Session

TIMEOUT_BYTES = 1 << 20
"""The read timeout applies to each so many bytes, when sending and when receiving."""


ANSWER_LIMIT = 64 << 20
"""Most bytes of an answer that is no object: a page of a listing has 1000 names of at most 1 KiB each."""


ERROR_LIMIT = 64 << 10
"""Bytes of an error answer that are read."""


Midway = Callable[[], None] | None


class Broken(ConnectionError):
    """An answer was truncated, does not match the request, or is not one of an S3 server."""


class Body:
    """A request body of several pieces of memory, as a file that hands them out without copies.

    Args:
        views: the pieces, none of them empty.
        midway: called when the first piece has been sent.
    """

    def __init__(self, views: Sequence[memoryview], midway: Midway = None) -> None:
        self._views, self._midway = views, midway
        self._number = self._offset = 0

    def __len__(self) -> int:
        return sum(map(len, self._views))

    def read(self, count: int = -1) -> bytes | memoryview:
        """The next bytes; as a rule more than ``count``, since urllib3 asks for very few at a time."""
        if self._number == len(self._views):
            return b""
        if self._number == 1 and not self._offset and self._midway is not None:
            self._midway()
        view, at = self._views[self._number], self._offset
        piece = view[at : at + TIMEOUT_BYTES]
        self._offset += len(piece)
        if self._offset == len(view):
            self._number, self._offset = self._number + 1, 0
        return piece

    def tell(self) -> int:
        """The position, in bytes from the beginning."""
        return sum(map(len, self._views[: self._number])) + self._offset

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position from the beginning, or to the end; returns it."""
        left = len(self) if whence == io.SEEK_END else position
        self._number = self._offset = 0
        while self._number < len(self._views) and left >= len(self._views[self._number]):
            left -= len(self._views[self._number])
            self._number += 1
        self._offset = left
        return self.tell()


class _Limits(threading.local):
    """Limits of the request that this thread sends.

    Attributes:
        connect, read: seconds to connect, and to wait for each `TIMEOUT_BYTES`.
        looked: whether botocore has asked for the region of the bucket.
        answered: whether the server has said anything when it was asked whether it wants a body.
    """

    connect: float = 5.0
    read: float = 30.0
    looked: bool = False
    answered: bool = False


_limits = _Limits()


class _Paced(RawIOBase):
    """Reads a socket. The socket's own timeout restarts with every byte; this one with every `TIMEOUT_BYTES`."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._timeout: float | None = sock.gettimeout()
        self._begin()

    def _begin(self) -> None:
        self._until = time.monotonic() + (self._timeout or 0)
        self._wanted = TIMEOUT_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int | None:
        if self._timeout is not None:
            self._sock.settimeout(max(self._until - time.monotonic(), 0.001))
        count: int | None = self._raw.readinto(out)
        self._wanted -= count or 0
        if self._wanted <= 0:
            self._begin()
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedResponse(AWSHTTPResponse):  # type: ignore[misc]
    """A response of which each `TIMEOUT_BYTES` must arrive within the read timeout."""

    def __init__(self, sock: Any, *args: Any, status_tuple: Any = None, **kwargs: Any) -> None:
        super().__init__(sock, *args, status_tuple=status_tuple, **kwargs)
        self.fp.close()
        self.fp: Any = BufferedReader(_Paced(sock))

    def begin(self) -> None:
        super().begin()
        if self.status >= 300 and self._method in ("PUT", "POST"):
            # It may have come before the body was sent, and the server would take the next request for that.
            self.will_close = True


class _Timed:
    """For a connection of botocore: bodies are sent with the read timeout, where urllib3 has the one to connect."""

    response_class: Any = _PacedResponse
    sock: Any
    timeout: Any

    def connect(self) -> None:
        self.timeout = _limits.connect
        super().connect()  # type: ignore[misc]
        self.sock.settimeout(_limits.read)

    def request(self, *args: Any, **kwargs: Any) -> Any:
        self.timeout = _limits.read
        return super().request(*args, **kwargs)  # type: ignore[misc]

    def _handle_expect_response(self, message_body: Any) -> None:
        _limits.answered = True
        super()._handle_expect_response(message_body)  # type: ignore[misc]

    def getresponse(self) -> Any:
        self.timeout = _limits.read
        if isinstance(self.response_class, partial):
            # botocore has read the status already, while it waited whether the server wants the body.
            self.response_class = partial(_PacedResponse, **self.response_class.keywords)
        return super().getresponse()  # type: ignore[misc]


class _Connection(_Timed, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _TlsConnection(_Timed, AWSHTTPSConnection):  # type: ignore[misc]
    def connect(self) -> None:
        super().connect()
        # With 'verify: false' urllib3 would warn at every request of what the user has asked for.
        self.is_verified = True


class _Direct:
    """For a pool of botocore: redirects are answers like others. urllib3 fails over headers of botocore's at one with
    status 303, and loses the connection."""

    def urlopen(self, *args: Any, **kwargs: Any) -> Any:
        return super().urlopen(*args, **{**kwargs, "redirect": False})  # type: ignore[misc]


class _Pool(_Direct, AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TlsPool(_Direct, AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


class _Text(io.BytesIO):
    """A body that has been read, for botocore."""

    def stream(self) -> Iterator[bytes]:
        """The whole of it."""
        yield self.getvalue()


class HttpSession(URLLib3Session):  # type: ignore[misc]
    """Sends the requests of a botocore client, for which it must be registered (`serve`). Thread-safe.

    Args:
        connect, read: timeouts in seconds; None for none but the deadline of an operation.
        keys: as for botocore's own.

    Attributes:
        asks_first: whether the server is asked whether it wants a long body, so that a refusal costs no transfer. Not
            any more after it has said nothing: botocore waits for a second each time, and Cloudflare R2 never answers.
    """

    asks_first = True

    def __init__(self, connect: float | None, read: float | None, **keys: Any) -> None:
        super().__init__(**keys)
        self._connect, self._read = connect or float("inf"), read or float("inf")
        self._pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        self._manager.pool_classes_by_scheme = self._pool_classes_by_scheme

    def serve(self, client: Any) -> None:
        """Send the requests of this client of S3."""
        client.meta.events.register("before-send.s3", self._answer)
        client.meta.events.register("before-parameter-build.s3.HeadBucket", self._look_once)

    @contextmanager
    def within(self, left: float) -> Iterator[None]:
        """Requests that this thread sends in the block have no longer timeouts than so many seconds."""
        before = _limits.connect, _limits.read
        _limits.connect, _limits.read = min(self._connect, left), min(self._read, left)
        _limits.looked = False
        try:
            yield
        finally:
            _limits.connect, _limits.read = before

    def _look_once(self, **_: Any) -> None:
        # botocore sends it to find the region after a redirect. Where that is redirected too, and says no region, it
        # would send another one for it, and so on for ever.
        if _limits.looked:
            raise Broken("the server redirects every request, and names no region")
        _limits.looked = True

    def _answer(self, request: Any, **_: Any) -> AWSResponse:
        """Send a request.

        Returns:
            Its answer; the body has been read unless it is an object.

        Raises:
            Broken, TimeoutError, ssl.SSLCertVerificationError, or an error of botocore.
        """
        streamed, request.stream_output = request.stream_output, True
        _limits.answered = False
        try:
            answer = self.send(request)
        except SSLError as error:
            raise _untrusted(error) or error from None
        if "Expect" in request.headers and not _limits.answered and answer.status_code < 300:
            self.asks_first = False
        if streamed and answer.status_code < 300:
            return answer
        limit = ERROR_LIMIT if answer.status_code >= 300 else ANSWER_LIMIT
        return AWSResponse(answer.url, answer.status_code, answer.headers, _Text(_read(answer.raw, limit)))


def _untrusted(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """What is wrong with the server's certificate, if that made the error."""
    one: BaseException | None = error
    while one is not None and not isinstance(one, ssl.SSLCertVerificationError):
        one = one.__cause__ or one.__context__
    return one


def _read(raw: Any, limit: int) -> bytes:
    """A whole body that is no object; of an error only the beginning."""
    body = direct(raw)
    try:
        known: int | None = body.length
        data = body.read() if known is not None and known <= limit else _read_up_to(body, limit)
    except HTTPException as error:
        raise Broken(f"the answer broke off: {type(error).__name__}") from error
    finally:
        finish(raw)
    if limit == ANSWER_LIMIT and len(data) == limit:
        raise Broken(f"the answer has {limit} bytes or more")
    return bytes(data)


def _read_up_to(body: Any, limit: int) -> bytes:
    pieces = []
    while limit and (piece := body.read(min(limit, TIMEOUT_BYTES))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def direct(raw: Any) -> Any:
    """The body of an answer of urllib3 as Python's own ``HTTPResponse``, whose ``readinto`` does not copy."""
    own = getattr(raw, "_fp", None)
    return own if isinstance(own, HTTPResponse) else raw


def finish(raw: Any) -> None:
    """Give the connection of an answer back if the body was read to its end; close it otherwise."""
    if direct(raw).isclosed():
        raw.release_conn()
    else:
        raw.close()
