"""Coding: which codec each chunk of a save gets on its way into one tier, and where it is encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.index import Array
from tierstate.manifest.layout import DELTA
from tierstate.manifest.leaf import Leaf

from .anchors import Anchors
from .arena import Slab
from .base import Tier
from .choices import AUTO
from .codecs import encode
from .encoding import Encoded, Encoding
from .route import Route
from .shelf import Shelf


class ChunkOf(NamedTuple):
    """A chunk of a version: its row, its digest and its raw length."""

    row: int
    digest: bytes
    nbytes: int


class Coding:
    """The codecs of one save on one tier.

    Args:
        shelf: the run in that tier.
        leaves, row_leaves, route: as for `Publication`.
        anchors: what deltas are made against.
        put: takes each chunk that was added, and its stored form, in the thread that adds them.

    Attributes:
        tier: where the save is written to: where `auto` has a say, it learns from that how fast the tier is.
        workers: in which chunks are encoded.
    """

    def __init__(
        self,
        shelf: Shelf,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        anchors: Anchors,
        put: Callable[[ChunkOf, Encoded], None],
    ) -> None:
        self._leaves, self._row_leaves, self._route = leaves, row_leaves, route
        self._choices, self._anchors = shelf.choices, anchors
        self.tier: Tier = shelf.tier
        stirred = None
        if AUTO in route.codecs:
            self._choices.begin()
            self.tier, stirred = self._choices.timed, self._choices.timed.speed.idled
        self.workers: Encoding[ChunkOf] = Encoding(put, stirred)

    def codec(self, row: int, raw: Buffer) -> str:
        """What a chunk is to be encoded with."""
        leaf = int(self._row_leaves[row])
        asked = self._route.codecs[leaf]
        return asked if asked != AUTO else self._choices.codec(self._kind(leaf), raw, self._itemsize(leaf))

    def _kind(self, leaf: int) -> tuple[str, int | None]:
        """What leaves that compress alike have in common: the type of their elements, and the rule that speaks of
        them."""
        return self._leaves[leaf].spec.dtype, self._route.rules[leaf]

    def _itemsize(self, leaf: int) -> int:
        return self._leaves[leaf].spec.itemsize

    def takes(self, row: int) -> bool:
        """Whether a chunk is to wait for the workers. What `auto` decides about does not while the tier has nothing to
        do: it goes out raw."""
        auto = self._route.codecs[int(self._row_leaves[row])] == AUTO
        return not auto or not self.workers.behind(lambda: self._choices.timed.speed.idle)

    def add(self, chunk: ChunkOf, raw: Buffer, slab: Slab | None, codec: str) -> None:
        """Have a chunk encoded; see `Encoding.add`."""
        self.workers.add(chunk, partial(self._encoded, chunk.row, raw, codec), slab)

    def _encoded(self, row: int, raw: Buffer, codec: str) -> Encoded:
        """A chunk's stored form. Called from the workers."""
        if codec == DELTA:
            return self._anchors.encode(row, raw, self._itemsize(int(self._row_leaves[row])))
        began, start, leaf = time.thread_time(), time.perf_counter(), int(self._row_leaves[row])
        found = Encoded(*encode(codec, raw, self._itemsize(leaf)))
        if self._route.codecs[leaf] == AUTO:
            spent, passed = time.thread_time() - began, time.perf_counter() - start
            self._choices.learn(self._kind(leaf), codec, len(raw), len(found.stored), spent, passed)
        return found
