"""What Python leaves of a bus's rate, and a save of a training's Python, without a GPU: a device's state is saved to a
`host` tier and restored from it.

python -m benchmarks.bus [--size 2GiB] [--rate 55] [--rounds 6] [--chunk 16MiB]

The fake of CUDA of the tests keeps time here: a copy takes as long as it would at the rate (GB/s), and moves nothing;
kernels take none. So neither the bus nor memory limits anything below the rate. It needs a C++ compiler, and as much
host memory as twice the state.

Beside a lazy save runs a step that uses the interpreter without a pause: small layers one after the other, whose
operators let it go for a moment, as those do that queue kernels. A training that is ahead of its device loses less.
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
from typing import Any, NamedTuple

import torch
import yaml

import tierstate as ts
from benchmarks.rounds import HOUSE
from tierstate.tiers.memory import kernels
from tierstate.tiers.units import parse_size

sys.path.insert(0, str(HOUSE / "tests"))

from support import fake_cuda

TENSOR = 64 << 20
"""Bytes of each tensor."""


LAYER = 10e-6
"""Seconds that one of the small layers takes, about."""


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


class Found(NamedTuple):
    """What was measured, in turns.

    Attributes:
        ways: seconds of each way, and seconds of processor time of all threads.
        steps: seconds of a step alone, of the call of a lazy save, and of a step beside that save.
    """

    ways: dict[str, list[tuple[float, float]]]
    steps: list[tuple[float, float, float]]


def step_of(optimizer: torch.optim.Optimizer, layers: int) -> None:
    """Small layers in the host's memory, then the optimizer's step, which waits for the save."""
    layer, values = torch.nn.Linear(8, 8), torch.zeros(1, 8)
    with torch.no_grad():
        for _ in range(layers):
            layer(values).add_(1).mul_(0.5)
    optimizer.step()


def measured(size: int, rate: float, rounds: int, place: str, layers: int, chunk: int) -> Found:
    """The times of each way, in turns; the first three rounds, which make the slabs, are left out."""
    fake = fake_cuda.install()
    kernels.CompiledKernels, kernels._check = AddressKernels, lambda *_: None  # type: ignore[assignment, misc]
    fake.timing(fake_cuda.EAGER)
    state = {str(i): torch.empty(TENSOR, dtype=torch.uint8, device="cuda") for i in range(size // TENSOR)}
    fake.pace(rate)
    tiers = {"host": {"type": "host", "keep": {"last": 1}}, "nvme": {"type": "nvme", "path": place}}
    rules = [{"match": "**", "tiers": ["host"]}]
    policy = {"chunk": chunk, "arena": {"size": 2 * size}, "rules": rules, "tiers": tiers}
    found: dict[str, list[tuple[float, float]]] = {"save to host: captured": [], "restore in place from host": []}
    steps: list[tuple[float, float, float]] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(one.view(torch.float32)) for one in state.values()], lr=0.1)
    with ts.Checkpointer(ts.Policy.parse(yaml.safe_dump(policy)), "run") as ckpt:
        for step in range(rounds + 3):
            AddressKernels.save = step
            saves: list[ts.Save] = []
            found["save to host: captured"].append(timed(lambda: saves.append(ckpt.save(state, step=step))))  # noqa: B023
            saves[0].wait("host")
            found["restore in place from host"].append(timed(lambda: ckpt.restore(into=state)))
        ckpt.guard(optimizer)
        for step in range(rounds + 3, 2 * rounds + 3):
            AddressKernels.save = step
            alone, _ = timed(lambda: step_of(optimizer, layers))
            call, _ = timed(lambda: saves.append(ckpt.save(state, step=step)))  # noqa: B023
            beside, _ = timed(lambda: step_of(optimizer, layers))
            saves[-1].wait("host")
            steps.append((alone, call, beside))
    return Found({way: times[3:] for way, times in found.items()}, steps)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.bus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default="2GiB")
    parser.add_argument("--rate", type=float, default=55, help="GB/s of the bus, each way")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--chunk", type=parse_size, default="16MiB", help="the policy's; a divisor of 64MiB")
    options = parser.parse_args(argv)
    if fake_cuda.VARIABLE not in os.environ:  # the fake has to be there before torch is
        command = [sys.executable, "-m", "benchmarks.bus", *(sys.argv[1:] if argv is None else argv)]
        return subprocess.run(command, env=fake_cuda.environment(), cwd=HOUSE, check=False).returncode
    with tempfile.TemporaryDirectory() as place:
        # As many as take several times as long as the bus does: the save ends within the step.
        layers = int(4 * options.size / options.rate / 1e9 / LAYER)
        found = measured(options.size, options.rate, options.rounds, place, layers, options.chunk)
    chunks = options.size // options.chunk
    least = options.size / options.rate / 1e9
    for way, times in found.ways.items():
        wall, busy = (statistics.median(column) for column in zip(*times, strict=True))
        share = f"{least / wall:.2f} of the rate, {busy / chunks * 1e6:.0f} µs of processor time for each chunk"
        print(f"{way}: {wall * 1e3:.1f} ms, {share}")
    alone, call = (statistics.median(column) for column in list(zip(*found.steps, strict=True))[:2])
    stall = statistics.median(beside - alone for alone, _, beside in found.steps)
    share = f"{stall * 1e3:.1f} ms more, {stall / chunks * 1e6:.0f} µs for each chunk; the call {call * 1e3:.1f} ms"
    print(f"step of {alone * 1e3:.0f} ms of Python, beside a lazy save: {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
