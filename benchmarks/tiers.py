"""The tiers alone: bytes per second of each one, beside the limit of what it stands on, in one run.

python -m benchmarks.tiers [--size 1GiB] [--rounds 5] [--path DIR]

No state, no digests, no records: one object is written in pieces that lie in huge pages, made durable where the tier
is persistent, and read back into such pages. Limits are memcpy for memory and fio for files; for object stores there is
`benchmarks.objects`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator
from ctypes import memmove
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.field.fio import Fio, run_fio
from benchmarks.files import make_cold
from benchmarks.gauge import Gauge
from benchmarks.machine import facts_line
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.pages import fault_in, map_pages
from tierstate.tiers.registry import open_tier
from tierstate.tiers.units import parse_size

PIECE = 64 << 20
"""Bytes of one piece, as long as a slab."""

Way = Callable[[], float | None]
"""Moves all bytes; returns seconds only if by its own clock."""


@dataclass
class Case:
    """One way of moving bytes there and back.

    Attributes:
        title: as the table shows it.
        limit: whether it is the limit that the case before it is compared with.
        write, read: the work.
        between: done before each read, not measured.
        after: done after each read, not measured.
    """

    title: str
    write: Way
    read: Way
    limit: bool = False
    between: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


class Memory:
    """Bytes to write, and as much memory to read them into; all in huge pages that have been touched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pieces, self.others = ([_pages() for _ in range(nbytes // PIECE)] for _ in range(2))
        for piece in self.pieces:
            piece.random_()

    def compare(self) -> None:
        """Make sure that what was read is what was written, and forget it.

        Raises:
            ValueError: it is not.
        """
        for piece, other in zip(self.pieces, self.others, strict=True):
            if not torch.equal(piece, other):
                raise ValueError("other bytes were read than were written")
            other.zero_()


def _pages() -> Buffer:
    buffer = map_pages(PIECE)
    fault_in(buffer)
    return buffer


def main() -> None:
    """Measure, and print a table."""
    args = arguments()
    root = Path(tempfile.mkdtemp(prefix="tierstate-tiers-", dir=args.path))
    data = Memory(args.size)
    try:
        print(facts_line(root))
        cases = [*memory_cases(data), *file_cases(root, data)]
        found: dict[str, list[list[float]]] = {case.title: [] for case in cases}
        for number in range(args.rounds):
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                found[case.title].append(measured(case))
                say(f"round {number + 1}: {case.title}: {', '.join(f'{v:.3f}' for v in found[case.title][-1])}")
    finally:
        shutil.rmtree(root)
    print(report(cases, found, args.size))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=lambda text: parse_size(text) // PIECE * PIECE, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    return parser.parse_args()


def measured(case: Case) -> list[float]:
    """Seconds and CPU seconds of a write, and of a read."""
    numbers = []
    for work in (case.write, case.read):
        with Gauge() as gauge:
            own = work()
        numbers += [own or gauge.seconds, gauge.cpu]
        case.between()
    case.after()
    return numbers


def memory_cases(data: Memory) -> Iterator[Case]:
    """Tiers of memory, and copying by one thread. Memory that is kept is new each time, as it is for a tier."""
    yield of_tier("memory", open_tier("memory", "memory", {}), data)
    yield of_tier("host (keeps what it is given)", open_tier("host", "host", {}), data)
    yield of_tier("gpu, `device: cpu`", open_tier("gpu", "gpu", {"device": "cpu"}), data)

    def copy() -> None:
        for piece, other in zip(data.pieces, data.others, strict=True):
            memmove(other.data_ptr(), piece.data_ptr(), PIECE)

    yield Case("memcpy, one thread", copy, copy, limit=True)


def file_cases(root: Path, data: Memory) -> Iterator[Case]:
    """Tiers of files, and fio."""
    for name in ("nvme", "lustre"):
        tier = open_tier(name, name, {"path": root / name})
        title = name if name == "nvme" else "lustre (on the same disk: no Lustre here)"
        yield of_tier(title, tier, data, between=lambda: make_cold(root))
    file, size = root / "fio", data.nbytes
    if Fio.version():
        way = {"write": lambda: run_fio("write", file, size), "read": lambda: run_fio("read", file, size)}
        yield Case(
            Fio.version(),
            **way,
            limit=True,
            between=lambda: make_cold(root),
            after=lambda: file.unlink(missing_ok=True),
        )


def of_tier(title: str, tier: Tier, data: Memory, between: Callable[[], object] = lambda: None) -> Case:
    """A tier that is written one object, piece by piece under leases, and read into other memory of that kind."""
    key = f"bench/{uuid.uuid4().hex}"

    def write() -> None:
        with tier.writer(key, data.nbytes) as writer:
            for piece in data.pieces:
                writer.append(piece, lambda: None)

    def read() -> None:
        tier.read(key, [Range(i * PIECE, piece) for i, piece in enumerate(data.others)])

    def after() -> None:
        tier.delete(key)
        data.compare()

    return Case(title, write, read, between=between, after=after)


def report(cases: list[Case], found: dict[str, list[list[float]]], nbytes: int) -> str:
    """Medians; each tier beside the first limit that comes after it."""
    rows = []
    for number, case in enumerate(cases):
        limit = next(other for other in cases[number:] if other.limit)
        own, bound = (_medians(found[one.title]) for one in (case, limit))
        gib = nbytes / 2**30
        row = [case.title]
        for at in (0, 2):
            ratio = "" if case.limit else f"{bound[at] / own[at]:.2f}"
            row += [f"{nbytes / own[at] / 1e9:.2f}", ratio, f"{own[at + 1] / gib:.2f}"]
        rows.append(row)
    return table("tier | write, GB/s | / limit | CPU s per GiB | read, GB/s | / limit | CPU s per GiB", rows)


def _medians(samples: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*samples, strict=True)]


if __name__ == "__main__":
    main()
