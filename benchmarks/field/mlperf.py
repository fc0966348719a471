"""The checkpointing of MLPerf Storage, scaled down: ranks that save together, each a shard of a Llama.

python -m benchmarks.field.mlperf [--models llama3-8b,…] [--ranks 1,8] [--peers tierstate,…] [--times 10] [--path DIR]

As its rules say: every checkpoint has other bytes and is on the disk, synced, before the next begins; then the page
cache is dropped and the last one is read, again and again. Its figure is bytes over the seconds of the slowest rank.
Only the first ranks of a job run here, with the shards that they have in the whole job.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierstate as ts
from benchmarks.competitor import Competitor, Pending
from benchmarks.field import find
from benchmarks.field.ours import Eager
from benchmarks.field.shapes import LLAMAS, SCALE, Shard
from benchmarks.files import make_cold, sync_tree
from benchmarks.machine import facts_line, touch_memory
from benchmarks.results import Results
from benchmarks.rounds import say, some_of, takers
from benchmarks.state import fingerprint, tensors
from benchmarks.tables import table

PEERS = ("tierstate", "torch", "dcp", "torchsnapshot", "direct")
ALONE = ("torch", "direct")
"""They know nothing of ranks: each rank has a folder of its own."""


class Together(Eager):
    """tierstate, all ranks one version; the shard of each is its own (`ts.PerRank`)."""

    title = "tierstate, `save().wait()`"

    def _checkpointer(self) -> ts.Checkpointer:
        policy = (
            f"arena: {{size: {self.arena}}}\ntiers: {{nvme: {{type: nvme, path: '{self.root}', keep: {{last: 2}}}}}}"
        )
        return ts.Checkpointer(ts.Policy.parse(policy), run="bench", process_group=dist.group.WORLD)

    def save(self, state: Any, number: int) -> Pending:
        assert self._ckpt is not None
        self._ckpt.save({"shard": ts.PerRank(state.live())}, step=number).wait()
        return Pending()

    def restore(self, state: Any, number: int, way: str) -> None:
        assert self._ckpt is not None
        self._ckpt.restore(into={"shard": ts.PerRank(state.live())}, step=number)


class _Rank:
    """One rank: its shard, and how it saves.

    Args:
        root: the folder of all saves.
    """

    def __init__(self, peer: str, model: str, rank: int, root: Path) -> None:
        self._rank, self._root, self._loads = rank, root, peer == "torch"
        self.state: Any = Shard(LLAMAS[model].shard(rank), seed=rank)
        if peer == "dcp":  # which has one value for each name, and not one for each rank
            self.state.named = {f"{rank}.{name}": tensor for name, tensor in self.state.named.items()}
        kind = Together if peer == "tierstate" else find(peer)
        own = root / f"rank-{rank}" if peer in ALONE else root
        own.mkdir(parents=True, exist_ok=True)
        self._saver: Competitor = kind(own)
        self._tidies = peer in ALONE or (rank == 0 and peer != "tierstate")
        self._saver.open(self.state)

    def write(self, number: int) -> float:
        """Save, synced; seconds of the slowest rank. The save before is removed, where that is left to the caller."""
        self.state.change()
        seconds = _slowest(lambda: self._write(number))
        if number and self._tidies:
            old = self._saver.place(number - 1)
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return seconds

    def _write(self, number: int) -> None:
        self._saver.save(self.state, number).durable()
        if self._tidies:
            sync_tree(self._saver.place(number))

    def read(self, number: int, expected: str) -> float:
        """Read a save from a cold disk; seconds of the slowest rank."""
        if self._rank == 0:
            make_cold(self._root)
        loaded: list[Any] = []
        seconds = _slowest(lambda: self._read(number, loaded))
        if self._saver.scattered and fingerprint(tensors(loaded[0]) if loaded else self.state.tensors()) != expected:
            raise ValueError(f"{self._saver.title} gave back other bytes than were saved")
        return seconds

    def _read(self, number: int, loaded: list[Any]) -> None:
        if self._loads:  # as DLIO's own class reads
            loaded.append(self._saver.load(number))
        else:
            self._saver.restore(self.state, number, self._saver.ways[0])

    def close(self) -> None:
        """Let go of everything."""
        self._saver.close()


def work(args: argparse.Namespace) -> dict[str, Any]:
    """What one rank does. Seconds of each write and read, of the slowest rank, and bytes of all ranks."""
    torch.set_num_threads(1)
    store = f"file://{args.folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=args.rank, world_size=args.ranks[0])
    mine = _Rank(args.peer, args.models[0], args.rank, args.folder / "saves")
    writes = [mine.write(number) for number in range(args.times)]
    expected = fingerprint(mine.state.tensors())
    mine.state.change()
    reads = [mine.read(args.times - 1, expected) for _ in range(args.times)]
    total = torch.tensor([mine.state.nbytes])
    dist.all_reduce(total)
    mine.close()
    dist.destroy_process_group()
    return {"nbytes": int(total), "tensors": len(mine.state.named), "writes": writes, "reads": reads}


def _slowest(call: Callable[[], None]) -> float:
    dist.barrier()
    start = time.monotonic()
    call()
    seconds = torch.tensor([time.monotonic() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measured(peer: str, model: str, ranks: int, times: int, path: str | None) -> dict[str, Any]:
    """Run all ranks, each a process of its own; what they found."""
    folder = Path(tempfile.mkdtemp(prefix="tierstate-mlperf-", dir=path))
    try:
        common = ["--peer", peer, "--models", model, "--ranks", str(ranks), "--times", str(times)]
        command = [sys.executable, "-m", "benchmarks.field.mlperf", *common, "--folder", str(folder)]
        processes = [subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE) for rank in range(ranks)]
        found = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError(f"{peer}: a rank has failed")
        told: dict[str, Any] = json.loads(found[0].splitlines()[-1])
        return told
    finally:
        shutil.rmtree(folder)


def row(model: str, ranks: int, peer: str, found: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """GB/s by medians, and how many times tierstate's seconds."""
    cells = []
    for what in ("writes", "reads"):
        seconds, base = statistics.median(found[what]), statistics.median(ours[what])
        low, high = min(found[what]), max(found[what])
        rate = f"{found['nbytes'] / seconds / 1e9:.2f}"
        cells += [rate, f"{seconds:.2f} ({low:.2f} to {high:.2f})", f"{seconds / base:.2f}"]
    title = "tierstate" if peer == "tierstate" else find(peer).title
    return [model, str(ranks), f"{found['nbytes'] / 2**30:.2f}", f"{found['tensors']}", title, *cells]


