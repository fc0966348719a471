"""The command: python -m benchmarks.devices."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import devices
from benchmarks.machine import facts
from benchmarks.results import Results
from benchmarks.rounds import HOUSE, say, some_of
from tierstate.tiers.units import parse_size

from .bench import PHASES, TIERS, Bench
from .machine import TooSmall, check_machine, gpu_facts
from .state import SHAPES
from .tables import report


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the tables; 1 where this machine cannot measure it."""
    args = arguments(argv)
    try:
        check_machine(args.size, args.shapes)
        results = measure(args)
    except TooSmall as error:
        print(f"benchmarks.devices: {error}", file=sys.stderr)
        return 1
    print(report(results))
    say(f"samples in {args.out}")
    return 0


def measure(args: argparse.Namespace) -> Results:
    """Run everything. What was found by then is kept, also when something ends the run."""
    options = {name: value for name, value in vars(args).items() if name not in ("out", "path")}
    results = Results(options=options)
    root = Path(tempfile.mkdtemp(prefix="tierstate-devices-", dir=args.path))
    try:
        results.machine = facts(root) | gpu_facts()
        Bench(results, args, root).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
        results.write(Path(args.out))
    return results


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""

    def seconds(text: str) -> float:
        if not 0 < (value := float(text)) < math.inf:
            raise argparse.ArgumentTypeError("a number of seconds above 0")
        return value

    out = HOUSE / "build" / "bench" / "devices.json"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.devices", description=(devices.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--size", type=parse_size, default=8 << 30, help="bytes of the state; a multiple of 64MiB")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions, after one that warms up")
    parser.add_argument("--step", type=seconds, default=0.5, help="seconds of a training step")
    parser.add_argument("--width", type=int, default=4096, help="of the matrices that a step multiplies")
    parser.add_argument("--graph", action="store_true", help="a step replays a CUDA graph: without Python in between")
    parser.add_argument("--chunk", type=parse_size, default=16 << 20, help="the policy's")
    parser.add_argument("--only", type=some_of(PHASES), default=list(PHASES), help=",".join(PHASES))
    parser.add_argument("--shapes", type=some_of(SHAPES), default=list(SHAPES), help=",".join(SHAPES))
    parser.add_argument("--tiers", type=some_of(TIERS), default=list(TIERS), help=",".join(TIERS))
    parser.add_argument("--path", help="a folder of the disk under the nvme tier; by default that for temporary files")
    parser.add_argument("--out", default=str(out), help="file of all samples, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
