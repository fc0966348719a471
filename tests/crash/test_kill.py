"""Jobs killed with SIGKILL at any moment: nothing that was durable is lost, and the losses go on bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import forked
from support.checkpointer_worlds import scratch

import tierstate as ts

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
ENDLESS = 1_000_000

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 64KiB}}
tiers:
  host: {{type: host, keep: {{last: 1}}}}
  nvme: {{type: nvme, path: {place}/nvme, keep: {{last: 3}}}}
  object: {{type: object, url: "file://{place}/object", every: 3, codec: auto, keep: {{all: true}}}}
"""


class Job:
    """A job that is killed again and again in one place.

    Attributes:
        durable: what it said to be durable, by tier.
        reached: the highest step that it logged.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.policy, self.log = place, place / "policy.yaml", place / "loss.jsonl"
        self.policy.write_text(POLICY.format(place=place))
        self.durable: dict[str, set[int]] = {"host": set(), "nvme": set(), "object": set()}

    def start(self, steps: int = ENDLESS) -> subprocess.Popen[str]:
        command = [*forked.command(str(HERE / "job.py")), str(self.policy), str(self.log), str(steps)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill(self, wait: float, *, ready: bool) -> None:
        """Run it, and kill it so many seconds after it was ready, or after it was started."""
        process = self.start()
        assert process.stdout is not None
        first = process.stdout.readline() if ready else ""
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        rest, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        self.told(first + rest)

    def told(self, output: str) -> None:
        """Take note of what the job said; the kill may have torn the last line."""
        for line in output.split("\n")[:-1]:
            word, *rest = line.split()
            if word == "durable":
                self.durable[rest[0]].add(int(rest[1]))

    def check(self) -> None:
        """Every version that is listed is whole, and whatever was said to be durable is there."""
        with ts.Checkpointer(self.policy, "job") as ckpt:
            report = ckpt.verify(deep=True)
            assert report.ok, report
            versions = ckpt.versions()
            for version in versions[-3:]:
                assert ckpt.load(version=version.id)["step"] == version.step
            nvme, stored = ([v.step for v in versions if t in v.tiers] for t in ("nvme", "object"))
            assert self.durable["object"] <= set(stored)
            assert max(self.durable["nvme"], default=0) <= max(nvme, default=0)
            assert nvme == sorted(set(nvme)), "a step is not saved twice, since a resumed run goes on after it"

    def losses(self) -> list[tuple[int, str]]:
        """Step and loss in hexadecimal of each line; a line torn by a kill has no end, and what follows it is lost."""
        found = []
        for line in self.log.read_text().splitlines():
            try:
                step, loss = json.loads(line)
            except ValueError:
                continue
            found.append((step, loss))
        return found


def killed_again_and_again(place: Path, kills: int, seed: int) -> None:
    chance, job = random.Random(seed), Job(place)
    for _ in range(kills):
        # Most kills hit training, some the start: the restore, the sweep of what a dead writer left.
        ready = chance.random() < 0.8
        job.kill(chance.uniform(0, 0.5) if ready else chance.uniform(0.02, 0.5), ready=ready)
        job.check()
    last = max((step for step, _ in job.losses()), default=0) + 5
    process = job.start(last)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    job.told(output)
    job.check()
    plain = place / "plain.jsonl"
    subprocess.run([*forked.command(str(HERE / "job.py")), "-", plain, str(last), "--plain"], check=True)
    truth = {step: loss for step, loss in map(json.loads, plain.read_text().splitlines())}
    losses = job.losses()
    assert len(losses) >= last
    assert [(s, loss) for s, loss in losses if truth[s] != loss] == []
    assert [p for p in place.rglob(".tmp*")] == [], "what dead writers left is removed"


def test_a_job_killed_at_random_moments_goes_on_bit_for_bit() -> None:
    with scratch() as place:
        killed_again_and_again(place, kills=6, seed=20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_a_job_killed_two_hundred_times(seed: int) -> None:
    with scratch() as place:
        killed_again_and_again(place, kills=50, seed=seed)


def train(place: Path, steps: int) -> subprocess.Popen[bytes]:
    """The example's training process; its tiers lie in ``place``."""
    command = [sys.executable, EXAMPLES / "train.py", "--policy", EXAMPLES / "policy.yaml", "--every", "2"]
    command += ["--steps", str(steps), "--log", place / "loss.jsonl"]
    return subprocess.Popen(list(map(str, command)), env={**os.environ, "TIERSTATE_DEMO": str(place)})


def logged(place: Path) -> list[tuple[int, str]]:
    path = place / "loss.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, (line for line in lines if line.endswith("}")))]


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the tests")
def test_the_example_is_killed_and_resumes_bit_for_bit() -> None:
    steps = 8
    with scratch() as plain, scratch() as place:
        process = train(place, steps)
        while len(logged(place)) < 5 and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.Random(5).uniform(0, 0.1))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert train(place, steps).wait() == 0
        assert train(plain, steps).wait() == 0
        truth, found = dict(logged(plain)), logged(place)
        assert list(truth) == list(range(1, steps + 1))
        assert found[-1][0] == steps
        assert all(truth[step] == loss for step, loss in found)
        again = [step for (before, _), (step, _) in itertools.pairwise(found) if step <= before]
        assert len(again) <= 1
        assert all(step > 1 for step in again), "it resumed, and did not start over"
