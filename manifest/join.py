"""One layout of the layouts of many parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import columns as col
from .errors import FormatError
from .layout import Draft, Layout
from .version import Version

Array = col.Array


def join(version: Version, parts: Sequence[tuple[Array, Layout]]) -> Layout:
    """The layout of a whole version, where the parts' chunks lie; rows that no part has are ABSENT.

    Args:
        parts: for each its rows in the whole, as `merge` or `placed` says them (-1: another's copy was kept, and what
            the part says of it is left out), and its layout.

    Raises:
        FormatError: rows and layout of a part do not fit together, or two parts name a pack with different lengths.
    """
    draft = Draft(len(version.digests))
    sizes: dict[str, int] = {}
    for rows, layout in parts:
        if len(rows) != len(layout.object) or (len(rows) and int(rows.max()) >= len(version.digests)):
            raise FormatError(f"a part of {len(rows)} rows has a layout of {len(layout.object)}, or is another's")
        here = np.flatnonzero((rows >= 0) & layout.present)
        draft.put_like(rows[here], layout, here)
        for key, size in zip(layout.objects, layout.object_sizes.tolist(), strict=True):
            if sizes.setdefault(key, size) != size:
                raise FormatError(f"{key} is {sizes[key]} bytes long by one rank's part and {size} by another's")
    return draft.build(sizes)
