"""Jobs killed with SIGKILL that go on on another host, from and to a shared file system alone."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from crash.test_kill import HERE, Job

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 64KiB}}
tiers:
  host: {{type: host, keep: {{last: 1}}}}
  nvme: {{type: lustre, path: {mount}/often, keep: {{last: 3}}}}
  object: {{type: lustre, path: {mount}/seldom, every: 3, codec: auto, keep: {{all: true}}}}
"""
"""The names are those that the job is asked about; both tiers are shared."""


class Moving(Job):
    """A job that is started on either host in turn."""

    def __init__(self, place: Path, mounts: tuple[Path, Path]) -> None:
        super().__init__(place)
        policies = [place / f"host{i}.yaml" for i in range(2)]
        for policy, mount in zip(policies, mounts, strict=True):
            policy.write_text(POLICY.format(mount=mount))
        self._hosts = itertools.cycle(policies)
        self.move()

    def move(self) -> None:
        """The next host."""
        self.policy = next(self._hosts)


@pytest.mark.parametrize("seed", range(2))
def test_a_job_killed_on_one_host_goes_on_on_the_other_bit_for_bit(mounts, place, seed):
    chance, job = random.Random(seed), Moving(place, (mounts.here, mounts.there))
    for _ in range(6):
        ready = chance.random() < 0.8
        job.kill(chance.uniform(0, 1) if ready else chance.uniform(0.8, 3), ready=ready)
        job.move()
        job.check()
    last = max((step for step, _ in job.losses()), default=0) + 5
    output, errors = (process := job.start(last)).communicate(timeout=300)
    assert process.returncode == 0, errors
    job.told(output)
    job.move()
    job.check()
    plain = place / "plain.jsonl"
    subprocess.run([sys.executable, HERE / "job.py", "-", plain, str(last), "--plain"], check=True)
    truth = {step: loss for step, loss in map(json.loads, plain.read_text().splitlines())}
    losses = job.losses()
    assert len(losses) >= last
    assert [(step, loss) for step, loss in losses if truth[step] != loss] == []
