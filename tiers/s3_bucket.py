"""An S3 bucket: objects under a URL, data in parts and ranges that travel side by side."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AccessDenied, TierError

from .base import ObjectWriter, Range, check_key
from .bucket import Bucket
from .object_errors import code_of
from .race import Start
from .s3_answers import Refused
from .s3_checksums import CHECKSUMS, Choice, choose
from .s3_reading import plan_gets
from .s3_store import S3Store
from .s3_uploads import S3Upload, abort_orphans
from .s3_writer import S3Writer

SINGLE = 64 << 20
"""Objects up to this many bytes are created by one conditional request; longer ones in parts."""

HOLD = 0.1
"""Seconds for which racers hold back the end of what they send, so that a store that looks at the beginning whether the
name is free, and creates the object at the end, finds it free for all."""

_WRONG_SUM = frozenset({"BadDigest", "InvalidDigest", "InvalidRequest", "NotImplemented", "400"})
"""What servers say to a checksum that is wrong, or that they do not know."""


class S3Bucket(Bucket):
    """Objects in an S3 store.

    Args:
        url, options, capacity: as for `Bucket`; options are those of s3fs.
        checksum: what is sent with every body, for the store to verify; ``auto`` finds out what it verifies.
        deadline: seconds that one request may take with all its attempts.
        orphan_age: seconds after which an upload in parts that did not end counts as a dead writer's.
    """

    races: ClassVar[int] = 2

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        capacity: int | None,
        *,
        checksum: Choice,
        deadline: float,
        orphan_age: float,
    ) -> None:
        self._s3 = S3Store(url, options, deadline)
        super().__init__(url, options, capacity, self._s3)
        self._choice, self._orphan_age = checksum, orphan_age
        self._checksum = CHECKSUMS["none"]

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.check_odd(key, ranges)
        with self.explained("read", key):
            self._s3.fill(key, plan_gets(ranges))

    def put(self, key: str, data: Buffer) -> None:
        if data.numel() <= SINGLE:
            super().put(key, data)
            return
        with self.writer(key, data.numel()) as writer:
            # The caller keeps the buffer until this returns: it need not be copied.
            writer.append(data, lambda: None)

    def _send(self, name: str, data: Buffer) -> None:
        self._send_whole(name, [view(data)])

    def _enter(self, name: str, racer: int, start: Start) -> None:
        body = memoryview(bytes([racer]) * 8)

        def midway() -> None:
            start()
            time.sleep(HOLD)

        with self.explained("create", name):
            self._s3.create_whole(name, [body[:1], body[1:]], {}, midway=midway)

    def create_whole(self, key: str, body: Sequence[memoryview]) -> None:
        """One conditional create; where races have been seen to go wrong, it looks first."""
        self.look_first(key)
        self._send_whole(key, body)

    def _send_whole(self, name: str, body: Sequence[memoryview]) -> None:
        with self.explained("create", name):
            self._s3.create_whole(name, body, self._checksum.of(body))

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        check_key(key)
        self._prepare()
        self.check_free(key)
        return S3Writer(self, key, size_hint or 0)

    def upload(self, key: str) -> S3Upload:
        """A new upload in parts."""
        return S3Upload(self._s3.session, self._s3.where(key), self._checksum)

    def _findings(self) -> Iterator[str]:
        yield from super()._findings()
        self._checksum, found = choose(self._choice, self._takes)
        yield found
        if found := self._orphans():
            yield found

    def _takes(self, body: memoryview, sums: Mapping[str, str]) -> str:
        """What the store says against a scratch object with these checksums; empty where it takes it."""
        name = f".probe-{uuid.uuid4().hex}"
        with self.explained("create", name):
            try:
                self._s3.create_whole(name, [body], sums, final=_WRONG_SUM)
            except Refused as error:
                if (code := code_of(error)) in _WRONG_SUM:
                    return code
                raise
        with suppress(AccessDenied):  # said of the scratch objects of the race already
            self._remove(name)
        return ""

    def _orphans(self) -> str:
        """What was found of uploads of dead writers, and done about it."""
        where = self._s3.where("")
        try:
            with self.explained("list the uploads of", ""):
                old, young = abort_orphans(self._s3.session.again, where["Bucket"], where["Key"], self._orphan_age)
        except TierError as error:
            return f"uploads of dead writers were not looked for: {error}"
        hours = f"{self._orphan_age / 3600:g} h"
        told = [f"{old} begun more than {hours} ago, which were aborted"] if old else []
        told += [f"{young} that may be under way"] if young else []
        return f"uploads without an end: {', '.join(told)}" if told else ""
