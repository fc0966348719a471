"""Ctrl-C and SIGTERM while saves run: the process ends as it should, soon, and what was committed is whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.leaks import temporary

import tierstate as ts

pytestmark = pytest.mark.slow

TEXT = """
version: 1
chunk: 1MiB
arena: {{size: 8MiB}}
tiers:
  nvme: {{type: nvme, path: "{place}", io: {io}}}
"""

JOB = """
import signal, sys, threading, time
import torch
import tierstate as ts
from support.slow_values import Fill
from tierstate.tiers.posix.files import BufferedFile

text, moment, graceful = sys.argv[1:]
if graceful == "exit":
    def handler(number, frame):
        raise SystemExit(143)
    signal.signal(signal.SIGTERM, handler)

begun, sync = threading.Event(), BufferedFile.sync

def slow_sync(file):
    begun.set()
    time.sleep(0.5)
    sync(file)

def slow_fill(out):
    begun.set()
    time.sleep(0.02)
    out.zero_()

def tell():
    begun.wait()
    print("now", flush=True)

threading.Thread(target=tell, daemon=True).start()
try:
    with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
        ckpt.save({"w": torch.arange(1 << 19)}, step=1).wait()
        if moment == "save":
            ckpt.save({"slow": Fill(300 << 20, slow_fill)}, step=2)
        BufferedFile.sync = slow_sync
        save = ckpt.save({"w": torch.ones(3 << 18)}, step=2)
        if moment == "wait":
            save.wait()
        while moment == "between":
            time.sleep(0.01)
finally:
    print("closed", [t.name for t in threading.enumerate() if t.name.startswith("tierstate")], flush=True)
"""


def signalled(place: Path, io: str, moment: str, number: int, graceful: str) -> tuple[int, str, str]:
    """Exit status and output of a process that got a signal in the middle of its second save."""
    command = [sys.executable, "-c", JOB, TEXT.format(place=place, io=io), moment, graceful]
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        command, cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        first = job.stdout.readline()
        job.send_signal(number)
        try:
            out, errors = job.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
        assert first == "now\n", errors
        return job.returncode, out, errors


def restores(place: Path, io: str, moment: str) -> None:
    """The next process has the last version that was committed."""
    with ts.Checkpointer(ts.Policy.parse(TEXT.format(place=place, io=io)), "run") as ckpt:
        steps = [v.step for v in ckpt.versions()]
        assert steps in ([[1]] if moment == "save" else [[1], [1, 2]])
        right = torch.arange(1 << 19) if steps[-1] == 1 else torch.ones(3 << 18)
        assert torch.equal(ckpt.load()["w"], right)
        assert torch.equal(ckpt.load(step=1)["w"], torch.arange(1 << 19))
        assert ckpt.verify(deep=True).ok
        ckpt.save({"w": torch.zeros(5)}, step=3).wait()
    assert temporary(place) == []


@pytest.mark.parametrize("moment", ["save", "wait", "between"])
def test_ctrl_c(place: Path, moment: str) -> None:
    status, out, errors = signalled(place, "auto", moment, signal.SIGINT, "")
    assert (status, out) == (-signal.SIGINT, "closed []\n"), errors
    assert "KeyboardInterrupt" in errors
    assert "Fatal" not in errors
    assert temporary(place) == []
    restores(place, "auto", moment)


@pytest.mark.parametrize("moment", ["save", "wait"])
def test_a_handler_that_exits(place: Path, moment: str) -> None:
    status, out, errors = signalled(place, "auto", moment, signal.SIGTERM, "exit")
    assert (status, out) == (143, "closed []\n"), errors
    assert "Traceback" not in errors
    assert temporary(place) == []
    restores(place, "auto", moment)


def test_sigterm_itself(place: Path, io: str) -> None:
    moment = "save" if io == "uring" else "wait"
    status, out, errors = signalled(place, io, moment, signal.SIGTERM, "")
    assert (status, out, errors) == (-signal.SIGTERM, "", "")
    restores(place, io, moment)


CALLS = ["save", "wait", "restore", "close"]


def reentered(outer: str, inner: str, leaves: str, place: Path, count: int) -> None:
    dice = random.Random(f"{outer} {inner} {leaves}")
    steps = [*map(str, sorted(dice.sample(range(1000), count)))]
    command = [sys.executable, "-m", "support.reentry", outer, inner, leaves, str(place / leaves), *steps]
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=100 + 20 * count)
    assert ended.returncode == 0, ended.stderr
    outcomes = ended.stdout.split()
    assert len(outcomes) == count
    assert {*outcomes} <= {"done", "never", "Reentered", "TierstateError"}, ended.stdout


@pytest.mark.parametrize("inner", CALLS)
@pytest.mark.parametrize("outer", CALLS)
def test_a_handler_that_uses_the_checkpointer_works_or_gets_an_error(outer: str, inner: str, place: Path) -> None:
    """At moments all over the interrupted call: it never hangs, and a later process restores what was saved."""
    leaves = "leaves" if (CALLS.index(outer) + CALLS.index(inner)) % 2 else "catches"
    reentered(outer, inner, leaves, place, 2)


@pytest.mark.soak
@pytest.mark.parametrize("leaves", ["catches", "leaves"])
@pytest.mark.parametrize("inner", CALLS)
@pytest.mark.parametrize("outer", CALLS)
def test_a_handler_at_many_moments(outer: str, inner: str, leaves: str, place: Path) -> None:
    reentered(outer, inner, leaves, place, 100)
