"""The catalogue: which versions of a run there are, in which tiers, over all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.manifest.index import Array
from tierstate.manifest.record import Record
from tierstate.manifest.thinning import thinned
from tierstate.manifest.version import Version

from .fetch import Holding
from .shelf import Shelf

log = logging.getLogger("tierstate")


@dataclass(frozen=True, eq=False)
class Entry:
    """One version and its copies, nearest first.

    Attributes:
        records: the record of each copy, as `holdings`.
    """

    version: Version
    holdings: tuple[Holding, ...]
    records: tuple[Record, ...]

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that have a record of it."""
        return tuple(h.shelf.name for h in self.holdings)

    @property
    def thinned(self) -> str:
        """What retention has dropped of it, in words; empty where all of it was kept."""
        records = zip(self.tiers, self.records, strict=True)
        gone = [f"{glob} from {name}" for name, record in records for glob in thinned(record.commit)]
        return f"`keep` has dropped leaves of it ({', '.join(gone)})" if gone else ""

    def absent(self, rows: Array) -> Array:
        """Those of the rows that no copy has."""
        here = np.zeros(len(self.version.digests), bool)
        for holding in self.holdings:
            here |= holding.layout.present
        missing: Array = rows[~here[rows]]
        return missing


@dataclass(frozen=True)
class Place:
    """One number of the run's line: the versions that tiers have under it, and the records that cannot be read."""

    seq: int
    entries: tuple[Entry, ...]
    problems: tuple[tuple[str, TierstateError], ...]


@dataclass
class Catalog:
    """All versions of a run over all tiers.

    Attributes:
        shelves: the run in each tier, nearest first.
        unreachable: tiers whose log could not be listed, with the reason; known after the first listing.
    """

    shelves: Sequence[Shelf]
    unreachable: dict[str, TierstateError] = field(default_factory=dict)

    def seqs(self) -> dict[int, list[Shelf]]:
        """Per number, rising, the shelves that have a record of it."""
        found: dict[int, list[Shelf]] = {}
        for shelf in self.shelves:
            try:
                for seq in shelf.log.seqs():
                    found.setdefault(seq, []).append(shelf)
            except TierstateError as error:
                self.unreachable[shelf.name] = error
                log.warning("%s: its log cannot be listed: %s", shelf.name, error)
        return dict(sorted(found.items()))

    def newest_first(self, upto: int | None = None) -> Iterator[Place]:
        """All numbers from the newest on, or from ``upto`` on; records are read as they are asked for."""
        for seq, shelves in reversed(self.seqs().items()):
            if upto is None or seq <= upto:
                yield self.look(seq, shelves)

    @staticmethod
    def look(seq: int, shelves: Sequence[Shelf]) -> Place:
        """The versions that these tiers have under one number."""
        copies: dict[str, list[tuple[Holding, Record]]] = {}
        problems = []
        for shelf in shelves:
            try:
                record = shelf.log.read(seq)
            except NotFound:
                continue  # dropped since the log was listed
            except TierstateError as error:
                problems.append((shelf.name, error))
                continue
            copies.setdefault(record.version.id, []).append((Holding(shelf, record.layout), record))
        entries = [
            Entry(found[0][1].version, tuple(h for h, _ in found), tuple(r for _, r in found))
            for found in copies.values()
        ]
        # Two writers may have used one number in different tiers: the later one counts as the newer.
        entries.sort(key=lambda e: e.version.head.time, reverse=True)
        return Place(seq, tuple(entries), tuple(problems))
