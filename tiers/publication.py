"""A publication: one version on its way into one tier, from the first pack to the record."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import CommitUnknown, TierstateError, TierUnavailable
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.layout import Layout, Place
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.log import commit_id
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .arena import Slab
from .codecs import encode
from .packs import PackWriter
from .shelf import Shelf


@dataclass(frozen=True, eq=False)
class Route:
    """Which leaves go to a tier, and how each is encoded.

    Attributes:
        leaves: ``(leaves,)`` of bool.
        codecs: per leaf, the codec the policy asks for.
    """

    leaves: Array
    codecs: Sequence[str]


class Publication:
    """One version into one tier.

    Args:
        shelf: the run in that tier.
        head: the version's head.
        leaves: the version's leaves.
        row_leaves: ``(chunks,)``: the leaf of each row.
        route: which leaves go there.
    """

    def __init__(self, shelf: Shelf, head: Head, leaves: Sequence[Leaf], row_leaves: Array, route: Route) -> None:
        self.shelf = shelf
        self._leaves, self._row_leaves, self._route = leaves, row_leaves, route
        self._packs = PackWriter(shelf.tier, head.run, head.seq)
        self._places: list[Place | None] = [None] * len(row_leaves)
        self._new: dict[bytes, Place] = {}
        self._sent = False
        self._routed: Array = route.leaves[row_leaves] if len(row_leaves) else np.zeros(0, bool)

    @property
    def stored(self) -> int:
        """Bytes written so far; what was reused is not among them."""
        return self._packs.stored

    def missing(self, rows: Sequence[int], digests: Array) -> list[int]:
        """Indices into ``rows`` of the chunks that must be written; the others are found where they lie already."""
        wanted = [i for i, row in enumerate(rows) if self._routed[row]]
        found = self.shelf.reusable(digests[wanted])
        for i, place in zip(wanted, found, strict=True):
            self._places[rows[i]] = place
        return [i for i, place in zip(wanted, found, strict=True) if place is None]

    def write(self, row: int, raw: Buffer, digest: bytes, slab: Slab | None) -> None:
        """Put one chunk into a pack, unless this save has put the same bytes already.

        Args:
            slab: the slab in which ``raw`` lies, leased until the tier needs it no longer; None for memory of its own.
        """
        place = self._new.get(digest)
        if place is None:
            leaf = int(self._row_leaves[row])
            codec, stored = encode(self._route.codecs[leaf], raw, self._leaves[leaf].spec.itemsize)
            release = None
            if stored is raw and slab is not None:
                slab.lease()
                release = slab.release
            place = self._new[digest] = self._packs.add(stored, digest, len(raw), codec, release)
        self._places[row] = place

    def commit(self, version: Version) -> Record:
        """Make packs durable, then create the record."""
        self._packs.close()
        sizes = self._sizes()
        record = Record(version, Layout.build(self._places, sizes), self._signature())
        self._sent = True
        self.shelf.publish(record)
        return record

    def _sizes(self) -> dict[str, int]:
        """Lengths of all packs that the layout names: of those written here, and of those reused."""
        sizes = dict(self._packs.sizes)
        for place in self._places:
            if place is not None and place.object not in sizes:
                sizes[place.object] = self.shelf.tier.size(place.object)
        return sizes

    def _signature(self) -> dict[str, Any]:
        return {"id": commit_id(), "tier": self.shelf.name, "host": socket.gethostname(), "pid": os.getpid()}

    def abort(self, error: BaseException) -> None:
        """Leave nothing behind, unless the record may take effect yet: then its packs must stay.

        A create that was not answered may still be under way, even if reading back has found nothing so far.
        """
        if isinstance(error, CommitUnknown) or (self._sent and isinstance(error, TierUnavailable)):
            return
        try:
            self._packs.abort()
        except TierstateError as second:
            error.add_note(f"and clearing up after it failed too: {second}")
