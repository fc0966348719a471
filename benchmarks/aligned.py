"""Cold restores in place into torch's own memory, and into memory that a drive can read into (`ts.aligned_like`).

python -m benchmarks.aligned [--size 4GiB] [--rounds 5] [--path DIR]

Each restore is made by a process of its own, both in turn; the memory was touched before. CPU is of the whole process,
kernel included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import tierstate as ts
from benchmarks.files import make_cold
from benchmarks.machine import facts_line
from benchmarks.rounds import HOUSE, say
from benchmarks.tables import table
from tierstate.tiers.posix.direct import direct_alignment
from tierstate.tiers.units import parse_size

TENSOR = 16 << 20
WAYS = ("torch's memory", "aligned_like")


def policy(place: Path) -> ts.Policy:
    """One directory."""
    return ts.Policy.parse(f"version: 1\ntiers: {{nvme: {{type: nvme, path: '{place}'}}}}\n")


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of random bits."""
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(TENSOR // 4, generator=generator) for i in range(max(1, nbytes // TENSOR))}


def restore(place: Path, way: str, nbytes: int) -> dict[str, float]:
    """In place, into memory that was touched."""
    state = {f"w{i}": torch.ones(TENSOR // 4) for i in range(max(1, nbytes // TENSOR))}
    if way == WAYS[1]:
        state = ts.aligned_like(state)
        for tensor in state.values():
            tensor.fill_(1)
    with ts.Checkpointer(policy(place), "run") as ckpt:
        before, began = os.times(), time.perf_counter()
        ckpt.restore(into=state)
        seconds, after = time.perf_counter() - began, os.times()
    right = state_of(nbytes)
    if not all(torch.equal(state[name], right[name]) for name in right):
        raise ValueError("another state came back than was saved")
    return {"seconds": seconds, "cpu": after.user + after.system - before.user - before.system}


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aligned", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=4 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(restore(Path(args.child[0]), args.child[1], args.size)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstate-aligned-", dir=args.path) as folder:
        place = Path(folder)
        with ts.Checkpointer(policy(place), "run") as ckpt:
            ckpt.save(state_of(args.size), step=1).wait()
        descriptor = os.open(next(p for p in place.rglob("packs/**/*") if p.is_file()), os.O_RDONLY)
        print(f"{facts_line(place)}; direct I/O: {direct_alignment(descriptor)}\n")
        os.close(descriptor)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(args.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                make_cold(place)
                command = [sys.executable, "-m", "benchmarks.aligned", "--size", str(args.size)]
                ran = subprocess.run(
                    [*command, "--child", folder, way], cwd=HOUSE, check=True, stdout=subprocess.PIPE, text=True
                )
                found[way].append(json.loads(ran.stdout.splitlines()[-1]))
                say(f"{way}: {found[way][-1]}")
    print(
        table(
            "memory | seconds | CPU, s", [[way, *(spread(found[way], w) for w in ("seconds", "cpu"))] for way in WAYS]
        )
    )
    return 0


def spread(found: list[dict[str, float]], what: str) -> str:
    """Median, least and most."""
    values = [one[what] for one in found]
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
