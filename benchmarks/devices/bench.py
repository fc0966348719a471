"""What is measured: copies, pinning, and steps of training with saves."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import tierstate as ts
from benchmarks.gauge import settle
from benchmarks.results import Results, Sample
from benchmarks.rounds import say
from tierstate.tiers.memory.limits import REMEDY, MemoryLimits
from tierstate.tiers.memory.pages import PAGE, fault_in, map_pages
from tierstate.tiers.memory.pinning import pin_memory, unpin_memory

from .machine import PINNED, TooSmall
from .raw import Raw
from .state import Params, Peak, compare, sums

PHASES = ("copies", "pin", "stalls")

TIERS = ("host", "gpu", "nvme")
"""What the stalls are measured with; copies only with the first two, which lie in memory."""


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
        compare(truth, sums(params.tensors))
        if tier == "host":
            loaded: list[dict[str, torch.Tensor]] = []
            load = f"load to the device from `{tier}`"
            self._fill(load, lambda: loaded.append(ckpt.load(device="cuda")), keep, asked=params.nbytes)
            compare(truth, sums(list(loaded[0].values())))

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


def _pin(slab: torch.Tensor) -> None:
    if (code := pin_memory(slab)) != 0:
        raise TooSmall(f"CUDA refused to pin memory (error {code}): {MemoryLimits.of_process().told()}. Try: {REMEDY}")
