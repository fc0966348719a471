"""Peak memory: a save takes the arena's memory and hardly any more, however long the state is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BESIDES = 8 << 20
"""Bytes beside the arena: four buffers of 1 MiB for what is not aligned, and a little for tables and threads."""

JOB = """
import gc, json, sys
import torch
import tierstate as ts

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

place, io, size, arena = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
text = f'''
version: 1
chunk: 4MiB
arena: {{size: {arena}}}
tiers:
  nvme: {{type: nvme, path: "{place}", io: {io}}}
'''
# Imports and the threads' own memory are no part of a save: all of it is there before it is measured.
with ts.Checkpointer(ts.Policy.parse(text.replace(place, place + "/warm")), "run") as ckpt:
    ckpt.save({"w": torch.ones(3 << 20)}, step=0).wait()
part = size // 8
state = {f"w{i}": torch.full((part // 4,), float(i)) for i in range(8)}
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
ckpt = ts.Checkpointer(ts.Policy.parse(text), "run")
for step in range(2):
    for tensor in state.values():
        tensor += 1
    ckpt.save(state, step=step).wait()
peak = status("VmHWM") - before
slabs = ckpt.stats().arena_peak
ckpt.close()
gc.collect()
print(json.dumps([peak, status("VmRSS") - before, slabs]))
"""


def measured(place: Path, io: str, size: int, arena: int) -> tuple[int, int]:
    """Bytes that two saves took at their peak, and what is left of them after close."""
    command = [sys.executable, "-c", JOB, str(place), io, str(size), str(arena)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    peak, left, slabs = json.loads(done.stdout)
    assert slabs <= arena
    print(f"{io}: peak {peak / 2**20:.1f} MiB, left {left / 2**20:.1f} MiB, arena {arena >> 20} MiB")
    return peak, left


def test_a_gibibyte_goes_through_an_eighth_of_it(disk_place: Path) -> None:
    arena = 128 << 20
    peak, left = measured(disk_place, "auto", 1 << 30, arena)
    assert peak <= arena + BESIDES
    assert left <= BESIDES


@pytest.mark.soak
def test_four_gibibytes_go_through_an_eighth_of_them(disk_place: Path, io: str) -> None:
    arena = 512 << 20
    peak, left = measured(disk_place, io, 4 << 30, arena)
    assert peak <= arena + BESIDES
    assert left <= BESIDES


@pytest.fixture
def disk_place(tmp_path: Path) -> Path:
    """A folder on a disk: what lies in memory would count, and pass by no page cache."""
    return tmp_path
