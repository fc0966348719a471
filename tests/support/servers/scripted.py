"""An S3 server that plays a script: which answer each request gets; for what no real server does when asked to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import numpy as np

from tierstate.tiers.object.s3 import multipart

WHOLE = np.random.default_rng(2).bytes(300_000)
KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG"
UPLOAD = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
COMPLETED = "<CompleteMultipartUploadResult><Key>ckpt/a</Key><ETag>{}</ETag></CompleteMultipartUploadResult>"
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Plays a script: one entry a request, None for the right answer."""

    protocol_version = "HTTP/1.1"
    server: Server
    part: ClassVar[Answer | None] = None
    body: bytes

    def do_GET(self) -> None:
        self.play()

    def do_PUT(self) -> None:
        self.body = self.rfile.read(int(self.headers["Content-Length"]))
        self.play()

    def do_HEAD(self) -> None:
        self.play()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.play()

    def do_DELETE(self) -> None:
        self.play()

    def right_for(self) -> Answer:
        """The answer of a server on which everything goes well, and which has one object."""
        return {
            "GET": lambda one: one.give(WHOLE),
            "PUT": Handler.take,
            "HEAD": lambda one: one.say(404, b""),
            "POST": lambda one: one.say(200, UPLOAD if one.path.endswith("?uploads") else one.completed()),
            "DELETE": lambda one: one.say(204, b""),
        }[self.command]

    def take(self) -> None:
        """Say what was received."""
        self.say(200, b"", ETag=f'"{hashlib.md5(self.body).hexdigest()}"')

    def completed(self) -> bytes:
        """The answer to the completion of an upload."""
        tags = re.findall(r"<ETag>(.*?)</ETag>", self.body.decode().replace("&quot;", ""))
        return COMPLETED.format(multipart.etag_of(tags)).encode()

    def play(self) -> None:
        self.server.seen.append(copy(self))
        script = self.server.script
        special = Handler.part if self.command == "PUT" else None
        (script.pop(0) if script else special or self.right_for())(self)

    def say(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("x-amz-request-id", "1")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def give(self, whole: bytes, cut: int | None = None) -> None:
        if "Range" not in self.headers:
            self.say(200, whole, ETag='"whole"')
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = whole[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(whole)}"
        self.say(206, part[:cut], len(part), Content_Range=span)
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at `seen`."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Answer] = []
        self.seen: list[Handler] = []

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Methods and paths of the requests so far."""
        return [(one.command, one.path) for one in self.seen]


def options(server: Server, **more: Any) -> dict[str, Any]:
    where = f"http://127.0.0.1:{server.server_address[1]}"
    return {"endpoint_url": where, "key": KEY, "secret": SECRET, "client_kwargs": {"region_name": "eu-west-7"}, **more}


def fail(status: int, code: str, **headers: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told so</Message></Error>".encode()
    return lambda one: one.say(status, body, **headers)


def hang_up(one: Handler) -> None:
    one.close_connection = True


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs in the block."""
    one = Server()
    thread = Thread(target=one.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield one
    finally:
        one.shutdown()
        thread.join()
        one.server_close()
