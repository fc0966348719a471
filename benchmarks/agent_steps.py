"""A loop whose Python is busy, with saves by an agent beside saves in its own process.

python -m benchmarks.agent_steps [--size 64MiB] [--steps 60] [--rounds 3] [--path DIR]

A step is many small kernels, while a thread prepares data in pure Python, which holds the interpreter's lock; all of
the state changes in it. Each loop is a process of its own, the ways in turn. What is told is by how much longer its
steps took, all together, than those of a loop that saves nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import tierstate as ts
from benchmarks.agent import WAYS, policy, spread, state_of
from benchmarks.machine import facts_line
from benchmarks.rounds import HOUSE, say
from benchmarks.tables import table
from tierstate.tiers.units import parse_size

KERNELS, WARM = 400, 10
"""Small kernels of a step, and steps before the clock begins."""


def train(place: Path, way: str, every: int, nbytes: int, codec: str, steps: int) -> float:
    """Seconds of so many steps. ``every``: steps from save to save; 0 for none."""
    torch.set_num_threads(1)
    state, small, over = state_of(nbytes), torch.randn(32, 32), threading.Event()

    def load() -> None:
        while not over.is_set():
            sum(i * i for i in range(20_000))
            time.sleep(0.002)

    loader = threading.Thread(target=load)
    loader.start()
    with ts.Checkpointer(policy(place, way, codec), "run") as ckpt:
        for step in range(1, WARM + steps + 1):
            for _ in range(KERNELS):
                small = torch.tanh(small @ small)
            for tensor in state.values():
                tensor.add_(1)
            if every and step % every == 0:
                ckpt.save(state, step=step)
            if step == WARM:
                start = time.perf_counter()
        seconds = time.perf_counter() - start
        over.set()
    loader.join()
    return seconds


def child(root: Path, way: str, every: int, nbytes: int, codec: str, steps: int) -> float:
    """As `train`, in a process of its own."""
    place = Path(tempfile.mkdtemp(dir=root))
    given = [str(place), way, str(every), str(nbytes), codec, str(steps)]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.agent_steps", "--child", *given],
            cwd=HOUSE, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if way == WAYS[1]:
            subprocess.run([sys.executable, "-m", "tierstate", "agent", "stop", "--wait"], check=True, cwd=HOUSE)
        return float(json.loads(ran.stdout.splitlines()[-1]))
    finally:
        shutil.rmtree(place)


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_steps", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=64 << 20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        place, way, every, nbytes, codec, steps = args.child
        print(json.dumps(train(Path(place), way, int(every), int(nbytes), codec, int(steps))))
        return 0
    root = Path(tempfile.mkdtemp(prefix="tierstate-agent-steps-", dir=args.path))
    print(facts_line(root), "\n")
    kinds = [(every, codec, way) for every, codec in itertools.product((1, 5), ("raw", "small")) for way in WAYS]
    found: dict[tuple[int, str, str], list[float]] = {kind: [] for kind in kinds}
    try:
        for number in range(args.rounds):
            none = child(root, WAYS[0], 0, args.size, "raw", args.steps)
            for every, codec, way in kinds if number % 2 else kinds[::-1]:
                took = child(root, way, every, args.size, codec, args.steps)
                found[every, codec, way].append(100 * (took / none - 1))
                say(f"round {number + 1}: every {every}, {codec}, {way}: {took:.2f} s, without saves {none:.2f} s")
    finally:
        shutil.rmtree(root)
    rows = [
        [f"every {every}", codec, *(spread(found[every, codec, way], 0) for way in WAYS)]
        for every, codec in itertools.product((1, 5), ("raw", "small"))
    ]
    print(f"{args.steps} steps, {args.size >> 20} MiB, medians of {args.rounds} (least–most):\n")
    print(table(f"save | codec | {WAYS[0]}: longer by, % | {WAYS[1]}: longer by, %", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
