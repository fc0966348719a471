"""The circuit breaker: a tier that hangs costs a deadline now and then, and is used again once it answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import NotFound, TierUnavailable
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.wrappers import retry
from tierstate.tiers.wrappers.breaker import LONGEST_PAUSE, Breaker, Breaking, Hung
from tierstate.tiers.wrappers.retry import Retried

DEADLINE = 5.0


class Store(Memory):
    """Answers at once, or never: then each call ends at the deadline. Time is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.silent, self.asked = 0.0, False, 0

    def size(self, key: str) -> int:
        self.asked += 1
        if self.silent:
            self.now += DEADLINE
            raise TierUnavailable("no answer")
        return super().size(key)


def breaking(store: Store) -> Breaking:
    return Breaking(store, DEADLINE, clock=lambda: store.now)


def outcome(tier: Breaking) -> type[Exception] | None:
    """The class of the error of a call, or None."""
    try:
        tier.size("a")
    except TierUnavailable as error:
        return type(error)
    return None


@given(st.lists(st.floats(0, 200), min_size=1, max_size=60), st.integers(0, 60))
def test_at_most_half_of_the_time_is_spent_on_a_tier_that_hangs(gaps: list[float], comes_back: int) -> None:
    store, waited = Store(), 0.0
    tier = breaking(store)
    store.put("a", empty_buffer(1))
    for number, gap in enumerate(gaps):
        store.now, store.silent, start = store.now + gap, number < comes_back, store.now + gap
        found = outcome(tier)
        assert (found is None) is (tier.trouble == "")
        assert not (found is None and store.silent)
        assert store.silent or found in (None, Hung)
        waited += store.now - start
        assert waited <= DEADLINE + store.now / 2
    store.now, store.silent = store.now + LONGEST_PAUSE, False
    assert tier.size("a") == 1, "after the longest pause it is asked, whatever has been before"


def test_a_tier_that_hung_and_answers_with_an_error_is_back() -> None:
    store = Store()
    tier = breaking(store)
    store.silent = True
    with pytest.raises(TierUnavailable):
        tier.size("a")
    store.silent = False
    with pytest.raises(Hung, match="it is asked again at intervals"):
        tier.size("a")
    assert store.asked == 1
    store.now += DEADLINE
    with pytest.raises(NotFound):
        tier.size("a")
    assert tier.trouble == ""


def test_a_quick_failure_is_no_hang() -> None:
    class Refusing(Store):
        def size(self, key: str) -> int:
            raise TierUnavailable("503")

    tier = breaking(Refusing())
    for _ in range(3):
        with pytest.raises(TierUnavailable, match="503"):
            tier.size("a")
    assert tier.trouble == ""


def test_a_writer_gets_its_buffers_back_from_a_tier_that_hangs() -> None:
    store, released = Store(), []
    tier = breaking(store)
    writer = tier.writer("a")
    store.silent = True
    with pytest.raises(TierUnavailable):
        tier.size("a")
    with pytest.raises(Hung):
        writer.append(empty_buffer(4), lambda: released.append(1))
    assert released == [1]
    with pytest.raises(Hung):
        writer.close()
    writer.abort()


def test_what_hung_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []

    class Pauses:
        def pause(self, failures: int) -> float:
            pauses.append(failures)
            return 0.0

    monkeypatch.setattr(retry, "CALL_BACKOFF", Pauses())
    store = Store()
    tier = Retried(breaking(store), 100)
    store.silent = True
    for _ in range(3):
        with pytest.raises(Hung):
            tier.size("a")
    assert store.asked == 1
    assert pauses == [1], "only the call that found out was tried again, and refused"


class BreakerMachine(RuleBasedStateMachine):
    """Calls that begin and end in any order, against what is promised: while open, one asks at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(lambda: "t", DEADLINE, clock=lambda: self.now)
        self.under_way: list[bool] = []
        self.asked_at: list[float] = []

    @rule()
    def begin(self) -> None:
        was = self.breaker.trouble
        try:
            asks = self.breaker.admit()
        except Hung:
            return
        assert asks is bool(was)
        if asks:
            assert not any(self.under_way), "only one call asks"
            self.asked_at.append(self.now)
        self.under_way.append(asks)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), end=st.sampled_from(["answered", "silent", "undecided"]))
    def end(self, data: st.DataObject, end: str) -> None:
        asks = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        was = self.breaker.trouble
        if end == "answered":
            self.breaker.answered()
            self.under_way, self.asked_at = [False for _ in self.under_way], []
            assert self.breaker.trouble == ""
        elif end == "silent":
            self.breaker.silent("a call", 1.0, asks=asks)
            assert self.breaker.trouble == (was or self.breaker.trouble)
            assert self.breaker.trouble
        else:
            self.breaker.undecided(asks=asks)
            self.asked_at = self.asked_at[:-1] if asks else self.asked_at
            assert self.breaker.trouble == was

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def asks_at_intervals(self) -> None:
        gaps = [b - a for a, b in zip(self.asked_at, self.asked_at[1:], strict=False)]
        assert all(gap >= DEADLINE for gap in gaps)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
