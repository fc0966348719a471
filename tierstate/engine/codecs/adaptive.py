"""Adaptive codec choice (``codec: auto``): per tier and kind of leaf, the codec with the shortest write time.

The bandwidth of the tier is measured on its writes; ratio and speed of each codec on samples of the data. The decision
(`fastest_codec`) is a pure function of these numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.format.layout import RAW
from tierstate.tiers.base import Tier
from tierstate.tiers.wrappers.measure import Timed

from .codecs import PLANE, STANDALONE_CODECS, compressed_size, take_sample
from .pool import workers_here

CLEARLY = 0.9
"""A codec of more work is chosen only if it needs at most this share of the time of one of less work: measurements on
samples are not exact, and the cores have other work to do."""


EFFORT = {codec: work for work, codec in enumerate((RAW, *STANDALONE_CODECS))}
"""The codecs that are tried; a higher number is more work."""


WORTH_ENCODING = 64 << 10
"""`auto` considers chunks of this many bytes or more. Shorter ones are written raw with their neighbours in one piece;
together they are a small part of any state that takes time to save."""


TRIALS = 4
"""Number of chunks of a kind that are sampled in a trial."""


SOON, AGAIN = 2, 16
"""Number of saves after which a kind is tried again: the first and the last value, doubled each time. Training changes
how well the leaves compress, and the first save of a process is not typical."""


MOST_SAMPLE = 1 << 20
"""Most bytes of a sample: about two milliseconds of one core."""


RECALLED = 256 << 20
"""After this many encoded bytes of a kind, older measurements of a codec count half."""


class CodecSpeed(NamedTuple):
    """Measured ratio and speed of a codec.

    Attributes:
        ratio: stored bytes per raw byte.
        speed: raw bytes that one thread encodes per second of CPU time.
        pace: raw bytes per second of wall time, while other threads use the cores too; infinite if not known yet.
    """

    ratio: float
    speed: float
    pace: float = math.inf


RAW_SPEED = CodecSpeed(1.0, math.inf)
"""Of raw bytes, which need no encoding."""


def seconds_per_byte(outcome: CodecSpeed, bandwidth: float, workers: int) -> float:
    """Seconds per raw byte to encode and write to a tier. Workers encode in parallel while the tier writes, so the
    slower of the two counts. If the cores are busy with other work, the workers encode only some of the chunks, and
    the tier gets the other chunks raw meanwhile.

    Args:
        bandwidth: stored bytes per second that the tier can write.
        workers: threads that encode.
    """
    saved = max(0.0, 1 - outcome.ratio)
    parted = 1 / (bandwidth + (saved * outcome.pace * workers if saved else 0.0))
    return max(1 / (outcome.speed * workers), outcome.ratio / bandwidth, parted)


def fastest_codec(outcomes: Mapping[str, CodecSpeed], bandwidth: float, workers: int) -> str:
    """The codec to use: raw, unless another one is clearly faster by `seconds_per_byte`.

    Args:
        outcomes: measurements of the codecs in `EFFORT` that were tried; without raw.
    """
    found = {RAW: RAW_SPEED, **outcomes}

    def judged(codec: str) -> tuple[float, int]:
        return seconds_per_byte(found[codec], bandwidth, workers) / CLEARLY ** EFFORT[codec], EFFORT[codec]

    return min(found, key=judged)


class CodecChooser:
    """Chooses the codec of chunks for one tier. Not thread-safe: one thread at a time; `learn` may be called late.

    Args:
        tier: the tier.
        workers: threads that encode.
    """

    def __init__(self, tier: Tier, workers: int | None = None) -> None:
        self._tier, self._workers = tier, workers or workers_here()
        self._kinds: dict[Hashable, _Trial] = {}
        self._saves = 0

    @cached_property
    def timed(self) -> Timed:
        """The tier in a wrapper that measures its bandwidth."""
        return Timed(self._tier)

    def begin(self) -> None:
        """Called at the start of each save."""
        self._saves += 1

    def codec(self, kind: Hashable, data: Buffer, itemsize: int) -> str:
        """The codec for a chunk, which may be sampled for a trial; raw while the tier's bandwidth is not known.

        Args:
            kind: key of the chunks that are expected to compress alike.
        """
        bandwidth = self.timed.speed.bandwidth
        if bandwidth is None or len(data) < WORTH_ENCODING:
            return RAW
        trial = self._kinds.get(kind)
        if trial is None or self._saves - trial.save >= trial.lasts:
            lasts = SOON if trial is None else min(AGAIN, 2 * trial.lasts)
            trial = self._kinds[kind] = _Trial(self._saves, lasts)
        if trial.samples < TRIALS:
            trial.sample(data, itemsize)
        return fastest_codec(trial.outcomes, bandwidth, self._workers)

    def learn(self, kind: Hashable, codec: str, nbytes: int, stored: int, spent: float, passed: float) -> None:
        """Add the measurement of encoding a whole chunk, weighted by its length as samples are.

        Args:
            spent, passed: seconds of CPU time, and of wall time.
        """
        if codec in EFFORT and kind in self._kinds:
            self._kinds[kind].add(codec, nbytes, stored, spent, passed)


class _Trial:
    """The measurements of one kind of leaf.

    Attributes:
        save: number of the save in which it began.
        lasts: number of saves for which it is valid.
        samples: number of chunks that were sampled.
        outcomes: measurements by codec.
    """

    def __init__(self, save: int, lasts: int) -> None:
        self.save, self.lasts, self.samples = save, lasts, 0
        self._sums: dict[str, tuple[float, float, float, float]] = {}
        self.outcomes: dict[str, CodecSpeed] = {}

    def sample(self, data: Buffer, itemsize: int) -> None:
        """Encode a sample of a chunk with each codec."""
        self.samples += 1
        piece = take_sample(data, min(MOST_SAMPLE, 2 * PLANE * itemsize), itemsize)
        for codec in EFFORT:
            if codec != RAW:
                compressed_size(codec, piece[:0], itemsize)  # the first use loads libraries
                start = time.thread_time()
                stored = compressed_size(codec, piece, itemsize)
                self.add(codec, len(piece), stored, time.thread_time() - start)

    def add(self, codec: str, nbytes: int, stored: int, spent: float, passed: float = 0.0) -> None:
        """Add a measurement. Wall time is not used for samples: one interruption would be most of it."""
        old = self._sums.get(codec, (0.0, 0.0, 0.0, 0.0))
        weight = 0.5 if old[0] > RECALLED else 1.0
        new = nbytes, stored, spent, passed
        raw, kept, core, clock = (weight * was + now for was, now in zip(old, new, strict=True))
        self._sums[codec] = raw, kept, core, clock
        self.outcomes[codec] = CodecSpeed(kept / raw, raw / max(core, 1e-9), raw / clock if clock else math.inf)
