"""Data requests with retries: range reads into memory, and uploads of parts and whole objects from it, without copies.

`plan_gets` decides which GET requests fill which ranges: long ranges are split, ranges close together are joined.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from tierstate.manifest.chunk import view
from tierstate.manifest.errors import AlreadyExists, NotFound
from tierstate.tiers.base import Range
from tierstate.tiers.concurrency import Cancelled
from tierstate.tiers.latch import Latch
from tierstate.tiers.object.filesystem import BeyondEnd, store_error_class, store_error_code

from .checksums import Checksum
from .http_session import Body, Broken, Midway, direct, finish
from .retry import RetryUntilDeadline, is_transient

REQUEST_SIZE = 8 << 20
"""Most bytes of one request; longer ranges are split into parallel requests."""


JOIN_GAP = 32 << 10
"""A gap of up to this many bytes between two ranges is read and discarded: cheaper than another request."""


_NOT_DONE = frozenset(
    {
        "SlowDown", "BadDigest", "RequestTimeout", "IncompleteBody", "429", "TooManyRequests",
        # Of botocore, where no connection could be made.
        "EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError",
    }
)  # fmt: skip
"""Error codes that mean that nothing was created."""


NO_CONDITIONS = frozenset({"NotImplemented", "501"})
"""Error codes of stores that refuse every request with 'If-None-Match', as Alibaba Cloud's OSS does."""


DIGESTED_BODY = 1 << 20
"""Objects up to this many bytes that are sent at once have their MD5 compared with the ETag in the answer."""


Call = Callable[[str, float, Mapping[str, Any]], Any]
"""Sends a request: the operation, the seconds that it may wait, its parameters."""


RECEIVE_SIZE = 256 << 10
"""Bytes of one receive call. After an error, an incomplete one is requested again."""


@dataclass(frozen=True)
class GetRequest:
    """One GET request: the bytes from ``start`` to ``end`` of an object, and their destinations.

    Attributes:
        pieces: offsets in the object and the memory to fill; rising, without overlaps.
    """

    start: int
    end: int
    pieces: tuple[tuple[int, memoryview], ...]

    def rest(self, at: int) -> Iterator[tuple[int, memoryview]]:
        """What remains to be filled from an offset on: how many bytes to skip first, and the memory."""
        for offset, out in self.pieces:
            if offset + len(out) > at:
                done = max(0, at - offset)
                yield max(0, offset - at), out[done:]
                at = offset + len(out)


def plan_gets(ranges: Sequence[Range]) -> list[GetRequest]:
    """The requests that fill all ranges, in order of offsets: long ranges are split, close ones joined."""
    plan: list[GetRequest] = []
    for offset, out in sorted((piece for wanted in ranges for piece in _split(wanted)), key=lambda piece: piece[0]):
        last = plan[-1] if plan else None
        end = offset + len(out)
        if last is not None and 0 <= offset - last.end <= JOIN_GAP and end - last.start <= REQUEST_SIZE:
            plan[-1] = GetRequest(last.start, end, (*last.pieces, (offset, out)))
        else:
            plan.append(GetRequest(offset, end, ((offset, out),)))
    return plan


