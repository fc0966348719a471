"""Multipart uploads: an S3 object is written as parts that are sent in parallel; short objects as one request.

`PartBuilder` splits and collects appended data into parts; `S3Writer` sends each part when it is full; `S3Upload` is
the upload itself; `abort_orphans` aborts uploads that dead writers left.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Protocol

from tierstate.manifest.chunk import Buffer, empty_buffer, view
from tierstate.manifest.errors import AlreadyExists, NotFound, TierError
from tierstate.tiers.base import AtomicWriter, Release
from tierstate.tiers.capacity import CapacityCounter
from tierstate.tiers.concurrency import Task
from tierstate.tiers.latch import Latch
from tierstate.tiers.object.filesystem import store_error_class, store_error_code

from .checksums import Checksum
from .http_session import Broken
from .transfers import NO_CONDITIONS, is_encrypted

MIN_PART = 5 << 20
"""Minimal bytes of a part in S3, except the last one."""


PART_SIZE = 16 << 20
"""Initial bytes of a part that collects small pieces."""


MAX_LENT_PART = 64 << 20
"""Initial maximum of the bytes of a part of a leased buffer: longer buffers are split."""


MAX_PARTS = 10_000


PARTS_PER_SIZE = 2_000
"""After each so many parts the part size doubles, so that ten thousand parts, the limit of S3, hold 1 TB and more."""


SentPart = Task[dict[str, Any]]
"""A part that is being sent; its result is the part's entry for the completion of the upload."""


S3Call = Callable[..., Any]
"""Sends a request, given by the name of the operation and its parameters."""


MARK = "tierstate-upload"
"""The metadata of an object in which its upload is named: ETags are no digests where the store encrypts, and in others
(Cloudflare R2, S3 Express One Zone)."""


_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


MAX_PAGES = 50
"""Most pages of a listing of uploads that are read."""


log = logging.getLogger("tierstate")


IN_FLIGHT = 8
"""Most parts of one object in flight; further appends wait."""


