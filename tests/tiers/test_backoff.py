"""Pauses between attempts: they double up to a bound, and are drawn at random."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.backoff import Backoff


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_a_pause_lies_between_its_fixed_share_and_its_bound(failures: int, fixed: float, drawn: float) -> None:
    pauses = Backoff(0.5, 40.0, fixed)
    bound = min(40.0, 0.5 * 2 ** min(failures - 1, 60))
    assert pauses.bound(failures) == bound
    assert fixed * bound <= pauses.pause(failures) <= bound * (1 + 1e-9)
    assert pauses.pause(failures, lambda: drawn) == pytest.approx(bound * (fixed + (1 - fixed) * drawn))
