"""Operations are tried again while that may help and time is left."""

import threading
import time
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.object.filesystem import store_errors_translated
from tierstate.tiers.object.s3 import retry
from tierstate.tiers.object.s3.http_session import Broken
from tierstate.tiers.object.s3.retry import MAX_USELESS, REQUEST_BACKOFF, GaveUp, RetryUntilDeadline, is_transient

NOT_CONNECTED = EndpointConnectionError(endpoint_url="http://h")


def refused(status: int, code: str, message: str = "") -> ClientError:
    """As botocore raises it."""
    error = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(error, "PutObject")  # type: ignore[arg-type]


AT_ONCE = RetryUntilDeadline(30, draw=lambda: 0.0)


class Failing:
    """Fails with each of these in turn, then gives the seconds that were left."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self, left: float) -> float:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return left


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (refused(503, "SlowDown", "slow down"), True),
        (refused(500, "InternalError"), True),
        (refused(502, "502"), True),
        (refused(429, "429"), True),
        (refused(400, "BadDigest"), True),
        (refused(403, "AccessDenied"), False),
        (refused(404, "NoSuchKey"), False),
        (refused(412, "PreconditionFailed"), False),
        (refused(301, "PermanentRedirect"), False),
        (Broken("short"), True),
        (NOT_CONNECTED, True),
        (TimeoutError(), True),
        (ValueError("x"), False),
    ],
)
def test_what_is_tried_again(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient
    attempt = Failing(error)
    if transient:
        assert 0 < AT_ONCE.run(attempt) <= 30
        assert attempt.calls == 2
    else:
        with pytest.raises(type(error)):
            AT_ONCE.run(attempt)
        assert attempt.calls == 1


def test_giving_up_tells_how_often_and_why() -> None:
    def attempt(left: float) -> None:
        raise errors.pop(0)

    errors: list[Exception] = [refused(503, "SlowDown", "wait"), Broken("short"), refused(503, "SlowDown", "wait")]
    draws = iter([0.0, 0.0, 1000.0])
    with pytest.raises(GaveUp, match=r"the last of 3 attempts in .* of a deadline of 60 s: 2 x SlowDown, 1 x Broken"):
        RetryUntilDeadline(60, draw=lambda: next(draws)).run(attempt)


def test_giving_up_is_an_unavailable_tier_with_the_remedy_of_its_cause() -> None:
    slow = refused(503, "SlowDown", "wait")
    draws = iter([0.0, 1000.0])
    with (
        pytest.raises(TierUnavailable, match=r"2 x SlowDown.*the store asks for fewer requests"),
        store_errors_translated("read", "s3", "a", "s3://b/a", frozenset()),
    ):
        RetryUntilDeadline(60, draw=lambda: next(draws)).run(Failing(slow, slow))


def test_the_only_attempt_speaks_for_itself() -> None:
    with pytest.raises(Broken, match=r"^short$"):
        RetryUntilDeadline(1, draw=lambda: 1000.0).run(Failing(Broken("short")))


def test_answers_that_bring_nothing_are_not_asked_for_for_ever() -> None:
    """Where each brings something it goes on, however often they break off."""
    attempt = Failing(*[Broken("short")] * 100)
    with pytest.raises(GaveUp, match=f"the last of {MAX_USELESS} attempts"):
        AT_ONCE.run(attempt)
    attempt = Failing(*[Broken("short")] * 100)
    AT_ONCE.run(attempt, moved=lambda: attempt.calls)
    assert attempt.calls == 101
    mixed = Failing(*[NOT_CONNECTED, Broken("short")] * (MAX_USELESS - 1))
    AT_ONCE.run(mixed)


@pytest.mark.slow
def test_pauses_are_short_again_after_something_moved() -> None:
    """With draws of one the pauses would be 0.1 s, 0.2 s, 0.4 s and so on, and go past the deadline."""
    attempt = Failing(*[NOT_CONNECTED] * 8)
    RetryUntilDeadline(10, draw=lambda: 1.0).run(attempt, moved=lambda: attempt.calls)
    assert attempt.calls == 9


class Lasting:
    """Each attempt lasts so many seconds of a clock that it turns on, and the first ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, failures: int) -> None:
        self.now, self.calls, self._seconds, self._failures = 0.0, 0, seconds, failures
        monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: self.now))

    def __call__(self, left: float) -> None:
        self.calls, self.now = self.calls + 1, self.now + self._seconds
        if self.calls <= self._failures:
            raise NOT_CONNECTED


@pytest.mark.parametrize("seconds", [36.0, 120.0, 86_400.0])
def test_an_attempt_during_which_the_process_was_stopped_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A server that does not answer ends an attempt sooner; so does one that ends all of them, after a while."""
    attempt = Lasting(monkeypatch, seconds, 1)
    RetryUntilDeadline(60, lambda: 0.0, silence=35).run(attempt)
    assert attempt.calls == 2
    attempt = Lasting(monkeypatch, seconds, 100)
    with pytest.raises(GaveUp, match="the last of 2 attempts"):
        RetryUntilDeadline(60, lambda: 0.0, silence=35).run(attempt)


@given(seconds=st.floats(0, 40), deadline=st.floats(1, 100))
def test_a_server_that_is_silent_is_waited_for_until_the_deadline(seconds: float, deadline: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        attempt = Lasting(patch, min(seconds, 2 * deadline, 35.0), 1)
        if attempt._seconds >= deadline:
            with pytest.raises(EndpointConnectionError):
                RetryUntilDeadline(deadline, lambda: 0.0, silence=35).run(attempt)
        else:
            RetryUntilDeadline(deadline, lambda: 0.0, silence=35).run(attempt)


def test_a_stop_is_heard_during_a_pause() -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    start = time.monotonic()
    with pytest.raises(Broken):
        RetryUntilDeadline(3600, draw=lambda: 3000.0).run(Failing(Broken("short")), stop=stop)
    assert time.monotonic() - start < 60


@given(st.integers(1, 10_000))
def test_pauses_double_up_to_a_limit(attempts: int) -> None:
    first, longest, bound = REQUEST_BACKOFF.first, REQUEST_BACKOFF.longest, REQUEST_BACKOFF.bound
    assert first <= bound(attempts) <= longest
    assert bound(attempts + 1) in (2 * bound(attempts), longest)
