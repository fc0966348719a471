"""Forks: a version of one run as the first version of another, which shares its packs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import columns as col
from .head import Head
from .layout import Draft, Layout, Place
from .version import WHAT, Version


def forked(version: Version, head: Head) -> Version:
    """The same leaves and chunks under another head; with all that this program does not know."""
    fields, columns = col.decode(memoryview(version.data), WHAT)
    return Version.decode(memoryview(col.encode({**fields, **head.encode()}, columns)))


def moved(layout: Layout, places: Mapping[int, Place], sizes: Mapping[str, int]) -> Layout:
    """A layout of which some rows lie elsewhere.

    Args:
        places: their rows, and where they lie now.
        sizes: length of every object that is named there.
    """
    if not places:
        return layout
    draft = Draft(len(layout.object))
    here = np.flatnonzero(layout.present)
    draft.put_like(here, layout, here)
    for row, place in places.items():
        draft.put(row, place)
    before = dict(zip(layout.objects, layout.object_sizes.tolist(), strict=True))
    return draft.build({**before, **sizes})
