"""Two checkouts of tierstate side by side: blocked time, time to durable, restore and import, as ratios.

    python -m benchmarks.checkouts BEFORE AFTER [--rounds 15] [--mib 512] [--root FOLDER]

For changes that must cost nothing. The checkouts take turns, each measurement in a process of its own that uses the
public API alone; which one begins changes from round to round. Medians, and the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
import torch
began = time.perf_counter()
import tierstate as ts
found = {"import": time.perf_counter() - began}
folder, mib = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
rows, norms = mib // 8, 256
state = {f"layer{i}": torch.randn(rows, 1 << 17) for i in range(16)}
state |= {f"norm{i}": torch.randn(1024) for i in range(norms)}
text = f"version: 1\\narena: {{size: {4 * mib}MiB}}\\ndurable: nvme\\ntiers: {{nvme: {{type: nvme, path: {folder}}}}}"
blocked, durable, restored = [], [], []
with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
    for step in range(1, 6):
        for tensor in state.values():
            tensor.add_(1)
        began = time.perf_counter()
        save = ckpt.save(state, step=step)
        blocked.append(time.perf_counter() - began)
        save.wait()
        durable.append(time.perf_counter() - began)
    for step in range(2, 6):
        began = time.perf_counter()
        ckpt.restore(into=state, step=step)
        restored.append(time.perf_counter() - began)
for name, samples in (("blocked", blocked[1:]), ("durable", durable[1:]), ("restore", restored[1:])):
    found[name] = sorted(samples)[len(samples) // 2]
print(json.dumps(found))
"""
FIGURES = ("import", "blocked", "durable", "restore")


def measure(checkout: Path, root: Path, mib: int) -> dict[str, float]:
    """Seconds of each figure, by one process that imports this checkout."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        command = [sys.executable, "-c", CHILD, folder, str(mib)]
        env = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()), help="a folder of the disk")
    args = parser.parse_args()
    checkouts = [args.before.resolve(), args.after.resolve()]
    found: list[list[dict[str, float]]] = [[], []]
    for number in range(args.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append(measure(checkouts[which], args.root, args.mib))
    print("| seconds | before | after | after / before |\n| --- | ---: | ---: | ---: |")
    for figure in FIGURES:
        before, after = ([sample[figure] for sample in samples] for samples in found)
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        print(f"| {figure} | {statistics.median(before):.4f} | {statistics.median(after):.4f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
