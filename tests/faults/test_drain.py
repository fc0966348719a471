"""The drain at close: a progress bar if there is a terminal, and Ctrl-C ends it cleanly."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from support import forked

import tierstate as ts

pytestmark = pytest.mark.slow

JOB = """
import sys, threading, time
import torch
from support.outcomes import in_function, until
import tierstate as ts
from tierstate.tiers.posix.directory import Nvme

class Slow(Nvme):
    '''A medium of so many bytes a second.'''
    def writer(self, key, size_hint=None):
        time.sleep(float(sys.argv[2]))
        return super().writer(key, size_hint)

ts.register_tier("slow", Slow)
place = sys.argv[1]
spec = ts.Policy.parse(f'''
version: 1
chunk: 64KiB
arena: {{size: 1MiB}}
tiers:
  nvme: {{type: nvme, path: "{place}/nvme"}}
  far: {{type: slow, path: "{place}/far"}}
''')
def tell(main):
    '''Say so when the main thread drains.'''
    until(lambda: in_function(main, "_drain"))
    print("draining", flush=True)

ckpt = ts.Checkpointer(spec, "run")
for step in range(3):
    ckpt.save({"w": torch.full((50_000,), float(step))}, step=step).wait()
threading.Thread(target=tell, args=(threading.get_ident(),), daemon=True).start()
try:
    ckpt.close()
except KeyboardInterrupt as error:
    print("interrupted", *error.__notes__, flush=True)
print("threads", *[t.name for t in threading.enumerate() if t.name.startswith("tierstate")], flush=True)
"""


def job(place: Path, seconds: float, stderr: int) -> subprocess.Popen[str]:
    """A process that drains three saves, each of which takes so many seconds."""
    command = [*forked.command("-c"), JOB, str(place), str(seconds)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def steps(place: Path, name: str) -> list[int]:
    spec = ts.Policy.parse(f"tiers: {{only: {{type: nvme, path: '{place / name}'}}}}")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.verify(deep=True).ok
        return [v.step for v in ckpt.versions()]


def shown(terminal: int) -> str:
    """All that was written to a terminal, to its end."""
    found = b""
    try:
        while data := os.read(terminal, 4096):
            found += data
    except OSError:  # what Linux says when the other end is gone
        pass
    return found.decode(errors="replace")


def test_a_long_drain_shows_what_is_left_on_a_terminal(place: Path) -> None:
    terminal, other = pty.openpty()
    process = job(place, 1.0, other)
    os.close(other)
    text = shown(terminal)
    out, _ = process.communicate(timeout=180)
    os.close(terminal)
    assert process.returncode == 0
    assert "saving to far" in text
    assert "KiB" in text
    assert "saving to nvme" not in text, "nothing is left for it"
    assert out.splitlines()[-1] == "threads"
    assert steps(place, "far") == [0, 1, 2]


def test_ctrl_c_ends_the_drain_cleanly(place: Path) -> None:
    process = job(place, 2.0, subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert any(line.startswith("interrupted closed while still under way") and "to far" in line for line in lines)
    assert lines[-1] == "threads", "all threads have ended before the tiers were closed"
    assert "Traceback" not in err
    assert steps(place, "nvme") == [0, 1, 2]
    assert steps(place, "far") in ([], [0]), "what was begun may have ended, and nothing else was"
    # The next process brings what is owed, and shows nothing where there is no terminal.
    process = job(place, 0.5, subprocess.PIPE)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0
    assert "saving to" not in err
    assert "step 2, which had not arrived at far, is there now" in err
    assert steps(place, "far") == [0, 1, 2] * 2
