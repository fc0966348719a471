"""``tierstate plan --measure`` with a real object store: what is found, what is told, and what is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.servers.buckets import BUCKET, fresh_prefix
from support.servers.rclone import KEY, SECRET, Rclone


def plan(
    place: Path, server: Rclone, prefix: str, *arguments: str, bucket: str = BUCKET, deadline: str = "20s", **keys: Any
) -> subprocess.CompletedProcess[str]:
    """Plan with three tiers that are measured; ``keys`` are options of the client."""
    tiers = {
        "nvme": {"type": "nvme", "path": str(place / "nvme")},
        "lustre": {"type": "lustre", "path": str(place / "lustre"), "every": 5},
        "s3": {
            "type": "object",
            "url": f"s3://{bucket}/{prefix}",
            "every": 10,
            "options": {**server.options(), **keys},
            "deadline": deadline,
        },
    }
    policy = place / "policy.yaml"
    policy.write_text(yaml.safe_dump({"tiers": tiers}, sort_keys=False))
    job = ("--state", "1GiB", "--step", "10s", "--nodes", "4", "--measure", "--for", "10min")
    command = [sys.executable, "-m", "tierstate", "plan", "-p", str(policy), *job, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def left(server: Rclone, prefix: str) -> list[Path]:
    """Objects below a prefix. A listing would not do: this server goes on naming what was raced for and is deleted."""
    return [path for path in (server.folder / "data" / BUCKET / prefix).rglob("*") if path.is_file()]


def test_a_store_is_measured_and_left_as_it_was(rclone: Rclone, place: Path) -> None:
    prefix = fresh_prefix()
    done = plan(place, rclone, prefix, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    tiers = json.loads(done.stdout)["now"]["tiers"]
    assert [tier["tier"] for tier in tiers] == ["nvme", "lustre", "s3"]
    assert all(tier["versions"] > 0 and 0 < tier["restore"] < 1e4 for tier in tiers)
    assert left(rclone, prefix) == []
    assert not [path for name in ("nvme", "lustre") for path in (place / name).rglob("*") if path.is_file()]


def test_what_was_measured_from_here_is_told(rclone: Rclone, place: Path) -> None:
    """Of a tier that all hosts share, one host alone may get less than all of them."""
    done = plan(place, rclone, fresh_prefix())
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": writes " in line)
    assert "as this host alone gets it" in told["s3"]
    assert "as this host alone gets it" in told["lustre"]
    assert "alone" not in told["nvme"]
    assert float(told["s3"].removeprefix("writes ").split()[0]) > 0


@pytest.mark.parametrize(
    ("keys", "bucket", "said"),
    [
        ({"secret": "another-secret"}, BUCKET, "check the credentials in the environment or in the tier's 'options'"),
        ({}, "nowhere", "there is no such bucket: create it, or correct the tier's 'url'"),
        ({"endpoint_url": "http://127.0.0.1:9"}, BUCKET, "see whether the store can be reached from this host"),
    ],
    ids=["credentials", "bucket", "endpoint"],
)
def test_a_store_that_cannot_be_measured_is_told_once(
    rclone: Rclone, place: Path, keys: dict[str, Any], bucket: str, said: str
) -> None:
    prefix = fresh_prefix()
    done = plan(place, rclone, prefix, "--speed", "s3=1GiB/s", "--json", bucket=bucket, deadline="2s", **keys)
    assert done.returncode == 0, "its speed was given"
    (line,) = done.stderr.splitlines()
    warning = json.loads(line)["warning"]
    assert warning.count("s3 was not measured: ") == 1
    assert said in warning
    assert not [word for word in (KEY, SECRET, "another-secret") if word in done.stdout + done.stderr]
    assert left(rclone, prefix) == []
