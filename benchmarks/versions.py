"""Many versions: what a mostly frozen state costs, and how long it takes to list, compare and prune a long run.

python -m benchmarks.versions [--size 1GiB] [--frozen 0.95] [--saves 6] [--chunks 1000000] [--path DIR]

Versions of a long run are written as records and packs, without training: ten thousand for `ls`, one thousand for
`prune`. Every figure is a median of what was repeated, and says how often.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import yaml

import tierstate as ts
from benchmarks.machine import facts_line
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.format.layout import LayoutBuilder
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.diff import diff_versions
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.base import Tier
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.units import parse_size

TENSORS = 200
BODY = bytes(4096)


def policy(place: Path, **keys: object) -> ts.Policy:
    """One directory."""
    tiers = {"nvme": {"type": "nvme", "path": str(place), **keys}}
    return ts.Policy.parse(yaml.safe_dump({"version": 1, "arena": {"size": "1GiB"}, "tiers": tiers}))


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Seconds that the block took."""
    start = time.perf_counter()
    yield
    into.append(time.perf_counter() - start)


def frozen(root: Path, nbytes: int, share: float, saves: int) -> str:
    """Saves of a state of which so much never changes, beside saves of one that changes altogether."""
    count = nbytes // 2 // TENSORS
    state = {f"layers.{i}": (torch.randn(count) * 0.02).bfloat16() for i in range(TENSORS)}
    trained = list(state.values())[: round(TENSORS * (1 - share))]
    seconds: dict[str, list[float]] = {"all": [], "part": []}
    stored: dict[str, list[int]] = {"all": [], "part": []}
    with ts.Checkpointer(policy(root / "frozen", keep={"last": 1}), "bench") as ckpt:
        ckpt.save(state, step=0).wait()
        for step in range(1, 2 * saves + 1):
            what = "all" if step % 2 else "part"
            for tensor in state.values() if what == "all" else trained:
                tensor.add_(1e-3)
            before = ckpt.stats().tiers["nvme"].stored
            with timed(seconds[what]):
                ckpt.save(state, step=step).wait()
            records = (root / "frozen" / "versions" / "bench").iterdir()
            stored[what].append(ckpt.stats().tiers["nvme"].stored - before + max(p.stat().st_size for p in records))
            say(f"{what}: {stored[what][-1] / nbytes:.4f} of the state, {seconds[what][-1]:.3f} s")
    full = statistics.median(seconds["all"])
    rows = [
        [
            what,
            f"{statistics.median(stored[key]) / statistics.median(stored['all']):.4f}",
            f"{statistics.median(seconds[key]):.3f}",
            f"{statistics.median(seconds[key]) / full:.3f}",
        ]
        for what, key in (("all of it changes", "all"), (f"{share:.0%} is frozen", "part"))
    ]
    return table("state | bytes written / all | durable, s | / all", rows)


def version(seq: int, chunks: int = 4, parent: str = "") -> Version:
    """A version of one leaf."""
    leaf = Leaf(("w",), Spec("tensor", "uint8", 1, (16 * chunks,)))
    head = Head("run", seq, seq, 1.6e9 + seq, parent, chunk=16, metadata={"loss": 1 / seq})
    digests = np.random.default_rng(seq).integers(0, 1 << 63, (chunks, 2), "u8")
    return Version.build(head, [leaf], [ShardRow(0, 0, Box.whole((16 * chunks,)))], digests)


def record(found: Version, key: str) -> Record:
    """A record of it whose chunks lie one after the other in one pack."""
    rows = np.arange(len(found.digests))
    draft = LayoutBuilder(len(rows))
    draft.put_run(rows, key, 16 * rows, 16, "raw")
    return Record(found, draft.build({key: max(len(BODY), 16 * len(rows))}), {"id": commit_id()})


def run_of(tier: Tier, count: int, *, packs: bool) -> None:
    """So many versions, each with a pack of its own, or all with one."""
    log = Log(tier, "run")
    for seq in range(1, count + 1):
        key = f"packs/run/{seq if packs else 1:012d}-0-0-abc"
        if packs:
            tier.put(key, as_buffer(BODY))
        log.commit(record(version(seq), key))


def repeated(times: int, work: Callable[[], object]) -> float:
    """Median seconds of some calls."""
    seconds: list[float] = []
    for _ in range(times):
        with timed(seconds):
            work()
    return statistics.median(seconds)


def long_runs(root: Path) -> list[list[str]]:
    """Listing and pruning."""
    rows = []
    tier = Nvme(path=root / "listed")
    run_of(tier, 10_000, packs=False)
    say("ten thousand records written")

    def listing() -> None:
        with ts.Checkpointer(policy(root / "listed"), "run") as ckpt:
            assert len(ckpt.versions()) == 10_000

    rows.append(["`ls` of 10,000 versions, no index", f"{repeated(1, listing):.2f} s", ""])
    with ts.Checkpointer(policy(root / "listed"), "run") as ckpt:
        ckpt._tier_runs[0].summaries.look()
        ckpt._tier_runs[0].summaries.write()
    rows.append(["`ls` of 10,000 versions, with the index that savers keep", f"{repeated(5, listing):.2f} s", "1 s"])
    run_of(Nvme(path=root / "pruned"), 1000, packs=True)
    with ts.Checkpointer(policy(root / "pruned", keep={"last": 1}), "run") as ckpt:
        seconds: list[float] = []
        with timed(seconds):
            report = ckpt.prune(grace=0)
        assert len(report.tiers[0].drop) == 999, report
    rows.append(["`prune` of 999 of 1,000 versions, each with a pack, synced", f"{seconds[0]:.2f} s", "10 s"])
    return rows


def manifest(root: Path, chunks: int) -> list[list[str]]:
    """One version of very many chunks."""
    tier, seconds = Nvme(path=root / "manifest"), []
    log = Log(tier, "run")
    key = "packs/run/000000000001-0-0-abc"
    one, other = version(1, chunks), version(2, chunks)
    for seq in range(1, 6):
        fresh = record(version(seq, chunks), key)
        with timed(seconds):
            log.commit(fresh)
    opened = repeated(5, lambda: log.read(3))
    compared = repeated(5, lambda: diff_versions(one, other))
    what = f"{chunks:,} chunks"
    return [
        [f"{what}: encode and commit, synced", f"{statistics.median(seconds):.2f} s", "1 s"],
        [f"{what}: open", f"{opened:.2f} s", "0.2 s"],
        [f"{what}: diff", f"{compared:.2f} s", "1 s"],
    ]


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--frozen", type=float, default=0.95)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-versions-", dir=args.path))
    try:
        print(facts_line(root), "", sep="\n")
        print(frozen(root, args.size, args.frozen, args.saves), "", sep="\n")
        print(table("what | took | aimed at", [*manifest(root, args.chunks), *long_runs(root)]))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
