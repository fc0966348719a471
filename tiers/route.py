"""A route: which of a state's leaves go to one tier, and how encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tierstate.manifest.index import Array
from tierstate.manifest.layout import RAW

from .formats import NATIVE


@dataclass(frozen=True, eq=False)
class Route:
    """Which leaves go to a tier, and how each is encoded.

    Attributes:
        leaves: ``(leaves,)`` of bool.
        codecs: per leaf, the codec the policy asks for.
        format: what kind of file a pack is there, as a policy names it.
        rules: per leaf, the number of the rule that names its codec; None where the tier does.
    """

    leaves: Array
    codecs: Sequence[str]
    format: str = NATIVE
    rules: Sequence[int | None] = ()

    @cached_property
    def raw(self) -> Array:
        """``(leaves,)`` of bool: which are stored as they are."""
        return np.array([codec == RAW for codec in self.codecs], bool)
