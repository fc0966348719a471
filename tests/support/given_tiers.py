"""A tier type for policies that uses existing tier objects of a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import tierstate as ts
from tierstate.tiers.base import Tier, Traits
from tierstate.tiers.wrappers.base import Wrapping


class Handed(Wrapping):
    """A tier type for policies, ``handed``: what stands under ``key`` in `TIERS`."""

    TIERS: ClassVar[dict[str, Tier]] = {}

    def __init__(self, *, key: str) -> None:
        super().__init__(self.TIERS[key])

    @property
    def traits(self) -> Traits:
        """Those of the tier inside, said to be persistent."""
        return replace(self.inner.traits, persistent=True)

    def close(self) -> None:
        """Nothing: the tier is the test's."""


@contextmanager
def handed(*tiers: Tier) -> Iterator[list[dict[str, Any]]]:
    """Keys of a policy's tier for each of these."""
    ts.register_tier("handed", Handed)
    found = {uuid.uuid4().hex: tier for tier in tiers}
    Handed.TIERS.update(found)
    try:
        yield [{"type": "handed", "key": key} for key in found]
    finally:
        for key in found:
            del Handed.TIERS[key]
