"""A training run that is killed (SIGKILL), and another process that goes on: the work lost, and the time to go on.

python -m benchmarks.field.kills [--sizes 1GiB] [--every 5,1] [--kills 3] [--peers torch,…] [--path DIR]

The run of `benchmarks.field.end_to_end` is killed within a step, at the same moments with each checkpointer. A new
process, whose state is in memory, tries one save after the other, the newest first, until one can be read; its bytes
are compared with those that were saved. Work lost is the time from the step whose state that is until the kill.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.competitor import Competitor
from benchmarks.field import find
from benchmarks.field.end_to_end import PEERS, Run, numbers, sizes
from benchmarks.files import make_cold
from benchmarks.machine import facts_line, touch_memory
from benchmarks.results import Results
from benchmarks.rounds import say, some_of, takers
from benchmarks.state import State, fingerprint
from benchmarks.tables import table
from benchmarks.training import Trainer

READERS = {"dcp-async": "dcp", "lazy": "eager"}
"""Who reads the files of those that only differ in how they write."""


FIRST = 12
"""The steps after which the first kill may come: some saves have ended by then."""


def train(peer: str, nbytes: int, every: int, root: Path) -> None:
    """Train and save until killed. Writes a line of each step: its number, when it ended, and what is saved then."""
    torch.set_num_threads(2)
    state = State(nbytes)
    competitor = find(peer)(root)
    competitor.open(state)
    trainer, run = Trainer(state), Run(competitor, state, every)
    for step in count(1):
        trainer.step()
        saves = step % every == 0
        print(json.dumps([step, time.monotonic(), fingerprint(state.tensors()) if saves else ""]), flush=True)
        if saves:
            run.save(competitor, step)


def resume(peer: str, nbytes: int, every: int, newest: int, root: Path) -> dict[str, Any]:
    """Fill a state from the newest save that can be read: its number, seconds, and how many were tried."""
    state = State(nbytes, seed=1)
    reader: Competitor = find(READERS.get(peer, peer))(root)
    make_cold(root)
    start = time.monotonic()
    for tried, number in enumerate(range(newest, 0, -every), 1):
        try:
            reader.restore(state, number, reader.ways[0])
        except (Exception, CheckpointException) as error:  # DCP's is none of the usual ones
            say(f"{peer}: save {number} cannot be read: {type(error).__name__}: {str(error)[:100]!r}")
            continue
        seconds = time.monotonic() - start
        return {"number": number, "seconds": seconds, "tried": tried, "bytes": fingerprint(state.tensors())}
    return {"number": 0, "seconds": time.monotonic() - start, "tried": tried, "bytes": ""}


def killed(peer: str, nbytes: int, every: int, moment: float, path: str | None) -> dict[str, Any]:
    """Kill a run at a moment, in steps, and go on. Raises ValueError if other bytes come back than were saved."""
    folder = tempfile.mkdtemp(prefix="tierstate-kills-", dir=path)
    what = ["--peer", peer, "--sizes", str(nbytes), "--every", str(every), "--path", folder]
    command = [sys.executable, "-m", "benchmarks.field.kills", *what]
    try:
        steps = dict[int, tuple[float, str]]()  # when each ended, and what was saved then
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = map(json.loads, process.stdout)
            for step, ended, saved in lines:
                steps[step] = ended, saved
                if step == int(moment):
                    time.sleep((moment - step) * (ended - steps[1][0]) / (step - 1))
                    break
            else:
                raise RuntimeError(f"{peer} ended by itself after step {max(steps, default=0)}")
            process.kill()
            end = time.monotonic()
            steps |= {step: (ended, saved) for step, ended, saved in lines}  # that ended meanwhile
        newest = ["--newest", str(max(step for step, (_, saved) in steps.items() if saved))]
        found: dict[str, Any] = json.loads(
            subprocess.run([*command, *newest], check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]
        )
    finally:
        shutil.rmtree(folder)
    number = found["number"]
    if number and steps[number][1] != found["bytes"]:
        raise ValueError(f"{peer}: save {number} gave back other bytes than were saved")
    since = steps[number or 1][0]  # before the first save, all is lost
    return found | {"lost": end - since, "steps": max(steps) - number}


HEAD = "a save each | | work lost, s | in steps | until it goes on, s | saves that could not be read"


def run(states: list[int], intervals: list[int], kills: int, peers: list[str], path: str | None) -> list[list[str]]:
    """Measure all; the rows of a table, of medians."""
    chance, rows = random.Random(0), []
    moments = [FIRST + chance.random() * 2 * max(intervals) for _ in range(kills)]
    for size in states:
        for every in intervals:
            for peer in peers:
                found = [killed(peer, size, every, moment, path) for moment in moments]
                lost, seconds = ([one[name] for one in found] for name in ("lost", "seconds"))
                say(f"{size >> 20} MiB, each {every}, {peer}: {lost} s lost, {seconds} s until it goes on")
                rows.append(
                    [
                        f"{every} steps" if every > 1 else "step",
                        find(peer).title,
                        f"{statistics.median(lost):.1f} ({min(lost):.1f} to {max(lost):.1f})",
                        f"{statistics.median(one['steps'] for one in found)}",
                        f"{statistics.median(seconds):.2f}",
                        f"{sum(one['tried'] - 1 for one in found)} of {sum(one['tried'] for one in found)}",
                    ]
                )
    return rows


def main() -> None:
    """Measure, and print a table; or be one run, or the process that goes on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes, default=[1 << 30])
    parser.add_argument("--every", type=numbers, default=[5, 1], help="steps between two saves")
    parser.add_argument("--kills", type=int, default=3, help="kills of each")
    peers = [peer for peer in PEERS if peer != "none"]
    parser.add_argument("--peers", type=some_of(peers), default=peers, help=",".join(peers))
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--newest", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer and args.newest is None:
        train(args.peer, args.sizes[0], args.every[0], Path(args.path))
    elif args.peer:
        print(json.dumps(resume(args.peer, args.sizes[0], args.every[0], args.newest, Path(args.path))))
    else:
        say(f"memory touched once, in {touch_memory():.0f} s")
        found = run(args.sizes, args.every, args.kills, takers(args.peers, Results(options={})), args.path)
        place = Path(args.path or tempfile.gettempdir())
        print(facts_line(place), "", table(HEAD, found), sep="\n")


if __name__ == "__main__":
    main()
