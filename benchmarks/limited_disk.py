"""Many ranks over one slow disk: how long a save and a restore take beside the size divided by the disk's rate.

python -m benchmarks.limited_disk [--ranks 64] [--hosts 8] [--size 16MiB] [--disk 50MiB/s] [--rounds 3] [--path DIR]

The ranks are real processes that save and restore by a `Checkpointer`, in a network namespace for each host. All are in
one control group, whose reads and writes of the disk are limited; first with a tier that all hosts share, then with a
tier of each host, which all are on that disk. Needs root, `ip`, `tc`, and control groups (version 1, blkio).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import tierstate as ts
from benchmarks.files import make_cold
from benchmarks.hosts import address, enter, forked, network
from benchmarks.machine import facts_line
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.tiers.units import parse_rate, parse_size

dist: Any = torch.distributed  # not all of it is in its type hints
GROUP, PORT = Path("/sys/fs/cgroup/blkio/tierstate-benchmark"), 29572
TIERS = {"of all hosts": "type: lustre, path: {place}/all", "of each host": "type: nvme, path: {place}/{host}"}


@contextmanager
def limited(path: Path, rate: int) -> Iterator[None]:
    """What is forked in the block reads and writes so many bytes per second of the disk with this folder, at most."""
    device = os.stat(path).st_dev
    GROUP.mkdir()
    mine = GROUP.parent / "cgroup.procs"
    try:
        for what in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {rate}"
            (GROUP / f"blkio.throttle.{what}_bps_device").write_text(limit)
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        mine.write_text(str(os.getpid()))
        GROUP.rmdir()


def policy(place: Path, tier: str, host: int) -> ts.Policy:
    """One tier, on the limited disk."""
    keys = tier.format(place=place, host=f"host-{host}")
    rest = "version: 1\narena: {size: 64MiB}\nranks: {trust: network}\n"
    return ts.Policy.parse(f"{rest}tiers:\n  disk: {{{keys}, keep: {{last: 2}}}}\n")


def rank_of(place: Path, rank: int, ranks: int, hosts: int, nbytes: int, rounds: int) -> list[dict[str, float]]:
    """What one rank has measured."""
    host = rank * hosts // ranks
    enter(host)
    os.environ |= {"TIERSTATE_HOST": f"host-{host}", "GLOO_SOCKET_IFNAME": f"tsi{host}"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address(0)}:{PORT}", rank=rank, world_size=ranks)
    values, found = torch.arange(nbytes // 4, dtype=torch.int32) * ranks + rank, []
    for name, tier in TIERS.items():
        (place / name).mkdir(exist_ok=True)
        with ts.Checkpointer(policy(place / name, tier, host), "run", process_group=dist.group.WORLD) as ckpt:
            for step in range(1, rounds + 1):
                values += 1
                dist.barrier()
                start = time.perf_counter()
                ckpt.save({"values": ts.PerRank(values)}, step=step).wait()
                dist.barrier()
                saved = time.perf_counter() - start
                if not rank:
                    make_cold(place)
                into = torch.zeros_like(values)
                dist.barrier()
                start = time.perf_counter()
                ckpt.restore({"values": ts.PerRank(into)}, step=step)
                dist.barrier()
                found.append({"save": saved, "restore": time.perf_counter() - start})
                if not torch.equal(into, values):
                    raise ValueError(f"rank {rank}: another state came back than was saved")
    dist.destroy_process_group()
    return found


def measured(place: Path, ranks: int, hosts: int, nbytes: int, rate: int, rounds: int) -> list[dict[str, float]]:
    """What rank 0 has found, which waits for all others each time."""
    with network(hosts, "10gbit"), limited(place, rate):
        found: list[dict[str, float]] = forked(ranks, lambda rank: rank_of(place, rank, ranks, hosts, nbytes, rounds))[
            0
        ]
    return found


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limited_disk", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--size", type=parse_size, default=16 << 20, help="of each rank's part")
    parser.add_argument("--disk", type=parse_rate, default=50 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder of the disk")
    args = parser.parse_args()
    print(facts_line(args.path) + "\n")
    place = Path(tempfile.mkdtemp(prefix="limited-disk-", dir=args.path))
    try:
        found = measured(place, args.ranks, args.hosts, args.size, args.disk, args.rounds)
    finally:
        shutil.rmtree(place)
    least, rows = args.ranks * args.size / args.disk, []
    for number, name in enumerate(TIERS):
        some = found[number * args.rounds : (number + 1) * args.rounds]
        for what in ("save", "restore"):
            seconds = sorted(one[what] for one in some)
            middle = statistics.median(seconds)
            rows.append([name, what, f"{middle:.2f} ({seconds[0]:.2f}–{seconds[-1]:.2f})", f"{middle / least:.2f}"])
            say(f"{rows[-1]}")
    print(f"{args.ranks} ranks on {args.hosts} hosts, {args.size >> 20} MiB each: {least:.2f} s at the disk's rate\n")
    print(table("tiers | what | seconds | of size ÷ rate", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
