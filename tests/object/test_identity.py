"""Buckets as tiers: which one is expected, and one bucket behind two names of its endpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import policy
from support.servers.buckets import BUCKET, At, Server, fresh_prefix
from support.servers.ceph import Ceph
from support.servers.proxy import Proxy

import tierstate as ts


def bucket(at: At, prefix: str) -> dict[str, Any]:
    return {"type": "object", "url": f"s3://{BUCKET}/{prefix}", "options": at.options(), "deadline": "5s"}


def spec(place: Path, **tiers: dict[str, Any]) -> ts.Policy:
    local = {"type": "nvme", "path": str(place / "nvme")}
    return policy({"nvme": local, **tiers}, chunk="64KiB", arena={"size": "4MiB"})


def save(policy: ts.Policy, step: int) -> None:
    with ts.Checkpointer(policy, "run") as ckpt:
        made = ckpt.save({"w": torch.full((9000,), float(step))}, step=step)
        for name in made.tiers:
            made.wait(name)


def resumed(policy: ts.Policy) -> int | None:
    state = {"w": torch.zeros(9000)}
    with ts.Checkpointer(policy, "run") as ckpt:
        found = ckpt.resume(into=state)
    assert found is None or bool((state["w"] == found.step).all())
    return None if found is None else found.step


@pytest.mark.usefixtures("patient_records")
def test_another_prefix_is_another_tier(ceph: Ceph, place: Path) -> None:
    prefix = fresh_prefix()
    assert resumed(spec(place, s3=bucket(ceph, prefix))) is None
    save(spec(place, s3=bucket(ceph, prefix)), 1)
    assert resumed(spec(place, s3=bucket(ceph, prefix))) == 1
    with pytest.raises(ts.WrongTier, match=r"s3: tier .* is expected here"):
        resumed(spec(place, s3=bucket(ceph, fresh_prefix())))
    shutil.rmtree(place / "nvme")
    assert resumed(spec(place, s3=bucket(ceph, prefix))) == 1
    with pytest.raises(ts.PolicyError, match="one place"):
        save(spec(place, s3=bucket(ceph, prefix), below=bucket(ceph, f"{prefix}/below")), 2)


def test_a_server_that_is_away_is_no_reason_to_start_afresh(server: Server, place: Path) -> None:
    keys = spec(place, s3=bucket(server, fresh_prefix()))
    save(keys, 1)
    shutil.rmtree(place / "nvme")
    server.kill()
    try:
        with pytest.raises(ts.Unreadable, match="s3 cannot be asked now"):
            resumed(keys)
    finally:
        server.start()
    assert resumed(keys) == 1


def test_one_bucket_behind_two_endpoints_is_found_by_its_marker(ceph: Ceph, proxy: Proxy, place: Path) -> None:
    prefix = fresh_prefix()
    save(spec(place, s3=bucket(ceph, prefix)), 1)
    both = spec(place, s3=bucket(ceph, prefix), other=bucket(proxy, prefix))
    with ts.Checkpointer(both, "run") as ckpt:
        made = ckpt.save({"w": torch.full((9000,), 2.0)}, step=2)
        made.wait("nvme")
        for name in ("s3", "other"):
            with pytest.raises(ts.PolicyError, match="same marker"):
                made.wait(name)
    shutil.rmtree(place / "nvme")
    assert resumed(spec(place, s3=bucket(ceph, prefix))) == 1
