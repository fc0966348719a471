"""Buffers and chunks: the types in which providers hand bytes to the engine and the engine hands bytes to tiers.

A *buffer* is a 1-D contiguous ``torch.uint8`` tensor on any device. A *chunk* is a run of a shard's bytes: the unit
that is digested, deduplicated, encoded, stored and verified.

torch and NumPy are imported when the first buffer is made: the server process of peer memory makes none, and without
them it stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

Buffer: TypeAlias = "torch.Tensor"


CHUNK_SIZE = 16 * 1024 * 1024
"""Default length of a chunk, in bytes."""


CHUNK_GRAIN = 16
"""Chunk lengths are multiples of this many bytes, so that no element of any dtype (complex128: 16) is split."""


MAX_CHUNK_SIZE = 1 << 30


class Event(Protocol):
    """What a fill on a device returns: the copy is complete once ``synchronize`` has returned."""

    def synchronize(self) -> None: ...


class StreamEvent(Protocol):
    """An event on a stream: it happens when all work queued before it is done."""

    def synchronize(self) -> None:
        """Wait until it has happened."""

    def wait(self) -> None:
        """Make all later work of the current stream wait for it."""


class Chunk(NamedTuple):
    """A run of a shard's bytes, in row-major order.

    Attributes:
        start: offset of the first byte within the shard, in bytes.
        nbytes: length in bytes.
        fill: copies those bytes, straight from where they are, into a buffer of exactly ``nbytes``. It returns an
            event to wait for when the copy runs on a device stream, otherwise None.
    """

    start: int
    nbytes: int
    fill: Callable[[Buffer], Event | None]


class DeviceChunk(Chunk):
    """A chunk whose bytes are contiguous in memory of a device: several cross the bus together, without ``fill``.

    Attributes:
        data: the bytes themselves, ``(nbytes,)``.
        after: what a stream has to wait for that reads them, beside the work on the caller's stream; else None.
    """

    data: Buffer
    after: StreamEvent | None

    @classmethod
    def of(
        cls, start: int, data: Buffer, fill: Callable[[Buffer], Event | None], after: StreamEvent | None = None
    ) -> DeviceChunk:
        """The chunk from these bytes, which ``fill`` copies too."""
        chunk = cls(start, data.numel(), fill)
        chunk.data, chunk.after = data, after
        return chunk


def empty_buffer(nbytes: int) -> Buffer:
    """A fresh, uninitialised host buffer of ``nbytes`` bytes."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def as_buffer(data: bytes | bytearray | memoryview | np.ndarray) -> Buffer:
    """A host buffer with the bytes of ``data``: a view where ``data`` is writable, a copy where it is not."""
    import numpy as np
    import torch

    array = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def view(buffer: Buffer) -> memoryview:
    """The host memory of a buffer, without a copy."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def to_bytes(buffer: Buffer) -> bytes:
    """The bytes of a host buffer, copied."""
    return view(buffer).tobytes()


def spans(nbytes: int, size: int) -> list[tuple[int, int]]:
    """``(start, length)`` of each chunk of a shard of ``nbytes`` bytes cut at multiples of ``size``; none if empty."""
    return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]
