"""Taking: which leaves of a version are a rank's own."""

from __future__ import annotations

from tierstate.manifest.leaf import Path

from .structure import Stem
from .survey import Place


def withhold(stem: Stem, place: Place) -> None:
    """Take from the tree what the things in the given state leave to other ranks."""
    if place.stateful is not None and place.stateful.takes is not None:
        takes = place.stateful.takes(place.value)
        pending: list[tuple[Stem, Path]] = [(stem, ())]
        while pending:
            at, path = pending.pop()
            at.children = {mark: below for mark, below in at.children.items() if takes((*path, below.key))}
            pending += [(below, (*path, below.key)) for below in at.children.values()]
    for mark, below in stem.children.items():
        if mark in place.children:
            withhold(below, place.children[mark][1])
