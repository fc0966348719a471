"""The union of many ranks' leaves, which are mostly the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import columns as col
from .catalog import Catalog
from .errors import StateMismatch
from .leaf import Leaf

Array = col.Array


class Union(NamedTuple):
    """All leaves, in order of first appearance, and for each catalog the number that each of its leaves has there."""

    catalog: Catalog
    places: list[Array]


def unite(catalogs: Sequence[Catalog], ranks: Sequence[int]) -> Union:
    """All leaves of these ranks' catalogs. What they share of them is looked at once.

    Raises:
        StateMismatch: ranks disagree on a leaf.
    """
    drawn = _Draft()
    places = [drawn.place(catalog, rank) for catalog, rank in zip(catalogs, ranks, strict=True)]
    first = catalogs[0]
    # Mostly nobody has a leaf that the first does not have, whose columns are there already.
    return Union(first if len(drawn.leaves) == len(first.leaves) else Catalog.of(drawn.leaves), places)


class _Draft:
    """The union while it grows."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._at: dict[str, int] = {}
        self._said: list[int] = []
        self._seen: dict[int, Array] = {}

    def place(self, catalog: Catalog, rank: int) -> Array:
        """Take a catalog's leaves; their numbers."""
        found = self._seen.get(id(catalog))
        if found is None:
            if catalog.joined:
                found = np.concatenate([self.place(piece, rank) for piece in catalog.joined])
            else:
                found = self._look(catalog, rank)
            self._seen[id(catalog)] = found
        return found

    def _look(self, catalog: Catalog, rank: int) -> Array:
        numbers = []
        for path, leaf in zip(catalog.paths, catalog.leaves, strict=True):
            number = self._at.setdefault(path, len(self.leaves))
            if number == len(self.leaves):
                self.leaves.append(leaf)
                self._said.append(rank)
            elif self.leaves[number] is not leaf and self.leaves[number].spec != leaf.spec:
                raise StateMismatch(
                    f"ranks disagree on {leaf.name}: {names_of([self._said[number]])} {self.leaves[number].spec}, "
                    f"{names_of([rank])} {leaf.spec}"
                )
            numbers.append(number)
        return np.array(numbers, "i8")


def names_of(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks as a message names them: ``ranks 0, 1, 5``."""
    known = [str(r) for r in ranks if r >= 0]
    if not known:
        return "a rank without shards"
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return f"rank{'s' if len(known) > 1 else ''} {', '.join(known[:most])}{more}"
