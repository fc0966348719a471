"""The device path: copies between a GPU and the host beside raw copies of pinned memory, and what a save costs a step.

python -m benchmarks.devices [--size 8GiB] [--rounds 7] [--only copies,pin,stalls] [--shapes large,small]
                             [--tiers host,gpu,nvme] [--graph] [--out FILE]

Two states of float32 tensors on the device: ``large`` has tensors of 64 MiB, ``small`` has 20,000 of 40 kB. Everything
takes turns in each round, and each ratio is made within a round. A first round warms up and does not count, except that
the first save, which faults the slabs in and pins them, has a row of its own. It needs a CUDA device with three times
the state free (the state, and two copies in a `gpu` tier), and twice the state of host memory (a `host` tier that keeps
one version while it gets the next).

``copies``: raw copies, saves until they are captured and until they are in the tier, restores.
``pin``: what it costs to make memory of the arena ready.
``stalls``: a step of training (matrix products, and a step of an optimizer that changes all of the state) without and
with a save before it, each until the device has done it all. With ``--graph`` the products are one replay: what a save
costs then is not the interpreter that the step waits for.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import tierstate as ts
from benchmarks.gauge import settle
from benchmarks.machine import facts
from benchmarks.results import Results, Sample, Spread, short
from benchmarks.rounds import HOUSE, say, some_of
from benchmarks.tables import table
from tierstate.tiers.memory.limits import REMEDY, MemoryLimits
from tierstate.tiers.memory.pages import PAGE, fault_in, map_pages
from tierstate.tiers.memory.pinning import pin_memory, unpin_memory
from tierstate.tiers.units import parse_size, rough_size

PHASES = ("copies", "pin", "stalls")
SHAPES = ("large", "small")
TIERS = ("host", "gpu", "nvme")
"""What the stalls are measured with; copies only with the first two, which lie in memory."""

LARGE, SMALL, MANY = 64 << 20, 40_000, 20_000
"""Bytes of a tensor of each shape, and the most tensors of the small one."""

PIECE = 256 << 20
"""Bytes of a raw copy, at most."""

PINNED = 1 << 30
"""Bytes of the pinned buffer of raw copies, at most, and of what is pinned to see what that costs."""

BESIDE = 3 * PIECE
"""Device memory that is needed beside the states: pieces of raw copies, and the matrices of the steps."""

DOWN, UP, WITHIN = "raw D2H", "raw H2D", "raw copy within the device"
"""The limits that others are compared with."""


class TooSmall(Exception):
    """This machine cannot measure what was asked for."""


class Params:
    """A state on the device, and an optimizer whose step changes every element of it.

    Args:
        shape: one of `SHAPES`.
        nbytes: bytes of all tensors together, at most.
    """

    def __init__(self, shape: str, nbytes: int) -> None:
        each = min(LARGE if shape == "large" else SMALL, nbytes)
        count = nbytes // each if shape == "large" else min(MANY, nbytes // each)
        self.tensors = [torch.randn(each // 4, device="cuda") for _ in range(count)]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.param_groups = [{"params": self.tensors}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None:
        """Change everything."""
        torch._foreach_add_(self.tensors, 1.0)

    def saved(self) -> dict[str, torch.Tensor]:
        """What is given to save and restore."""
        return {f"t{i:05}": tensor for i, tensor in enumerate(self.tensors)}


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A sum of each tensor's bits."""
    found = torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])
    return [int(one) for one in found.tolist()]


