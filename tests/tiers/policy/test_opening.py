"""Opening a tier as a policy has it, with its wrappers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.checkpointer_worlds import alike, faulty, policy, tensors, tier, wrapped

import tierstate as ts
from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.base import layers
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.policy.policy import open_policy_tier
from tierstate.tiers.posix.directory import Directory, Nvme
from tierstate.tiers.testing import Fault
from tierstate.tiers.wrappers.limit import Limited
from tierstate.tiers.wrappers.measure import Measured
from tierstate.tiers.wrappers.retry import Retried


def kinds(spec: ts.Policy, name: str) -> list[type]:
    return [type(layer) for layer in layers(open_policy_tier(spec.tier(name)))]


def test_a_tier_has_the_wrappers_that_its_policy_asks_for(place: Path) -> None:
    spec = policy(
        {
            "plain": tier("nvme", place),
            "wide": tier("nvme", place, bandwidth="500MiB/s"),
            "rare": tier("nvme", place, operations=10, retries=0),
            "all": tier("nvme", place, bandwidth="500MiB/s", operations=10, retries=3),
        }
    )
    assert kinds(spec, "plain") == [Measured, Nvme, Directory]
    assert kinds(spec, "wide") == kinds(spec, "rare") == [Limited, Measured, Nvme, Directory]
    assert kinds(spec, "all") == [Retried, Limited, Measured, Nvme, Directory]
    full = open_policy_tier(spec.tier("all"))
    assert full.name == "all"
    assert full.traits.bandwidth == 500 << 20
    assert full.traits.notes == ("limited to 500 MiB/s and 10 operations/s",)


def test_a_save_survives_what_fails_for_a_moment(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lost answers of a pack's close and of the record's put, and an open and a read that fail."""
    state, inner = tensors(40_000, 400), Memory()
    with wrapped(inner) as keys:
        spec = policy({"far": {**keys, "retries": 3, "bandwidth": "1GiB/s"}})
        caplog.set_level(logging.INFO, logger="tierstate")
        with ts.Checkpointer(spec, "run") as ckpt:
            down = TierUnavailable("no answer")
            for fault in (Fault("close", 1, down, after=True), Fault("put", 1, down, after=True)):
                faulty(keys).add(fault)
            faulty(keys).add(Fault("writer", 1, down))
            ckpt.save(state, step=1).wait()
            faulty(keys).add(Fault("read", 2, down))
            assert alike(ckpt.load(), state)
            operations = ckpt.stats().tiers["far"].operations
        assert operations["open"].failures == operations["commit"].failures == operations["put"].failures == 1
        assert operations["read"].failures == 1
        assert "retry 1 of 3" in caplog.text


def test_without_retries_the_same_save_fails(place: Path) -> None:
    with wrapped(Memory()) as keys:
        spec = policy({"far": keys})
        ckpt = ts.Checkpointer(spec, "run")
        faulty(keys).add(Fault("writer", 1, TierUnavailable("no answer")))
        save = ckpt.save(tensors(40_000), step=1)
        with pytest.raises(TierUnavailable, match="no answer"):
            save.wait()
        ckpt.close()
