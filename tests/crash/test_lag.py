"""`max_lag`: whenever a job is killed, what a tier has is never further behind the last save than the policy allows."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.checkpointer_worlds import scratch
from support.forked import command

import tierstate as ts

pytestmark = pytest.mark.slow

JOB = Path(__file__).resolve().parent / "lagging_job.py"

STEPS, SECONDS = 3, 0.5

SLOW = {"type": "nvme", "bandwidth": "1MiB/s", "keep": {"last": 2}}
"""A tier that falls behind: a version is 80 KB, and the job makes hundreds a second."""

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "written directly": {"slow": {**SLOW, "max_lag": {"steps": STEPS}}},
    "copied to": {"fast": {"type": "nvme", "keep": {"last": 2}}, "slow": {**SLOW, "max_lag": {"steps": STEPS}}},
    "in time": {"fast": {"type": "nvme", "keep": {"last": 2}}, "slow": {**SLOW, "max_lag": {"seconds": SECONDS}}},
    "the newest only": {
        "fast": {"type": "host", "keep": {"last": 1}},
        "slow": {**SLOW, "on_lag": "skip", "every": 100, "max_lag": {"steps": STEPS}},
    },
    "at once": {"slow": {**SLOW, "max_lag": {"steps": 0}}},
}


def policy_text(place: Path, tiers: dict[str, dict[str, Any]]) -> str:
    made = {n: {**t, **({"path": str(place / n)} if t["type"] == "nvme" else {})} for n, t in tiers.items()}
    return json.dumps({"arena": {"size": "4MiB"}, "chunk": "64KiB", "tiers": made})


def killed(place: Path, policy: Path, wait: float) -> None:
    process = subprocess.Popen([*command(str(JOB)), policy, place / "log"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def killed_again_and_again(place: Path, case: str, kills: int, seed: int) -> None:
    chance, policy, tiers = random.Random(seed), place / "policy.json", CASES[case]
    policy.write_text(policy_text(place, tiers))
    (place / "log").touch()
    alone = ts.Policy.parse(policy_text(place, {"slow": {**SLOW, "bandwidth": "1GiB/s"}}))
    for _ in range(kills):
        killed(place, policy, chance.uniform(0, 0.7))
        lines = (place / "log").read_text().splitlines()
        if not lines:
            continue  # no save has returned yet
        step, called = int(lines[-1].split()[0]), float(lines[-1].split()[1])
        with ts.Checkpointer(alone, "job") as ckpt:
            found = ckpt.load()["step"]
            (newest,) = (v for v in ckpt.versions() if v.step == found)
        if case == "in time":
            assert newest.time >= called - SECONDS
        else:
            assert step - found <= tiers["slow"]["max_lag"]["steps"]


@pytest.mark.parametrize("case", CASES)
def test_a_killed_job_loses_no_more_than_the_policy_allows(case: str) -> None:
    with scratch() as place:
        killed_again_and_again(place, case, kills=3, seed=len(case))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_job_killed_fifty_times_loses_no_more_than_the_policy_allows(case: str) -> None:
    with scratch() as place:
        killed_again_and_again(place, case, kills=50, seed=1)