class Raw:
    """Copies by torch alone, timed by the device's own clock.

    Args:
        params: their tensors are what is copied tensor by tensor; as many bytes are copied in long pieces.
    """

    def __init__(self, params: Params) -> None:
        self._tensors, nbytes = [t.view(torch.uint8) for t in params.tensors], params.nbytes
        self._pinned = torch.empty(min(nbytes, PINNED), dtype=torch.uint8, pin_memory=True)
        piece = torch.zeros(min(nbytes, PIECE), dtype=torch.uint8, device="cuda")
        self._other = torch.empty_like(piece)
        self._pieces = [piece[: min(len(piece), nbytes - at)] for at in range(0, nbytes, len(piece))]

    def ways(self) -> dict[str, Callable[[], float]]:
        """Each way by its title; a call returns seconds."""
        apart = "tensor by tensor"
        return {
            DOWN: lambda: self._timed(self._pieces, down=True),
            UP: lambda: self._timed(self._pieces, down=False),
            WITHIN: self._within,
            f"{DOWN}, {apart}": lambda: self._timed(self._tensors, down=True),
            f"{UP}, {apart}": lambda: self._timed(self._tensors, down=False, into=self._other),
        }

    def _timed(self, tensors: Sequence[torch.Tensor], *, down: bool, into: torch.Tensor | None = None) -> float:
        pairs, at = [], 0
        for tensor in tensors:
            at = at if at + len(tensor) <= len(self._pinned) else 0
            # What lies in the state stays as it is: its values are compared after restores.
            there = tensor if into is None else into[: len(tensor)]
            here = self._pinned[at : at + len(tensor)]
            pairs.append((here, tensor) if down else (there, here))
            at += len(tensor)
        return _on_device(lambda: [to.copy_(source, non_blocking=True) for to, source in pairs])

    def _within(self) -> float:
        return _on_device(lambda: [self._other[: len(p)].copy_(p, non_blocking=True) for p in self._pieces])


