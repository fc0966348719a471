"""The rescue: a chunk that one tier could not give, from wherever else it is whole."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.digest import algorithm
from tierstate.manifest.errors import Damaged, NotFound, TierstateError
from tierstate.manifest.layout import DELTA, Layout, Place
from tierstate.manifest.version import Version

from .base import Range
from .codecs import decode
from .deltas import WrongBase, undone
from .shelf import Shelf

log = logging.getLogger("tierstate")

Mended = Callable[[int, int, Buffer], None]
"""Called with the index of the holding that failed, the row, and the good raw bytes."""


class Holding(NamedTuple):
    """One tier's copy of a version."""

    shelf: Shelf
    layout: Layout


class Trouble(NamedTuple):
    """One chunk that one tier could not give."""

    tier: str
    row: int
    error: TierstateError


class Rescue:
    """Verifies chunks, and looks in the other holdings for those that fail.

    Attributes:
        troubles: every failure so far.
    """

    def __init__(self, version: Version, holdings: Sequence[Holding], mended: Mended | None) -> None:
        self._version, self._holdings, self._mended = version, holdings, mended
        self._digest = algorithm(version.head.digest)
        self._digests = version.digests.tobytes()
        self._nbytes = version.chunk_nbytes
        self._lock = threading.Lock()
        self.troubles: list[Trouble] = []

    def verified(self, index: int, row: int, codec: str, stored: Buffer) -> Buffer | None:
        """The raw bytes of a holding's chunk (``stored`` itself where they are raw); None if it is not what was saved.

        Raises:
            Damaged: the stored bytes cannot be this chunk.
            TierError: its base could not be read.
        """
        nbytes = int(self._nbytes[row])
        if codec == DELTA:
            shelf, layout = self._holdings[index]
            raw = undone(shelf, layout.base(row), stored, nbytes, self._digest)
        else:
            raw = decode(codec, stored, nbytes)
        return raw if self._digest(raw) == self._digests[16 * row : 16 * row + 16] else None

    def alone(self, index: int, row: int, place: Place) -> Buffer:
        """A chunk read by itself, verified.

        Raises:
            Damaged, TierError
        """
        # Rare, so a buffer of its own is better than a second slab, for which this worker might wait on itself.
        out = empty_buffer(place.stored)
        self._holdings[index].shelf.tier.read(place.object, [Range(place.offset, out)])
        raw = self.verified(index, row, place.codec, out)
        if raw is None:
            raise wrong(place)
        return raw

    def elsewhere(self, failed: int, row: int, error: TierstateError) -> Buffer:
        """Look for one chunk where it was mended, then in the other tiers, and tell of what failed.

        Raises:
            Damaged: it is whole in no tier; the message names leaf, version and every tier's trouble.
        """
        place = self._holdings[failed].layout.place(row)
        shelf = self._holdings[failed].shelf
        if place is not None and isinstance(error, (Damaged, NotFound)) and not isinstance(error, WrongBase):
            shelf.distrust(place.object)
        troubles = [Trouble(shelf.name, row, error)]
        for index, spot in self._other_places(failed, row):
            try:
                raw = self.alone(index, row, spot)
            except TierstateError as again:
                troubles.append(Trouble(self._holdings[index].shelf.name, row, again))
                continue
            self._note(troubles)
            if self._mended is not None and index != failed and not error.transient:
                self._mended(failed, row, raw)
            return raw
        self._note(troubles)
        raise self.nowhere(row, troubles) from error

    def _other_places(self, failed: int, row: int) -> Iterator[tuple[int, Place]]:
        digest = self._digests[16 * row : 16 * row + 16]
        for index in [failed, *range(failed), *range(failed + 1, len(self._holdings))]:
            shelf, layout = self._holdings[index]
            place = layout.place(row)
            if place is not None and index != failed:
                yield index, place
            try:
                mended = shelf.mended(digest) if place is not None else None
            except TierstateError as error:
                log.warning("%s: cannot tell what was mended: %s", shelf.name, error)
                continue
            if mended is not None:
                yield index, mended

    def _note(self, troubles: list[Trouble]) -> None:
        with self._lock:
            known = {trouble.tier for trouble in self.troubles}
            self.troubles += troubles
        for trouble in troubles:
            # One warning a tier: a lost pack is thousands of chunks. `troubles` has them all.
            quiet = trouble.tier in known or self._let_go(trouble)
            level = logging.DEBUG if quiet else logging.WARNING
            log.log(level, "%s: %s: %s", trouble.tier, self._leaf(trouble.row), trouble.error)

    def _let_go(self, trouble: Trouble) -> bool:
        """Whether a tier that forgets anyway has made room meanwhile: nothing is amiss."""
        here = (h.shelf.tier.traits.persistent for h in self._holdings if h.shelf.name == trouble.tier)
        return isinstance(trouble.error, NotFound) and not any(here)

    def _leaf(self, row: int) -> str:
        return self._version.leaves[int(self._version.chunk_leaf[row])].name

    def nowhere(self, row: int, troubles: Sequence[Trouble] = ()) -> Damaged:
        """The error for a chunk that no tier has whole."""
        head = self._version.head
        told = "; ".join(f"{t.tier}: {t.error}" for t in troubles)
        tried = told or f"none of {', '.join(h.shelf.name for h in self._holdings) or 'the tiers'} has it"
        return Damaged(
            f"leaf {self._leaf(row)} of version {head.seq} (step {head.step}, {self._version.id[:12]}) "
            f"of run {head.run!r} is whole in no tier: {tried}"
        )


def wrong(place: Place) -> Damaged:
    """The error for a chunk whose bytes are others than were saved."""
    return Damaged(f"{place.object} at byte {place.offset}: the chunk's digest is not the one it was saved under")
