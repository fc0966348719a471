"""An S3 bucket: conditional creates, multipart uploads of long objects, parallel range requests, checksum probing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AccessDenied, TierError
from tierstate.tiers.base import ObjectWriter, check_key
from tierstate.tiers.object.bucket import Bucket, StartBarrier
from tierstate.tiers.object.filesystem import store_error_code

from .checksums import CHECKSUMS, ChecksumChoice, choose_checksum
from .client import S3Client
from .http_session import Midway
from .multipart import S3Upload, S3Writer, abort_orphans
from .options import encoded_secrets, with_configuration
from .transfers import NO_CONDITIONS

SINGLE = 64 << 20
"""Objects up to this many bytes are created by one conditional request; longer ones in parts."""


HOLD = 0.1
"""Seconds for which the probe delays the end of a body. A store that checks the name when the body begins, and creates
the object when it ends, then lets all racing creates win, and so the probe detects it."""


_WRONG_SUM = frozenset({"BadDigest", "InvalidDigest", "InvalidRequest", "NotImplemented", "400"})
"""Error codes of servers for a checksum that is wrong or not supported."""


class S3Bucket(Bucket):
    """Objects in an S3 store.

    Args:
        url, options, capacity: as for `Bucket`; options are those of s3fs.
        checksum: the checksum that is sent with every body; ``auto`` probes which one the store verifies.
        deadline: seconds that one operation may take with all its attempts.
        orphan_age: seconds after which an unfinished multipart upload counts as a leftover of a dead writer.
    """

    races: ClassVar[int] = 2

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        capacity: int | None,
        *,
        checksum: ChecksumChoice,
        deadline: float,
        orphan_age: float,
    ) -> None:
        options = with_configuration(options)
        self._s3 = S3Client(url, options, deadline)
        super().__init__(url, options, capacity, self._s3)
        self._secrets |= encoded_secrets(options)
        self._choice, self._orphan_age = checksum, orphan_age
        self._checksum = CHECKSUMS["none"]

    def put(self, key: str, data: Buffer) -> None:
        if data.numel() <= SINGLE:
            super().put(key, data)
            return
        with self.writer(key, data.numel()) as writer:
            # The buffer is valid until this returns: it need not be copied.
            writer.append(data, lambda: None)

    def _send(self, name: str, data: Buffer) -> None:
        self._send_whole(name, [view(data)])

    def _known_to_race(self) -> str:
        if not self._s3.conditional:
            return "the store refuses requests that say 'If-None-Match'"
        if not self._s3.session.is_swift:
            return ""
        return "OpenStack Swift looks whether a name is free before it writes, not when it does"

    def _enter(self, name: str, racer: int, start: StartBarrier) -> None:
        body = memoryview(bytes([racer]) * 8)

        def midway() -> None:
            start()
            time.sleep(HOLD)

        with self.explained("create", name):
            self._create_once(name, [body[:1], body[1:]], {}, midway=midway)

    def create_whole(self, key: str, body: Sequence[memoryview]) -> None:
        """One conditional create; if the probe found several winners, it first checks that the key is free."""
        self.look_first(key)
        self._send_whole(key, body)

    def _send_whole(self, name: str, body: Sequence[memoryview]) -> None:
        with self.explained("create", name):
            self._create_once(name, body, self._checksum.of(body))

    def _create_once(
        self, name: str, body: Sequence[memoryview], sums: Mapping[str, str], midway: Midway = None
    ) -> None:
        """Create an object by one request, which is conditional unless the store refuses conditions."""
        undecided = self._s3.conditional and not self._conditional
        try:
            self._s3.create_whole(name, body, sums, midway=midway)
        except Exception as error:
            # A checksum may be what is refused: the probe begins without. And what it found to work is not given up.
            if sums or not undecided or store_error_code(error) not in NO_CONDITIONS:
                raise
            self._s3.conditional = False
            self._s3.create_whole(name, body, sums, midway=midway)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        check_key(key)
        self._prepare()
        self.check_free(key)
        return S3Writer(self, key, size_hint or 0, fixed=self._s3.fixed_parts)

    def upload(self, key: str) -> S3Upload:
        """A new multipart upload."""
        with self.explained("begin an upload of", key):
            where = self._s3.where(key)
            return S3Upload(self._s3.session, where, self._checksum, conditional=self._s3.conditional)

    def _findings(self) -> Iterator[str]:
        yield from super()._findings()
        self._checksum, found = choose_checksum(self._choice, self._takes)
        yield found
        if found := self._orphans():
            yield found

    def _takes(self, body: memoryview, sums: Mapping[str, str]) -> str:
        """The store's error code for a scratch object with these checksums; empty if it accepts it."""
        name = f".probe-{uuid.uuid4().hex}"
        with self.explained("create", name):
            try:
                self._s3.create_whole(name, [body], sums, final=_WRONG_SUM)
            except Exception as error:
                if (code := store_error_code(error)) in _WRONG_SUM:
                    return code
                raise
        with suppress(AccessDenied):  # already reported for the scratch objects of the probe
            self._remove(name)
        return ""

    def _orphans(self) -> str:
        """Abort multipart uploads that dead writers left. Returns a note for users."""
        where = self._s3.where("")
        try:
            with self.explained("list the uploads of", ""):
                old, young = abort_orphans(self._s3.session, where["Bucket"], where["Key"], self._orphan_age)
        except TierError as error:
            return f"uploads of dead writers were not looked for: {error}"
        hours = f"{self._orphan_age / 3600:g} h"
        told = [f"{old} begun more than {hours} ago, which were aborted"] if old else []
        told += [f"{young} that may be under way"] if young else []
        return f"uploads without an end: {', '.join(told)}" if told else ""
