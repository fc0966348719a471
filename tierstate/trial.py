"""A trial: how fast a live tier is, with every byte made durable, in about a second each way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from tierstate.manifest.chunk import Buffer, spans
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.pages import map_pages

FIRST, MOST = 4 << 20, 256 << 20
"""Bytes of the first object that is written, and of the longest."""

ENOUGH = 1.0
"""Seconds that writing an object takes to be believed; shorter ones are followed by a longer one."""

SLAB = 16 << 20
SMALL = 4096


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a tier was with its last and longest object.

    Attributes:
        nbytes: its length.
        write: bytes per second until its writer was closed.
        read: bytes per second of reading it back, with as many requests at once as the tier likes.
    """

    nbytes: int
    write: float
    read: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that a call takes, in the middle of a few.

    Attributes:
        put: of an object of 4 KiB.
        list: of a handful of keys.
    """

    put: float
    list: float


def latency(tier: Tier, prefix: str) -> Latency:
    """Put a few small objects and list them."""
    data = _random(SMALL)
    puts = [_seconds(partial(tier.put, f"{prefix}/small-{n}", data)) for n in range(5)]
    lists = [_seconds(lambda: list(tier.list(f"{prefix}/small-"))) for _ in range(3)]
    return Latency(median(puts), median(lists))


def speed(tier: Tier, prefix: str, most: int = MOST) -> Speed:
    """Write longer and longer objects, until one takes long enough or is long enough, and read that one back.

    Args:
        most: bytes of the longest object.
    """
    slab = _random(min(SLAB, most))
    nbytes = min(FIRST, most)
    while True:
        key = f"{prefix}/speed-{nbytes}"
        seconds = _seconds(partial(_write, tier, key, nbytes, slab))
        if seconds >= ENOUGH or nbytes >= most:
            return Speed(nbytes, nbytes / seconds, nbytes / _seconds(partial(_read, tier, key, nbytes)))
        tier.delete(key)
        nbytes = min(most, int(nbytes * min(8.0, max(2.0, ENOUGH / seconds))))


def _write(tier: Tier, key: str, nbytes: int, slab: Buffer) -> None:
    with tier.writer(key, nbytes) as writer:
        for _, length in spans(nbytes, slab.numel()):
            # Nobody changes the slab, so that it may be leased many times, as slabs of a save are.
            writer.append(slab[:length], _nothing)


def _read(tier: Tier, key: str, nbytes: int) -> None:
    traits = tier.traits
    part = min(traits.part_size, SLAB)
    memory = map_pages(min(nbytes, part * min(traits.parallelism, 8)))
    for start, length in spans(nbytes, memory.numel()):
        tier.read(key, [Range(start + at, memory[at : at + n]) for at, n in spans(length, part)])


def _nothing() -> None:
    pass


def _random(nbytes: int) -> Buffer:
    return map_pages(nbytes).random_(0, 256)


def _seconds(call: Callable[[], object]) -> float:
    start = time.monotonic()
    call()
    # A clock may not tick between two very short calls.
    return max(time.monotonic() - start, 1e-9)
