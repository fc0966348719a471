"""HTTP connections to S3 servers: a keep-alive pool, requests with streamed bodies, and error responses as exceptions.

(A later version will use botocore for this.)
"""

from __future__ import annotations

import os
import re
import select
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from .signing import Signed, Signer

ERROR_BODY_LIMIT = 64 << 10
"""Bytes of an error response that are read."""


TIMEOUT_BYTES = 1 << 20
"""The timeout applies to each so many bytes, when sending and when receiving."""


_FIELD = r"<{0}>([^<]{{1,1000}})</{0}>"


MAX_IDLE_CONNECTIONS = 16
"""Most idle connections that are kept."""


Midway = Callable[[], None] | None


_PORTS = {"http": 80, "https": 443}


class Refused(Exception):
    """The server returned an error status. Has the attribute ``response`` of botocore's ``ClientError``.

    Args:
        status: HTTP status.
        code: the server's error code.
        message: the server's error message.
        region: the right region, if the server named it.
    """

    def __init__(self, status: int, code: str, message: str, region: str = "") -> None:
        super().__init__(f"{status} {code}: {message}" if message else f"{status} {code}")
        self.response = {
            "Error": {"Code": code, "Message": message, "Region": region},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class Broken(ConnectionError):
    """A response was truncated, or does not match the request."""


class NotConnected(ConnectionError):
    """No connection could be made, so nothing was sent."""


class Answer(HTTPResponse):
    """A response of which each `TIMEOUT_BYTES` must arrive within the socket's timeout."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = BufferedReader(_Paced(sock))


class _Paced(RawIOBase):
    """Reads a socket. The socket's own timeout restarts with every byte; this one with every `TIMEOUT_BYTES`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._timeout = sock.gettimeout()
        self._begin()

    def _begin(self) -> None:
        self._until = time.monotonic() + (self._timeout or 0)
        self._wanted = TIMEOUT_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int | None:
        if self._timeout is not None:
            self._sock.settimeout(max(self._until - time.monotonic(), 0.001))
        count = self._raw.readinto(out)
        self._wanted -= count or 0
        if self._wanted <= 0:
            self._begin()
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def refusal(answer: HTTPResponse) -> Refused:
    """The exception for an error response."""
    try:
        body = answer.read(ERROR_BODY_LIMIT).decode("utf-8", "replace")
    except (OSError, HTTPException):
        body = ""  # the status is known, and is enough
    region = answer.headers.get("x-amz-bucket-region") or _field("Region", body)
    return Refused(answer.status, _field("Code", body) or str(answer.status), _field("Message", body), region)


def _field(name: str, body: str) -> str:
    # Not parsed as XML: an untrusted response could use entities.
    found = re.search(_FIELD.format(name), body)
    return found[1].strip() if found else ""


class Connections:
    """A connection pool with the timeouts, certificates and proxies of an s3fs file system. Thread-safe.

    Args:
        fs: the file system of s3fs.
        signer: has the trusted certificates.
    """

    def __init__(self, fs: Any, signer: Signer) -> None:
        self._signer = signer
        self._config: dict[str, Any] = fs.config_kwargs
        self._idle: deque[tuple[str, HTTPConnection]] = deque()
        self._lock = threading.Lock()
        self._trust: ssl.SSLContext | None = None

    def take(self, url: SplitResult, left: float) -> HTTPConnection:
        """An idle connection from the pool, or a new one.

        Args:
            left: seconds that connecting may take.

        Raises:
            NotConnected
        """
        while (found := self._pop(_origin(url))) is not None:
            if not _is_over(found):
                found.sock.settimeout(min(self._config["read_timeout"], left))
                return found
            found.close()
        return self.open(url, left)

    def open(self, url: SplitResult, left: float) -> HTTPConnection:
        """A new connection. Raises as `take` does."""
        connection = self._new(url, min(self._config["connect_timeout"], left))
        connection.response_class = Answer
        try:
            connection.connect()
        except ssl.SSLCertVerificationError:
            connection.close()
            raise
        except (OSError, HTTPException) as error:
            connection.close()
            raise NotConnected(f"no connection to {_origin(url)}: {error}") from error
        connection.sock.settimeout(min(self._config["read_timeout"], left))
        return connection

    def keep(self, url: SplitResult, connection: HTTPConnection) -> None:
        """Return a connection to the pool, after its last response was read completely."""
        with self._lock:
            self._idle.append((_origin(url), connection))
            surplus = self._idle.popleft()[1] if len(self._idle) > MAX_IDLE_CONNECTIONS else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for _, connection in idle:
            connection.close()

    def _pop(self, origin: str) -> HTTPConnection | None:
        with self._lock:
            # The server is least likely to have closed the one that was used last.
            for i in reversed(range(len(self._idle))):
                if self._idle[i][0] == origin:
                    found = self._idle[i][1]
                    del self._idle[i]
                    return found
        return None

    def _new(self, url: SplitResult, timeout: float) -> HTTPConnection:
        host, port = url.hostname or "", url.port or _PORTS[url.scheme]
        if proxy := self.proxy(url):
            return self._proxied(urlsplit(proxy if "://" in proxy else f"http://{proxy}"), url, timeout)
        if url.scheme == "http":
            return HTTPConnection(host, port, timeout=timeout)
        return HTTPSConnection(host, port, timeout=timeout, context=self._trusted())

    def _proxied(self, proxy: SplitResult, url: SplitResult, timeout: float) -> HTTPConnection:
        host, port = proxy.hostname or "", proxy.port or _PORTS[proxy.scheme]
        if url.scheme == "http":
            return HTTPConnection(host, port, timeout=timeout)
        connection = HTTPSConnection(host, port, timeout=timeout, context=self._trusted())
        connection.set_tunnel(url.hostname or "", url.port or _PORTS[url.scheme], headers=_login(proxy))
        return connection

    def proxy(self, url: SplitResult) -> str:
        """The proxy for a URL, by the options or the usual environment variables; empty for none."""
        from botocore.utils import get_environ_proxies

        given: Mapping[str, str] = self._config.get("proxies") or get_environ_proxies(urlunsplit(url))
        return given.get(url.scheme) or ""

    def _trusted(self) -> ssl.SSLContext:
        with self._lock:
            if self._trust is None:
                self._trust = _context(self._signer.trusted, self._config.get("client_cert"))
            return self._trust

    def ask(
        self, connection: HTTPConnection, signed: Signed, body: Sequence[memoryview], midway: Midway = None
    ) -> HTTPResponse:
        """Send a request and its body, without copying it; returns the response with its body unread.

        Args:
            midway: called when the first piece of the body has been sent.
        """
        url, target = signed.url, urlunsplit(("", "", signed.url.path, signed.url.query, ""))
        headers = {"Host": url.netloc.rpartition("@")[2], **signed.headers}
        if url.scheme == "http" and (proxy := self.proxy(url)):
            target = urlunsplit(url)
            headers |= _login(urlsplit(proxy))
        if signed.method in ("PUT", "POST"):
            headers["Content-Length"] = str(sum(len(view) for view in body))
        connection.putrequest(signed.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            _send(connection, body, midway)
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that rejects a request may close the connection before it has read the body.
            return _answer_after_all(connection, error)
        return connection.getresponse()


def _send(connection: HTTPConnection, body: Sequence[memoryview], midway: Midway) -> None:
    for i, view in enumerate(body):
        if i == 1 and midway is not None:
            midway()
        for at in range(0, len(view), TIMEOUT_BYTES):
            connection.sock.sendall(view[at : at + TIMEOUT_BYTES])


def _answer_after_all(connection: HTTPConnection, error: OSError) -> HTTPResponse:
    try:
        answer = connection.getresponse()
    except (OSError, HTTPException):
        raise error from None
    if answer.status < 300:
        raise error
    return answer


def _is_over(connection: HTTPConnection) -> bool:
    """Whether an idle connection is readable, which usually means that the server has closed it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _origin(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}"


def _login(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _context(trusted: bool | str, certificate: str | tuple[str, str] | None) -> ssl.SSLContext:
    """A TLS context that trusts the same certificates as s3fs."""
    from botocore.httpsession import get_cert_path

    if trusted is False:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        place = str(get_cert_path(trusted))
        folder = os.path.isdir(place)
        context = ssl.create_default_context(capath=place if folder else None, cafile=None if folder else place)
    if certificate is not None:
        context.load_cert_chain(*((certificate,) if isinstance(certificate, str) else certificate))
    return context
