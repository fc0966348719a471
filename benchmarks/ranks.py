"""Many ranks: what one process pays that merges the parts of up to ten thousand, and how that grows.

python -m benchmarks.ranks [--ranks 16,104,1000,10000] [--leaves 100] [--shapes fsdp,…] [--plot FILE]

No rank runs: what each would give is made here, and a process of its own does what the coordinator of a save does with
it: shares out what several ranks hold, reads the parts, merges them, joins their layouts, encodes the record. Then it
does what every rank does on a restore: reads the record, and finds what is its own. Seconds are of one core: none of
this waits, and other programs of the machine are not to count.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.gauge import Peak
from benchmarks.machine import facts_line
from benchmarks.rounds import say, some_of
from benchmarks.tables import table
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Boxes
from tierstate.manifest.format.layout import LayoutBuilder
from tierstate.manifest.format.leaf import Leaf, LeafTable, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Shards, Version
from tierstate.manifest.sharded.merge import MergePlan, join_layouts, merge_parts, rows_in_merged
from tierstate.manifest.sharded.ownership import SaveCandidates, assign_owners
from tierstate.manifest.sharded.part import PartReader, encode_part, part_of

T = TypeVar("T")
HOST = 8
"""Ranks of a host; also replicas of a group and stages of a pipeline."""
SHAPES = {
    "fsdp": "every tensor cut by rows over all ranks",
    "hsdp": f"cut over groups of {HOST} ranks, all of which hold the same",
    "stages": f"{HOST} stages of a pipeline, the tensors of each cut over its ranks",
    "own": "as fsdp, and a leaf that each rank has its own of",
}
STEPS = ("share out", "read parts", "merge", "join", "encode record", "merge again", "read record", "place", "own part")
"""The commit of a first save is the second to the fifth; a later one of the same shards has `merge again` for `merge`.
"""


class Held(NamedTuple):
    """What a rank holds."""

    catalog: LeafTable
    shards: Shards
    single: Array


def held(shape: str, ranks: int, leaves: int) -> Iterator[Held]:
    """What each rank holds."""
    cut = ranks if shape in ("fsdp", "own") else ranks // HOST
    stages = HOST if shape == "stages" else 1
    catalogs = [LeafTable.of(tensors(stage, leaves, cut)) for stage in range(stages)]
    for rank in range(ranks):
        catalog = catalogs[rank % stages]
        piece = rank if cut == ranks else rank // HOST
        ndim, numbers = catalog.wholes.ndim[1:], catalog.wholes.shape.copy()
        offset = np.zeros_like(numbers)
        first = catalog.wholes.starts[1:]
        numbers[first] //= cut
        offset[first] = piece * numbers[first]
        boxes, count = Boxes(ndim, offset, numbers), leaves
        if shape == "own":
            own = [Leaf(("rng",), Spec("dict")), Leaf(("rng", rank), Spec("value", shape=(100,)))]
            catalog, count = LeafTable.of([*catalog.leaves, *own]), leaves + 1
            boxes = Boxes.concat([boxes, Boxes.wholes([(100,)])])
        leaf = np.flatnonzero(catalog.has_bytes).astype("<u4")
        yield Held(catalog, Shards(leaf, np.full(count, rank, "<u4"), boxes), np.arange(count) < leaves)


def tensors(stage: int, count: int, cut: int) -> list[Leaf]:
    """Leaves as of a transformer, rows of which each rank has four."""
    names = [
        ("model", f"stages.{stage}.layers.{i // 8}", ("attention", "mlp")[i % 2], f"w{i % 8}") for i in range(count)
    ]
    shapes = [(4 * cut, 64) if i % 4 else (4 * cut,) for i in range(count)]
    return [
        Leaf((), Spec("dict")),
        *(Leaf(name, Spec("tensor", "float32", 4, shape)) for name, shape in zip(names, shapes, strict=True)),
    ]


def record_of(rank: int, mine: Held, chosen: Array) -> Record:
    """A rank's part: these of its shards, each in one chunk, in one pack."""
    rows = np.flatnonzero(chosen)
    shards = Shards(mine.shards.leaf[rows], mine.shards.rank[rows], mine.shards.boxes[rows])
    # Of replicas only one saves: nobody ever compares digests here.
    digests = np.random.default_rng(rank).integers(0, 1 << 63, (len(rows), 2), "u8")
    head = Head("run", 1, 100, 1.6e9 + rank, metadata={"loss": 1 / (rank + 1)})
    version = Version.build(head, mine.catalog, shards, digests)
    draft, key = LayoutBuilder(len(rows)), f"packs/run/000000000001-{rank}-0-{'0' * 16}"
    draft.put_run(np.arange(len(rows)), key, 4096 * np.arange(len(rows)), version.chunk_nbytes, "raw")
    return Record(version, draft.build({key: 4096 * (len(rows) + 1)}), {"id": f"{rank:032x}"})