class SharedLease:
    """A reference count on an appended buffer: released when the writer and all parts that use it have finished.

    Args:
        release: called once.

    Attributes:
        shared: whether any part uses it.
    """

    def __init__(self, release: Release) -> None:
        self._release = release
        self._users = 1
        self.shared = False
        self._lock = threading.Lock()

    def share(self) -> None:
        """Count one more part that uses the buffer."""
        with self._lock:
            self._users += 1
            self.shared = True

    def done(self) -> None:
        """Remove one user; the last one releases the buffer."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._release()

    def disown(self) -> None:
        """Do not call release: after an error the caller of append does."""
        self._release = _nothing


def _nothing() -> None:
    """Does nothing."""


@dataclass
class UploadPart:
    """One part: a sequence of pieces of memory.

    Attributes:
        views: the pieces.
        after: called once when they are no longer needed.
    """

    views: list[memoryview] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(map(len, self.views))

    def done(self) -> None:
        """Release the memory. A second call does nothing."""
        after, self.after, self.views = self.after, [], []
        for call in after:
            call()


class PartBuilder:
    """Builds parts: long leased buffers are sent in place, everything else is copied into the builder's memory.

    So a buffer is held only until its own part has been sent, and never until more data comes. Otherwise there could be
    a deadlock: the next data may need the memory that is held.

    Args:
        size_hint: the likely length of the object in bytes.
        fixed: all parts but the last have one length, as Cloudflare R2 demands.
    """

    def __init__(self, size_hint: int = 0, fixed: bool = False) -> None:
        self._least = max(PART_SIZE, -(-size_hint // (MAX_PARTS - 1000)))
        self._fixed = fixed
        self._open = UploadPart()
        self._room = memoryview(b"")
        self._filled = 0
        self.count = 0
        self._spare: list[memoryview] = []

    @property
    def size(self) -> int:
        """Bytes of the next part, if it collects copies."""
        return self._least << (0 if self._fixed else min(self.count // PARTS_PER_SIZE, 8))

    def add(self, data: memoryview, lease: SharedLease | None) -> Iterator[UploadPart]:
        """Add bytes; returns the parts that are full now, to be sent in this order before the next `add`."""
        if lease is not None and self._fixed:
            data = yield from self._filled_up(data, lease)
        elif lease is not None and len(data) >= self.size // PART_SIZE * MIN_PART:
            yield from self._lent(data, lease)
            return
        while len(data):
            if self._filled == len(self._room):
                yield from self.rest()
                self._begin()
            count = min(len(data), len(self._room) - self._filled)
            _copy(self._room[self._filled : self._filled + count], data[:count])
            self._filled, data = self._filled + count, data[count:]

    def _lent(self, data: memoryview, lease: SharedLease) -> Iterator[UploadPart]:
        longest = max(MAX_LENT_PART, self.size)
        length = -(-len(data) // -(-len(data) // longest))
        for at in range(0, len(data), length):
            yield self._with(data[at : at + length], lease)

    def _filled_up(self, data: memoryview, lease: SharedLease) -> Generator[UploadPart, None, memoryview]:
        """Parts of the fixed length, made of what is collected and of the buffer; returns its rest, which is less."""
        while len(data) >= (missing := self.size - self._filled):
            if missing:
                yield self._with(data[:missing], lease)
            else:
                yield from self.rest()
            data = data[missing:]
        return data

    def _with(self, piece: memoryview, lease: SharedLease) -> UploadPart:
        """The unfinished part, with a piece of a leased buffer behind what is collected."""
        part = self._take()
        lease.share()
        part.views.append(piece)
        part.after.append(lease.done)
        return part

    def rest(self) -> Iterator[UploadPart]:
        """The collected rest, if any, as the last part, which may be short."""
        if self._filled:
            yield self._take()

    def _take(self) -> UploadPart:
        """The unfinished part, with the collected bytes."""
        part, self._open = self._open, UploadPart()
        if self._filled:
            part.views.append(self._room[: self._filled])
            room = self._room
            part.after.append(lambda: self._spare.append(room))
        self._room, self._filled = memoryview(b""), 0
        self.count += 1
        return part

    def _begin(self) -> None:
        while self._spare:
            room = self._spare.pop()
            if len(room) == self.size:
                self._room = room
                return
        self._room = view(empty_buffer(self.size))


def _copy(out: memoryview, data: memoryview) -> None:
    import numpy as np

    # NumPy releases the GIL meanwhile; assigning to a memoryview does not.
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


class Session(Protocol):
    """The part of the S3 session that an upload uses."""

    def briefly(self, method: str, **params: Any) -> Any: ...
    def uploads(self, **params: Any) -> Any: ...
    def once(self, method: str, **params: Any) -> Any: ...
    def patiently(self, attempt: Callable[[], Any]) -> Any: ...
    def head(self, where: Mapping[str, str]) -> Any: ...
    def send_part(
        self,
        where: Mapping[str, str],
        number: int,
        body: Sequence[memoryview],
        sum: Checksum,
        stop: Latch,
        then: Callable[[SentPart], object],
    ) -> SentPart: ...


class S3Upload:
    """One multipart upload: started by the constructor, visible once completed.

    Args:
        session: the store.
        where: bucket and key.
        checksum: the kind of checksum of every part.
        conditional: the store is told to complete it only if the name is free. Otherwise the caller has looked.
    """

    def __init__(
        self, session: Session, where: Mapping[str, str], checksum: Checksum, *, conditional: bool = True
    ) -> None:
        self._session, self._object, self._checksum, self._conditional = session, where, checksum, conditional
        self._mark = uuid.uuid4().hex
        algorithm = {"ChecksumAlgorithm": checksum.algorithm} if checksum.algorithm else {}
        self._where = {**where, "UploadId": session.patiently(lambda: self._begin(algorithm))}

    def _begin(self, algorithm: Mapping[str, str]) -> str:
        mark = {"Metadata": {MARK: self._mark}}
        begun = self._session.once("create_multipart_upload", **self._object, **mark, **algorithm)
        if not begun.get("UploadId"):
            raise Broken("the answer to the beginning of an upload has no id")
        return str(begun["UploadId"])

    def send(
        self, number: int, body: Sequence[memoryview], stop: Latch, then: Callable[[SentPart], object]
    ) -> SentPart:
        """Send one part, numbered from 1. ``then`` is called when that has ended."""
        return self._session.send_part(self._where, number, body, self._checksum, stop, then)

    def complete(self, parts: Sequence[dict[str, Any]], nbytes: int) -> None:
        """Make the object visible if the name is free: AWS checks that condition here, Ceph does not.

        It counts as done when the object's ETag is the right one, by the answer, or by one HEAD, which also says by
        the object's metadata whether it is this upload's. That shows too who created it when an answer is lost.

        Args:
            parts: the entries of the parts, in their order.
            nbytes: length of the object.
        """
        wanted, lost = etag_of([part["ETag"] for part in parts]), False

        def attempt() -> None:
            nonlocal lost
            if lost and self._is_complete(wanted):
                return
            try:
                answer = self._completed(parts)
                if not self._proves(answer, wanted, nbytes):
                    raise Broken("the answer to the completion of an upload does not prove that the object is there")
            except Exception as error:
                # A transient error may hide a success; others mean that the store did nothing.
                lost = lost or store_error_class(error).transient
                if lost and store_error_class(error) is AlreadyExists and self._is_complete(wanted):
                    return
                raise

        self._session.patiently(attempt)

    def _completed(self, parts: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
        """The answer to the completion. The caller has looked whether the name is free, for stores that refuse the
        condition, some of them here only."""
        request = partial(
            self._session.once, "complete_multipart_upload", **self._where, MultipartUpload={"Parts": list(parts)}
        )
        answer: Mapping[str, Any]
        try:
            answer = request(IfNoneMatch="*") if self._conditional else request()
        except Exception as error:
            if not self._conditional or store_error_code(error) not in NO_CONDITIONS:
                raise
            answer = request()
        return answer

    def _proves(self, answer: Mapping[str, Any], wanted: str, nbytes: int) -> bool:
        """Whether the object is there: by the ETag in the answer, or by one HEAD."""
        tag = str(answer.get("ETag") or "").strip('"')
        if wanted and tag == wanted and not is_encrypted(answer):
            return True
        try:
            head = self._session.head(self._object)
        except Exception as error:
            if store_error_class(error).transient or store_error_class(error) is NotFound:
                return False
            raise
        ours = self._mark == _mark_in(head) or str(head["ETag"]).strip('"') in {tag, wanted} - {""}
        return ours and head.get("ContentLength", nbytes) == nbytes

    def _is_complete(self, wanted: str) -> bool:
        """Whether the object exists and was made by this upload.

        Raises:
            FileExistsError: another writer created the object.
            ConnectionError: the object exists, and its ETag does not show who created it.
        """
        try:
            head = self._session.head(self._object)
        except Exception as error:
            if store_error_class(error) is NotFound:
                return False
            raise
        found = str(head["ETag"]).strip('"')
        if mark := _mark_in(head):
            if mark == self._mark:
                return True
            raise FileExistsError("an object of another upload is there")
        if not wanted or is_encrypted(head):
            raise ConnectionError("an object of this name is there now, and its ETag does not tell whether it is ours")
        if found != wanted:
            raise FileExistsError(f"an object with ETag {found[:80]!r} is there, ours would have {wanted!r}")
        return True

    def abort(self) -> None:
        """Abort the upload and delete its parts."""
        abort(self._session.briefly, self._where)


def _mark_in(head: Mapping[str, Any]) -> str:
    """The mark of the upload that created an object; empty if it has none."""
    return next((str(value) for name, value in head.get("Metadata", {}).items() if name.lower() == MARK), "")


def abort(call: S3Call, where: Mapping[str, str]) -> None:
    """Abort an upload and delete its parts; an upload that no longer exists is no error."""
    try:
        call("abort_multipart_upload", **where)
    except Exception as error:
        if store_error_code(error) != "NoSuchUpload" and store_error_class(error) is not NotFound:
            raise


def etag_of(tags: Sequence[str]) -> str:
    """The ETag of an object from the ETags of its parts; empty if those are no MD5, as with some encryptions."""
    found = [_MD5.fullmatch(tag) for tag in tags]
    if not all(found):
        return ""
    joined = b"".join(bytes.fromhex(one[1]) for one in found if one)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"


def abort_orphans(session: Session, bucket: str, prefix: str, age: float) -> tuple[int, int]:
    """Abort the uploads below a prefix that are older than ``age`` seconds, by the clock of the store.

    Returns:
        How many were aborted, and how many are younger.
    """
    old = young = 0
    for upload, now in _uploads(session, bucket, prefix):
        if now - upload["Initiated"] > timedelta(seconds=age):
            abort(session.briefly, {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})
            old += 1
        else:
            young += 1
    return old, young


def _uploads(session: Session, bucket: str, prefix: str) -> Iterator[tuple[Mapping[str, Any], datetime]]:
    """Unfinished uploads, each with the store's current time."""
    marker: dict[str, str] = {}
    for _ in range(MAX_PAGES):
        page = session.uploads(Bucket=bucket, Prefix=prefix, **marker)
        date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
        if "IsTruncated" not in page or not date:
            raise Broken("the answer to a listing of uploads has nothing of one")
        now = parsedate_to_datetime(date)
        for upload in page.get("Uploads", ()):
            if upload["Key"].startswith(prefix):
                yield upload, now
        if not page["IsTruncated"]:
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


