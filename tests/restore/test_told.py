"""When errors are raised (docs/decisions/0004), and what close does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.checkpointer_worlds import engine_threads, faulty, policy, tensors, tier, wrapped
from support.outcomes import until

import tierstate as ts
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault


@pytest.fixture
def failing() -> Iterator[tuple[ts.Policy, dict[str, Any]]]:
    """A policy with one tier, which fails; and its keys."""
    with wrapped(Memory()) as keys:
        yield policy({"bad": keys}), keys


def fails(keys: dict[str, Any]) -> None:
    faulty(keys).add(Fault("put", 0, ts.TierFull("no room at all", tier="bad")))


def settled(save: ts.Save) -> None:
    """Wait without being told of errors."""
    for future in save._save_state.tiers.values():
        future.exception()


def test_a_save_without_a_durable_copy_is_told_at_the_next_save_once(failing):
    spec, keys = failing
    with ts.Checkpointer(spec, "run") as ckpt:
        fails(keys)
        settled(ckpt.save(tensors(100), step=1))
        with pytest.raises(ts.TierFull, match="no room at all") as caught:
            ckpt.save(tensors(100), step=2)
        assert "step 1" in caught.value.__notes__[0]
        assert "no durable copy" in caught.value.__notes__[0]
        faulty(keys).heal()
        ckpt.save(tensors(100), step=3).wait()
        assert [v.step for v in ckpt.versions()] == [3]


def test_close_tells_every_failure_that_nobody_asked_about(failing):
    spec, keys = failing
    ckpt = ts.Checkpointer(spec, "run")
    fails(keys)
    ckpt.save(tensors(100), step=4)
    with pytest.raises(ts.TierFull) as caught:
        ckpt.close()
    assert caught.value.__notes__ == ["step 4 did not arrive at bad: no room at all"]
    ckpt.close()
    with pytest.raises(ts.TierstateError, match="closed"):
        ckpt.save(tensors(100), step=5)
    with pytest.raises(ts.TierstateError, match="closed"):
        ckpt.load()


def test_what_was_told_by_wait_is_not_told_again(failing):
    spec, keys = failing
    with ts.Checkpointer(spec, "run") as ckpt:
        fails(keys)
        with pytest.raises(ts.TierFull):
            ckpt.save(tensors(100), step=1).wait()


def test_the_block_s_own_error_comes_first(failing):
    def block() -> None:
        with ts.Checkpointer(spec, "run") as ckpt:
            fails(keys)
            ckpt.save(tensors(100), step=1)
            raise ZeroDivisionError

    spec, keys = failing
    with pytest.raises(ZeroDivisionError) as caught:
        block()
    assert "saves failed too" in caught.value.__notes__[0]
    assert "no room at all" in caught.value.__notes__[0]


@pytest.mark.slow
def test_close_waits_no_longer_than_it_is_told_and_says_what_is_late(place):
    with wrapped(Memory()) as slow, wrapped(Memory()) as bad:
        spec = policy({"nvme": tier("nvme", place), "slow": slow, "bad": bad})
        ckpt = ts.Checkpointer(spec, "run")
        gate = faulty(slow).shut("writer")
        faulty(bad).add(Fault("put", 0, ts.AccessDenied("not yours", tier="bad")))
        save = ckpt.save(tensors(9000), step=1)
        save.wait()
        until(lambda: "bad" in save.errors())
        with pytest.raises(ts.TierUnavailable, match="step 1 to slow") as caught:
            ckpt.close(timeout=0.5)
        assert not gate.is_set(), "what is late is still under way"
        assert any("step 1 did not arrive at bad: not yours" in note for note in caught.value.__notes__)
        gate.set()
        until(lambda: engine_threads() == [])


def test_close_drains_what_is_under_way(place):
    with wrapped(Memory()) as slow:
        spec = policy({"nvme": tier("nvme", place), "slow": slow})
        ckpt = ts.Checkpointer(spec, "run")
        gate = faulty(slow).shut("close")
        for step in range(3):
            ckpt.save(tensors(9000, seed=step), step=step)
        threading.Timer(0.2, gate.set).start()
        ckpt.close()
        assert Log(faulty(slow).inner, "run").seqs() == [1, 2, 3]
        assert engine_threads() == []