def _split(wanted: Range) -> Iterator[tuple[int, memoryview]]:
    """Split into equal pieces, so that parallel requests end at the same time."""
    out, total = view(wanted.out), wanted.out.numel()
    length = -(-total // max(1, -(-total // REQUEST_SIZE))) or 1
    for at in range(0, total, length):
        yield wanted.offset + at, out[at : at + length]


class Transfers:
    """Sends data requests. Thread-safe; each call blocks until it is done.

    Args:
        call: sends a request once.
        patience: repeats them until the deadline.
    """

    def __init__(self, call: Call, patience: RetryUntilDeadline) -> None:
        self._call, self._patience = call, patience

    def fill(self, where: Mapping[str, str], get: GetRequest) -> None:
        """Fill the pieces of a request. After a broken connection, it continues where the body ended.

        Raises:
            BeyondEnd, or a ClientError of botocore with the code ``InvalidRange``: the object is too short.
            GaveUp, Broken, OSError, or another error of botocore
        """
        at = get.start

        def moved(count: int) -> None:
            nonlocal at
            at += count

        def attempt(left: float) -> None:
            with self._object(where, left, Range=f"bytes={at}-{get.end - 1}") as (answer, body):
                _check_range(answer, at, get.end)
                for skip, out in get.rest(at):
                    _skip(body, skip, moved)
                    _receive(body, out, moved)

        self._patience.run(attempt, moved=lambda: at)

    def send_part(
        self,
        upload: Mapping[str, str],
        number: int,
        body: Sequence[memoryview],
        checksum: Checksum,
        stop: Latch | None = None,
    ) -> dict[str, Any]:
        """Send one part, numbered from 1; returns its entry for the completion of the upload. Raises as `fill` does."""
        if stop is not None and stop.is_set():
            raise Cancelled("the upload was given up")
        sums = checksum.of(body)

        def attempt(left: float) -> str:
            params = {**upload, "PartNumber": number, "Body": Body(body), **sums}
            tag = str(self._call("upload_part", left, params).get("ETag") or "")
            if not tag:
                raise Broken("the answer to a part has no ETag")
            return tag

        tag = self._patience.run(attempt, stop=stop)
        return {"PartNumber": number, "ETag": tag, **checksum.named(sums)}

    def create(
        self,
        where: Mapping[str, str],
        body: Sequence[memoryview],
        sums: Mapping[str, str],
        *,
        conditional: bool = True,
        final: frozenset[str] = frozenset(),
        midway: Midway = None,
    ) -> None:
        """Create an object by one request, if it does not exist.

        It counts as created when the answer proves it (`_proves`). If an answer is lost or proves nothing, the object
        may exist, and another attempt would fail. So each attempt after that first checks the object: if it has the
        bytes that were sent, the create has succeeded.

        Args:
            sums: parameters with its checksum.
            conditional: the store is told to create it only if it does not exist. Otherwise the caller has looked.
            final: error codes after which it is not repeated.
            midway: called when the first piece of the body has been sent.

        Raises:
            FileExistsError: an answer was lost, and the object has other bytes.
            as `fill` does.
        """
        lost, condition = False, {"IfNoneMatch": "*"} if conditional else {}

        def attempt(left: float) -> None:
            nonlocal lost
            if lost and self._holds(where, body, left):
                return
            try:
                params = {**where, "Body": Body(body, midway), **condition, **sums}
                answer = self._call("put_object", left, params)
                if not self._proves(answer, where, body, sums):
                    raise Broken("the answer to a create does not prove that the object is there")
            except Exception as error:
                if lost and store_error_class(error) is AlreadyExists and self._holds(where, body, left):
                    return
                lost = lost or store_error_code(error) not in _NOT_DONE
                raise

        self._patience.run(attempt, again=lambda error: is_transient(error) and store_error_code(error) not in final)

    def _proves(
        self, answer: Mapping[str, Any], where: Mapping[str, str], body: Sequence[memoryview], sums: Mapping[str, str]
    ) -> bool:
        """Whether the object is there as it was sent: by the checksum or the ETag in the answer, or by one HEAD."""
        tag, nbytes = str(answer.get("ETag") or "").strip('"'), sum(map(len, body))
        if not tag:
            return False
        if any(name.startswith("Checksum") and answer.get(name) == value for name, value in sums.items()):
            return True
        wanted = _md5(body, sums) if nbytes <= DIGESTED_BODY or "ContentMD5" in sums else ""
        if wanted == tag:
            return True
        if wanted and _IS_MD5.fullmatch(tag) and not is_encrypted(answer):
            return False
        try:
            found = self.head(where)
        except Exception as error:
            if is_transient(error) or store_error_class(error) is NotFound:
                return False
            raise
        return str(found["ETag"]).strip('"') == tag and found.get("ContentLength", nbytes) == nbytes

    def head(self, where: Mapping[str, str]) -> Any:
        """Ask once for the head of an object; returns the answer, which has its ETag and the time of its creation.

        Raises:
            as `fill` does.
        """
        left = self._patience.deadline
        try:
            answer = self._call("head_object", left, where)
        except Broken:
            # It said that there is no such object, with nothing that only S3 says; a GET has the reason in its body.
            with self._object(where, left, Range="bytes=0-0"):
                raise
        if not answer.get("ETag") or "LastModified" not in answer:
            raise Broken("the answer to a HEAD is not one of an S3 server")
        return answer

    def _holds(self, where: Mapping[str, str], body: Sequence[memoryview], left: float) -> bool:
        """Whether the object exists with these bytes.

        Raises:
            FileExistsError: it has other bytes.
            Broken: it could not be determined.
        """
        try:
            with self._object(where, left) as (answer, found):
                if not answer.get("ETag"):
                    raise Broken("the answer to a GET is not one of an S3 server")
                right = answer.get("ContentLength", -1) in (-1, sum(map(len, body)))
                if right and all(_is_next(found, view) for view in body) and not found.read(1):
                    return True
        except Exception as error:
            if store_error_class(error) is NotFound:
                return False
            if is_transient(error):
                raise
            raise Broken(f"the answer to a create was lost, and the object cannot be read: {error}") from None
        raise FileExistsError("the answer to a create was lost, and an object with other bytes is there")

    @contextmanager
    def _object(self, where: Mapping[str, str], left: float, **params: str) -> Iterator[tuple[Mapping[str, Any], Any]]:
        """The answer to a GET, and its body; its connection is kept if that was read completely."""
        answer = self._call("get_object", left, {**where, **params})
        raw = answer["Body"]._raw_stream
        try:
            yield answer, direct(raw)
        except HTTPException as error:
            raise Broken(f"the body broke off: {type(error).__name__}") from None
        finally:
            finish(raw)


_IS_MD5 = re.compile(r"[0-9a-f]{32}")


def is_encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether the ETag in an answer is no MD5, because the object is encrypted with a key of its own."""
    return bool(answer.get("SSECustomerAlgorithm")) or str(answer.get("ServerSideEncryption", "")).startswith("aws:")


def _md5(body: Sequence[memoryview], sums: Mapping[str, str]) -> str:
    if "ContentMD5" in sums:
        return base64.b64decode(sums["ContentMD5"]).hex()
    total = hashlib.md5(usedforsecurity=False)
    for piece in body:
        total.update(piece)
    return total.hexdigest()


def _check_range(answer: Mapping[str, Any], start: int, end: int) -> None:
    """Check that the answer is exactly the requested range. Some servers send one with the status 200."""
    found, nbytes = str(answer.get("ContentRange") or ""), answer.get("ContentLength")
    first, _, total = found.partition("/")
    right = nbytes in (None, end - start)
    if right and first == f"bytes {start}-{end - 1}":
        return
    if right and start == 0 and nbytes is not None and not found and answer.get("ETag"):
        return  # some servers do not return the whole object as a range
    if total.isdigit() and int(total) < end:
        raise BeyondEnd(f"the object has {int(total)} bytes")
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    raise Broken(
        f"bytes {start} to {end} were asked for, the answer is status {status} with "
        f"{'unknown' if nbytes is None else nbytes} bytes of range {found[:80] or 'none'!r}"
    )


def _skip(body: Any, count: int, moved: Callable[[int], None]) -> None:
    if count:
        moved(len(data := body.read(count)))
        if len(data) < count:
            raise Broken(f"the body ended {count - len(data)} bytes before what is wanted")


def _receive(body: Any, out: memoryview, moved: Callable[[int], None]) -> None:
    at = 0
    while at < len(out):
        count = body.readinto(out[at : at + RECEIVE_SIZE])
        if not count:
            raise Broken(f"the body ended {len(out) - at} bytes too early")
        at += count
        moved(count)


def _is_next(body: Any, view: memoryview) -> bool:
    """Whether these are the next bytes of a body."""
    for at in range(0, len(view), RECEIVE_SIZE):
        wanted = bytes(view[at : at + RECEIVE_SIZE])
        found = body.read(len(wanted))
        if len(found) < len(wanted):
            raise Broken("the body of an object that is compared ended too early")
        if found != wanted:
            return False
    return True