def _on_device(work: Callable[[], object]) -> float:
    """Seconds by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    settle()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class Work:
    """Matrix products that take the device so many seconds.

    Args:
        seconds: of one call.
        width: of the matrices.
        graph: whether they are queued by the replay of one CUDA graph, which needs the interpreter for one call.
    """

    def __init__(self, seconds: float, width: int, graph: bool = False) -> None:
        self._one, self._other = (torch.randn(width, width, device="cuda").bfloat16() for _ in range(2))
        self._out = torch.empty_like(self._one)
        self.count = 8
        self._graph: torch.cuda.CUDAGraph | None = None
        for _ in range(5):  # the first ones also load the library, and let the clock of the device rise
            taken = self._seconds()
            self.count = max(1, round(self.count * seconds / taken))
        if graph:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._queue()

    def run(self) -> None:
        """Queue them."""
        if self._graph is None:
            self._queue()
        else:
            self._graph.replay()

    def _queue(self) -> None:
        for _ in range(self.count):
            torch.mm(self._one, self._other, out=self._out)

    def _seconds(self) -> float:
        settle()
        start = time.perf_counter()
        self.run()
        settle()
        return time.perf_counter() - start


# What is measured


@dataclass
class Bench:
    """One run of the command.

    Attributes:
        results: where samples go.
        args: what was asked for.
        root: a folder for persistent tiers.
    """

    results: Results
    args: argparse.Namespace
    root: Path

    def run(self) -> None:
        """Measure all that was asked for."""
        if "pin" in self.args.only:
            self.pin()
        for shape in self.args.shapes:
            params = Params(shape, self.args.size)
            if "copies" in self.args.only:
                for tier in (tier for tier in TIERS[:2] if tier in self.args.tiers):
                    self.copies(shape, params, tier)
            if "stalls" in self.args.only:
                work = Work(self.args.step, self.args.width, self.args.graph)
                for tier in self.args.tiers:
                    self.stalls(shape, params, tier, work)
            del params
            torch.cuda.empty_cache()

    def pin(self) -> None:
        """Slabs of the arena, as its background thread prepares them."""
        torch.zeros(1, device="cuda")  # memory is pinned only where a device is in use
        size = -(-self.args.chunk // PAGE) * PAGE
        for number in range(self.args.rounds):
            slabs = [map_pages(size) for _ in range(max(1, min(self.args.size, PINNED) // size))]
            nbytes = size * len(slabs)
            for way, call in (("fault in", fault_in), ("pin", _pin), ("unpin", unpin_memory)):
                start = time.perf_counter()
                for slab in slabs:
                    call(slab)
                self._keep("pin", "", nbytes, number, way, seconds=time.perf_counter() - start)
        say("pin: done")

    def copies(self, shape: str, params: Params, tier: str) -> None:
        """Raw copies, saves to a tier, and restores from it, in turn."""
        raw = Raw(params).ways()
        with self._checkpointer(tier, params.nbytes) as ckpt:
            for number in range(self.args.rounds + 1):
                if number:
                    for way, call in raw.items():
                        self._keep("copies", shape, params.nbytes, number, way, group=tier, seconds=call())
                self._round(ckpt, shape, params, tier, number)
                say(f"{shape}, `{tier}`: round {number} of {self.args.rounds}")

    def _round(self, ckpt: ts.Checkpointer, shape: str, params: Params, tier: str, number: int) -> None:
        def keep(way: str, seconds: float, extra: int) -> None:
            way = way if number else f"first {way}"
            self._keep("copies", shape, params.nbytes, number, way, group=tier, seconds=seconds, extra=extra)

        params.step()
        truth = sums(params.tensors)
        peak = Peak()
        start = time.perf_counter()
        save = ckpt.save(params.saved(), step=number)
        save.wait_captured()
        captured = time.perf_counter() - start
        save.wait(tier)
        keep(f"save to `{tier}`: captured", captured, peak.extra())
        keep(f"save to `{tier}`: committed", time.perf_counter() - start, peak.extra())
        params.step()
        self._fill(f"restore in place from `{tier}`", lambda: ckpt.restore(params.saved()), keep)
        _compare(truth, sums(params.tensors))
        if tier == "host":
            loaded: list[dict[str, torch.Tensor]] = []
            load = f"load to the device from `{tier}`"
            self._fill(load, lambda: loaded.append(ckpt.load(device="cuda")), keep, asked=params.nbytes)
            _compare(truth, sums(list(loaded[0].values())))

    def _fill(
        self, way: str, work: Callable[[], object], keep: Callable[[str, float, int], None], asked: int = 0
    ) -> None:
        """Time what fills device memory, which is asked for with so many new bytes."""
        peak = Peak()
        start = time.perf_counter()
        work()
        settle()
        keep(way, time.perf_counter() - start, peak.extra() - asked)

    def stalls(self, shape: str, params: Params, tier: str, work: Work) -> None:
        """Steps without and with a save before them, which is waited for before the next pair."""
        with self._checkpointer(tier, params.nbytes) as ckpt:
            for number in range(self.args.rounds + 1):
                for how in ("lazy", "eager"):
                    if how == "lazy":
                        ckpt.guard(params)
                    try:
                        sample = self._pair(ckpt, params, tier, work, saves_first=number % 2 == 1)
                    finally:
                        ckpt.unguard(params)
                    if number:
                        self._keep("stalls", shape, params.nbytes, number, f"{how}, `{tier}`", **sample)
                say(f"stalls, {shape}, `{tier}`: round {number} of {self.args.rounds}")

    def _pair(self, ckpt: ts.Checkpointer, params: Params, tier: str, work: Work, saves_first: bool) -> Sample:
        found: Sample = {}

        def step() -> None:
            work.run()
            params.step()
            settle()

        def quiet() -> None:
            start = time.perf_counter()
            step()
            found["quiet"] = time.perf_counter() - start

        def saving() -> None:
            waited, peak = ckpt.stats().waited, Peak()
            start = time.perf_counter()
            save = ckpt.save(params.saved(), step=0)
            found["call"] = time.perf_counter() - start
            step()
            found["saving"] = time.perf_counter() - start
            found["waited"] = ckpt.stats().waited - waited
            save.wait(tier)
            found["extra"] = peak.extra()

        for one in (saving, quiet) if saves_first else (quiet, saving):
            one()
        return found | {"stall": found["saving"] - found["quiet"]}

    @contextmanager
    def _checkpointer(self, tier: str, nbytes: int) -> Iterator[ts.Checkpointer]:
        """A run that keeps everything in one tier. The arena holds all of a save, so that no tier slows a capture."""
        place = Path(tempfile.mkdtemp(dir=self.root))
        tiers: dict[str, dict[str, object]] = {"nvme": {"type": "nvme", "path": str(place), "keep": {"last": 1}}}
        if tier != "nvme":
            tiers = {tier: {"type": tier, "keep": {"last": 1}}, **tiers}
        arena = nbytes + nbytes // 8 + 8 * self.args.chunk
        keys = {"chunk": self.args.chunk, "arena": {"size": arena}, "rules": [{"match": "**", "tiers": [tier]}]}
        try:
            with ts.Checkpointer(ts.Policy.parse(yaml.safe_dump({**keys, "tiers": tiers})), "bench") as ckpt:
                yield ckpt
        finally:
            shutil.rmtree(place)
            torch.cuda.empty_cache()

    def _keep(self, phase: str, shape: str, size: int, number: int, way: str, **numbers: Any) -> None:
        sample = {"phase": phase, "peer": shape, "size": size, "round": number, "way": way}
        self.results.samples.append(sample | numbers)


class Peak:
    """Most device memory that torch has allocated since this was made, beyond what was allocated then."""

    def __init__(self) -> None:
        settle()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def extra(self) -> int:
        """Bytes."""
        return torch.cuda.max_memory_allocated() - self._before


def _pin(slab: torch.Tensor) -> None:
    if (code := pin_memory(slab)) != 0:
        raise TooSmall(f"CUDA refused to pin memory (error {code}): {MemoryLimits.of_process().told()}. Try: {REMEDY}")


def _compare(one: Sequence[int], other: Sequence[int]) -> None:
    if one != other:
        raise ValueError("other bytes came back than were saved")


# The page


LIMITS = {"save to `host`": DOWN, "save to `gpu`: captured": WITHIN, "save to `gpu`: committed": DOWN, "load": UP}
"""What a way is compared with, by how its title begins."""


def limit_of(way: str) -> str:
    """The raw copy that is the limit of a way; empty for the raw ones."""
    way = way.removeprefix("first ")
    if way.startswith("raw"):
        return DOWN if way.startswith(f"{DOWN},") else UP if way.startswith(f"{UP},") else ""
    if way == "restore in place from `gpu`":
        return WITHIN
    return next((limit for begin, limit in LIMITS.items() if way.startswith(begin)), UP)


def report(results: Results) -> str:
    """All tables that there are samples for."""
    parts = [f"{name}: {what}" for name, what in results.machine.items()]
    pages = ["\n".join(f"* {part}" for part in parts)]
    for shape in SHAPES:
        found = results.pick("copies", peer=shape)
        if found:
            pages += [f"State `{shape}`, {rough_size(found[0]['size'])}:", copies_table(found)]
    pages += [pin_table(results.pick("pin")), stalls_table(results)]
    return "\n\n".join(page for page in pages if page)


def copies_table(samples: list[Sample]) -> str:
    """Each way beside its limit, both of the same round."""
    rows = []
    for way in dict.fromkeys(s["way"] for s in samples):
        mine = [s for s in samples if s["way"] == way]
        limit, first = limit_of(way), way.startswith("first ")
        seconds, spread = (Spread.of(mine, lambda s, k=k: s["seconds"] * k) for k in (1, 1e3))
        assert seconds is not None
        # Of the first save there is one, before the first round of raw copies.
        ratios = [_raw(samples, limit, 1 if first else s["round"], s["group"]) / s["seconds"] for s in mine if limit]
        extra = max((s["extra"] for s in mine if "extra" in s), default=None)
        rate = mine[0]["size"] / seconds.median / 1e9
        ratio = short(statistics.median(ratios)) if ratios else ""
        more = "" if extra is None else f"{extra / 2**20:.0f}"
        rows.append([way, str(spread), short(rate), ratio, limit, more])
    return table("way | ms (least–most) | GB/s | / limit | limit | extra device memory, MiB", rows)


def _raw(samples: list[Sample], way: str, number: int, group: str) -> float:
    found = [s for s in samples if (s["way"], s["round"], s["group"]) == (way, number, group)]
    return float(found[0]["seconds"])


def pin_table(samples: list[Sample]) -> str:
    """Milliseconds for each GiB."""
    rows = []
    for way in dict.fromkeys(s["way"] for s in samples):
        mine = [s for s in samples if s["way"] == way]
        rows.append([way, str(Spread.of(mine, lambda s: s["seconds"] * 1e3 * 2**30 / s["size"]))])
    return table("slabs of the arena | ms per GiB (least–most)", rows)


def stalls_table(results: Results) -> str:
    """What a save adds to a step."""
    rows = []
    for shape in SHAPES:
        samples = results.pick("stalls", peer=shape)
        for way in dict.fromkeys(s["way"] for s in samples):
            mine = [s for s in samples if s["way"] == way]
            quiet, call, waited = (Spread.of(mine, lambda s, k=k: s[k] * 1e3) for k in ("quiet", "call", "waited"))
            stall = Spread.of(mine, lambda s: s["stall"] * 1e3)
            share = statistics.median(s["stall"] / s["quiet"] for s in mine)
            extra = max(s["extra"] for s in mine)
            row = [shape, way, *map(str, (quiet, stall)), f"{100 * share:+.2f} %", *map(str, (call, waited))]
            rows.append([*row, f"{extra / 2**20:.0f}"])
    head = "state | save | step, ms | stall, ms (least–most) | of the step | of which the call, ms"
    return table(f"{head} | and the optimizer waiting, ms | extra device memory, MiB", rows)


# The machine


def gpu_facts() -> dict[str, str]:
    """What a reader has to know of the device."""
    seen = torch.cuda.get_device_properties(0)
    found = {
        "GPU": f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB",
        "CUDA of torch": str(torch.version.cuda),
    }
    names = ("driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current")
    which = getattr(seen, "uuid", None)
    told = _nvidia_smi(names, f"GPU-{which}" if which is not None else "0")
    if told is None:
        return found | {"driver and PCIe link": "nvidia-smi does not tell"}
    driver, now, most, width = told
    return found | {"driver": driver, "PCIe": f"generation {most} (now {now}), {width} lanes"}


def _nvidia_smi(names: Sequence[str], which: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "-i", which]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in ran.stdout.strip().split(",")]
    return values if len(values) == len(names) else None


def check_machine(size: int, shapes: Sequence[str]) -> None:
    """Whether this machine can measure states of this size.

    Raises:
        TooSmall: it has no CUDA device, or too little memory.
    """
    if not torch.cuda.is_available():
        raise TooSmall("there is no CUDA device that torch can use here, and this benchmark measures nothing else")
    most = max(SMALL if shape == "small" else 4 for shape in shapes)
    if size < most:
        raise TooSmall(f"--size is less than a tensor of {rough_size(most)}")
    free = torch.cuda.mem_get_info()[0]
    if free < 3 * size + BESIDE:
        raise TooSmall(
            f"a state of {rough_size(size)} needs three times that and {rough_size(BESIDE)} of device memory: "
            f"the state and two copies in a gpu tier; {rough_size(free)} are free: give a smaller --size"
        )
    line = next(one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith("MemAvailable"))
    available = int(line.split()[1]) * 1024
    if available < 2.25 * size + PINNED:
        raise TooSmall(
            f"a state of {rough_size(size)} needs {rough_size(int(2.25 * size) + PINNED)} of host memory: two versions "
            f"in a host tier, and what is pinned for raw copies; {rough_size(available)} are available: give a smaller "
            "--size"
        )


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the tables; 1 where this machine cannot measure it."""
    args = arguments(argv)
    try:
        check_machine(args.size, args.shapes)
        results = measure(args)
    except TooSmall as error:
        print(f"benchmarks.devices: {error}", file=sys.stderr)
        return 1
    print(report(results))
    say(f"samples in {args.out}")
    return 0


