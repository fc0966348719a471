"""What layout and I/O do for checkpoints of many tensors: the ablation of arXiv 2512.24511, through our tiers.

python -m benchmarks.field.layouts [--models 3b,7b,13b] [--io buffered,…] [--blocks 4MiB,…] [--rounds 2] [--path DIR]

Each tensor as an object of its own, or all of them behind each other in one pack; moved by `buffered` writes, by direct
I/O from threads or by io_uring; in blocks of so many bytes. Several threads at once move objects of their own,
as engines do that save them so. A write ends when all is synced; a read begins with nothing in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.files import make_cold
from benchmarks.machine import facts_line, touch_memory
from benchmarks.rounds import say, some_of
from benchmarks.tables import table
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.concurrency import run_concurrently
from tierstate.tiers.memory.pages import PAGE, fault_in, map_pages
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.units import parse_size

SCALE = 8
"""A model has so many times fewer layers; its tensors have their true sizes."""


class Model(NamedTuple):
    """Layers, width of a layer and of its feed-forward part."""

    layers: int
    hidden: int
    ffn: int

    def tensors(self) -> list[int]:
        """Bytes of each tensor, in fp16: attention, feed-forward part and norms of each layer."""
        layer = [*[self.hidden * self.hidden] * 4, *[self.hidden * self.ffn] * 3, self.hidden, self.hidden]
        return [2 * length for length in layer] * (self.layers // SCALE)


MODELS = {"3b": Model(28, 3072, 8192), "7b": Model(32, 4096, 11008), "13b": Model(40, 5120, 13824)}
PACKINGS = ("object per tensor", "one pack")
WAYS = ("buffered", "threads", "uring")
BLOCKS = ("1MiB", "4MiB", "16MiB", "64MiB")


def paged(nbytes: int) -> int:
    """So many bytes in whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Case(NamedTuple):
    """One way of writing and reading."""

    packing: str
    io: str
    block: int


class Source:
    """Memory that the tensors are written from and read into, in huge pages, as an arena has it."""

    def __init__(self, nbytes: int) -> None:
        self._pages = map_pages(paged(nbytes))
        fault_in(self._pages)
        self._pages.random_()

    def part(self, start: int, nbytes: int) -> Buffer:
        """Some of it."""
        return self._pages[start : start + nbytes]


def objects(sizes: list[int], packing: str) -> Iterator[tuple[str, int, int]]:
    """Key, place in memory and bytes of each object."""
    if packing == "one pack":
        yield "pack", 0, sum(paged(size) for size in sizes)
        return
    at = 0
    for number, size in enumerate(sizes):
        yield f"tensor-{number}", at, size
        at += paged(size)


def write(tier: Tier, source: Source, sizes: list[int], case: Case) -> None:
    """Write all objects, synced."""

    def one(what: tuple[str, int, int]) -> None:
        key, start, nbytes = what
        with tier.writer(key, nbytes) as writer:
            for at in range(0, nbytes, case.block):
                writer.append(source.part(start + at, min(case.block, nbytes - at)))

    run_concurrently(one, objects(sizes, case.packing))


def read(tier: Tier, into: Source, sizes: list[int], case: Case) -> None:
    """Read all objects."""

    def one(what: tuple[str, int, int]) -> None:
        key, start, nbytes = what
        starts = range(0, nbytes, case.block)
        tier.read(key, [Range(at, into.part(start + at, min(case.block, nbytes - at))) for at in starts])

    run_concurrently(one, objects(sizes, case.packing))


def measured(sizes: list[int], case: Case, memory: Source, root: Path) -> tuple[float, float]:
    """Seconds of a write and of a cold read."""
    tier = Nvme(path=root / "tier", io=case.io)  # type: ignore[arg-type]
    try:
        seconds = timed(lambda: write(tier, memory, sizes, case))
        make_cold(root)
        return seconds, timed(lambda: read(tier, memory, sizes, case))
    finally:
        tier.close()
        shutil.rmtree(root / "tier")


def timed(call: Callable[[], None]) -> float:
    """Seconds."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def run(models: list[str], ways: list[str], blocks: list[int], rounds: int, root: Path) -> Iterator[str]:
    """Measure all, the cases taking turns; a table for each model."""
    for name in models:
        sizes = MODELS[name].tensors()
        nbytes = sum(sizes)
        memory = Source(sum(paged(size) for size in sizes))
        cases = [Case(*parts) for parts in product(PACKINGS, ways, blocks)]
        found: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(rounds):
            for case in cases:
                found[case].append(measured(sizes, case, memory, root))
            say(f"{name}: a round of {len(cases)} ways is done")
        yield f"### {name}: {len(sizes)} tensors, {nbytes / 2**30:.2f} GiB"
        yield table("objects | I/O | block | write, GB/s | read, GB/s", [row(c, found[c], nbytes) for c in cases])


def row(case: Case, found: list[tuple[float, float]], nbytes: int) -> list[str]:
    """Rates by medians."""
    rates = [f"{nbytes / statistics.median(one[i] for one in found) / 1e9:.2f}" for i in range(2)]
    return [case.packing, case.io, f"{case.block >> 20} MiB", *rates]


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field.layouts", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=some_of(MODELS), default=list(MODELS), help=",".join(MODELS))
    parser.add_argument("--io", type=some_of(WAYS), default=list(WAYS), help=",".join(WAYS))
    sizes = [parse_size(block) for block in BLOCKS]
    parser.add_argument("--blocks", type=lambda text: [parse_size(part) for part in text.split(",")], default=sizes)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-layouts-", dir=args.path))
    try:
        say(f"memory touched once, in {touch_memory():.0f} s")
        print(facts_line(root), f"layers: 1/{SCALE}", sep="\n")
        for part in run(args.models, args.io, args.blocks, args.rounds, root):
            print("", part, sep="\n", flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
