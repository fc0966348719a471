"""Whether `tierstate plan` predicts what happens: its simulator beside real runs on tiers of a limited bandwidth.

python -m benchmarks.planner [--path DIR] [--steps 50] [--size 64MiB] [--rounds 3]

Each case is a real process that trains for so many steps, of which each is a sleep and a change of the whole state, and
saves after each; some are killed with SIGKILL in the midst, and go on in a new process, of which the time until it has
restored is measured too. The simulator is given the policy, the length of a step and what one unlimited save has
shown: how fast a state is copied, and what a version costs in a tier besides its bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tierstate as ts
from benchmarks.machine import facts
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.planning.figures import Speed, tier_models
from tierstate.planning.model import Failure, Outcome, TierModel, Workload
from tierstate.planning.simulation import simulate
from tierstate.tiers.units import parse_size

STEP = 0.4
TIERS = ("nvme", "lustre")


@dataclass(frozen=True)
class Case:
    """A policy, and what happens.

    Attributes:
        name: what it shows.
        nvme, lustre: keys of the tiers.
        arena: its size, in states.
        killed: after so many seconds of training; 0 for never.
        host_lost: then the nearer tier is emptied too.
    """

    name: str
    nvme: str = "bandwidth: 400MiB/s"
    lustre: str = "bandwidth: 100MiB/s, every: 5"
    arena: int = 4
    killed: float = 0.0
    host_lost: bool = False

    def policy(self, root: Path, nbytes: int) -> str:
        """The policy file."""
        return (
            f"version: 1\nchunk: 4MiB\narena: {{size: {self.arena * nbytes + (16 << 20)}}}\ntiers:\n"
            f"  nvme: {{type: nvme, path: {root}/nvme, {self.nvme}}}\n"
            f"  lustre: {{type: lustre, path: {root}/lustre, {self.lustre}}}\n"
        )


CASES = (
    Case("each save, every fifth copied"),
    Case("the disk cannot keep up", nvme="bandwidth: 100MiB/s", lustre="bandwidth: 100MiB/s, every: 1000", arena=3),
    Case("the slow tier skips", lustre="bandwidth: 50MiB/s, on_lag: skip"),
    Case("the slow tier queues", lustre="bandwidth: 120MiB/s"),
    Case("a bounded lag", lustre="bandwidth: 120MiB/s, max_lag: {steps: 2}"),
    Case("by time", nvme="bandwidth: 400MiB/s, every: 2s", lustre="bandwidth: 100MiB/s, every: 6s"),
    Case("killed", "bandwidth: 400MiB/s, every: 10", killed=12.0),
    Case(
        "killed, the host is lost",
        "bandwidth: 400MiB/s, every: 10",
        "bandwidth: 100MiB/s, every: 20",
        killed=15.0,
        host_lost=True,
    ),
)


def train(policy: str, steps: int, nbytes: int, out: str) -> None:
    """The process of a case: trains from where it has ended, and writes down what happens and when."""
    state = {"w": torch.rand(nbytes // 4), "step": 0}  # no two chunks are equal
    with open(out, "a", buffering=1) as file, ts.Checkpointer(policy, "run") as ckpt:

        def tell(**what: Any) -> None:
            file.write(json.dumps({"time": time.time(), **what}) + "\n")

        ckpt.on(("committed", "cascaded"), lambda event: tell(kind="arrived", tier=event.tier, step=event.step))
        begun = time.time()
        ckpt.resume(into=state)
        tell(kind="began", step=state["step"], restored=time.time() - begun)
        for step in range(state["step"] + 1, steps + 1):
            ends = time.monotonic() + STEP
            state["w"].add_(1.0)
            state["step"] = step
            time.sleep(max(0.0, ends - time.monotonic()))
            saved, begun = time.time(), time.monotonic()
            ckpt.save(state, step=step)
            tell(kind="saved", step=step, saved=saved, blocked=time.monotonic() - begun)
        tell(kind="trained")
    print("done")


def told(out: Path) -> list[dict[str, Any]]:
    """What processes have written down."""
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def start(policy: Path, steps: int, nbytes: int, out: Path) -> subprocess.Popen[str]:
    """Start the process of a case."""
    command = [sys.executable, "-m", "benchmarks.planner", "train", str(policy), str(steps), str(nbytes), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(case: Case, root: Path, steps: int, nbytes: int) -> dict[str, float]:
    """Run a case. Returns figures by name."""
    policy, out = root / "policy.yaml", root / "told.jsonl"
    policy.write_text(case.policy(root, nbytes))
    out.touch()
    process = start(policy, steps, nbytes, out)
    if case.killed:
        while not any(one["kind"] == "began" for one in told(out)):
            time.sleep(0.01)
        began = next(one["time"] for one in told(out) if one["kind"] == "began")
        time.sleep(max(0.0, began + case.killed - time.time()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if case.host_lost:
            shutil.rmtree(root / "nvme")
        process = start(policy, steps, nbytes, out)
    if process.wait():
        raise RuntimeError(f"{case.name}: the process has failed")
    return figures(told(out), case)


def figures(lines: list[dict[str, Any]], case: Case) -> dict[str, float]:
    """What the lines of a case say."""
    began = [one for one in lines if one["kind"] == "began"]
    saved = {one["step"]: one for one in lines if one["kind"] == "saved"}
    trained = next(one["time"] for one in reversed(lines) if one["kind"] == "trained")
    last = max(one["time"] for one in lines if one["kind"] in ("arrived", "trained"))
    found = {
        "training": trained - began[-1]["time"],
        "drained": last - began[-1]["time"],
        "blocked": sum(one["blocked"] for one in lines if one["kind"] == "saved" and one["time"] >= began[-1]["time"]),
    }
    for tier in TIERS:
        there = [one for one in lines if one["kind"] == "arrived" and one["tier"] == tier]
        found[f"{tier}: versions"] = len(there)
        if not case.killed:
            found[f"{tier}: delay"] = statistics.mean(one["time"] - saved[one["step"]]["saved"] for one in there)
    if case.killed:
        went = [one for one in lines if one["kind"] == "saved" and one["step"] == began[-1]["step"]]
        found["seconds lost"] = began[0]["time"] + case.killed - went[0]["saved"]
        found["restored in"] = began[-1]["restored"]
    return found


def predict(case: Case, root: Path, steps: int, nbytes: int, known: Mapping[str, float]) -> dict[str, float]:
    """What the simulator says of a case."""
    policy = ts.Policy.parse(case.policy(root, nbytes))
    fixed = {tier: known[tier] for tier in TIERS}
    speeds = {tier: Speed(*2 * (known[f"{tier} speed"],)) for tier in TIERS}
    models = tier_models(policy, 1, 1, known["capture"], speeds, fixed)
    work = Workload(((("w",), nbytes),), STEP, processes=1, capture=known["capture"])
    failures = [Failure(case.killed, case.host_lost)] if case.killed else []
    outcome = simulate(policy, work, models, steps, failures)
    return said(outcome, models, case)


def said(outcome: Outcome, models: list[TierModel], case: Case) -> dict[str, float]:
    """The figures of an outcome, as of `figures`."""
    found, again = {}, 0.0
    if case.killed:
        (recovery,) = outcome.recoveries
        again = recovery.failure.time + recovery.seconds
        found["seconds lost"] = recovery.lost
        found["restored in"] = recovery.seconds
    found |= {"training": outcome.seconds - again, "drained": outcome.drained - again}
    if not case.killed:
        found["blocked"] = outcome.blocking
    for model in models:
        tier = outcome.tiers[model.level.name]
        found[f"{model.level.name}: versions"] = tier.versions
        if not case.killed:
            found[f"{model.level.name}: delay"] = tier.delay or 0.0
    return found


def calibrate(root: Path, nbytes: int) -> tuple[float, dict[str, float]]:
    """Median seconds that a save blocks, and that a version takes in each tier, where nothing limits them."""
    policy, out = root / "policy.yaml", root / "told.jsonl"
    policy.write_text(Case("", "every: 1", "every: 1", 8).policy(root, nbytes))
    out.touch()
    if start(policy, 8, nbytes, out).wait():
        raise RuntimeError("the calibration has failed")
    lines = told(out)
    saved = {one["step"]: one for one in lines if one["kind"] == "saved"}
    there = {
        tier: {o["step"]: o["time"] for o in lines if o["kind"] == "arrived" and o["tier"] == tier} for tier in TIERS
    }
    return statistics.median(one["blocked"] for one in saved.values()), {
        "nvme": statistics.median(at - saved[step]["saved"] for step, at in there["nvme"].items()),
        "lustre": statistics.median(at - there["nvme"][step] for step, at in there["lustre"].items()),
    }


def rows(path: Path, steps: int, nbytes: int, rounds: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Case, figure, predicted, measured (median), ratio."""
    with folder(path) as root:
        blocked, large = calibrate(root, nbytes)
    with folder(path) as root:
        _, known = calibrate(root, 1 << 20)
    known |= {f"{tier} speed": nbytes / max(1e-3, large[tier] - known[tier]) for tier in TIERS}
    known["capture"] = nbytes / blocked
    say(
        f"a state is captured at {known['capture'] / 2**30:.2f} GiB/s; a version costs "
        + ", ".join(f"{1000 * known[tier]:.0f} ms on {tier}" for tier in TIERS)
    )
    for case in CASES:
        measured = []
        for _ in range(rounds):
            with folder(path) as root:
                measured.append(measure(case, root, steps, nbytes))
        with folder(path) as root:
            predicted = predict(case, root, steps, nbytes, known)
        for name, value in predicted.items():
            real = statistics.median(one[name] for one in measured)
            ratio = value / real if real else float(value == real)
            say(f"{case.name}: {name}: {value:.3f} predicted, {real:.3f} measured, {ratio:.2f}")
            yield case.name, name, f"{value:.3g}", f"{real:.3g}", f"{ratio:.2f}"


class folder:
    """A folder that is removed again."""

    def __init__(self, path: Path) -> None:
        self._at = Path(tempfile.mkdtemp(prefix="tierstate-plan-", dir=path))

    def __enter__(self) -> Path:
        return self._at

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._at)


def main() -> None:
    """Run all cases, and print the table."""
    if sys.argv[1:2] == ["train"]:
        policy, steps, nbytes, out = sys.argv[2:]
        train(policy, int(steps), int(nbytes), out)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("."), help="where the tiers lie")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", type=parse_size, default=64 << 20, help="of the state")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = list(rows(args.path, args.steps, args.size, args.rounds))
    print(json.dumps(facts(args.path), indent=2))
    print(table("case | figure | predicted | measured | ratio", map(list, found)))


if __name__ == "__main__":
    main()
