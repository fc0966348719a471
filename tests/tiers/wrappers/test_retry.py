"""The tier around a tier that tries again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, NotFound, TierFull, TierUnavailable
from tierstate.tiers.backoff import Backoff
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty, Lease, random_bytes
from tierstate.tiers.wrappers import retry
from tierstate.tiers.wrappers.retry import CALL_BACKOFF, Retried

DATA, OTHER = random_bytes(50_000, 1), random_bytes(50_000, 2)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "CALL_BACKOFF", Backoff(1e-6, 20.0))


def lost(operation: Any, *at: int, after: bool = True) -> Iterator[Fault]:
    return (Fault(operation, n, TierUnavailable(f"{operation} {n} lost"), after=after) for n in at)


def everything(tier: Tier) -> None:
    tier.put("a", DATA)
    assert torch.equal(tier.get("a"), DATA)
    assert list(tier.list("")) == ["a"]
    with tier.writer("b") as writer:
        writer.append(DATA)
    tier.delete("a")
    assert list(tier.list("")) == ["b"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("operation", ["put", "read", "list", "size", "delete", "writer"])
def test_what_fails_for_a_moment_is_tried_again(operation: Any, after: bool) -> None:
    for failures in (1, 2):
        everything(Retried(Faulty(Memory(), *lost(operation, *range(1, failures + 1), after=after)), 2))
    with pytest.raises(TierUnavailable, match=f"{operation} 3 lost"):
        everything(Retried(Faulty(Memory(), *lost(operation, 1, 2, 3, after=False)), 2))


@pytest.mark.parametrize("error", [AccessDenied, TierFull, AlreadyExists, NotFound])
def test_what_is_not_transient_passes_at_once(error: type[Exception]) -> None:
    inner = Faulty(Memory(), Fault("put", 1, error("no")))
    with pytest.raises(error, match="no"):
        Retried(inner, 5).put("a", DATA)
    assert inner.calls["put"] == 1


def test_a_put_whose_answer_was_lost_is_not_sent_again() -> None:
    inner = Faulty(Memory(), *lost("put", 1))
    Retried(inner, 1).put("a", DATA)
    assert inner.calls["put"] == 1
    assert torch.equal(inner.get("a"), DATA)


def test_a_put_does_not_conflict_with_itself_even_if_looking_fails_first() -> None:
    inner = Faulty(Memory(), *lost("put", 1), *lost("size", 1, after=False), *lost("read", 1, after=False))
    Retried(inner, 3).put("a", DATA)
    assert inner.calls["put"] == 1


@pytest.mark.parametrize("first", [DATA, OTHER])
def test_a_put_that_takes_effect_late_is_no_conflict_with_the_next_one(first: torch.Tensor) -> None:
    """The first request was given up, and reaches the store when it has been looked whether it did."""

    class Late(Faulty):
        def put(self, key: str, data: Buffer) -> None:
            if self.calls["put"] == 1:
                self.inner.put(key, first)
            super().put(key, data)

    inner = Late(Memory(), *lost("put", 1, after=False))
    with nullcontext() if first is DATA else pytest.raises(AlreadyExists):
        Retried(inner, 1).put("a", DATA)
    assert inner.calls["put"] == 2
    assert torch.equal(inner.get("a"), first)


def test_a_put_that_lost_against_another_is_told_so() -> None:
    for other in (OTHER, DATA[:-1], random_bytes(0)):
        inner = Faulty(Memory(), *lost("put", 1, after=False))
        tier = Retried(inner, 2)
        tier.name = "far"
        inner.inner.put("a", other)
        with pytest.raises(AlreadyExists, match="far: a: exists already with other bytes"):
            tier.put("a", DATA)
        assert torch.equal(inner.get("a"), other)


def test_an_object_that_was_there_before_is_a_conflict_though_its_bytes_are_the_same() -> None:
    tier = Retried(Memory(), 2)
    tier.put("a", DATA)
    with pytest.raises(AlreadyExists):
        tier.put("a", DATA)


def test_long_objects_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "COMPARE_PIECE", 1000)
    inner = Faulty(Memory(), *lost("put", 1))
    Retried(inner, 1).put("a", DATA)
    assert inner.calls["read"] == 50
    swapped = torch.cat([DATA[1000:], DATA[:1000]])
    inner = Faulty(Memory(), *lost("put", 1, after=False))
    inner.inner.put("a", swapped)
    with pytest.raises(AlreadyExists):
        Retried(inner, 1).put("a", DATA)


# Writers


def test_a_close_that_took_effect_is_a_success_and_sent_once() -> None:
    inner = Faulty(Memory(), *lost("close", 1), *lost("size", 1, after=False))
    writer = Retried(inner, 1).writer("a")
    leases = [Lease(DATA[:20_000]), Lease(DATA[20_000:])]
    for lease in leases:
        writer.append(lease.buffer, lease.release)
    writer.close()
    writer.close()
    writer.abort()
    assert inner.calls["close"] == 1
    assert [lease.releases for lease in leases] == [1, 1]
    assert torch.equal(inner.get("a"), DATA)


def test_a_close_that_did_not_take_effect_keeps_its_error() -> None:
    inner = Faulty(Memory(), *lost("close", 1, after=False))
    writer = Retried(inner, 3).writer("a")
    writer.append(DATA)
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="close 1 lost"):
            writer.close()
    assert inner.calls["close"] == 1
    assert list(inner.list("")) == []


def test_a_close_that_lost_against_another_says_so() -> None:
    inner = Faulty(Memory(), *lost("close", 1, after=False))
    writer = Retried(inner, 3).writer("a")
    writer.append(DATA)
    inner.put("a", OTHER)
    with pytest.raises(AlreadyExists, match="other bytes"):
        writer.close()


def test_a_close_of_which_nothing_can_be_found_out_keeps_its_error() -> None:
    inner = Faulty(Memory(), *lost("close", 1), Fault("size", 0, AccessDenied("not for you")))
    writer = Retried(inner, 3).writer("a")
    writer.append(DATA)
    with pytest.raises(TierUnavailable, match="close 1 lost") as found:
        writer.close()
    assert found.value.__notes__ == ["and whether it took effect could not be found out: not for you"]


def test_an_append_is_never_repeated() -> None:
    inner = Faulty(Memory(), *lost("append", 2, after=False))
    lease = Lease(DATA)
    writer = Retried(inner, 5).writer("a")
    writer.append(DATA)
    for step in (lambda: writer.append(lease.buffer, lease.release), writer.close):
        with pytest.raises(TierUnavailable, match="append 2 lost"):
            step()
    assert (inner.calls["append"], lease.releases) == (2, 1)
    assert list(inner.list("")) == []


# Waiting


@given(attempt=st.integers(1, 10_000), share=st.floats(0, 1))
def test_the_wait_is_anything_up_to_a_bound_that_doubles(attempt: int, share: float) -> None:
    pauses = retry.CALL_BACKOFF
    bound = min(pauses.longest, pauses.first * 2 ** min(attempt - 1, 60))
    assert 0 <= pauses.pause(attempt) <= bound
    assert pauses.pause(attempt, lambda: share) == pytest.approx(share * bound)
    assert CALL_BACKOFF.first < CALL_BACKOFF.longest


def test_whoever_waits_is_woken_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "CALL_BACKOFF", Backoff(3600.0, 3600.0, 1.0))
    tier, told = Retried(Faulty(Memory(), Fault("put", 0, TierUnavailable("down"))), 5), []

    def put() -> None:
        try:
            tier.put("a", DATA)
        except TierUnavailable as error:
            told.append(str(error))

    thread = threading.Thread(target=put)
    thread.start()
    tier.close()
    thread.join(60)
    assert told == ["down"]
