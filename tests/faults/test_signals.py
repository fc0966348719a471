"""Ctrl-C and SIGTERM while saves run: the process ends as it should, soon, and what was committed is whole."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import forked
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

begun, signalled, sync = threading.Event(), threading.Event(), BufferedFile.sync

def slow_sync(file):
    begun.set()
    signalled.wait(60)
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
        try:
            save = ckpt.save({"w": torch.ones(3 << 18)}, step=2)
            if moment == "wait":
                save.wait()
            while moment == "between":
                time.sleep(0.01)
        finally:
            signalled.set()
finally:
    print("closed", [t.name for t in threading.enumerate() if t.name.startswith("tierstate")], flush=True)
"""


def signalled(place: Path, io: str, moment: str, number: int, graceful: str) -> tuple[int, str, str]:
    """Exit status and output of a process that got a signal in the middle of its second save."""
    command = [*forked.command("-c"), JOB, TEXT.format(place=place, io=io), moment, graceful]
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        command, cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        first = job.stdout.readline()
        job.send_signal(number)
        try:
            out, errors = job.communicate(timeout=180)
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


CALLS = [
    "first save",
    "save",
    "wait",
    "restore",
    "load",
    "resume",
    "versions",
    "verify",
    "prune",
    "tag",
    "stats",
    "close",
]
HANDLERS = ["calls", "leaves", "raises", "preempts"]


def interrupted(hows: Sequence[str], outers: Sequence[str], share: float, place: Path) -> None:
    command = [sys.executable, "-m", "support.reentry", ",".join(hows), str(place), str(share), "1", *outers]
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(command, cwd=tests, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr
    told = ended.stdout.splitlines()
    assert {line.split(" at ")[0] for line in told} == {f"{how} {outer}" for how in hows for outer in outers}
    assert sum(not line.endswith(": never") for line in told) > len(told) // 2


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.soak) for first in (1, 2, 3))])
def test_a_handler_that_uses_the_checkpointer_or_raises(first: int, place: Path) -> None:
    """At moments all over the interrupted calls: it works or gets an error; all goes on; what was saved is whole.

    All handlers of one call are in one process, which finds the call's moments once.
    """
    interrupted(HANDLERS, CALLS[first::4], 0.002, place)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("outer", CALLS)
@pytest.mark.parametrize("how", HANDLERS)
def test_a_handler_at_every_moment(how: str, outer: str, place: Path) -> None:
    interrupted([how], [outer], 1, place)


def test_no_lock_is_entered_in_python() -> None:
    """An interrupt as `Condition.__enter__` ends or `__exit__` begins leaves it locked; locks are entered in C."""
    root, found = Path(ts.__file__).parent, []
    rooms = [root / room for room in (".", "tiers", "providers", "manifest")]
    for path in [path for room in rooms for path in room.resolve().rglob("*.py") if "testing" not in path.parts]:
        text = path.read_text()
        conditions = re.findall(r"(\w+) = threading\.Condition\(", text)
        found += [f"{path}: with {name}" for name in conditions if re.search(rf"with self\.{name}\b", text)]
        found += [f"{path}: {made}" for made in re.findall(r"threading\.Condition\(\)", text)]
    assert found == []
