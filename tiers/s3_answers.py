"""Answers: what an S3 server says that is not what was asked for, as errors that tell it."""

from __future__ import annotations

import re
from http.client import HTTPException, HTTPResponse

LONGEST = 64 << 10
"""Bytes of an answer that are looked at, where it is not what was asked for."""

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
