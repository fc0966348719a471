"""Rough figures of a save: time blocked, time to durable, bytes copied; and the time of the import.

    python -m benchmarks [--size 1GiB] [--runs 5] [--path DIR]

Peers run in their default configuration, interleaved with ours in one process tree; fsync is counted; medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierstate as ts
from tierstate.providers.tree import flatten
from tierstate.tiers.units import parse_size

from .state import gpt_like, tensor_bytes

Times = dict[str, list[float]]


def main() -> None:
    """Run, and print Markdown."""
    args = arguments()
    state = gpt_like(parse_size(args.size))
    nbytes = tensor_bytes(state)
    print(f"state: {nbytes / 2**30:.2f} GiB in {len(flatten(state).nodes)} leaves; torch {torch.__version__}, ", end="")
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads; {args.runs} interleaved runs, medians\n")
    root = Path(tempfile.mkdtemp(prefix="tierstate-bench-", dir=args.path))
    try:
        times, copied = save_times(state, root, args.runs)
    finally:
        shutil.rmtree(root)
    memcpy = statistics.median(times["one memcpy of the state"])
    torch_save = statistics.median(times["torch.save + fsync"])
    print("| what | seconds | GB/s | / memcpy | torch.save / this |\n| --- | --- | --- | --- | --- |")
    for name, found in times.items():
        middle = statistics.median(found)
        ratios = f"{middle / memcpy:.2f} | {torch_save / middle:.2f}"
        print(f"| {name} | {middle:.3f} | {nbytes / middle / 1e9:.2f} | {ratios} |")
    print("\nbytes moved per byte of state by one save:", copied, sep="\n")
    print("\n| import | seconds (median of 7, each in a new process) |\n| --- | --- |")
    for what in ("torch", "tierstate"):
        print(f"| `import {what}` | {statistics.median(import_times(what)):.2f} |")


def save_times(state: Any, root: Path, runs: int) -> tuple[Times, str]:
    """Seconds of each way to save, the ways taking turns."""
    copies = [torch.empty_like(t) for t in tensors(state)]
    times: Times = {}
    moved: dict[str, str] = {}
    for run in range(runs + 1):
        found: dict[str, float] = {"one memcpy of the state": timed(lambda: copy_all(state, copies))}
        found["torch.save + fsync"] = timed(lambda: torch_save(state, root / "peer.pt"))
        for io in ("auto", "threads", "buffered"):
            blocked, durable, moved[io] = tierstate_save(state, root / "ours", io)
            found[f"tierstate, io: {io}: save() blocks"], found[f"tierstate, io: {io}: durable on nvme"] = (
                blocked,
                durable,
            )
            shutil.rmtree(root / "ours")
        if run:  # the first round only warms up
            for name, seconds in found.items():
                times.setdefault(name, []).append(seconds)
    return times, "\n".join(f"* io: {io}: {text}" for io, text in moved.items())


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes, on a disk that has nothing left to write from before."""
    os.sync()
    start = time.monotonic()
    work()
    return time.monotonic() - start


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [t for v in values for t in tensors(v)]


def copy_all(state: Any, copies: list[torch.Tensor]) -> None:
    """What capturing would cost at the least."""
    for source, target in zip(tensors(state), copies, strict=True):
        target.copy_(source)


def torch_save(state: Any, path: Path) -> None:
    """The peer, with what makes its file durable."""
    torch.save(state, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def tierstate_save(state: Any, root: Path, io: str) -> tuple[float, float, str]:
    """Seconds blocked, seconds to durable, and the bytes moved, of a job's second save, with every byte changed."""
    policy = ts.Policy.parse(
        f"version: 1\narena: {{size: 2GiB}}\ntiers:\n"
        f"  nvme: {{type: nvme, path: {root}, keep: {{last: 1}}, io: {io}}}\n"
    )
    with ts.Checkpointer(policy, run="bench") as ckpt:
        ckpt.save(state, step=0).wait()
        change_all(state)
        os.sync()
        written, passed = storage_written(), characters_written()
        start = time.monotonic()
        save = ckpt.save(state, step=1)
        blocked = time.monotonic() - start
        save.wait()
        durable = time.monotonic() - start
        os.sync()
        written, passed = storage_written() - written, characters_written() - passed
        captured = ckpt.stats().tiers["nvme"].raw / ckpt.stats().saves
    nbytes = tensor_bytes(state)
    cached = passed if io == "buffered" else 0  # direct writes pass the page cache by
    text = f"{captured / nbytes:.3f} copied into slabs, {cached / nbytes:.3f} copied into the page cache, "
    return blocked, durable, text + f"{written / nbytes:.3f} written to the disk"


def change_all(state: Any) -> None:
    """Change every chunk, so that nothing of it can be reused."""
    for tensor in tensors(state):
        tensor.reshape(-1).view(torch.uint8).bitwise_xor_(1)


def characters_written() -> int:
    """Bytes this process has passed to write calls so far; io_uring's are not counted."""
    return _io("wchar")


def storage_written() -> int:
    """Bytes this process has caused to be written to storage so far."""
    return _io("write_bytes")


def _io(name: str) -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def import_times(what: str) -> list[float]:
    """Seconds of whole processes that only import it, less those of one that imports nothing."""

    def run(code: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    return [run(f"import {what}") - run("pass") for _ in range(7)]


def arguments() -> argparse.Namespace:
    """What was given on the command line."""
    parser = argparse.ArgumentParser(description="rough figures of a save, beside torch.save")
    parser.add_argument("--size", default="1GiB", help="bytes of the state")
    parser.add_argument("--runs", type=int, default=5, help="counted rounds")
    parser.add_argument("--path", default=None, help="folder on the disk to measure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
