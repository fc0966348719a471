"""A restart of many ranks: what each pays to know who reads what and passes it on, and what a late rank costs all.

python -m benchmarks.restart [--ranks 16,104,1000,10000] [--leaves 2000] [--shapes replicas,…] [--plot FILE] [--late]

No rank runs in the first part: what each would say is made here, and then everything is done with it that one rank does
until it knows its part. Seconds are CPU seconds of one core. With ``--late`` real ranks restore, of which one reads
slowly or hangs.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed

import tierstate as ts
from benchmarks.hosts import forked
from benchmarks.machine import facts_line
from benchmarks.ranks import HOST, timed
from benchmarks.rounds import say, some_of
from benchmarks.tables import table
from tierstate.engine.ranks.restore import stragglers
from tierstate.engine.ranks.restore.exchange_plan import NO_ROWS, ExchangePlan, plan_exchange
from tierstate.engine.ranks.restore.offers import decode_offers, encode_offer
from tierstate.engine.ranks.team.team import pack_answers, unpack_answers
from tierstate.manifest.arrays import Array
from tierstate.tiers.base import Range
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.registry import register_tier
from tierstate.tiers.wrappers.base import Wrapping

dist: Any = torch.distributed  # not all of it is in its type hints
CHUNK, SAMPLE, PORT, LATE = 1 << 20, 64, 29573, 1
SHAPES = {
    "replicas": "all ranks want all, from the site",
    "same": "each rank wants what it saved, from the site",
    "pairs": "half as many pieces as were saved, each for two ranks, from the site",
    "moved": "each rank wants what is on another host's tier",
}
STEPS = ("offer", "pack", "decode", "plan")


class Wants(NamedTuple):
    """What the ranks want and reach: as runs, by rank."""

    rows: int
    wants: list[Array]
    host: list[Array]
    site: Array


def pieces(number: int, count: int, leaves: int, ranks: int) -> Array:
    """Rows of one piece of so many of every leaf. A leaf has one chunk of each rank, and every fourth one has two."""
    chunks = np.where(np.arange(leaves) % 4, 1, 2) * ranks
    starts = np.cumsum(chunks) - chunks + number * chunks // count
    return np.stack([starts, starts + chunks // count], 1)


def wanted(shape: str, ranks: int, leaves: int) -> Wants:
    """What all ranks want and reach."""
    rows = int(pieces(0, 1, leaves, ranks)[-1, 1])
    every, none = np.array([[0, rows]]), [NO_ROWS] * ranks
    if shape == "replicas":
        few = np.array([[0, 5 * leaves // 4]])  # a state that each rank holds does not grow with the ranks
        return Wants(5 * leaves // 4, [few] * ranks, none, few)
    if shape == "same":
        return Wants(rows, [pieces(r, ranks, leaves, ranks) for r in range(ranks)], none, every)
    if shape == "pairs":
        return Wants(rows, [pieces(r // 2, ranks // 2, leaves, ranks) for r in range(ranks)], none, every)
    there = [joined([pieces(HOST * h + i, ranks, leaves, ranks) for i in range(HOST)]) for h in range(ranks // HOST)]
    mine = [pieces((r + HOST) % ranks, ranks, leaves, ranks) for r in range(ranks)]
    return Wants(rows, mine, [there[r // HOST] for r in range(ranks)], NO_ROWS)


def joined(parts: Sequence[Array]) -> Array:
    """The union of runs that do not overlap."""
    runs = np.concatenate(parts)
    runs = runs[np.argsort(runs[:, 0])]
    ends = np.append(runs[1:, 0] != runs[:-1, 1], True)
    starts = np.insert(ends[:-1], 0, True)
    return np.stack([runs[starts, 0], runs[ends, 1]], 1)


def offer_of(wants: Wants, rank: int) -> bytes:
    """What a rank says."""
    sets = dict(zip((f"rows.{i}" for i in range(5)), (NO_ROWS, wants.host[rank], wants.site, NO_ROWS), strict=False))
    more = {"rows.4": wants.wants[rank], "rows.all": wants.wants[rank], "elsewhere": NO_ROWS, "rows.away": NO_ROWS}
    address = f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255} {20_000 + rank % 40_000} exchange/{os.urandom(16).hex()}"
    return encode_offer(address, sets | more)


def planned(shape: str, ranks: int, leaves: int) -> dict[str, Any]:
    """One size of one shape: seconds, bytes, and what some of the ranks read and pass on."""
    seconds: dict[str, float] = {}
    wants, hosts = wanted(shape, ranks, leaves), [rank // HOST for rank in range(ranks)]
    timed(seconds, "offer", lambda: offer_of(wants, ranks // 2))
    offers = [offer_of(wants, rank) for rank in range(ranks)]
    message = timed(seconds, "pack", lambda: pack_answers(offers))
    said = timed(seconds, "decode", lambda: decode_offers(unpack_answers(message), wants.rows, 1))
    nbytes = np.full(wants.rows, CHUNK)
    timed(seconds, "plan", lambda: plan_exchange(said.offers, hosts, nbytes, ranks // 2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sample = sorted({rank * ranks // SAMPLE for rank in range(SAMPLE)} if ranks > SAMPLE else range(ranks))
    if seconds["plan"] > 1:
        sample = sample[:: 1 + len(sample) // 8]
    plans = {rank: plan_exchange(said.offers, hosts, nbytes, rank) for rank in sample}
    reads = np.zeros(wants.rows, "i4")
    for rank, plan in plans.items():
        reads[plan.reads] += 1
        mine = rows_of(wants.wants[rank])
        if not np.array_equal(np.intersect1d(found := there(plan), mine), mine) or len(np.unique(found)) < len(found):
            raise ValueError(f"{shape}: rank {rank} of {ranks} does not get what it wants, once")
    return {
        "shape": shape,
        "ranks": ranks,
        "chunks": wants.rows,
        "seconds": seconds,
        "peak": peak,
        "said": sum(map(len, offers)),
        "message": len(message),
        "reads": int(reads.max()),
        "read": statistics.mean(len(plan.reads) for plan in plans.values()),
        "sent": statistics.mean(sum(map(len, plan.sends.values())) for plan in plans.values()),
        "most": max(sum(map(len, plan.sends.values())) for plan in plans.values()),
        "peers": max(len(plan.sends) + len(plan.receives) for plan in plans.values()),
    }


def there(plan: ExchangePlan) -> Array:
    """The rows that a rank reads or receives."""
    return np.sort(np.concatenate([plan.reads, *plan.receives.values()]))


def rows_of(runs: Array) -> Array:
    """The rows of runs."""
    return np.concatenate([np.arange(a, b) for a, b in runs.tolist()])


def measured(shape: str, ranks: int, leaves: int) -> dict[str, Any]:
    """As `planned`, in a process of its own, whose memory is only that."""
    found: dict[str, Any] = forked(1, lambda _: planned(shape, ranks, leaves))[0]
    say(f"{shape}, {ranks} ranks: {found['seconds']}")
    return found


def tables_of(found: list[dict[str, Any]]) -> Iterator[str]:
    """What was found, as tables."""
    for shape in dict.fromkeys(f["shape"] for f in found):
        yield f"### {shape}: {SHAPES[shape]}"
        head = ["ranks", "chunks", *(f"{step}, s" for step in STEPS), "peak, MiB", "all say, MiB", "each receives, MiB"]
        head += ["reads of a chunk", "reads", "sends", "sends at most", "connections"]
        yield table(" | ".join(head), [row_of(f) for f in found if f["shape"] == shape])


def row_of(f: dict[str, Any]) -> list[str]:
    """One line of a table; chunks are of 1 MiB."""
    seconds = [f"{f['seconds'][step]:.3f}" for step in STEPS]
    sizes = [f"{f['peak'] / 2**20:.0f}", f"{f['said'] / 2**20:.2f}", f"{f['message'] / 2**20:.2f}"]
    counts = [f"{f['reads']}", f"{f['read']:,.1f}", f"{f['sent']:,.1f}", f"{f['most']:,}", f"{f['peers']:,}"]
    return [f"{f['ranks']:,}", f"{f['chunks']:,}", *seconds, *sizes, *counts]


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Growth: seconds of a rank's plan, what it receives for that, and connections."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    panels = {
        "decode and plan, s": lambda f: f["seconds"]["decode"] + f["seconds"]["plan"],
        "each receives, MiB": lambda f: f["message"] / 2**20,
        "connections of a rank": lambda f: max(1, f["peers"]),
    }
    for axis, (name, value) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for shape in dict.fromkeys(f["shape"] for f in found):
            mine = [f for f in found if f["shape"] == shape]
            axis.plot([f["ranks"] for f in mine], [value(f) for f in mine], marker=".", label=shape)
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=name)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


class Straggling(Wrapping):
    """A folder from which one rank reads slowly: a number of seconds per request of at most 16 MiB."""

    def __init__(self, *, path: str, seconds: float) -> None:
        super().__init__(Directory(Path(path)))
        self._seconds = seconds

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Be late."""
        if key.startswith("packs/"):
            time.sleep(self._seconds)
        super().read(key, ranges)


