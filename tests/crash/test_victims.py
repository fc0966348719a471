"""Savers killed with SIGKILL at any moment, again and again in one place: on directories, and on real object stores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.checkpointer_worlds import opened, scratch, tensors
from support.leaks import objects, temporary
from support.servers.buckets import BUCKET, Server, fresh_prefix
from support.servers.buckets import open_tier as open_bucket

import tierstate as ts
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier

pytestmark = pytest.mark.slow

VICTIMS = Path(__file__).resolve().parent / "victims.py"
LAST = 3_000_000
"""A step that no victim reaches, and that goes to both tiers."""


KINDS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "native": ({}, {"codec": "auto"}),
    "delta": ({"codec": "delta"}, {"codec": "small"}),
    "safetensors": ({"format": "safetensors"}, {"codec": "delta"}),
    "hdf5": ({"codec": "fast"}, {"format": "hdf5"}),
}
"""How packs are written in the folder and in the slower tier: every format and every codec."""


def policy_file(place: Path, slow: Mapping[str, Any], kind: str = "native") -> Path:
    """A policy of a folder, and a slower tier that gets every third save."""
    fast_keys, slow_keys = KINDS[kind]
    tiers = {
        "nvme": {"type": "nvme", "path": str(place / "nvme"), "keep": {"last": 3}, **fast_keys},
        "slow": {**slow, "every": 3, "keep": {"last": 4, "every": 50}, **slow_keys},
    }
    path = place / "policy.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "chunk": "4KiB", "arena": {"size": "128KiB"}, "tiers": tiers}))
    return path


def killed(policy: Path, kills: int, seed: int) -> dict[str, float]:
    """Kill so many savers; every check after a kill has gone well. What was counted."""
    command = [sys.executable, str(VICTIMS), str(policy), str(kills), str(seed)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    counts: dict[str, float] = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] == kills
    assert counts["saves durable on nvme"] >= kills // 2
    return counts


def on_directories(place: Path, kind: str, kills: int, seed: int) -> None:
    policy = policy_file(place, {"type": "object", "url": f"file://{place}/slow"}, kind)
    killed(policy, kills, seed)
    ends_clean(policy, lambda name: opened(ts.Policy.load(policy), name))
    with ts.Checkpointer(policy, "job") as ckpt:
        ckpt.save(tensors(9000), step=LAST).wait("slow")
    assert temporary(place) == [], "the first write removes what dead writers left"


def on_a_store(server: Server, place: Path, kills: int, seed: int) -> None:
    """As on directories; then the folder is lost, and the store alone is enough."""
    prefix = fresh_prefix()
    policy = policy_file(
        place,
        {
            "type": "object",
            "url": f"s3://{BUCKET}/{prefix}",
            "options": server.options(),
        },
    )
    killed(policy, kills, seed)
    ends_clean(
        policy,
        lambda name: open_bucket(server, prefix) if name == "slow" else opened(ts.Policy.load(policy), name),
    )
    with ts.Checkpointer(policy, "job") as ckpt:
        stored = [version.step for version in ckpt.versions() if "slow" in version.tiers]
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(policy, "job") as ckpt:
        assert [version.step for version in ckpt.versions()] == stored
        assert ckpt.verify(deep=True).ok


def ends_clean(policy: Path, handle: Callable[[str], Tier]) -> None:
    """What the dead left behind is never visible, and goes with a prune; so does what they no longer needed."""
    for run in ("side", "job") * 2:
        with ts.Checkpointer(policy, run) as ckpt:
            for _ in range(3):
                report = ckpt.prune(grace=0)
                assert report.ok, report
            assert ckpt.verify(deep=True).ok
    for name in ("nvme", "slow"):
        tier = handle(name)
        named = {
            key
            for log in (Log(tier, "job"), Log(tier, "side"))
            for seq in log.seqs()
            for key in log.read(seq).layout.objects
        }
        assert set(tier.list("packs/")) == named
        assert [key for key in tier.list("leases/") if "-fork-" not in key] == []
        tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_savers_killed_on_directories(kind: str) -> None:
    with scratch() as place:
        on_directories(place, kind, kills=4, seed=1)
        assert objects(place / "nvme")


def test_savers_killed_on_a_store(ceph: Server) -> None:
    with scratch() as place:
        on_a_store(ceph, place, kills=3, seed=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_savers_killed_eight_hundred_times_on_directories(kind: str) -> None:
    with scratch() as place:
        on_directories(place, kind, kills=200, seed=10)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_savers_killed_a_hundred_times_on_each_store(server: Server) -> None:
    with scratch() as place:
        on_a_store(server, place, kills=100, seed=20)
