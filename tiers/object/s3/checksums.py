"""The checksums that are sent with a body; `choose_checksum` finds out which ones a server verifies, by wrong ones."""

from __future__ import annotations

import base64
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

ChecksumChoice: TypeAlias = Literal["auto", "crc32", "md5", "none"]


_SCRATCH = memoryview(b"tierstate looks which checksums are verified here")


ChecksumProbe: TypeAlias = Callable[[memoryview, Mapping[str, str]], str]
"""Sends a test object with that body and those parameters. Returns the error code; empty if it was accepted."""


class Checksum(ABC):
    """A checksum of a body that is sent with the request.

    Attributes:
        name: its name in a policy.
        algorithm: its name in S3, if the start of an upload must declare it.
    """

    name: ClassVar[str]
    algorithm: ClassVar[str] = ""

    @abstractmethod
    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        """The checksum parameters of a request with that body."""

    def named(self, sums: Mapping[str, str]) -> dict[str, str]:
        """The checksum parameters that completing an upload must repeat."""
        return {}


class Unsummed(Checksum):
    """No checksum."""

    name = "none"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        return {}


class Crc32(Checksum):
    """CRC-32, 2 GB/s on one core; AWS and OpenStack Swift verify it."""

    name, algorithm = "crc32", "CRC32"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        total = 0
        for piece in body:
            total = zlib.crc32(piece, total)
        return {"ChecksumCRC32": base64.b64encode(total.to_bytes(4, "big")).decode()}

    def named(self, sums: Mapping[str, str]) -> dict[str, str]:
        return dict(sums)


class Md5(Checksum):
    """MD5, 0.6 GB/s on one core; every server verifies it."""

    name = "md5"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        total = hashlib.md5(usedforsecurity=False)
        for piece in body:
            total.update(piece)
        return {"ContentMD5": base64.b64encode(total.digest()).decode()}


CHECKSUMS: dict[str, Checksum] = {one.name: one for one in (Crc32(), Md5(), Unsummed())}


def choose_checksum(choice: ChecksumChoice, against: ChecksumProbe) -> tuple[Checksum, str]:
    """The checksum to send, and a note for users that says why.

    Sends wrong checksums to the server, cheapest first, to find out which ones it verifies.
    """
    if choice != "auto":
        return CHECKSUMS[choice], f"checksum of what is sent: {choice}, by the policy"
    passed: list[str] = []
    for name in ("crc32", "md5"):
        one = CHECKSUMS[name]
        wrong, right = one.of([_SCRATCH[1:]]), one.of([_SCRATCH])
        said = against(_SCRATCH, wrong)
        # Any other error may mean that the server does not know this checksum.
        if said == "BadDigest" or (said and not against(_SCRATCH, right)):
            also = f"; it does not verify {passed[0]}" if passed else ""
            return one, f"checksum of what is sent: {name}, a wrong one is refused{also}"
        passed.append(name)
    return CHECKSUMS["none"], (
        "checksum of what is sent: none, since the store verifies neither crc32 nor md5; "
        "what is damaged on its way there is found when it is read"
    )
