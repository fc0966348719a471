"""Checkpointing of each framework, its own beside ours: what a save costs the training, and how long a resume takes.

python -m benchmarks.frameworks [--size 512MiB] [--rounds 5] [--only transformers,…] [--path DIR]

The same training of one process on a CPU, in its own process each time, in turn with either; by default those of the
frameworks that are installed. Its own checkpoints are in the default configuration. The second save counts. It is
durable when all its files are synced, which no framework does itself: a thread does so right after its call. A restore
reads cold files. What is restored is compared with what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.files import make_cold
from benchmarks.frameworks.jobs import JOBS, quiet
from benchmarks.machine import facts_line
from benchmarks.rounds import HOUSE, say
from benchmarks.tables import table
from tierstate.tiers.units import parse_size

WHO = ("own", "ours")
FIGURES = ("call", "later", "durable", "restore")


def one(name: str, who: str, phase: str, place: Path, nbytes: int) -> dict[str, Any]:
    """One process: a training that saves, or one that resumes."""
    quiet()
    job = JOBS[name](place, who == "ours", nbytes)
    if phase == "restore":
        return {"restore": job.resume(), "state": job.state()}
    job.train()
    return {**job.clock.last()._asdict(), "state": job.clock.fingerprint}


def child(name: str, who: str, phase: str, place: Path, nbytes: int) -> dict[str, Any]:
    """What a process of its own found.

    Raises:
        subprocess.CalledProcessError: it ended badly.
    """
    given = ["--child", name, who, phase, str(place), "--size", str(nbytes)]
    command = [sys.executable, "-m", "benchmarks.frameworks", *given]
    subprocess.run(command, check=True, cwd=HOUSE, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((place / "found.json").read_text())
    return found


def round_of(name: str, who: str, root: Path, nbytes: int) -> dict[str, float]:
    """Save and restore once."""
    place = root / f"{name}-{who}"
    place.mkdir()
    try:
        os.sync()
        saved = child(name, who, "save", place, nbytes)
        make_cold(place)
        restored = child(name, who, "restore", place, nbytes)
        if restored.pop("state") != saved.pop("state"):
            raise ValueError(f"{name}, {who}: another state came back than was saved")
        return saved | restored
    finally:
        shutil.rmtree(place)


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=512 << 20, help="bytes of the training state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[n for n in JOBS if _version(n)])
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        *what, place = args.child
        found = one(*what, Path(place), args.size)
        (Path(place) / "found.json").write_text(json.dumps(found))
        return 0
    root = Path(tempfile.mkdtemp(prefix="tierstate-frameworks-", dir=args.path))
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {who: [] for who in WHO} for name in args.only}
    try:
        print(facts_line(root), "", sep="\n")
        for number in range(args.rounds):
            for name in args.only:
                for who in WHO if number % 2 else WHO[::-1]:
                    try:
                        took = round_of(name, who, root, args.size)
                    except subprocess.CalledProcessError as error:
                        say(f"round {number + 1}: {name}, {who}: {error}; it does not count")
                        continue
                    found[name][who].append(took)
                    say(f"round {number + 1}: {name}, {who}: {', '.join(f'{k} {took[k]:.3f}' for k in FIGURES)}")
    finally:
        shutil.rmtree(root)
    print(f"{args.size / 2**30:.2f} GiB of state, medians of {args.rounds} (least–most):\n")
    print(report(found))
    return 0


def report(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """A table: two rows for each framework, and the ratios."""
    rows = []
    for name, both in found.items():
        if not all(both.values()):
            rows.append([f"{JOBS[name].title} {_version(name)}", *["no round ended well"] * len(FIGURES)])
            continue
        medians = {who: [statistics.median(one[k] for one in both[who]) for k in FIGURES] for who in WHO}
        for who in WHO:
            spans = [f"{statistics.median(all_):.2f} ({min(all_):.2f}–{max(all_):.2f})"
                     for all_ in ([one[k] for one in both[who]] for k in FIGURES)]  # fmt: skip
            rows.append([f"{JOBS[name].title} {_version(name)}" if who == "own" else "with tierstate", *spans])
        rows.append(["ratio", *(f"{a / b:.1f}x" for a, b in zip(medians["own"], medians["ours"], strict=True))])
    return table("what | the call, s | training later by, s | durable, s | cold restore, s", rows)


def _version(name: str) -> str:
    """Of the installed package; empty if it is not."""
    try:
        return version(JOBS[name].package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
