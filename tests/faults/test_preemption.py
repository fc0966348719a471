"""Signals that announce the end: what `save` was called for is committed within the grace, near tiers first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import forked, preempted_job
from support.leaks import temporary
from support.outcomes import until
from support.preempted_job import policy, state

import tierstate as ts

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


class Job:
    """A job that got a signal when it said ``now``, in the middle of a save.

    Attributes:
        status, said, errors: its exit status, the lines that it printed, and its log.
        seconds: from the signal to its end.
    """

    def __init__(
        self, place: Path, kind: str, number: int = signal.SIGTERM, kill_when: Callable[[], bool] | None = None
    ) -> None:
        command = [*forked.command(preempted_job.__file__), str(place), kind]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=TESTS, stdout=pipe, stderr=pipe, text=True) as job:
            assert job.stdout is not None
            first = job.stdout.readline()
            job.send_signal(number)
            start = time.monotonic()
            try:
                if kill_when is not None:
                    until(kill_when, pause=0.2)
                    job.kill()
                out, self.errors = job.communicate(timeout=180)
            except subprocess.TimeoutExpired:
                job.kill()
                raise
        self.seconds = time.monotonic() - start
        assert first == "now\n", self.errors
        self.status, self.said = job.returncode, out.splitlines()


def steps(place: Path, tier: str) -> list[int]:
    """What a tier alone has, each checked bit for bit."""
    text = f'{{type: nvme, path: "{place}/nvme"}}' if tier == "nvme" else f'{{type: object, url: "file://{place}/far"}}'
    with ts.Checkpointer(ts.Policy.parse(f"version: 1\ntiers:\n  {tier}: {text}\n"), "run") as ckpt:
        found = [version.step for version in ckpt.versions()]
        for step in found:
            loaded = ckpt.load(step=step, only=["w", "step"])
            assert torch.equal(loaded["w"], state(step)["w"])
            assert loaded["step"] == step
    return found


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("plain", -signal.SIGTERM, ["saved 1"]),
        ("plain-handler", 0, ["saved 1", "handled", "closed"]),
        ("plain-ignore", 0, ["saved 1", "closed"]),
        ("asks", 0, ["saved 1", "saved 2", "closed"]),
        ("asks-handler", 0, ["saved 1", "saved 2", "handled", "closed"]),
    ],
)
def test_a_save_under_way_is_finished_and_then_the_process_ends(
    place: Path, kind: str, status: int, said: list[str]
) -> None:
    """Also with a signal in the middle of `save`; the previous handler is called once, after the commits."""
    job = Job(place, kind)
    assert (job.status, job.said) == (status, said), job.errors
    assert "SIGTERM: 200 s for what is under way" in job.errors
    last = int(said[1].removeprefix("saved ")) if kind.startswith("asks") else 1
    assert steps(place, "nvme") == steps(place, "far") == [*range(last + 1)]
    assert temporary(place) == []


def test_a_save_of_which_nothing_was_captured_yet_is_finished_too(place: Path) -> None:
    job = Job(place, "planned")
    assert job.status == -signal.SIGTERM, job.errors
    assert steps(place, "nvme") == [0, 1]


def test_the_newest_version_goes_to_the_nearest_persistent_tier_even_if_it_is_not_due(place: Path) -> None:
    """It was in host memory only."""
    job = Job(place, "rare", signal.SIGUSR1)
    assert job.status == -signal.SIGUSR1, job.errors
    assert steps(place, "nvme") == [0, 1]
    assert steps(place, "far") == [0]


def test_a_tier_that_hangs_costs_the_grace_and_no_more(place: Path) -> None:
    """What it lacks is written to the log, and the next process brings it."""
    job = Job(place, "hung")
    assert job.status == -signal.SIGTERM, job.errors
    assert "a faster tier has it, from which the next process that saves this run copies it" in job.errors
    assert steps(place, "nvme") == [0, 1]
    with ts.Checkpointer(policy(place), "run") as ckpt:
        ckpt.save(state(2), step=2)
    assert steps(place, "far") == [0, 1, 2]


def test_killed_at_the_end_of_the_grace(place: Path) -> None:
    """SIGKILL comes while a tier hangs: what was committed before is there."""
    job = Job(place, "hung-long", kill_when=lambda: steps(place, "nvme") == [0, 1])
    assert job.status == -signal.SIGKILL
    assert steps(place, "nvme") == [0, 1]


CHILD = """
import os, signal, sys, time
import torch
import tierstate as ts
from support.preempted_job import policy, state
from pathlib import Path

with ts.Checkpointer(policy(Path(sys.argv[1])), "run") as ckpt:
    ckpt.save(state(0), step=0).wait("nvme")
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(5)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), ckpt.preempted)
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_end_by_signals_as_before(place: Path) -> None:
    """As workers of a data loader do: nothing of theirs is under way."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(place)], cwd=TESTS, capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGTERM), "False"], done.stderr


def test_handlers_are_given_back(place: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with ts.Checkpointer(policy(place), "run") as first:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        with ts.Checkpointer(policy(place), "other", preemption={"signals": ["USR2"], "grace": "1s"}) as other:
            assert not first.preempted
            os.kill(os.getpid(), signal.SIGUSR2)
            assert other.preempted
            assert not first.preempted
            other.save(state(1), step=1)
        with ts.Checkpointer(policy(place), "third", preemption=False) as third:
            assert not third.preempted
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert steps(place, "nvme") == []


def test_a_checkpointer_that_could_not_be_made_leaves_signals_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its limit of threads: a handler that is left would have SIGTERM do nothing from then on."""
    before, start = signal.getsignal(signal.SIGTERM), threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == "tierstate-preemption":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ts.Checkpointer(policy(place), "run")
    assert signal.getsignal(signal.SIGTERM) == before
