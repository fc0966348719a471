"""Many leaves, and small states: what a save and a restore cost that hardly move bytes, beside torch.save and DCP.

python -m benchmarks.leaves [--leaves 100,1000,10000] [--rounds 7] [--path DIR]

All ways take turns in each round; restores and loads are from a warm page cache for the peers, and by direct I/O for
tierstate, whose reads do not use it. A quarter of the leaves are matrices of 64 KiB, the others vectors of 256 B.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import tierstate as ts
from benchmarks.machine import facts_line
from benchmarks.tables import table

OURS = "tierstate, `restore` in place"
SMALL = 16 << 20
"""Bytes of a small state that is saved at each step."""


LARGE = 18 << 20
"""Bytes of a large tensor: a little longer than a chunk."""


def state_of(leaves: int) -> dict[str, torch.Tensor]:
    """Parameters as a module has them: a matrix and three vectors each."""
    return {f"layers.{i // 4}.{'wbgn'[i % 4]}": torch.randn((128, 128) if i % 4 == 0 else (64,)) for i in range(leaves)}


class Ways:
    """All ways of one state, saved once by each."""

    def __init__(self, root: Path, state: dict[str, torch.Tensor]) -> None:
        self._state, self._root = state, root
        policy = f"tiers: {{nvme: {{type: nvme, path: '{root / 'ours'}', keep: {{last: 2}}}}}}"
        self._ckpt = ts.Checkpointer(ts.Policy.parse(policy), run="leaves")
        self._ckpt.save(state, step=0).wait()
        self._step = 0
        torch.save(state, root / "state.pt")
        self._dcp_save()

    def reads(self) -> dict[str, Callable[[], object]]:
        """What is measured of restores."""
        return {
            OURS: lambda: self._ckpt.restore(into=self._state),
            "tierstate, `load`": self._ckpt.load,
            "`torch.load`": lambda: torch.load(self._root / "state.pt"),
            "`torch.load(mmap=True)` and copies in place": self._mapped,
            "DCP `load` in place": lambda: dcp.load(self._state, checkpoint_id=self._root / "dcp", no_dist=True),
        }

    def saves(self) -> dict[str, Callable[[], object]]:
        """What is measured of saves: until the training may go on."""
        return {
            "tierstate, `save` blocked": self._save,
            "`torch.save`": lambda: torch.save(self._state, self._root / "again.pt"),
            "DCP `save`": self._dcp_save,
        }

    def _save(self) -> float:
        """Seconds until the state is captured; then it is waited for."""
        for tensor in self._state.values():
            tensor.add_(1.0)
        self._step += 1
        start = time.perf_counter()
        made = self._ckpt.save(self._state, step=self._step)
        seconds = time.perf_counter() - start
        made.wait()
        return seconds

    def _mapped(self) -> None:
        found = torch.load(self._root / "state.pt", mmap=True)
        for name, tensor in found.items():
            self._state[name].copy_(tensor)

    def _dcp_save(self) -> None:
        shutil.rmtree(self._root / "dcp", ignore_errors=True)
        dcp.save(self._state, checkpoint_id=self._root / "dcp", no_dist=True)

    def close(self) -> None:
        """End the saves."""
        self._ckpt.close()


def measured(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            said = call()
            seconds = said if isinstance(said, float) else time.perf_counter() - start
            if number:
                found[name].append(seconds)
    return found


def rows_of(found: dict[str, list[float]], leaves: int) -> list[list[str]]:
    """Rows of a table: the median, least and most, for each leaf, and as a ratio to the first way."""
    base = statistics.median(next(iter(found.values())))
    return [
        [
            str(leaves),
            name,
            f"{statistics.median(every) * 1e3:.1f} ({min(every) * 1e3:.1f}-{max(every) * 1e3:.1f})",
            f"{statistics.median(every) / leaves * 1e6:.1f}",
            f"{statistics.median(every) / base:.2f}",
        ]
        for name, every in found.items()
    ]


def small_saves(root: Path, rounds: int) -> str:
    """16 MiB saved at each of many steps: the time for which a step is blocked."""
    state = {f"t{i}": torch.randn(SMALL // 400) for i in range(100)}
    policy = f"tiers: {{nvme: {{type: nvme, path: '{root / 'small'}', keep: {{last: 2}}}}}}"
    blocked = []
    with ts.Checkpointer(ts.Policy.parse(policy), run="small") as ckpt:
        for step in range(20 * rounds):
            for tensor in state.values():
                tensor.add_(1.0)
            start = time.perf_counter()
            ckpt.save(state, step=step)
            blocked.append(time.perf_counter() - start)
            time.sleep(0.05)
    steady = sorted(blocked[rounds:])
    return (
        f"16 MiB in 100 tensors, all of it changed, saved at each step of 50 ms: blocked "
        f"{statistics.median(steady) * 1e3:.1f} ms (least {steady[0] * 1e3:.1f}, nine of ten below "
        f"{steady[len(steady) * 9 // 10] * 1e3:.1f})"
    )


def large_saves(root: Path, rounds: int) -> str:
    """Few and large tensors, as of MLPerf's 8b: a save that is not guarded, and what a copy in memory costs."""
    state = {f"t{i}": torch.randn(LARGE // 4) for i in range(32)}
    copy = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    policy = f"tiers: {{nvme: {{type: nvme, path: '{root / 'large'}', keep: {{last: 2}}}}}}"
    blocked, durable, cpu = list[float](), list[float](), list[float]()
    copied: dict[int, list[float]] = {threads: [] for threads in {1, torch.get_num_threads()}}
    with ts.Checkpointer(ts.Policy.parse(policy), run="large") as ckpt:
        for step in range(rounds + 2):
            for threads, found in copied.items():
                before = torch.get_num_threads()
                torch.set_num_threads(threads)
                start = time.perf_counter()
                for name, tensor in state.items():
                    copy[name].copy_(tensor)
                found.append(time.perf_counter() - start)
                torch.set_num_threads(before)
            for tensor in state.values():
                tensor.add_(1.0)
            time.sleep(0.4)  # a step, in which memory is prepared
            start, used = time.perf_counter(), time.process_time()
            save = ckpt.save(state, step=step)
            blocked.append(time.perf_counter() - start)
            save.wait()
            durable.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    first, second, later = blocked[0] * 1e3, blocked[1] * 1e3, statistics.median(blocked[2:]) * 1e3
    copies = ", ".join(
        f"{statistics.median(found[2:]) * 1e3:.1f} ms with {threads} threads" for threads, found in copied.items()
    )
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return (
        f"{nbytes / 2**30:.2f} GiB in 32 tensors, saved each 0.4 s: the first save blocked for {first:.0f} ms, the "
        f"second one for {second:.0f}, later ones for {later:.1f} (least {min(blocked[2:]) * 1e3:.1f}), durable after "
        f"{statistics.median(durable[2:]) * 1e3:.0f} ms; {statistics.median(cpu[2:]) / nbytes * 2**30:.2f} s of "
        f"processor time for a GiB; torch copies as much in {copies}"
    )


def first_bytes(root: Path, rounds: int) -> str:
    """A load of one tensor of many, as of weights alone: a new reader, until the tensor is there."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        policy = ts.Policy.parse(f"tiers: {{nvme: {{type: nvme, path: '{root / 'ours'}'}}}}")
        with ts.Checkpointer(policy, run="leaves") as ckpt:
            ckpt.load(only=['"layers.0.b"'])
            found.append(time.perf_counter() - start)
    return f"A new Checkpointer until one of these tensors is loaded: {statistics.median(found) * 1e3:.0f} ms"


def main() -> None:
    """Measure, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", default="100,1000,10000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--path", type=Path, default=None)
    given = parser.parse_args()
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
    root = Path(tempfile.mkdtemp(prefix="tierstate-leaves-", dir=given.path))
    read, saved = [], []
    try:
        print(facts_line(root))
        for leaves in map(int, given.leaves.split(",")):
            shutil.rmtree(root / "ours", ignore_errors=True)
            ways = Ways(root, state_of(leaves))
            read += rows_of(measured(ways.reads(), given.rounds), leaves)
            saved += rows_of(measured(ways.saves(), given.rounds), leaves)
            ways.close()
        print(table("leaves | restore | ms (least-most) | µs a leaf | / tierstate", read))
        print(table("leaves | save | ms (least-most) | µs a leaf | / tierstate", saved))
        print(first_bytes(root, given.rounds))
        print(small_saves(root, given.rounds))
        print(large_saves(root, given.rounds))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