class Upload(Protocol):
    """A multipart upload, started by its constructor."""

    def send(
        self, number: int, body: Sequence[memoryview], stop: Latch, then: Callable[[SentPart], object]
    ) -> SentPart: ...
    def complete(self, parts: Sequence[dict[str, Any]], nbytes: int) -> None: ...
    def abort(self) -> None: ...


class UploadTarget(Protocol):
    """The part of the tier that the writer uses."""

    name: str
    gauge: CapacityCounter

    def explained(self, doing: str, key: str) -> AbstractContextManager[None]: ...
    def create_whole(self, key: str, body: Sequence[memoryview]) -> None: ...
    def check_free(self, key: str) -> None: ...
    def upload(self, key: str) -> Upload: ...


class S3Writer(AtomicWriter):
    """Sends each part when it is full. Before the first part is full nothing is sent; before close nothing is visible.

    Args:
        tier: the tier to write to.
        key: the key of the object.
        size_hint: its likely length in bytes: longer objects need longer parts.
        fixed: all parts but the last have one length.
    """

    def __init__(self, tier: UploadTarget, key: str, size_hint: int = 0, *, fixed: bool = False) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._parts = PartBuilder(size_hint, fixed)
        self._length = 0
        self._upload: Upload | None = None
        self._room = threading.BoundedSemaphore(IN_FLIGHT)
        self._stop = Latch()
        self._sent: list[tuple[SentPart, Latch]] = []
        self._failed: SentPart | None = None

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._tier.gauge.take(buffer.numel(), self._tier.name, self._key)
        self._length += buffer.numel()
        lease = SharedLease(release) if release is not None else None
        try:
            for part in self._parts.add(view(buffer), lease):
                self._send(part)
        except BaseException:
            if lease is not None:
                lease.disown()
            raise
        if lease is None or not lease.shared:
            return False
        lease.done()
        return True

    def _send(self, part: UploadPart) -> None:
        """Send a part as soon as fewer than `IN_FLIGHT` are in flight."""
        try:
            if self._parts.count > MAX_PARTS:
                text = f"{self._place}: is longer than {MAX_PARTS} parts of S3; say its length when it is begun"
                raise TierError(text, tier=self._tier.name, key=self._key)
            if self._upload is None:
                self._upload = self._tier.upload(self._key)
            arrived = Latch()
            sent = self._send_to(self._upload, part, lambda sent: self._arrived(part, sent, arrived))
        except BaseException:
            part.done()
            raise
        self._sent.append((sent, arrived))

    def _send_to(self, upload: Upload, part: UploadPart, then: Callable[[SentPart], object]) -> SentPart:
        self._room.acquire()
        try:
            self._check()
            return upload.send(self._parts.count, part.views, self._stop, then)
        except BaseException:
            self._room.release()
            raise

    def _arrived(self, part: UploadPart, sent: SentPart, arrived: Latch) -> None:
        try:
            part.done()
        finally:
            if sent.error is not None:
                self._failed = sent
            self._room.release()
            arrived.set()

    def _check(self) -> None:
        """Raise the error of a part that has failed."""
        if self._failed is not None:
            with self._tier.explained("write", self._key):
                self._failed.result()

    def _drain(self) -> None:
        """Wait until all parts have ended and their leases are released: a task's result comes slightly earlier."""
        for _, arrived in self._sent:
            arrived.wait()

    def _publish(self) -> None:
        rest = list(self._parts.rest())
        if self._upload is None:
            self._tier.create_whole(self._key, [piece for part in rest for piece in part.views])
        else:
            self._complete(self._upload, rest)
        self._tier.gauge.made(self._length)

    def _complete(self, upload: Upload, rest: Sequence[UploadPart]) -> None:
        for part in rest:
            self._send(part)
        self._drain()
        with self._tier.explained("write", self._key):
            parts = [sent.result() for sent, _ in self._sent]
        # Not every store checks the condition when an upload is completed, so also check here, as late as possible.
        self._tier.check_free(self._key)
        with self._tier.explained("create", self._key):
            upload.complete(parts, self._length)
        self._sent, self._parts = [], PartBuilder()

    def _discard(self) -> None:
        self._tier.gauge.give_up(self._length)
        self._stop.set()
        self._drain()
        self._parts = PartBuilder()
        if self._upload is not None:
            upload, self._upload = self._upload, None
            try:
                with self._tier.explained("abort the upload of", self._key):
                    upload.abort()
            except TierError as error:
                # The error that aborted the object matters more; remaining parts are found by their age later.
                log.warning("parts of an upload stay at the store for now: %s", error)
