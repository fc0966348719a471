"""Digests: a chunk's name, computed from its raw bytes and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from .chunk import Buffer, view
from .errors import FormatError

DIGEST_SIZE = 16
"""Bytes of a digest: 128 bits."""

DEFAULT = "xxh3-128"

Digest = Callable[[Buffer], bytes]


def _xxh3(buffer: Buffer) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(view(buffer))


def _blake3(buffer: Buffer) -> bytes:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ImportError("digest: blake3 needs the package blake3: pip install 'tierstate[blake3]'") from error
    return blake3(view(buffer)).digest(length=DIGEST_SIZE)


ALGORITHMS: dict[str, Digest] = {"xxh3-128": _xxh3, "blake3": _blake3}
"""xxh3-128 finds accidents at memory speed; blake3 also finds forgery, at a fifth of it."""


def algorithm(name: str) -> Digest:
    """The digest function of that name: host buffer in, 16 bytes out.

    Raises:
        FormatError: the name is not known.
    """
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise FormatError(f"digest {name!r} is not known here; known are {', '.join(ALGORITHMS)}") from None


def checksum(data: bytes | memoryview) -> bytes:
    """xxh3-128 of host bytes: what frames records and footers."""
    import xxhash

    return xxhash.xxh3_128_digest(data)
