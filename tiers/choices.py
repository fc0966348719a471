"""Choices: what `auto` has learnt of one tier: how fast it is, and which codec pays there for which kind of leaf."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from functools import cached_property

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.layout import RAW

from .base import Tier
from .codecs import PLANE, compressed, spread
from .encoding import workers_here
from .speed import Timed
from .trial import EFFORT, Outcome, choose

AUTO = "auto"

WORTH_ENCODING = 64 << 10
"""Bytes of a chunk from which on `auto` thinks about it. Shorter ones go out with their neighbours as they lie, in one
piece; all of them together are a small part of any state that takes time to save."""

TRIALS = 4
"""Chunks of a kind that are sampled before its trial is over."""

SOON, AGAIN = 2, 16
"""Saves after which a kind is tried anew, at first and in the end, doubled each time: what training makes of its leaves
changes, and the first save of a process is like no other."""

MOST_SAMPLE = 1 << 20
"""Bytes of a sample, at most: about two milliseconds of one core."""

RECALLED = 256 << 20
"""Bytes that a codec has encoded of a kind after which older ones count for half."""


class Choices:
    """Which codec pays on one tier. For one thread at a time, but for `learn`'s numbers, which may come late.

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
        """The tier, by which its speed gets known."""
        return Timed(self._tier)

    def begin(self) -> None:
        """Another save comes."""
        self._saves += 1

    def codec(self, kind: Hashable, data: Buffer, itemsize: int) -> str:
        """How a chunk is to be encoded, perhaps by a trial on it; raw as long as nobody knows how fast the tier is.

        Args:
            kind: what the chunk has in common with others that compress alike.
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
        return choose(trial.outcomes, bandwidth, self._workers)

    def learn(self, kind: Hashable, codec: str, nbytes: int, stored: int, spent: float, passed: float) -> None:
        """What encoding a whole chunk has shown counts like a sample of that length.

        Args:
            spent, passed: seconds of a core, and of the clock.
        """
        if codec in EFFORT and kind in self._kinds:
            self._kinds[kind].add(codec, nbytes, stored, spent, passed)


class _Trial:
    """What was learnt of one kind of leaf.

    Attributes:
        save: the one in which it began.
        lasts: saves for which it counts.
        samples: chunks that were sampled for it.
        outcomes: by codec.
    """

    def __init__(self, save: int, lasts: int) -> None:
        self.save, self.lasts, self.samples = save, lasts, 0
        self._sums: dict[str, tuple[float, float, float, float]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def sample(self, data: Buffer, itemsize: int) -> None:
        """Encode a sample of a chunk in each way."""
        self.samples += 1
        piece = spread(data, min(MOST_SAMPLE, 2 * PLANE * itemsize), itemsize)
        for codec in EFFORT:
            if codec != RAW:
                compressed(codec, piece[:0], itemsize)  # loads what is loaded when first used
                start = time.thread_time()
                stored = compressed(codec, piece, itemsize)
                self.add(codec, len(piece), stored, time.thread_time() - start)

    def add(self, codec: str, nbytes: int, stored: int, spent: float, passed: float = 0.0) -> None:
        """One more outcome; of a sample the clock tells nothing, since one stop would be most of its time."""
        old = self._sums.get(codec, (0.0, 0.0, 0.0, 0.0))
        weight = 0.5 if old[0] > RECALLED else 1.0
        new = nbytes, stored, spent, passed
        raw, kept, core, clock = (weight * was + now for was, now in zip(old, new, strict=True))
        self._sums[codec] = raw, kept, core, clock
        self.outcomes[codec] = Outcome(kept / raw, raw / max(core, 1e-9), raw / clock if clock else math.inf)
