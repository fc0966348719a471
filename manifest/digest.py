"""Digests: content hashes of chunks, by which chunks are named, deduplicated and verified.

A digest is 128 bits, computed from the raw bytes alone: xxh3-128 by default, blake3, or sha256. `DigestIndex` looks up
digests in the table of a version, which may have a million rows, without a Python object for each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from .arrays import Array
from .chunk import Buffer, view
from .errors import FormatError

DIGEST_SIZE = 16
"""Bytes of a digest: 128 bits."""


DEFAULT_DIGEST = "xxh3-128"


Data: TypeAlias = "Buffer | memoryview"


DigestFunction: TypeAlias = Callable[[Data], bytes]


SAMPLE_BYTES = 4096
"""Bytes of the sample of a chunk that is compared first, to detect most changed chunks early."""


def _memory(data: Data) -> memoryview:
    return data if isinstance(data, memoryview) else view(data)


def _xxh3(data: Data) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(_memory(data))


def _blake3(data: Data) -> bytes:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ImportError("digest: blake3 needs the package blake3: pip install 'tierstate[blake3]'") from error
    return blake3(_memory(data)).digest(length=DIGEST_SIZE)


def _sha256(data: Data) -> bytes:
    return hashlib.sha256(_memory(data)).digest()[:DIGEST_SIZE]


ALGORITHMS: dict[str, DigestFunction] = {"xxh3-128": _xxh3, "blake3": _blake3, "sha256": _sha256}
"""xxh3-128 detects accidental changes at memory speed; blake3 also detects forgery, at a third of the speed; so does
sha256, at a tenth, where only standardized functions may be used."""


UNFORGEABLE = ("blake3", "sha256")
"""The digests of which nobody can make a chunk with a given digest: a seal over digests is one over chunks."""


def digest_function(name: str) -> DigestFunction:
    """The digest function of that name: host memory in, 16 bytes out.

    Raises:
        FormatError: the name is not known.
    """
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise FormatError(f"digest {name!r} is not known here; known are {', '.join(ALGORITHMS)}") from None


def sample_hash(chunk: memoryview) -> int:
    """xxh3-64 of a sample from the middle of a chunk: if it differs, the chunk has changed."""
    import xxhash

    middle = len(chunk) // 2
    return xxhash.xxh3_64_intdigest(chunk[middle : middle + SAMPLE_BYTES])


def checksum(data: bytes | memoryview) -> bytes:
    """xxh3-128 of host bytes: the checksum of records and of footers of packs."""
    import xxhash

    return xxhash.xxh3_128_digest(data)


def checksum_of(pieces: Iterable[bytes]) -> bytes:
    """As `checksum`, of these pieces one after another: they need not be copied into one."""
    import xxhash

    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return found.digest()


def json_checksum(fields: Mapping[str, Any]) -> str:
    """`checksum` of JSON values, as hexadecimal digits."""
    return checksum(json.dumps(fields, sort_keys=True).encode()).hex()


def json_with_checksum(fields: Mapping[str, Any]) -> bytes:
    """An object of JSON as bytes, with the checksum of its fields as ``sum``, as tags and markers have it."""
    return json.dumps({**fields, "sum": json_checksum(fields)}, sort_keys=True).encode()


class DigestIndex:
    """Finds the row of a digest in a table of digests.

    Args:
        digests: ``(n, 2)`` of uint64.
    """

    def __init__(self, digests: Array) -> None:
        self._order = np.lexsort((digests[:, 1], digests[:, 0]))
        ordered = digests[self._order]
        self._high, self._low = np.ascontiguousarray(ordered[:, 0]), np.ascontiguousarray(ordered[:, 1])

    def find(self, digests: Array) -> Array:
        """``(m,)``: the row of each of ``(m, 2)`` digests, the lowest if several are equal; -1 if there is none."""
        if not len(self._order) or not len(digests):
            return np.full(len(digests), -1, "i8")
        high, low = digests[:, 0], digests[:, 1]
        at, last = self._high.searchsorted(high), len(self._order) - 1
        if not (self._high[np.minimum(at, last)] == high).any():  # as of chunks that have all changed
            return np.full(len(digests), -1, "i8")
        stop = end = self._high.searchsorted(high, "right")
        # Bisect the second half among equal first halves: usually one round, and never more than 64, so that a table
        # with forged collisions does not take long.
        for _ in range(int((end - at).max()).bit_length()):
            middle = (at + stop) // 2
            below = (at < stop) & (self._low[np.minimum(middle, last)] < low)
            at, stop = np.where(below, middle + 1, at), np.where(below, stop, middle)
        spot = np.minimum(at, last)
        return np.where((at < end) & (self._low[spot] == low), self._order[spot], -1)
