"""Checksums of what is sent, by which a server can refuse what was damaged on its way."""

from __future__ import annotations

import base64
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

Choice: TypeAlias = Literal["auto", "crc32", "md5", "none"]


class Checksum(ABC):
    """A way to say with a request what its body is.

    Attributes:
        name: as a policy has it.
        algorithm: as S3 has it, where an upload must be told at its beginning.
    """

    name: ClassVar[str]
    algorithm: ClassVar[str] = ""

    @abstractmethod
    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        """Parameters of a request with that body."""

    def named(self, sums: Mapping[str, str]) -> dict[str, str]:
        """Those that completing an upload must repeat."""
        return {}


class Unsummed(Checksum):
    """None at all."""

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
    """MD5, 0.6 GB/s on one core; what every server verifies."""

    name = "md5"

    def of(self, body: Sequence[memoryview]) -> dict[str, str]:
        total = hashlib.md5(usedforsecurity=False)
        for piece in body:
            total.update(piece)
        return {"ContentMD5": base64.b64encode(total.digest()).decode()}


CHECKSUMS: dict[str, Checksum] = {one.name: one for one in (Crc32(), Md5(), Unsummed())}

_SCRATCH = memoryview(b"tierstate looks which checksums are verified here")

Try: TypeAlias = Callable[[memoryview, Mapping[str, str]], str]
"""What is said against a scratch object with that body and those parameters; empty where it is taken."""


def choose(choice: Choice, against: Try) -> tuple[Checksum, str]:
    """The checksum to send, and why, for people.

    What a server verifies is found out by sending it wrong ones, cheapest first.
    """
    if choice != "auto":
        return CHECKSUMS[choice], f"checksum of what is sent: {choice}, by the policy"
    passed: list[str] = []
    for name in ("crc32", "md5"):
        one = CHECKSUMS[name]
        wrong, right = one.of([_SCRATCH[1:]]), one.of([_SCRATCH])
        said = against(_SCRATCH, wrong)
        # Any other refusal may be of the checksum as such.
        if said == "BadDigest" or (said and not against(_SCRATCH, right)):
            also = f"; it does not verify {passed[0]}" if passed else ""
            return one, f"checksum of what is sent: {name}, a wrong one is refused{also}"
        passed.append(name)
    return CHECKSUMS["none"], (
        "checksum of what is sent: none, since the store verifies neither crc32 nor md5; "
        "what is damaged on its way there is found when it is read"
    )
