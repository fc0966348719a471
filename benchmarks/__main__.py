"""The command: measure everything side by side, or make the page of what was measured.

python -m benchmarks [--size 1GiB,4GiB] [--rounds 3,2] [--path DIR] [--only save,restore,…] [--peers lazy,torch,…]
python -m benchmarks peer                 # a lost node, found again in the memory of others (benchmarks/peer.py)
python -m benchmarks --report docs        # benchmarks.md and benchmarks.png from the last results
python -m benchmarks dcp [...]            # torch.distributed.checkpoint through our tiers: see benchmarks/dcp.py
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmarks.field import NAMES
from benchmarks.machine import facts, touch_memory
from benchmarks.results import Results
from benchmarks.rounds import HOUSE, Rounds, say, some_of, takers
from tierstate.tiers.units import parse_size

PHASES = ("save", "restore", "unchanged", "train", "import")


def main() -> int:
    """Measure, or report; 1 where something failed."""
    if sys.argv[1:2] == ["peer"]:
        from benchmarks import peer

        return peer.main(sys.argv[2:])
    if sys.argv[1:2] == ["dcp"]:
        from benchmarks.dcp import main as dcp

        return dcp(sys.argv[2:])
    from benchmarks.page import write_page  # which needs matplotlib

    args = arguments()
    out = Path(args.out)
    if args.report:
        write_page(Results.read(out), Path(args.report))
        return 0
    results = measure(args)
    write_page(results, out.parent)
    print((out.parent / "benchmarks.md").read_text())
    say(f"results in {out}, page and plot beside it")
    return 1 if results.failures else 0


def measure(args: argparse.Namespace) -> Results:
    """Run all phases that were asked for. What was found by then is kept, also when something ends the run."""
    results = Results(options={"size": args.size, "rounds": args.rounds, "only": args.only, "device": args.device})
    field = takers(args.peers, results)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="tierstate-bench-", dir=args.path or Path(args.out).parent))
    try:
        results.machine = facts(root)
        say(f"memory touched once, in {touch_memory():.0f} s")
        rounds = Rounds(results, field, root, args.rounds[0], args.device)
        if {"save", "restore"} & set(args.only):
            for number, size in enumerate(args.size):
                often = args.rounds[min(number, len(args.rounds) - 1)]
                rounds.saves(size, often, "restore" in args.only, extras=size == min(args.size))
        if "unchanged" in args.only:
            rounds.unchanged(min(args.size))
        if "train" in args.only:
            rounds.training()
        if "import" in args.only:
            rounds.imports()
    finally:
        shutil.rmtree(root)
        results.write(Path(args.out))
    return results


def arguments() -> argparse.Namespace:
    """What was given on the command line."""

    def listed(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
        def parts(text: str) -> list[int]:
            try:
                return [parse(part) for part in text.split(",")]
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from error

        return parts

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=listed(parse_size), default=[1 << 30, 4 << 30], help="bytes of the states")
    parser.add_argument("--rounds", type=listed(int), default=[3, 2], help="repetitions, of each size")
    parser.add_argument(
        "--device", default="cpu", help="where the states' tensors are: cpu, or cuda where there is one"
    )
    parser.add_argument("--path", help="folder on the disk to measure; by default that of the results")
    parser.add_argument("--only", type=some_of(PHASES), default=list(PHASES), help=",".join(PHASES))
    parser.add_argument("--peers", type=some_of(NAMES), default=list(NAMES), help=",".join(NAMES))
    parser.add_argument("--out", default=str(HOUSE / "build" / "bench" / "results.json"), help="file of the results")
    parser.add_argument("--report", metavar="DIR", help="measure nothing; make page and plot of the results in DIR")
    return parser.parse_args()


def _terminated(*_: object) -> NoReturn:
    sys.exit(143)


if __name__ == "__main__":
    # So that what is temporary is removed.
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())
