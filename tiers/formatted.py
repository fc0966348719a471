"""Formatted publications: a version on its way into a tier whose packs are files of another kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .batch import Batch
from .fetch import Fetch
from .formats import Format, format_of
from .leaf_files import LeafFiles
from .publication import Publication
from .route import Route
from .shelf import Shelf, Stop

Stages = Callable[[], Array]
"""Gives ``(leaves,)``: in which part of a capture each leaf comes whole; -1 where it does not. See `Plan.stages`."""


def publication_of(
    shelf: Shelf,
    head: Head,
    leaves: Sequence[Leaf],
    row_leaves: Array,
    route: Route,
    stages: Stages,
    faster: Sequence[Shelf] = (),
) -> Publication:
    """A version's way into a tier.

    Args:
        shelf, head, leaves, row_leaves, route: as for `Publication`.
        stages: asked once, when the first bytes come, and only where the format is not native.
        faster: as for `Publication`.
    """
    kind = format_of(route.format)
    if kind is None:
        return Publication(shelf, head, leaves, row_leaves, route, faster)
    return Formatted(shelf, head, leaves, row_leaves, route, kind, stages, faster)


class Formatted(Publication):
    """One version into files of another kind; what those cannot express goes into native packs beside them.

    Args:
        shelf, head, leaves, row_leaves, route: as for `Publication`.
        kind: of the files.
        stages, faster: as for `publication_of`.
    """

    def __init__(
        self,
        shelf: Shelf,
        head: Head,
        leaves: Sequence[Leaf],
        row_leaves: Array,
        route: Route,
        kind: Format,
        stages: Stages,
        faster: Sequence[Shelf] = (),
    ) -> None:
        super().__init__(shelf, head, leaves, row_leaves, route, faster)
        self._head, self._kind, self._stages = head, kind, stages
        self._begin = threading.Lock()
        self._begun: LeafFiles | None = None

    @property
    def _files(self) -> LeafFiles:
        """The files; decided upon when first asked for, since the training waits while this object is made."""
        with self._begin:
            if self._begun is None:
                leaves, rows = self._leaves, self._row_leaves
                here = self._route.leaves & np.fromiter(map(self._kind.expresses, leaves), bool, len(leaves))
                stages = np.where(here, self._stages(), -1)
                self._elsewhere, self._beside = ~self._routed, self._routed & (stages < 0)[rows]
                self._routed = self._beside
                self._begun = LeafFiles(self.shelf, self._head, leaves, rows, self._kind, stages)
            return self._begun

    @property
    def stored(self) -> int:
        return super().stored + self._files.stored

    @property
    def plain(self) -> Array:
        """None: what lies in files is laid out before it is known."""
        return np.zeros(len(self._leaves), bool)

    def standing(self, digests: Array) -> Array:
        in_files = self._files.standing(digests)
        # To the base, what goes into files does not go to this tier.
        found: Array = in_files | (super().standing(digests) & (self._elsewhere | self._beside))
        return found

    def keep(self, rows: Array, digests: Array) -> bool:
        in_files = self._files.keep(rows, digests)
        return super().keep(rows, digests) and in_files

    def take(self, batch: Batch) -> None:
        files = self._files
        super().take(batch)
        files.take(batch)

    def copy(self, version: Version, fetch: Fetch) -> None:
        self._files.copy(version, fetch)
        super().copy(version, fetch)

    def commit(self, version: Version, stop: Stop | None = None) -> Record:
        self._files.finish(self._draft, version)
        return super().commit(version, stop)

    def _written_sizes(self) -> dict[str, int]:
        return super()._written_sizes() | self._files.sizes

    def _discard(self) -> None:
        try:
            if self._begun is not None:
                self._begun.abort()
        finally:
            super()._discard()


def whole(version: Version) -> Array:
    """``(leaves,)``: 0 for the leaves that the version has in one piece, -1 for the others: the stages of a copy, which
    reads in any order."""
    shards = np.bincount(version.shard_leaf, minlength=len(version.leaves))
    found = np.where(shards == 1, 0, -1)
    for leaf, box in zip(version.shard_leaf.tolist(), version.boxes, strict=True):
        if box.shape != version.leaves[leaf].spec.shape:
            found[leaf] = -1
    return found
