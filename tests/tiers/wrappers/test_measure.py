"""The tier around a tier that counts and times."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, tensors

import tierstate as ts
from tierstate.manifest.errors import NotFound, TierUnavailable
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty, random_bytes
from tierstate.tiers.wrappers.limit import Limited
from tierstate.tiers.wrappers.measure import Measured, OperationMeter, operations_of


def test_calls_failures_and_bytes_are_counted() -> None:
    faulty = Faulty(Memory(), Fault("put", 2, TierUnavailable("down")), Fault("close", 1, TierUnavailable("down")))
    tier = Measured(faulty)
    assert tier.operations == {}
    tier.put("a", random_bytes(100))
    with pytest.raises(TierUnavailable):
        tier.put("b", random_bytes(100))
    tier.get("a")
    with pytest.raises(NotFound):
        tier.size("b")
    with pytest.raises(TierUnavailable), tier.writer("c") as writer:
        writer.append(random_bytes(7))
    assert list(tier.list("")) == ["a"]
    tier.delete("a")
    found = {name: (one.calls, one.failures, one.nbytes) for name, one in tier.operations.items()}
    assert found == {
        "put": (2, 1, 100),
        "read": (1, 0, 100),
        "size": (2, 1, 0),
        "open": (1, 0, 0),
        "append": (1, 0, 7),
        "commit": (1, 1, 0),
        "list": (1, 0, 0),
        "delete": (1, 0, 0),
    }
    assert all(0 <= one.median <= one.p99 <= one.longest <= one.seconds for one in tier.operations.values())


@given(seconds=st.lists(st.floats(0, 5e4), min_size=1, max_size=300))
def test_percentiles_are_a_fifth_too_long_at_most(seconds: list[float]) -> None:
    meter = OperationMeter()
    for one in seconds:
        meter.add(one, 1, failed=False)
    found, ordered = meter.stats, sorted(seconds)
    for share, said in ((0.5, found.median), (0.99, found.p99)):
        true = ordered[math.ceil(share * len(ordered)) - 1]
        assert said >= true * (1 - 1e-9)
        assert said <= max(true * 1.2, 1e-6)
    assert found.calls == found.nbytes == len(seconds)
    assert found.longest == ordered[-1]


def test_it_is_found_inside_other_wrappers() -> None:
    tier = Limited(Measured(Memory()), operations=1e9)
    tier.put("a", random_bytes(3))
    assert operations_of(tier)["put"].nbytes == 3
    assert operations_of(Memory()) == {}


def test_a_checkpointer_tells_what_its_tiers_did(place: Path) -> None:
    spec = policy({"memory": {"type": "memory"}, "nvme": {"type": "nvme", "path": str(place / "ckpt")}})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert all(not tier.operations.get("append") for tier in ckpt.stats().tiers.values())
        save = ckpt.save(tensors(40_000, 400), step=1)
        for name in ("memory", "nvme"):
            save.wait(name)
        ckpt.load()
        for name, tier in ckpt.stats().tiers.items():
            assert tier.operations["append"].nbytes > 40_000
            assert tier.operations["commit"].calls == 1
            assert tier.operations["put"].calls == {"memory": 1, "nvme": 2}[name], "the record, and a marker"
        assert ckpt.stats().tiers["memory"].operations["read"].nbytes > 40_000
