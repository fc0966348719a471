"""Footers: whether packs say of themselves what layouts say of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierstate.manifest.columns import Array
from tierstate.manifest.errors import FormatError, TierstateError
from tierstate.manifest.layout import Layout
from tierstate.manifest.version import Version

from .base import Tier
from .packs import read_footer

FILES = (".safetensors", ".h5")
"""How the names of packs end that are files of other kinds, and have no footer of ours."""


def has_footer(key: str) -> bool:
    """Whether a pack is one of ours, by its name."""
    return not key.endswith(FILES)


def disagreements(tier: Tier, version: Version, layout: Layout, rows: Array) -> Iterator[str]:
    """What the footers of packs say otherwise of these rows; packs that are gone are passed over."""
    digests, nbytes = version.digests.tobytes(), version.chunk_nbytes
    for number in np.unique(layout.object[rows]).tolist():
        key = layout.objects[number]
        if not has_footer(key):
            continue
        try:
            said = {r.place.offset: (r.digest, r.nbytes, r.place.stored, r.place.codec) for r in read_footer(tier, key)}
        except FormatError as error:
            yield str(error)
            continue
        except TierstateError:
            continue  # told of where its length was asked for
        here = rows[layout.object[rows] == number]
        for row in here.tolist():
            place = layout.place(row)
            assert place is not None
            right = (digests[16 * row : 16 * row + 16], int(nbytes[row]), place.stored, place.codec)
            if said.get(place.offset) != right:
                leaf = version.leaves[int(version.chunk_leaf[row])].name
                yield f"{key}: its footer has another chunk at byte {place.offset} than the record, which has {leaf}"
                break
