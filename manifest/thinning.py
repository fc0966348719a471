"""Thinning: a version stays in a tier with fewer of its leaves, which its record there then says. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .columns import Array
from .layout import Draft
from .leaf import TIED, matches
from .log import commit_id
from .record import Record
from .retention import EVERYTHING
from .version import Version

Mask: TypeAlias = NDArray[np.bool_]


class Groups:
    """Parts leaves by the rule that says how long they are kept.

    Args:
        globs: those of the rules, in the order in which they are tried; what none matches is EVERYTHING.

    Attributes:
        names: of the groups, in that order.
    """

    def __init__(self, globs: Iterable[str] = ()) -> None:
        self.names = tuple(dict.fromkeys([*globs, EVERYTHING]))
        self._last: tuple[tuple[str, ...], Array] | None = None

    def of(self, version: Version) -> Mask:
        """``(leaves, groups)`` of bool: to which groups each leaf belongs; to several where others are tied to it."""
        found: Mask = np.zeros((len(version.leaves), len(self.names)), bool)
        found[np.arange(len(version.leaves)), self._first(version)] = True
        for i, leaf in enumerate(version.leaves):
            root = version.leaf_index.get(str(leaf.spec.attrs.get("to"))) if leaf.spec.kind == TIED else None
            if root is not None:
                found[root] |= found[i]
        return found

    def _first(self, version: Version) -> Array:
        """``(leaves,)``: number of the first group that each leaf matches; remembered while the paths stay."""
        paths = tuple(version.leaf_index)
        if self._last is None or self._last[0] != paths:
            self._last = paths, np.array([self._number(leaf.path) for leaf in version.leaves], "i8")
        return self._last[1]

    def _number(self, path: tuple[Any, ...]) -> int:
        others = self.names[:-1]
        return next((i for i, glob in enumerate(others) if matches(glob, path)), len(others))

    def here(self, record: Record) -> tuple[str, ...]:
        """Groups of which a record's tier has leaves; EVERYTHING where no leaf has bytes."""
        if len(self.names) == 1:
            return self.names
        version, gone = record.version, thinned(record.commit)
        present = np.zeros(len(version.leaves), bool)
        present[version.chunk_leaf[record.layout.present]] = True
        belongs = self.of(version)[present]
        # What is here for the sake of a tied leaf alone does not bring back a group that was dropped.
        own = np.flatnonzero(np.any(belongs[belongs.sum(axis=1) == 1], axis=0))
        shared = np.flatnonzero(np.any(belongs, axis=0))
        there = [n for i, n in enumerate(self.names) if i in own or (i in shared and n not in gone)]
        return tuple(there) or (EVERYTHING,)

    def thin(self, record: Record, kept: Collection[str]) -> Record | None:
        """The record with the leaves of the other groups absent; None where there are none of them."""
        version, layout = record.version, record.layout
        stays = np.flatnonzero(np.any(self.of(version)[:, [name in kept for name in self.names]], axis=1))
        rows = np.flatnonzero(layout.present & np.isin(version.chunk_leaf, stays))
        if len(rows) == int(layout.present.sum()):
            return None
        draft = Draft(len(version.digests))
        draft.put_like(rows, layout, rows)
        sizes = dict(zip(layout.objects, layout.object_sizes.tolist(), strict=True))
        gone = [*thinned(record.commit), *(name for name in self.here(record) if name not in kept)]
        commit = {**record.commit, "id": commit_id(), "thinned": list(dict.fromkeys(gone))}
        return Record(version, draft.build(sizes), commit)


def thinned(commit: Mapping[str, Any]) -> tuple[str, ...]:
    """Groups of leaves that retention has dropped of a version in a tier, as the commit section says; often none."""
    found = commit.get("thinned")
    return tuple(str(name) for name in found) if isinstance(found, list) else ()
