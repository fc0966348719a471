"""Gets: which requests fill which ranges of an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstate.manifest.chunk import view

from .base import Range

LENGTH = 8 << 20
"""Bytes that one request asks for at most; longer ranges are split into requests that run side by side."""

GAP = 32 << 10
"""Bytes between two ranges that cost less to receive and throw away than to leave out by another request."""


@dataclass(frozen=True)
class Get:
    """One request: the bytes from ``start`` to ``end`` of an object, and where they go.

    Attributes:
        pieces: offsets in the object and the memory for what lies there; rising, without overlaps.
    """

    start: int
    end: int
    pieces: tuple[tuple[int, memoryview], ...]

    def rest(self, at: int) -> Iterator[tuple[int, memoryview]]:
        """What is left to be filled from an offset on: how many bytes to skip first, and the memory."""
        for offset, out in self.pieces:
            if offset + len(out) > at:
                done = max(0, at - offset)
                yield max(0, offset - at), out[done:]
                at = offset + len(out)


def plan_gets(ranges: Sequence[Range]) -> list[Get]:
    """Requests that together fill all ranges, in order of offsets: long ranges split, neighbours joined."""
    plan: list[Get] = []
    for offset, out in sorted((piece for wanted in ranges for piece in _split(wanted)), key=lambda piece: piece[0]):
        last = plan[-1] if plan else None
        end = offset + len(out)
        if last is not None and 0 <= offset - last.end <= GAP and end - last.start <= LENGTH:
            plan[-1] = Get(last.start, end, (*last.pieces, (offset, out)))
        else:
            plan.append(Get(offset, end, ((offset, out),)))
    return plan


def _split(wanted: Range) -> Iterator[tuple[int, memoryview]]:
    """Equal pieces, so that they end together."""
    out, total = view(wanted.out), wanted.out.numel()
    length = -(-total // max(1, -(-total // LENGTH))) or 1
    for at in range(0, total, length):
        yield wanted.offset + at, out[at : at + length]
