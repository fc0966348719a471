"""What the records of a run name in one tier, for whoever deletes packs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Named(NamedTuple):
    """What all records of a run name, as they say themselves.

    Attributes:
        packs: keys.
        commits: commit ids of the records of each number.
    """

    packs: set[str]
    commits: Mapping[int, Collection[str]]
