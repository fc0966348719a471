"""Faults that a proxy injects into requests: chosen by request and count, so that they are deterministic."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl

Kind = Literal[
    "latency", "rate", "status", "hang", "reset_up", "reset_down", "cut_down", "short", "lost", "flip_up", "flip_down",
    "stall_down", "pass_up", "pass_down", "say", "garble",
]  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request as it came: its method, its target (path and query), its headers under names in lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def what(self) -> tuple[str, ...]:
        """What is asked for: the same when it is sent again, with another time and signature."""
        query = sorted(f"{k}={v}" for k, v in parse_qsl(self.target.partition("?")[2]) if not k.startswith("X-Amz-"))
        return self.method, self.path, *query, self.headers.get("range", "")

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return int(self.headers.get("content-length", 0))


@dataclass
class Fault:
    """One thing that goes wrong, with the requests to which it happens.

    ============  =====================================================================================
    latency       the request waits ``seconds`` before it goes on
    rate          both bodies pass at ``rate`` bytes per second
    status        answered with ``status`` and S3's error ``code``; the server never sees it
    say           answered with ``status``, the headers ``head`` and ``body``; the server never sees it
    garble        the server has answered; the client gets such an answer instead
    hang          the request is taken whole, and never answered; the server never sees it
    reset_up      the server gets ``at`` bytes of the body; then both connections are reset
    reset_down    the client gets ``at`` bytes of the answer's body; then its connection is reset
    cut_down      the same, but its connection ends in good order
    short         the same, and the answer's head says that this is all
    lost          the server has answered; the client's connection is reset instead
    flip_up       the bits of byte ``at`` of the request's body are flipped
    flip_down     the bits of byte ``at`` of the answer's body are flipped
    stall_down    the client gets ``at`` bytes of the answer's body, and never another one
    pass_up       nothing, at byte ``at`` of the request's body; for the sake of ``action``
    pass_down     nothing, at byte ``at`` of the answer's body
    ============  =====================================================================================

    At that moment ``action`` is called first. Where there is no body, a request that is reset never reaches the
    server, and an answer is reset before its head.

    Args:
        kind: what happens.
        method: to requests with this method; "" for all.
        target: to those in whose target (path and query) this regular expression is found.
        header: to those with a header of this name, in lower case; "" for all.
        longer: to those whose own body has more bytes than this.
        skip: how many of those pass first.
        every: of those that follow, each so-manieth.
        count: how often it happens; None for always.
        fresh: never twice to what asks for the same.
        at: the byte, from 0 on; the last one where the body is shorter.

    Attributes:
        met: how many requests it could have happened to.
        hits: how often it happened.
        begun: set when it happens for the first time.
    """

    kind: Kind
    method: str = ""
    target: str = ""
    header: str = ""
    longer: int = -1
    skip: int = 0
    every: int = 1
    count: int | None = 1
    fresh: bool = False
    at: int = 0
    seconds: float = 0.0
    rate: float = 1e9
    status: int = 503
    code: str = "SlowDown"
    head: str = ""
    body: bytes = b""
    action: Callable[[], object] = lambda: None
    met: int = 0
    hits: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    _asked: set[tuple[str, ...]] = field(default_factory=set)

    def happens_to(self, request: Request) -> bool:
        """Whether it happens to this request, which is counted."""
        if self.method not in ("", request.method) or request.length <= self.longer:
            return False
        if not re.search(self.target, request.target) or (self.header and self.header not in request.headers):
            return False
        if self.fresh and request.what in self._asked:
            return False
        self._asked.add(request.what)
        self.met += 1
        due = self.met > self.skip and (self.met - self.skip) % self.every == 0
        if not due or (self.count is not None and self.hits >= self.count):
            return False
        self.hits += 1
        self.begun.set()
        return True
