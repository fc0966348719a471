"""Jobs that begin at once in an empty tier, in a store that does not create exclusively: they agree on what is made
once for all, the keys of an encrypted tier and the marker of a tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy
from support.outcomes import Background
from support.servers.buckets import BUCKET, fresh_prefix, open_tier
from support.servers.faults import Fault
from support.servers.proxy import Proxy
from support.servers.rclone import Rclone

import tierstate as ts
from tierstate.tiers.keys import SecretKey
from tierstate.tiers.testing import random_bytes
from tierstate.tiers.wrappers.encrypt import Encrypted

KEYS = [SecretKey(bytes(range(32)))]


@pytest.fixture
def slow(rclone: Rclone) -> Iterator[Proxy]:
    """The server, in which each has looked whether a name is free before the object of the other one arrives."""
    with Proxy(rclone) as proxy:
        yield proxy


def test_ranks_agree_on_the_keys_of_an_encrypted_tier(slow: Proxy) -> None:
    prefix, start = fresh_prefix(), threading.Barrier(2)
    tiers = [open_tier(slow, prefix) for _ in range(2)]
    for rank, tier in enumerate(tiers):
        tier.put(f"ready-{rank}", random_bytes(1, 0))  # the probe of the store is over
    assert tiers[0].traits.conditional_create is False
    slow.add(Fault("latency", "PUT", "keys/000001.0", count=None, seconds=0.5))

    def begin(rank: int) -> None:
        start.wait()
        Encrypted(tiers[rank], KEYS).put(f"object-{rank}", random_bytes(1000, rank))

    racers = [Background(lambda rank=rank: begin(rank)) for rank in range(2)]  # type: ignore[misc]
    assert [racer.outcome() for racer in racers] == [None, None]
    assert len([one for one in slow.seen if one.request.method == "PUT" and "keys/000001.0" in one.request.path]) == 2
    with closing(Encrypted(open_tier(slow, prefix), KEYS)) as tier:
        for rank in range(2):
            assert tier.get(f"object-{rank}").equal(random_bytes(1000, rank))
    for inner in tiers:
        inner.close()


def spec(at: Proxy, prefix: str) -> ts.Policy:
    tier = {"type": "object", "url": f"s3://{BUCKET}/{prefix}", "options": at.options()}
    return policy({"s3": tier}, chunk="64KiB", arena={"size": "4MiB"})


@pytest.mark.timeout(300)
def test_jobs_agree_on_the_marker_of_a_tier(slow: Proxy, place: Path) -> None:
    prefix, names = fresh_prefix(), ("first", "second")
    slow.add(Fault("latency", "PUT", "tier.json", count=None, seconds=1.0))

    def job(name: str, steps: Sequence[int]) -> None:
        with ts.Checkpointer(spec(slow, prefix), name) as ckpt:
            state = {"w": torch.zeros(9000)}
            found = ckpt.resume(into=state)
            assert (found.step if found else 0) == steps[0] - 1
            for step in steps:
                ckpt.save({"w": torch.full((9000,), float(step))}, step=step).wait()

    for steps in ([1], [2]):
        jobs = [Background(lambda name=name, steps=steps: job(name, steps)) for name in names]  # type: ignore[misc]
        assert [one.outcome() for one in jobs] == [None, None]
