"""Uploads in parts: the one under way, and those that dead writers left."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from tierstate.manifest.errors import AlreadyExists

from .object_errors import code_of, kind
from .s3_checksums import Checksum

Call = Callable[..., Any]
"""Asks the store by the name of an operation and its parameters."""

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
PAGES = 50
"""Pages of a listing of uploads that are looked at, at most."""


class Session(Protocol):
    """What an upload needs of the store."""

    def again(self, method: str, **params: Any) -> Any: ...
    def briefly(self, method: str, **params: Any) -> Any: ...
    def once(self, method: str, **params: Any) -> Any: ...
    def patiently(self, attempt: Callable[[], None]) -> None: ...
    def send_part(
        self, where: Mapping[str, str], number: int, body: Sequence[memoryview], sum: Checksum, stop: threading.Event
    ) -> Future[dict[str, Any]]: ...


class S3Upload:
    """One upload in parts: begun when constructed, visible once completed.

    Args:
        session: the store.
        where: bucket and key.
        checksum: of every part.
    """

    def __init__(self, session: Session, where: Mapping[str, str], checksum: Checksum) -> None:
        self._session, self._object, self._checksum = session, where, checksum
        algorithm = {"ChecksumAlgorithm": checksum.algorithm} if checksum.algorithm else {}
        begun = session.again("create_multipart_upload", **where, **algorithm)
        self._where = {**where, "UploadId": begun["UploadId"]}

    def send(self, number: int, body: Sequence[memoryview], stop: threading.Event) -> Future[dict[str, Any]]:
        """Send one part, numbered from 1; the future holds what `complete` needs of it."""
        return self._session.send_part(self._where, number, body, self._checksum, stop)

    def complete(self, parts: Sequence[dict[str, Any]]) -> None:
        """Make the object visible, if there is none of its name: AWS honours that condition here, Ceph does not.

        When an answer is lost, the object itself tells by its ETag whether this upload became it.
        """
        wanted, lost = etag_of([part["ETag"] for part in parts]), False

        def attempt() -> None:
            nonlocal lost
            if lost and self._is_complete(wanted):
                return
            try:
                self._session.once(
                    "complete_multipart_upload", **self._where, MultipartUpload={"Parts": list(parts)}, IfNoneMatch="*"
                )
            except Exception as error:
                # Not where it is certain that the store did nothing.
                lost = lost or kind(error).transient
                if lost and kind(error) is AlreadyExists and self._is_complete(wanted):
                    return
                raise

        self._session.patiently(attempt)

    def _is_complete(self, wanted: str) -> bool:
        """Whether the object is there and ours.

        Raises:
            FileExistsError: there is another one.
            ConnectionError: there is one, and nothing tells whose.
        """
        try:
            found = self._session.again("head_object", **self._object)["ETag"].strip('"')
        except FileNotFoundError:
            return False
        if not wanted:
            raise ConnectionError("an object of this name is there now, and its ETag does not tell whether it is ours")
        if found != wanted:
            raise FileExistsError(f"an object with ETag {found[:80]!r} is there, ours would have {wanted!r}")
        return True

    def abort(self) -> None:
        """Forget the parts."""
        abort(self._session.briefly, self._where)


def abort(call: Call, where: Mapping[str, str]) -> None:
    """Forget the parts of an upload; one that is gone already is no error."""
    try:
        call("abort_multipart_upload", **where)
    except Exception as error:
        if code_of(error) != "NoSuchUpload" and not isinstance(error, FileNotFoundError):
            raise


def etag_of(tags: Sequence[str]) -> str:
    """The ETag of an object made of parts with these; empty where they are no MD5, as with some encryptions."""
    found = [_MD5.fullmatch(tag) for tag in tags]
    if not all(found):
        return ""
    joined = b"".join(bytes.fromhex(one[1]) for one in found if one)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"


def abort_orphans(call: Call, bucket: str, prefix: str, age: float) -> tuple[int, int]:
    """Abort the uploads below a prefix that were begun longer ago than ``age`` seconds, by the store's own clock.

    Returns:
        How many were aborted, and how many are younger.
    """
    old = young = 0
    for upload, now in _uploads(call, bucket, prefix):
        if now - upload["Initiated"] > timedelta(seconds=age):
            abort(call, {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})
            old += 1
        else:
            young += 1
    return old, young


def _uploads(call: Call, bucket: str, prefix: str) -> Iterator[tuple[Mapping[str, Any], datetime]]:
    """Uploads that were begun and have not ended, each with the store's time."""
    marker: dict[str, str] = {}
    for _ in range(PAGES):
        page = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        for upload in page.get("Uploads", ()):
            if upload["Key"].startswith(prefix):
                yield upload, now
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
