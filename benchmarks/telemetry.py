"""What it costs to be watched: saves with events, metrics and a trace, in turn with saves without.

python -m benchmarks.telemetry [--size 1GiB] [--rounds 12] [--path DIR]

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
from benchmarks.machine import facts
from benchmarks.rounds import say
from benchmarks.tables import table
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


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-telemetry-", dir=args.path))
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    try:
        print(", ".join(f"{name}: {what}" for name, what in facts(root).items()), "\n")
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
    finally:
        shutil.rmtree(root)
    rows = [[way, *(spread([one[k] for one in found[way]]) for k in FIGURES)] for way in WAYS]
    plain = found[WAYS[0]]
    for way in WAYS[1:]:
        ratios = [statistics.median(b[k] / a[k] for a, b in zip(plain, found[way], strict=True)) for k in FIGURES]
        rows.append([f"{way} / {WAYS[0]}", *(f"{ratio:.3f}" for ratio in ratios)])
    print(f"{args.size / 2**30:.2f} GiB, medians of {args.rounds} (least–most):\n")
    print(table("watched by | blocked, s | durable, s | CPU, s", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
