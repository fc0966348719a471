"""Serves a report of runs that may be under way, to browsers of this host only; it reads, and changes nothing.

A web page elsewhere could make a browser of this host ask for the report, by a name that it lets stand for 127.0.0.1
(DNS rebinding). So a request is answered only if its ``Host`` is a name of the loopback interface.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tierstate.manifest.errors import TierstateError

from .data import ReportData
from .html import embedded_json
from .page import render_body, render_page

log = logging.getLogger("tierstate")


REFRESH = 5.0
"""Seconds after which a page asks again; and for so long a report is shown before it is made anew."""


REQUEST_SECONDS = 10.0
"""A client that sends nothing for so long is given up."""


NAMES = ("localhost", "127.0.0.1", "[::1]")
"""What the ``Host`` of a request may be, beside the address that is served, each with the port."""


class LiveReport:
    """A report that is made anew when somebody asks for it, at most once in `REFRESH` seconds.

    Args:
        collect: makes it.
    """

    def __init__(self, collect: Callable[[], ReportData]) -> None:
        self._collect, self._lock = collect, threading.Lock()
        self._found: ReportData | None = None
        self._until = 0.0

    def get(self) -> ReportData:
        """The report, at most so old.

        Raises:
            TierstateError: the run cannot be read.
        """
        with self._lock:
            if self._found is None or time.monotonic() >= self._until:
                start = time.monotonic()
                self._found = self._collect()
                # One that takes long is not made all the time.
                self._until = time.monotonic() + max(REFRESH, 2 * (time.monotonic() - start))
            return self._found


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, and nothing else."""

    server: ReportServer
    server_version, sys_version = "tierstate", ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """The page, its body, or its data."""
        if self.headers.get("Host", "") not in self.server.names:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "this host is not served here\n")
            return
        make = _PAGES.get(self.path)
        if make is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "here are / and /report.json\n")
            return
        try:
            kind, text = make(self.server.live.get())
        except TierstateError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        else:
            self._answer(HTTPStatus.OK, kind, text)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in (*_HEADERS, ("Content-Type", f"{kind}; charset=utf-8"), ("ETag", tag)):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # the browser has gone
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""
        log.debug(format, *args)


_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


_PAGES: dict[str, Callable[[ReportData], tuple[str, str]]] = {
    "/": lambda data: ("text/html", render_page(data, refresh=REFRESH)),
    "/body.html": lambda data: ("text/html", render_body(data)),
    "/report.json": lambda data: ("application/json", embedded_json(data.encode())),
}


class ReportServer(ThreadingHTTPServer):
    """A server on the loopback interface.

    Args:
        collect: makes a report.
        address: of the loopback interface: ``127.0.0.1``, ``::1``, or ``localhost``.
        port: 0 for any free one.

    Raises:
        ValueError: the address is another one.
        OSError: the port is not free.
    """

    daemon_threads = True

    def __init__(self, collect: Callable[[], ReportData], address: str = "127.0.0.1", port: int = 0) -> None:
        host = loopback(address)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.live = LiveReport(collect)
        super().__init__((host, port), _Handler)
        shown = f"[{host}]" if ":" in host else host
        self.names = frozenset(f"{name}:{self.server_port}" for name in (*NAMES, shown))
        self.url = f"http://{shown}:{self.server_port}/"

    def server_bind(self) -> None:
        """Bind; unlike the base class, no name is looked up."""
        socket_address = self.server_address
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind(socket_address)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "{}:{}".format(*socket_address[:2])) from error
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def loopback(address: str) -> str:
    """The address, if it is one of the loopback interface.

    Raises:
        ValueError: it is another one.
    """
    host = "127.0.0.1" if address == "localhost" else address.strip("[]")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError(
            f"{address!r} is not of the loopback interface; right are 127.0.0.1 and ::1, and `ssh -L` from elsewhere"
        )
    return host
