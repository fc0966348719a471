"""Connections: HTTP to S3 servers, kept open for whoever comes next."""

from __future__ import annotations

import os
import select
import ssl
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from .s3_answers import STRETCH, Answer, NotConnected
from .s3_signing import Signed, Signer

IDLE = 16
"""Connections that are kept for later, at most."""

Midway = Callable[[], None] | None

_PORTS = {"http": 80, "https": 443}


class Connections:
    """Connections with what s3fs was told of timeouts, certificates and proxies. Safe to use from many threads.

    Args:
        fs: the file system of s3fs.
        signer: knows whom to trust.
    """

    def __init__(self, fs: Any, signer: Signer) -> None:
        self._signer = signer
        self._config: dict[str, Any] = fs.config_kwargs
        self._idle: deque[tuple[str, HTTPConnection]] = deque()
        self._lock = threading.Lock()
        self._trust: ssl.SSLContext | None = None

    def take(self, url: SplitResult, left: float) -> HTTPConnection:
        """A connection that others have used before, or a new one.

        Args:
            left: seconds that it may take at most.

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
        """Give back a connection on which everything was answered and read."""
        with self._lock:
            self._idle.append((_origin(url), connection))
            surplus = self._idle.popleft()[1] if len(self._idle) > IDLE else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for _, connection in idle:
            connection.close()

    def _pop(self, origin: str) -> HTTPConnection | None:
        with self._lock:
            # The one used last is the one least likely to have been closed by the server.
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
        """The proxy for a URL, by the options or the usual variables; empty for none."""
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
        """Send a request and its body, from where the body lies; the answer, its body unread.

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
            # A server that refuses does not always wait for the body.
            return _answer_after_all(connection, error)
        return connection.getresponse()


def _send(connection: HTTPConnection, body: Sequence[memoryview], midway: Midway) -> None:
    for i, view in enumerate(body):
        if i == 1 and midway is not None:
            midway()
        for at in range(0, len(view), STRETCH):
            connection.sock.sendall(view[at : at + STRETCH])


def _answer_after_all(connection: HTTPConnection, error: OSError) -> HTTPResponse:
    try:
        answer = connection.getresponse()
    except (OSError, HTTPException):
        raise error from None
    if answer.status < 300:
        raise error
    return answer


def _is_over(connection: HTTPConnection) -> bool:
    """Whether there is something to read where nothing was asked: mostly that the server has closed."""
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
    """A TLS context that trusts whom s3fs would trust."""
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