def timed(into: dict[str, float], name: str, call: Callable[[], T]) -> T:
    """What the call gave; its CPU seconds go into the table."""
    start = time.process_time()
    found = call()
    into[name] = time.process_time() - start
    return found


def ranks_side(shape: str, ranks: int, leaves: int, folder: Path) -> dict[str, float]:
    """Make what each rank would give; seconds of one, as a median."""
    holders = list(held(shape, ranks, leaves))
    given, took, parts = [], [], []
    for catalog, shards, single in holders:
        leaf, boxes = shards.leaf[single], shards.boxes[np.flatnonzero(single)]
        paths = [catalog.paths[i] for i in leaf.tolist()]
        given.append(SaveCandidates(paths, boxes, boxes.volumes * catalog.itemsize[leaf]))
    sharing = assign_owners(given)
    for rank, mine in enumerate(holders):
        chosen = np.ones(len(mine.single), bool)
        chosen[mine.single] = sharing.owners_of(rank, given[rank]) == rank
        record = record_of(rank, mine, chosen)
        start = time.process_time()
        parts.append(encode_part(record))
        took.append(time.process_time() - start)
    # Made here and read here: a file of this program's own.
    (folder / "parts").write_bytes(pickle.dumps(parts))
    (folder / "tables").write_bytes(pickle.dumps([one.encode() for one in given]))
    return {"encode part": statistics.median(took)}


def coordinate(folder: Path) -> dict[str, Any]:
    """Do what the coordinator does; seconds, peak memory beyond what the process had, and bytes."""
    seconds: dict[str, float] = {}
    peak = Peak()
    tables: list[bytes] = pickle.loads((folder / "tables").read_bytes())
    sizes = {"tables": sum(map(len, tables)), "sharing": timed(seconds, "share out", partial(shared, tables))}
    del tables
    parts: list[bytes] = pickle.loads((folder / "parts").read_bytes())
    pieces: dict[bytes, LeafTable] = {}
    reader = PartReader(pieces)
    records = timed(seconds, "read parts", lambda: [reader.decode(data) for data in parts])
    merged = timed(seconds, "merge", lambda: merge_parts([r.version for r in records]))
    # The next save, as mostly only digests change.
    plan = MergePlan([r.version for r in records], merged)
    del records
    reader = PartReader(pieces)
    records = [reader.decode(data) for data in parts]
    again = timed(seconds, "merge again", lambda: plan.again([r.version for r in records]))
    assert again is not None
    version, rows, _ = again
    pairs = [(mine, r.layout) for mine, r in zip(rows, records, strict=True)]
    records[:] = records[-1:]  # as the coordinator forgets the parts
    layout = timed(seconds, "join", lambda: join_layouts(version, pairs))
    data = timed(seconds, "encode record", Record(version, layout, {"id": "x"}).encode)
    extra = peak.extra()
    sizes |= {"parts": sum(map(len, parts)), "record": len(data), "version": len(version.data)}
    whole = timed(seconds, "read record", lambda: Record.decode(memoryview(data)))
    timed(seconds, "place", lambda: rows_in_merged(whole.version, records[-1].version))
    timed(seconds, "own part", lambda: part_of(whole, len(parts) - 1))
    return {"seconds": seconds, "peak": extra, "bytes": sizes, "chunks": len(version.digests)}


def shared(tables: list[bytes]) -> int:
    """Share out, and encode for each rank what it needs of that: how many bytes."""
    sharing = assign_owners([SaveCandidates.decode(data) for data in tables])
    return sum(len(sharing.of([rank]).encode()) for rank in range(len(tables)))