HEAD = "model | ranks | GiB | tensors of rank 0 | | write, GB/s | s | / tierstate | read, GB/s | s | / tierstate"


def run(models: list[str], ranks: list[int], peers: list[str], times: int, path: str | None) -> list[list[str]]:
    """Measure all; the rows of a table."""
    rows = []
    for model in models:
        for count in ranks:
            if count > LLAMAS[model].ranks:
                continue
            found: dict[str, dict[str, Any]] = {}
            for peer in [*peers, *peers]:
                one = measured(peer, model, count, -(-times // 2), path)
                say(f"{model}, {count} ranks, {peer}: {statistics.median(one['writes']):.2f} s")
                for what in ("writes", "reads"):
                    one[what] = [*found.get(peer, {}).get(what, ()), *one[what]]
                found[peer] = one
            rows += [row(model, count, peer, one, found[peers[0]]) for peer, one in found.items()]
    return rows


def draw(rows: list[list[str]], path: Path) -> None:
    """Write a PNG of the rates."""
    from benchmarks.plot import draw_groups  # only a plot needs matplotlib

    panels: dict[str, dict[str, dict[str, float]]] = {}
    for name, column in (("write, GB/s", 5), ("read with a cold cache, GB/s", 8)):
        groups = panels[name] = dict[str, dict[str, float]]()
        for row in rows:
            group = f"{row[0].removeprefix('llama3-')}, {row[1]} rank{'s' * (row[1] != '1')}\n{row[2]} GiB"
            groups.setdefault(group, {})[row[4]] = float(row[column])
    draw_groups(path, f"MLPerf Storage's Llama 3, tensors of 1/{SCALE}: more is better", panels)


def main() -> None:
    """Measure, and print a table; or be one rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field.mlperf", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=some_of(LLAMAS), default=list(LLAMAS), help=",".join(LLAMAS))
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--peers", type=some_of(PEERS), default=list(PEERS), help=",".join(PEERS))
    parser.add_argument(
        "--times", type=int, default=10, help="writes, and reads, half of them after all peers have had their turn"
    )
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(work(args)))
        return
    say(f"memory touched once, in {touch_memory():.0f} s")
    peers = ["tierstate", *takers([peer for peer in args.peers if peer != "tierstate"], Results(options={}))]
    found = run(args.models, args.ranks, peers, args.times, args.path)
    place = Path(args.path or tempfile.gettempdir())
    print(facts_line(place), f"scale: 1/{SCALE}", "", table(HEAD, found), sep="\n")
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
