"""What it costs to be watched: saves with events, metrics and a trace, in turn with saves without.

python -m benchmarks.telemetry [--size 1GiB] [--rounds 12] [--path DIR]
python -m benchmarks.telemetry --probe [--rounds 12]      # a trace beside a loop of nothing but Python code

All of the state changes between saves. Each round makes one save without anything; one with the events logged in the
tier, Prometheus' metrics in a file every second, OpenTelemetry's API without an SDK, and a trace; and one with the
statistics of leaves.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import tierstate as ts
from benchmarks.agent import spread, state_of
from benchmarks.machine import facts_line
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.tiers import trace
from tierstate.tiers.units import parse_size

WAYS = ("nothing", "events, metrics, a trace", "statistics")
FIGURES = ("blocked", "durable", "cpu")


def policy(place: Path, way: str) -> ts.Policy:
    """One directory."""
    keys = {
        WAYS[1]: f"metrics: {{events: true, textfile: '{place}/run.prom', interval: 1s, opentelemetry: true}}\n",
        WAYS[2]: "statistics: true\n",
    }
    return ts.Policy.parse(
        f"version: 1\narena: {{size: 2GiB}}\n{keys.get(way, '')}"
        f"tiers: {{nvme: {{type: nvme, path: '{place}/tier', keep: {{last: 2}}}}}}\n"
    )


def busy(seconds: float) -> tuple[int, float]:
    """A loop of nothing but Python code: rounds of it in so many CPU seconds of this thread, and the CPU time of all
    other threads in proportion to its own."""
    start, began, count = time.thread_time(), time.process_time(), 0
    while (mine := time.thread_time() - start) < seconds:
        for _ in range(1000):
            count += 1
    return count, (time.process_time() - began - mine) / mine


def probed(rounds: int, root: Path) -> str:
    """What a trace, which looks every 20 ms at how soon a thread gets the interpreter, costs such a loop."""
    found: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
    for _ in range(rounds):
        found[False].append(busy(1.0))
        trace.begin(root / "trace.json")
        found[True].append(busy(1.0))
        trace.end()
    speed = statistics.median(b[0] / a[0] for a, b in zip(found[False], found[True], strict=True))
    share = statistics.median(one[1] for one in found[True])
    return f"a loop beside a trace / without: {speed:.3f}; the trace's own threads: {100 * share:.2f} % of a core"


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--probe", action="store_true", help="only what a trace costs Python code beside it")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-telemetry-", dir=args.path))
    try:
        print(probed(args.rounds, root) if args.probe else watched(args, root))
    finally:
        shutil.rmtree(root)
    return 0


def watched(args: argparse.Namespace, root: Path) -> str:
    """What each way of being watched costs saves: a table."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    print(facts_line(root), "\n")
    state = state_of(args.size)
    with ExitStack() as closing:
        runs = {}
        for way in WAYS:
            (root / way.replace(" ", "-")).mkdir()
            spec = policy(root / way.replace(" ", "-"), way)
            runs[way] = closing.enter_context(ts.Checkpointer(spec, "run"))
        for number in range(-2, args.rounds):  # two rounds to warm up
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                for tensor in state.values():
                    tensor.add_(1)
                with ExitStack() as tracing:
                    if way == WAYS[1]:
                        tracing.enter_context(runs[way].trace(root / "trace.json"))
                    start, began = time.perf_counter(), time.process_time()
                    save = runs[way].save(state, number + 2)
                    blocked = time.perf_counter() - start
                    save.wait()
                    durable, cpu = time.perf_counter() - start, time.process_time() - began
                if number >= 0:
                    found[way].append({"blocked": blocked, "durable": durable, "cpu": cpu})
                    say(f"round {number + 1}: {way}: blocked {blocked:.4f}, durable {durable:.4f}")
    rows = [[way, *(spread([one[k] for one in found[way]]) for k in FIGURES)] for way in WAYS]
    plain = found[WAYS[0]]
    for way in WAYS[1:]:
        ratios = [statistics.median(b[k] / a[k] for a, b in zip(plain, found[way], strict=True)) for k in FIGURES]
        rows.append([f"{way} / {WAYS[0]}", *(f"{ratio:.3f}" for ratio in ratios)])
    head = f"{args.size / 2**30:.2f} GiB, medians of {args.rounds} (least–most):\n\n"
    return head + table("watched by | blocked, s | durable, s | CPU, s", rows)


if __name__ == "__main__":
    sys.exit(main())
