"""The contract of a tier as a pytest class; import it from `tierstate.tiers.testing`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstate.tiers.base import Tier

from .machine import machine_of, run_histories
from .promises import PROMISES, Check


class TierContract:
    """Tests every promise of a tier, and random histories of calls. Subclass it under a name that pytest collects.

    Attributes:
        examples, steps: how many histories are tried, and their greatest length.
    """

    examples: int = 20
    steps: int = 25

    def make(self, tmp_path: Path) -> Tier:
        """Return a tier on an empty place; called once per test."""
        raise NotImplementedError("say how your tier is made: def make(self, tmp_path): return MyTier(place=tmp_path)")

    def reopen(self, tier: Tier) -> Tier | None:
        """Return another handle on the same place, as another process would have it; None if that is not possible."""
        return None

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """The tier under test."""
        tier = self.make(tmp_path)
        tier.name = tier.name or "contract"
        yield tier
        tier.close()

    @pytest.fixture
    def other(self, tier: Tier) -> Iterator[Tier | None]:
        """A second handle on the place of the tier under test."""
        other = self.reopen(tier)
        if other is not None:
            other.name = other.name or "reopened"
        yield other
        if other is not None:
            other.close()

    @pytest.mark.parametrize("check", [pytest.param(check, id=name.replace(" ", "-")) for name, check in PROMISES])
    def test_promise(self, check: Check, tier: Tier, other: Tier | None) -> None:
        """The tier keeps a promise."""
        check(tier, "contract", other)

    def test_any_history(self, tier: Tier, other: Tier | None) -> None:
        """The tier does what a dict does, for random calls in random order."""
        run_histories(machine_of(tier, other), self.examples, self.steps)
