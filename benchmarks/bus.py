"""What Python leaves of a bus's rate, without a GPU: a device's state is saved to a `host` tier and restored from it.

python -m benchmarks.bus [--size 2GiB] [--rate 55] [--rounds 6]

The fake of CUDA of the tests keeps time here: a copy takes as long as it would at the rate (GB/s), and moves nothing;
kernels take none. So neither the bus nor memory limits anything below the rate. It needs a C++ compiler, and as much
host memory as twice the state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml

import tierstate as ts
from benchmarks.rounds import HOUSE
from tierstate.tiers.memory import kernels
from tierstate.tiers.units import parse_size

sys.path.insert(0, str(HOUSE / "tests"))

from support import fake_cuda

CHUNK = 16 << 20


class AddressKernels:
    """Stands for tierstate's kernels: a digest is the chunk's address, and the number of the save.

    Attributes:
        save: the number of the save, so that each has digests of its own.
    """

    save = 0

    def __init__(self, _device: torch.device) -> None:
        self._addresses = torch.empty(0)

    def launch(self, name: str, _blocks: int, _threads: int, *args: Any) -> None:
        if name == "xxh3_lanes":
            self._addresses = fake_cuda.fake().on_host(args[1]).clone()
        elif name == "xxh3_merge":
            args[3][:, 0], args[3][:, 1] = self._addresses, AddressKernels.save


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds that a call takes, and seconds of processor time of all threads."""
    start, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - busy


def measured(size: int, rate: float, rounds: int, place: str) -> dict[str, list[tuple[float, float]]]:
    """The times of each way, in turns; the first three rounds, which make the slabs, are left out."""
    fake = fake_cuda.install()
    kernels.CompiledKernels, kernels._check = AddressKernels, lambda *_: None  # type: ignore[assignment, misc]
    fake.timing(fake_cuda.EAGER)
    state = {str(i): torch.empty(4 * CHUNK, dtype=torch.uint8, device="cuda") for i in range(size // (4 * CHUNK))}
    fake.pace(rate)
    tiers = {"host": {"type": "host", "keep": {"last": 1}}, "nvme": {"type": "nvme", "path": place}}
    rules = [{"match": "**", "tiers": ["host"]}]
    policy = {"chunk": CHUNK, "arena": {"size": 2 * size}, "rules": rules, "tiers": tiers}
    found: dict[str, list[tuple[float, float]]] = {"save to host: captured": [], "restore in place from host": []}
    with ts.Checkpointer(ts.Policy.parse(yaml.safe_dump(policy)), "run") as ckpt:
        for step in range(rounds + 3):
            AddressKernels.save = step
            saves: list[ts.Save] = []
            found["save to host: captured"].append(timed(lambda: saves.append(ckpt.save(state, step=step))))  # noqa: B023
            saves[0].wait("host")
            found["restore in place from host"].append(timed(lambda: ckpt.restore(into=state)))
    return {way: times[3:] for way, times in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.bus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default="2GiB")
    parser.add_argument("--rate", type=float, default=55, help="GB/s of the bus, each way")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(argv)
    if fake_cuda.VARIABLE not in os.environ:  # the fake has to be there before torch is
        command = [sys.executable, "-m", "benchmarks.bus", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=fake_cuda.environment(), cwd=HOUSE, check=False).returncode
    with tempfile.TemporaryDirectory() as place:
        found = measured(options.size, options.rate, options.rounds, place)
    chunks = options.size // CHUNK
    least = chunks * CHUNK / options.rate / 1e9
    for way, times in found.items():
        wall, busy = (statistics.median(column) for column in zip(*times, strict=True))
        share = f"{least / wall:.2f} of the rate, {busy / chunks * 1e6:.0f} µs of processor time for each chunk"
        print(f"{way}: {wall * 1e3:.1f} ms, {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