def measure(args: argparse.Namespace) -> Results:
    """Run everything. What was found by then is kept, also when something ends the run."""
    options = {name: value for name, value in vars(args).items() if name not in ("out", "path")}
    results = Results(options=options)
    root = Path(tempfile.mkdtemp(prefix="tierstate-devices-", dir=args.path))
    try:
        results.machine = facts(root) | gpu_facts()
        Bench(results, args, root).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
        results.write(Path(args.out))
    return results


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""

    def seconds(text: str) -> float:
        if not 0 < (value := float(text)) < math.inf:
            raise argparse.ArgumentTypeError("a number of seconds above 0")
        return value

    out = HOUSE / "build" / "bench" / "devices.json"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=8 << 30, help="bytes of the state; a multiple of 64MiB")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions, after one that warms up")
    parser.add_argument("--step", type=seconds, default=0.5, help="seconds of a training step")
    parser.add_argument("--width", type=int, default=4096, help="of the matrices that a step multiplies")
    parser.add_argument("--graph", action="store_true", help="a step replays a CUDA graph: without Python in between")
    parser.add_argument("--chunk", type=parse_size, default=16 << 20, help="the policy's")
    parser.add_argument("--only", type=some_of(PHASES), default=list(PHASES), help=",".join(PHASES))
    parser.add_argument("--shapes", type=some_of(SHAPES), default=list(SHAPES), help=",".join(SHAPES))
    parser.add_argument("--tiers", type=some_of(TIERS), default=list(TIERS), help=",".join(TIERS))
    parser.add_argument("--path", help="a folder of the disk under the nvme tier; by default that for temporary files")
    parser.add_argument("--out", default=str(out), help="file of all samples, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
