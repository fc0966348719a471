"""Pauses between attempts: they double up to a bound, are drawn at random, and end with success."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers import backoff
from tierstate.tiers.backoff import TIER_BACKOFF, Backoff, RetryTimer


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_a_pause_lies_between_its_fixed_share_and_its_bound(failures: int, fixed: float, drawn: float) -> None:
    pauses = Backoff(0.5, 40.0, fixed)
    bound = min(40.0, 0.5 * 2 ** min(failures - 1, 60))
    assert pauses.bound(failures) == bound
    assert fixed * bound <= pauses.pause(failures) <= bound * (1 + 1e-9)
    assert pauses.pause(failures, lambda: drawn) == pytest.approx(bound * (fixed + (1 - fixed) * drawn))


def test_a_timer_waits_longer_after_each_failure_until_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff.time, "monotonic", lambda: 100.0)
    one = RetryTimer()
    assert one.left == 0
    expected = TIER_BACKOFF.first
    for _ in range(12):
        one.failed()
        assert expected / 2 <= one.left <= expected
        expected = min(TIER_BACKOFF.longest, 2 * expected)
    assert expected == TIER_BACKOFF.longest
    one.succeeded()
    assert one.left == 0
    one.failed()
    assert one.left <= TIER_BACKOFF.first
