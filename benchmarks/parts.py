"""Long parts of a save: fetched from the ranks, and read as objects of a tier, side by side.

python -m benchmarks.parts [--parts 1000] [--size 168KB] [--rounds 5]

One process plays all ranks: it offers their parts, or has put them into a folder. Another one does what the coordinator
does until it has the bytes of all of them, 32 at a time. The folder is in the page cache, so that reading from it takes
no longer than it must; a file system or an object store of a site takes its round trips more. CPU seconds are of the
coordinator alone: the ranks of a job are elsewhere.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.machine import facts_line
from benchmarks.tables import table
from tierstate.engine.ranks.save.coordinator import PARTS_AT_ONCE
from tierstate.engine.ranks.save.relay import VersionRelay
from tierstate.engine.ranks.team.team import Team, never
from tierstate.manifest.chunk import as_buffer, empty_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.tiers.base import Range
from tierstate.tiers.concurrency import WorkerPool
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.posix.lustre import Lustre
from tierstate.tiers.units import parse_size

SECRET = bytes(range(32))


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts")
    parser.add_argument("--parts", type=int, default=1000)
    parser.add_argument("--size", type=parse_size, default=parse_size("168KB"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["TIERSTATE_ADDRESS"] = "127.0.0.1"
    found: dict[str, list[tuple[float, float]]] = {"fetched from the ranks": [], "read from a folder": []}
    with tempfile.TemporaryDirectory(prefix="tierstate-parts-") as folder:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        ranks = context.Process(target=play, args=(theirs, folder, args.parts, args.size))
        ranks.start()
        held = ours.recv()
        team = Team(dist.HashStore(), 0, 2, [0, 1], secret=JobSecret(SECRET))
        relay, tier = VersionRelay(team, lambda *_: None), Lustre(path=Path(folder))
        for _ in range(args.rounds):
            found["fetched from the ranks"].append(measured(lambda one: relay.fetch_part(one, 1, never), held))
            found["read from a folder"].append(measured(lambda one: read(tier, one), held))
        relay.close()
        team.close()
        ours.send("all came")
        ranks.join()
    rows = []
    for way, runs in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append([way, f"{seconds:.2f}", f"{cpu:.2f}", f"{1000 * cpu / args.parts:.2f}"])
    print(facts_line(Path(tempfile.gettempdir())), f"{args.parts} parts of {args.size} bytes", sep="; ")
    print(table("parts are | seconds | CPU seconds of rank 0 | ms of them for each", rows))
    return 0


def play(pipe: Connection, folder: str, count: int, size: int) -> None:
    """All ranks: offer their parts, and put them into the folder."""
    team = Team(dist.HashStore(), 1, 2, [0, 1], secret=JobSecret(SECRET))
    relay, tier = VersionRelay(team, lambda *_: None), Lustre(path=Path(folder))
    held = []
    for _ in range(count):
        part = os.urandom(size)
        held.append(relay.offer(part))
        tier.put(key_of(held[-1]), as_buffer(part))
    pipe.send(held)
    pipe.recv()
    relay.close()
    team.close()


def key_of(held: Mapping[str, Any] | None) -> str:
    """Where a part is in the folder."""
    assert held is not None
    return f"packs/run/000000000001-1-part-{held['sum']}"


def read(tier: Lustre, held: Mapping[str, Any]) -> bytes | None:
    """A part from the folder, as the coordinator reads it."""
    out = empty_buffer(held["bytes"])
    tier.read(key_of(held), [Range(0, out)])
    data = to_bytes(out)
    return data if checksum(data).hex() == held["sum"] else None


def measured(get: Any, held: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, until all parts are here."""
    began, cpu = time.monotonic(), time.process_time()
    with WorkerPool(PARTS_AT_ONCE, "parts") as pool:
        for data in pool.map(get, held):
            assert data is not None
    return time.monotonic() - began, time.process_time() - cpu


if __name__ == "__main__":
    raise SystemExit(main())