def measured(shape: str, ranks: int, leaves: int) -> dict[str, Any]:
    """One size of one shape; the coordinator is a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tierstate-ranks-"))
    try:
        told = ranks_side(shape, ranks, leaves, folder)
        command = [sys.executable, "-m", "benchmarks.ranks", "--coordinate", str(folder)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found: dict[str, Any] = json.loads(out)
    finally:
        shutil.rmtree(folder)
    found["seconds"] |= told
    say(f"{shape}, {ranks} ranks: {sum(found['seconds'][s] for s in STEPS[1:5]):.2f} s, {found['peak'] >> 20} MiB")
    return {"shape": shape, "ranks": ranks, **found}


def tables_of(found: list[dict[str, Any]]) -> Iterator[str]:
    """What was found, as tables."""
    for shape in dict.fromkeys(f["shape"] for f in found):
        mine = [f for f in found if f["shape"] == shape]
        yield f"### {shape}: {SHAPES[shape]}"
        head = ["ranks", "chunks", *STEPS[:5], "commit, s", "peak, MiB", *STEPS[5:], "encode part"]
        yield table(" | ".join(head), [times(f) for f in mine])
        head = ["ranks", "tables in", "sharing out", "parts in", "record", "version", "version to all hosts"]
        yield table(" | ".join(head) + " | requests, site | requests, hosts", [amounts(f) for f in mine])


def times(f: dict[str, Any]) -> list[str]:
    """A row of seconds; the commit is from reading the parts to the record's bytes."""
    s = f["seconds"]
    commit = sum(s[step] for step in STEPS[1:5])
    steps = [f"{s[step]:.3f}" for step in STEPS]
    head = [f"{f['ranks']:,}", f"{f['chunks']:,}", *steps[:5], f"{commit:.2f}", f"{f['peak'] / 2**20:.0f}"]
    return [*head, *steps[5:], f"{s['encode part']:.4f}"]


def amounts(f: dict[str, Any]) -> list[str]:
    """A row of MiB, and of requests.

    On a site-wide tier each rank puts a pack and the coordinator the record. On tiers of hosts each rank puts a pack
    and each host's leader a record.
    """
    b, ranks = f["bytes"], f["ranks"]
    hosts = -(-ranks // HOST)
    sizes = [b["tables"], b["sharing"], b["parts"], b["record"], b["version"], b["version"] * (hosts - 1)]
    return [f"{ranks:,}", *(f"{n / 2**20:,.2f}" for n in sizes), f"{ranks + 1:,}", f"{ranks + hosts:,}"]


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Growth: seconds of the commit and of each step, peak memory and bytes, by ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    left, middle, right = figure.subplots(1, 3)
    first = [f for f in found if f["shape"] == found[0]["shape"]]
    for step in STEPS[:6]:
        left.plot([f["ranks"] for f in first], [f["seconds"][step] for f in first], marker=".", label=step)
    for shape in dict.fromkeys(f["shape"] for f in found):
        mine = [f for f in found if f["shape"] == shape]
        ranks = [f["ranks"] for f in mine]
        middle.plot(ranks, [sum(f["seconds"][s] for s in STEPS[1:5]) for f in mine], marker=".", label=shape)
        right.plot(ranks, [f["bytes"]["parts"] / 2**20 for f in mine], marker=".", label=f"{shape}: parts in")
        right.plot(ranks, [f["peak"] / 2**20 for f in mine], "--", label=f"{shape}: peak memory")
    for axis, name in ((left, f"{found[0]['shape']}: steps, s"), (middle, "commit, s"), (right, "MiB")):
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=name)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Measure, print tables, draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[16, 104, 1000, 10_000])
    parser.add_argument("--leaves", type=int, default=100, help="tensors that a rank has shards of")
    parser.add_argument("--shapes", type=some_of(SHAPES), default=list(SHAPES), help=",".join(SHAPES))
    parser.add_argument("--plot", type=Path, help="file of the plot")
    parser.add_argument("--coordinate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.coordinate:
        print(json.dumps(coordinate(args.coordinate)))
        return
    if odd := [n for n in args.ranks if n % HOST]:
        parser.error(f"{odd[0]} ranks are not groups of {HOST}")
    print(facts_line(Path(tempfile.gettempdir())), "", sep="\n")
    found = [measured(shape, ranks, args.leaves) for shape in args.shapes for ranks in args.ranks]
    print(*tables_of(found), sep="\n\n")
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
