"""Digests: a chunk's name, computed from its raw bytes and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .chunk import Buffer, view
from .errors import FormatError

DIGEST_SIZE = 16
"""Bytes of a digest: 128 bits."""

DEFAULT = "xxh3-128"

Data: TypeAlias = Buffer | memoryview
Digest: TypeAlias = Callable[[Data], bytes]


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


ALGORITHMS: dict[str, Digest] = {"xxh3-128": _xxh3, "blake3": _blake3}
"""xxh3-128 finds accidents at memory speed; blake3 also finds forgery, at a fifth of it."""


def algorithm(name: str) -> Digest:
    """The digest function of that name: host memory in, 16 bytes out.

    Raises:
        FormatError: the name is not known.
    """
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise FormatError(f"digest {name!r} is not known here; known are {', '.join(ALGORITHMS)}") from None


SAMPLE = 4096
"""Bytes of a chunk by which is guessed whether it has changed."""


def sample(chunk: memoryview) -> int:
    """xxh3-64 of a piece from the middle of a chunk: if it is another one, the chunk has changed."""
    import xxhash

    middle = len(chunk) // 2
    return xxhash.xxh3_64_intdigest(chunk[middle : middle + SAMPLE])


def checksum(data: bytes | memoryview) -> bytes:
    """xxh3-128 of host bytes: what frames records and footers."""
    import xxhash

    return xxhash.xxh3_128_digest(data)
