"""Answers: what an S3 server says that is not what was asked for, as errors that tell it."""

from __future__ import annotations

import re
import socket
import time
from http.client import HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from typing import Any

LONGEST = 64 << 10
"""Bytes of an answer that are looked at, where it is not what was asked for."""

STRETCH = 1 << 20
"""Bytes that one timeout is for, when sending and when receiving."""

_FIELD = r"<{0}>([^<]{{1,1000}})</{0}>"


class Refused(Exception):
    """The server answered, and said no. Looks like botocore's ``ClientError``: ``response`` says what and why.

    Args:
        status: of HTTP.
        code: the server's name for what is wrong.
        message: what it said about it.
        region: the one that would be right, where it said so.
    """

    def __init__(self, status: int, code: str, message: str, region: str = "") -> None:
        super().__init__(f"{status} {code}: {message}" if message else f"{status} {code}")
        self.response = {
            "Error": {"Code": code, "Message": message, "Region": region},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class Broken(ConnectionError):
    """A body ended before its end, or an answer is not the one to the question."""


class NotConnected(ConnectionError):
    """There is no connection, so that nothing was sent."""


class Answer(HTTPResponse):
    """An answer each stretch of which must arrive within the timeout of its socket, however its bytes drip."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = BufferedReader(_Paced(sock))


class _Paced(RawIOBase):
    """What a socket receives. Its own timeout begins anew with every byte; this one with every stretch."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)
        self._timeout = sock.gettimeout()
        self._begin()

    def _begin(self) -> None:
        self._until = time.monotonic() + (self._timeout or 0)
        self._wanted = STRETCH

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
    """The error that an answer is."""
    try:
        body = answer.read(LONGEST).decode("utf-8", "replace")
    except (OSError, HTTPException):
        body = ""  # the status is known, which says most
    region = answer.headers.get("x-amz-bucket-region") or _field("Region", body)
    return Refused(answer.status, _field("Code", body) or str(answer.status), _field("Message", body), region)


def _field(name: str, body: str) -> str:
    # Not parsed as XML: whoever answers here is not trusted with entities.
    found = re.search(_FIELD.format(name), body)
    return found[1].strip() if found else ""