def rank_of(rank: int, ranks: int, place: Path, nbytes: int, seconds: float, rounds: int) -> list[dict[str, float]]:
    """What one rank has measured."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TIERSTATE_ADDRESS": "127.0.0.1"}
    torch.set_num_threads(1)
    logging.getLogger("tierstate").setLevel(logging.ERROR)
    register_tier("straggling", Straggling)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=ranks)
    values, found = torch.arange(nbytes // 4, dtype=torch.int32), []
    policy = ts.Policy.parse(
        "version: 1\nchunk: 1MiB\narena: {size: 64MiB}\nranks: {trust: network}\ntiers:\n"
        f"  disk: {{type: straggling, path: {place}, seconds: {seconds if rank == LATE else 0.001}}}\n"
    )
    with ts.Checkpointer(policy, "run", process_group=dist.group.WORLD) as ckpt:
        ckpt.save({"values": values}, step=1).wait()
        named: list[float] = []
        ckpt.on("rank_late", lambda event: named.append(event.time))
        for _ in range(rounds):
            into = torch.zeros_like(values)
            named.clear()
            dist.barrier()
            start, began = time.perf_counter(), time.time()
            ckpt.restore({"values": into})
            dist.barrier()
            seconds_taken = time.perf_counter() - start
            time.sleep(0.2)  # events come by a thread
            found.append({"seconds": seconds_taken, "named": named[0] - began if named else 0.0})
            if not torch.equal(into, values):
                raise ValueError(f"rank {rank}: another state came back than was saved")
    dist.destroy_process_group()
    return found


def late(ranks: int, nbytes: int, rounds: int) -> str:
    """A table: restores with a slow rank, with hedged reads and without."""
    rows, patient = [], stragglers.is_late
    for name, seconds, hedged in (
        ("none", 0.001, True),
        ("one: 1 s a request", 1.0, False),
        ("one: 1 s a request", 1.0, True),
        ("one: 60 s a request", 60.0, True),
    ):
        place = Path(tempfile.mkdtemp(prefix="restart-"))
        stragglers.is_late = patient if hedged else lambda *_: False  # type: ignore[assignment]
        try:
            every = forked(ranks, lambda rank, s=seconds, p=place: rank_of(rank, ranks, p, nbytes, s, rounds))  # type: ignore[misc]
        finally:
            stragglers.is_late = patient
            shutil.rmtree(place)
        took = sorted(one["seconds"] for one in every[0])
        told = [one["named"] for each in every for one in each if one["named"]]
        said = f"{min(told):.1f}–{max(told):.1f}" if told else "–"
        middle = f"{statistics.median(took):.2f} ({took[0]:.2f}–{took[-1]:.2f})"
        rows.append([name, "yes" if hedged else "no", middle, said])
        say(f"{rows[-1]}")
    return table("late | hedged | restore, s | named after, s", rows)


def main() -> int:
    """Measure, print tables, draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[16, 104, 1000, 10_000])
    parser.add_argument("--leaves", type=int, default=2000, help="tensors that a rank wants a part of")
    parser.add_argument("--shapes", type=some_of(SHAPES), default=list(SHAPES), help=",".join(SHAPES))
    parser.add_argument("--plot", type=Path, help="file of the plot")
    parser.add_argument("--late", action="store_true", help="restore with real ranks, one of which is late")
    parser.add_argument("--rounds", type=int, default=3, help="of --late")
    args = parser.parse_args()
    print(facts_line(Path(tempfile.gettempdir())), "", sep="\n")
    if args.late:
        print(late(8, 256 << 20, args.rounds))
        return 0
    found = [measured(shape, ranks, args.leaves) for shape in args.shapes for ranks in args.ranks]
    print(*tables_of(found), sep="\n\n")
    if args.plot:
        draw(found, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
