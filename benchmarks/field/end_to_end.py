"""A training run end to end with each checkpointer, as DataStates-LLM (HPDC'24) compares them.

python -m benchmarks.field.end_to_end [--sizes 1GiB,…] [--steps 50] [--every 10,5,2,1] [--peers none,…] [--path DIR]

A GPT with its AdamW is trained for so many steps, with a save each so many of them, and the run ends when all of them
are on the disk. Its work lost is what a kill at any moment of the run would cost on average: the time since the start
of the last save that was on the disk by then. The peers take turns, each run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.competitor import Competitor, Pending
from benchmarks.field import find
from benchmarks.files import sync_tree
from benchmarks.gauge import settle
from benchmarks.machine import facts_line, touch_memory
from benchmarks.results import Results
from benchmarks.rounds import say, some_of, takers
from benchmarks.state import State
from benchmarks.tables import table
from benchmarks.training import Trainer
from tierstate.tiers.units import parse_size

PEERS = ("none", "torch", "dcp", "dcp-async", "torchsnapshot", "eager", "lazy")


class Run:
    """One training run.

    Args:
        every: steps between two saves.

    Attributes:
        blocked: seconds of each save call, and of waits before optimizer steps, all together.
        saves: when each save began and was on the disk, in seconds since the start of the run.
    """

    def __init__(self, competitor: Competitor | None, state: State, every: int) -> None:
        self._competitor, self._state, self._every = competitor, state, every
        self.blocked = 0.0
        self.saves: list[tuple[float, Future[float]]] = []
        self._durable = ThreadPoolExecutor(1)
        self._start = time.monotonic()

    def train(self, steps: int) -> dict[str, Any]:
        """All steps; seconds, and work lost at a kill."""
        trainer, waited = Trainer(self._state), self._waited()
        trainer.step()
        self._start = time.monotonic()
        for step in range(1, steps + 1):
            trainer.step()
            if self._competitor is not None and step % self._every == 0:
                self.save(self._competitor, step)
        trained = self._now()
        ends = [(start, end.result()) for start, end in self.saves]
        total = self._now()
        blocked = self.blocked + self._waited() - waited
        return {"total": total, "trained": trained, "blocked": blocked, "lost": lost_on_average(ends, trained)}

    def save(self, competitor: Competitor, number: int) -> None:
        """Save, and wait for the end of it beside the training. The save before the one before it is removed then."""
        start = self._now()
        pending = competitor.save(self._state, number)
        settle()
        self.blocked += self._now() - start
        before = number - 2 * self._every
        self.saves.append((start, self._durable.submit(self._wait, competitor, pending, number, before)))

    def _wait(self, competitor: Competitor, pending: Pending, number: int, before: int) -> float:
        pending.durable()
        if (place := competitor.place(number)).exists():
            sync_tree(place)
        end = self._now()
        old = competitor.place(before)
        if before > 0 and old.exists():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return end

    def _waited(self) -> float:
        return 0.0 if self._competitor is None else self._competitor.waited()

    def _now(self) -> float:
        return time.monotonic() - self._start


def lost_on_average(saves: list[tuple[float, float]], until: float) -> float:
    """Seconds of work that a kill costs, on average over all moments until then.

    Args:
        saves: when each began, whose state it has, and when it was durable.
    """
    lost, have, at = 0.0, 0.0, 0.0
    for start, durable in [*sorted(saves, key=lambda save: save[1]), (0.0, until)]:
        end = min(durable, until)
        lost += (end - at) * ((at + end) / 2 - have)
        have, at = max(have, start), max(at, end)
    return lost / until if until else 0.0


def measured(peer: str, nbytes: int, every: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run, in a process of its own."""
    folder = tempfile.mkdtemp(prefix="tierstate-field-", dir=path)
    try:
        what = ["--peer", peer, "--sizes", str(nbytes), "--every", str(every), "--steps", str(steps), "--path", folder]
        command = [sys.executable, "-m", "benchmarks.field.end_to_end", *what]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    finally:
        shutil.rmtree(folder)


def train(peer: str, nbytes: int, every: int, steps: int, root: Path) -> dict[str, Any]:
    """The run of this process. One save before it warms up."""
    torch.set_num_threads(2)
    state = State(nbytes)
    competitor = None if peer == "none" else find(peer)(root)
    if competitor is not None:
        competitor.open(state)
        competitor.save(state, 0).durable()
    found = Run(competitor, state, every).train(steps)
    if competitor is not None:
        competitor.close()
    return found | {"nbytes": state.nbytes}


HEAD = "state, GiB | a save each | | total, s | / no save | blocked, s | work lost at a kill, s"


def run(states: list[int], steps: int, intervals: list[int], peers: list[str], path: str | None) -> list[list[str]]:
    """Measure all; the rows of a table."""
    rows = []
    for size in states:
        base = measured("none", size, 1, steps, path) if "none" in peers else None
        for every in intervals:
            for peer in peers:
                if peer == "none":
                    continue
                found = measured(peer, size, every, steps, path)
                say(f"{size >> 20} MiB, each {every}, {peer}: {found['total']:.1f} s, blocked {found['blocked']:.2f} s")
                cells = [f"{found['nbytes'] / 2**30:.2f}", f"{every} steps", find(peer).title, f"{found['total']:.1f}"]
                cells.append(f"{found['total'] / base['total']:.2f}" if base else "")
                rows.append([*cells, f"{found['blocked']:.2f}", f"{found['lost']:.1f}"])
        if base:
            rows.append([f"{base['nbytes'] / 2**30:.2f}", "never", "", f"{base['total']:.1f}", "1.00", "0", ""])
    return rows


def draw(rows: list[list[str]], path: Path) -> None:
    """Write a PNG of how much longer runs took."""
    from benchmarks.plot import draw_groups  # only a plot needs matplotlib

    panels: dict[str, dict[str, dict[str, float]]] = {}
    for name, column in (("time of the whole run / of one without saves", 4), ("training blocked by saves, s", 5)):
        groups = panels[name] = dict[str, dict[str, float]]()
        for row in rows:
            if row[2] and row[4]:
                groups.setdefault(f"{row[0]} GiB\na save each {row[1]}", {})[row[2]] = float(row[column])
    draw_groups(path, "A training run end to end: less is better", panels)


def numbers(text: str) -> list[int]:
    """The numbers of a list with commas."""
    return [int(part) for part in text.split(",")]


def sizes(text: str) -> list[int]:
    """The bytes of a list of sizes with commas."""
    return [parse_size(part) for part in text.split(",")]


def main() -> None:
    """Measure, and print a table; or be one run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field.end_to_end", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes, default=[1 << 30, 1_400_000_000])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=numbers, default=[10, 5, 2, 1], help="steps between two saves")
    parser.add_argument("--peers", type=some_of(PEERS), default=list(PEERS), help=",".join(PEERS))
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(train(args.peer, args.sizes[0], args.every[0], args.steps, Path(args.path))))
        return
    say(f"memory touched once, in {touch_memory():.0f} s")
    peers = ["none", *takers([peer for peer in args.peers if peer != "none"], Results(options={}))]
    found = run(args.sizes, args.steps, args.every, peers, args.path)
    place = Path(args.path or tempfile.gettempdir())
    print(facts_line(place), "", table(HEAD, found), sep="\n")
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
