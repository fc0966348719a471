"""A loopback proxy in front of an S3 server that injects faults into requests and answers."""

from __future__ import annotations

import re
import socket
import struct
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

from support.servers.buckets import At
from support.servers.faults import Fault, Request

_PIECE = 64 << 10
_CONTINUE = 100
_ENDLESS = 1 << 62
_LENGTH = re.compile(rb"(?i)(?<=\r\ncontent-length: )\d+")


class _Over(Exception):
    """The exchange ends here: the client's connection is closed, or reset."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


@dataclass
class Seen:
    """A request that came, what was done to it, and the status that the client was sent (0: none)."""

    request: Request
    fault: Fault | None
    status: int = 0


class Proxy:
    """Takes S3 requests on a port of its own and hands them to a server, each by a new connection.

    The first fault of `add` that fits a request happens to it.

    Args:
        server: what to stand in front of.

    Attributes:
        seen: all requests, in the order in which they came.
    """

    def __init__(self, server: At) -> None:
        self._server = server
        self._faults: list[Fault] = []
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """What S3 clients call ``endpoint_url``."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def options(self) -> dict[str, Any]:
        """What s3fs wants to know."""
        return {**self._server.options(), "endpoint_url": self.endpoint}

    def add(self, fault: Fault) -> Fault:
        """From now on this happens, too."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def mend(self) -> None:
        """From now on nothing happens."""
        with self._lock:
            self._faults.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        # Closing alone does not wake who waits in accept or recv.
        self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for one in self._sockets:
                _shut(one)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    # Connections

    def _start(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._talk, client)

    def _keep(self, one: socket.socket) -> None:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets.add(one)
            if self._closed.is_set():
                _shut(one)

    def _drop(self, one: socket.socket, *, reset: bool) -> None:
        with self._lock:
            self._sockets.discard(one)
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()

    def _talk(self, client: socket.socket) -> None:
        self._keep(client)
        reset = False
        reader = client.makefile("rb")
        try:
            while (request := _read_request(reader)) is not None:
                self._exchange(*request, reader, client)
        except _Over as over:
            reset = over.reset
        except OSError:
            reset = True
        finally:
            reader.close()
            self._drop(client, reset=reset)

    def _exchange(self, request: Request, head: bytes, reader: BinaryIO, client: socket.socket) -> None:
        with self._lock:
            fault = next((f for f in self._faults if f.happens_to(request)), None)
            seen = Seen(request, fault)
            self.seen.append(seen)
        body = _Body(self, reader, request.length, fault, "up")
        if fault is not None:
            self._before(fault, body, seen, client)
        url = urlsplit(self._server.options()["endpoint_url"])
        server = socket.create_connection((url.hostname, url.port))
        self._keep(server)
        answer = server.makefile("rb")
        broken = True
        try:
            server.sendall(head)
            if _waits(request):
                self._let_go_on(answer, seen, client)
            body.pump(server)
            self._answer(request, answer, seen, client)
            broken = False
        finally:
            answer.close()
            self._drop(server, reset=broken)

    def _before(self, fault: Fault, body: _Body, seen: Seen, client: socket.socket) -> None:
        """What happens to a request of which the server has seen nothing yet."""
        if fault.kind.endswith("_up"):
            self._before_no_body(fault, seen)
        elif fault.kind in ("latency", "rate", "hang", "status", "say"):
            fault.action()
        if fault.kind == "latency":
            self.wait(fault.seconds)
        elif fault.kind in ("status", "say"):
            if not _waits(seen.request):
                body.pump(None)
            self._refuse(fault, seen, client)
        elif fault.kind == "hang":
            if not _waits(seen.request):
                body.pump(None)
            self.wait(None)

    def _before_no_body(self, fault: Fault, seen: Seen) -> None:
        if not seen.request.length:
            fault.action()
            if fault.kind == "reset_up":
                raise _Over(reset=True)

    def _refuse(self, fault: Fault, seen: Seen, client: socket.socket) -> None:
        text, more = fault.body, fault.head
        if fault.kind == "status":
            text = f'<?xml version="1.0"?><Error><Code>{fault.code}</Code><Message>told to</Message></Error>'.encode()
            more = "Content-Type: application/xml\r\n"
        head = f"HTTP/1.1 {fault.status} {fault.code}\r\n{more}"
        head += f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        seen.status = fault.status
        client.sendall(head.encode() + (b"" if seen.request.method == "HEAD" else text))
        raise _Over

    def _let_go_on(self, answer: BinaryIO, seen: Seen, client: socket.socket) -> None:
        """Pass on whether the server wants the body; where it does not, its answer is the last word."""
        head = _read_head(answer)
        if _status(head) == _CONTINUE:
            client.sendall(head)
            return
        self._pass_on(head, answer, seen, client)
        raise _Over

    def _answer(self, request: Request, answer: BinaryIO, seen: Seen, client: socket.socket) -> None:
        head = _read_head(answer)
        while _status(head) == _CONTINUE:
            head = _read_head(answer)
        if seen.fault is not None and seen.fault.kind == "lost":
            seen.fault.action()
            raise _Over(reset=True)
        if seen.fault is not None and seen.fault.kind == "garble":
            seen.fault.action()
            self._refuse(seen.fault, seen, client)
        self._pass_on(head, answer, seen, client)

    def _pass_on(self, head: bytes, answer: BinaryIO, seen: Seen, client: socket.socket) -> None:
        headers = _headers(head)
        seen.status = _status(head)
        empty = seen.request.method == "HEAD" or seen.status in (204, 304)
        if "chunked" in headers.get("transfer-encoding", ""):
            client.sendall(head)
            _pump_chunks(answer, client)
        else:
            ends = "content-length" not in headers and not empty
            length = 0 if empty else int(headers.get("content-length", _ENDLESS))
            self._pass_on_body(head, length, answer, seen.fault, client, ends=ends)
        if headers.get("connection", "").lower() == "close":
            raise _Over

    def _pass_on_body(
        self, head: bytes, length: int, answer: BinaryIO, fault: Fault | None, client: socket.socket, *, ends: bool
    ) -> None:
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "short" and not ends and length > fault.at:
            fault.action()
            head = _LENGTH.sub(str(fault.at).encode(), head)
            length = fault.at
        if fault is not None and kind.endswith("_down") and not length:
            fault.action()
            if kind in ("reset_down", "cut_down"):
                raise _Over(reset=kind == "reset_down")
        client.sendall(head)
        _Body(self, answer, length, fault, "down", ends=ends).pump(client)
        if kind == "short" or ends:
            raise _Over

    def wait(self, seconds: float | None) -> None:
        """Let time pass, or all of it (None); the end of the proxy ends this, too."""
        if self._closed.wait(seconds):
            raise _Over(reset=True)


class _Body:
    """A body on its way up (to the server) or down, with what happens to it there.

    Args:
        reader: where it comes from.
        length: its bytes.
        ends: whether the end of the connection is its end.
    """

    def __init__(
        self, proxy: Proxy, reader: BinaryIO, length: int, fault: Fault | None, way: str, *, ends: bool = False
    ) -> None:
        self._proxy, self._reader, self._left, self._ends = proxy, reader, length, ends
        self._rate = fault.rate if fault is not None and fault.kind == "rate" else None
        mine = fault is not None and fault.kind.endswith(f"_{way}") and length > 0
        self._fault = fault if mine else None
        self._until = min(fault.at, length - 1) if fault is not None and mine else 0

    def pump(self, out: socket.socket | None) -> None:
        """Pass everything on, or throw it away; the fault happens at its byte."""
        if self._fault is not None and out is not None:
            self._pass(self._until, out)
            self._happen(self._fault, out)
        self._pass(self._left, out)

    def _pass(self, nbytes: int, out: socket.socket | None) -> None:
        while nbytes:
            data = self._take(min(nbytes, _PIECE))
            if not data:
                return
            nbytes -= len(data)
            if out is not None:
                out.sendall(data)
            if self._rate is not None:
                self._proxy.wait(len(data) / self._rate)

    def _take(self, nbytes: int) -> bytes:
        data: bytes = self._reader.read1(nbytes)  # type: ignore[attr-defined]
        if not data and not self._ends:
            raise _Over(reset=True)
        self._left -= len(data)
        return data

    def _happen(self, fault: Fault, out: socket.socket) -> None:
        fault.action()
        name = fault.kind.partition("_")[0]
        if name == "flip":
            out.sendall(bytes(byte ^ 0xFF for byte in self._take(1)))
        elif name == "stall":
            self._proxy.wait(None)
        elif name != "pass":
            raise _Over(reset=name == "reset")


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was faster


def _read_head(reader: BinaryIO) -> bytes:
    """Everything up to the empty line; b"" where the connection has ended instead."""
    lines = []
    while line := reader.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    raise _Over(reset=bool(lines))


def _read_request(reader: BinaryIO) -> tuple[Request, bytes] | None:
    head = _read_head(reader)
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin1").split(" ", 2)
    headers = _headers(head)
    if "transfer-encoding" in headers:
        raise NotImplementedError("requests in chunks")
    return Request(method, target, headers), head


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _status(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


def _waits(request: Request) -> bool:
    """Whether the client sends the body only after it was told to."""
    return "100-continue" in request.headers.get("expect", "").lower()


def _pump_chunks(answer: BinaryIO, client: socket.socket) -> None:
    while True:
        line = answer.readline()
        length = int(line.split(b";")[0] or b"0", 16)
        client.sendall(line + answer.read(length) + answer.readline())
        if not length:
            return
