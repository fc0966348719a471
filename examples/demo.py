"""The main job: a training run is killed in the middle of a save, resumes bit for bit, then loses its fast tiers too.

    python examples/demo.py [--device cuda] [--lazy]

Takes about a minute on two cores, writes under .demo/ (or $TIERSTATE_DEMO), and exits 1 if a single bit differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tierstate as ts
from tierstate.tiers.units import rough_size

HERE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("TIERSTATE_DEMO", ".demo")).resolve()
POLICY = HERE / "policy.yaml"
STEPS, EVERY, KILL_FROM = 150, 5, 85
FAST = ("nvme", "lustre")


def start(place: Path, options: Sequence[str], steps: int = STEPS) -> subprocess.Popen[bytes]:
    """A training process whose tiers lie under ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, HERE / "train.py", "--policy", POLICY, "--run", "gpt"]
    command += ["--steps", str(steps), "--every", str(EVERY)]
    command += ["--log", place / "loss.jsonl", "--stats", place / "stats.json", *options]
    return subprocess.Popen(list(map(str, command)), env={**os.environ, "TIERSTATE_DEMO": str(place)})


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a training process that is meant to end well."""
    if process.wait() != 0:
        sys.exit(f"the training process ended with status {process.returncode}")


def losses(place: Path) -> list[tuple[int, str]]:
    """Step and loss, in hexadecimal, of each step that was logged; a line torn by the kill is left out."""
    lines = (place / "loss.jsonl").read_text().splitlines() if (place / "loss.jsonl").exists() else []
    return [(row["step"], row["loss"]) for row in (json.loads(line) for line in lines if line.endswith("}"))]


def kill_in_a_save(process: subprocess.Popen[bytes], place: Path) -> int:
    """SIGKILL, as soon as a pack is being written after step KILL_FROM. Returns the last step it had logged."""
    while process.poll() is None:
        done = losses(place)
        if done and done[-1][0] >= KILL_FROM:
            break
        time.sleep(0.05)
    packs = place / "nvme" / "packs" / "gpt"
    while process.poll() is None:
        # A pack that is being written has a hidden name until it is whole and synced.
        if any(name.startswith(".") for name in os.listdir(packs)):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    if process.returncode != -signal.SIGKILL:
        sys.exit("the training process ended before it could be killed")
    return losses(place)[-1][0]


def compare(what: str, place: Path, first: int, truth: dict[int, str]) -> bool:
    """Whether each loss from step ``first`` on is the uninterrupted run's, to the last bit; the last run counts."""
    rows = losses(place)
    begin = max(i for i, row in enumerate(rows) if row[0] == first)
    later = rows[begin:]
    same = sum(truth[step] == loss for step, loss in later)
    whole = [step for step, _ in later] == list(range(first, STEPS + 1))
    verdict = "bit for bit the same" if same == len(later) and whole else "NOT THE SAME"
    print(f"  {what}: {same} of {len(later)} losses of steps {first} to {STEPS}: {verdict}")
    return same == len(later) and whole


def adopt(place: Path, tiers: Sequence[str]) -> None:
    """Say that tiers are lost for good, and that what is in their places now is to be used."""
    for tier in tiers:
        command = [sys.executable, "-m", "tierstate", "adopt", tier, "--policy", str(POLICY)]
        print(f"  $ tierstate adopt {tier}", flush=True)
        environment = {**os.environ, "TIERSTATE_DEMO": str(place)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def newest(place: Path) -> ts.VersionInfo:
    """The version that a resume will find, and its tiers."""
    os.environ["TIERSTATE_DEMO"] = str(place)
    with ts.Checkpointer(POLICY, run="gpt") as ckpt:
        return ckpt.versions()[-1]


def summary(place: Path) -> None:
    """A table: per tier its versions, raw and stored bytes, and the times."""
    os.environ["TIERSTATE_DEMO"] = str(place)
    with ts.Checkpointer(POLICY, run="gpt") as ckpt:
        versions = ckpt.versions()
    stats = json.loads((place / "stats.json").read_text())
    blocked = statistics.median(stats["blocked"]) * 1e3
    print(f"\n  {stats['saves']} saves of {rough_size(versions[-1].nbytes)}; ", end="")
    print(f"each kept the training waiting for {blocked:.1f} ms (median)\n")
    print(f"  {'tier':8} {'saves':>5} {'kept now':>9} {'raw':>12} {'written':>12} {'ms to commit (median)':>22}")
    for name, tier in stats["tiers"].items():
        kept = str(sum(name in v.tiers for v in versions)) if name != "host" else "(memory)"
        seconds = f"{statistics.median(tier['seconds']) * 1e3:.0f}" if tier["seconds"] else "-"
        sizes = f"{rough_size(tier['raw']):>12} {rough_size(tier['stored']):>12}"
        print(f"  {name:8} {tier['saves']:>5} {kept:>9} {sizes} {seconds:>22}")


def say(text: Any) -> None:
    """A heading."""
    print(f"\n{text}", flush=True)


def options_for_training() -> list[str]:
    """What was given on the command line, for each training process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda where there is a GPU")
    parser.add_argument("--lazy", action="store_true", help="capture saves beside the next step")
    args = parser.parse_args()
    return ["--device", args.device, *(["--lazy"] if args.lazy else [])]


def main() -> int:
    """Run the demo; 0 if every bit agrees."""
    options = options_for_training()
    shutil.rmtree(ROOT, ignore_errors=True)
    plain, killed = ROOT / "uninterrupted", ROOT / "killed"

    say(f"1. Train a small GPT for {STEPS} steps, never interrupted.")
    finish(start(plain, options))
    truth = dict(losses(plain))

    say(f"2. Train it again, and kill it (SIGKILL) in the middle of a save after step {KILL_FROM}.")
    reached = kill_in_a_save(start(killed, options), killed)
    found = newest(killed)
    print(f"  killed at step {reached}; the newest whole version is of step {found.step}, in {', '.join(found.tiers)}")

    say("3. Resume in a new process.")
    finish(start(killed, options))
    agrees = compare("resumed after SIGKILL", killed, found.step + 1, truth)
    summary(killed)

    say(f"4. Delete the fast tiers ({', '.join(FAST)}), and resume from object storage alone.")
    for tier in FAST:
        shutil.rmtree(killed / tier)
    # Without this the next process refuses to go on: a tier that is expected and not there may just not be mounted.
    adopt(killed, FAST)
    # As if the run had been lost some steps ago: drop what object storage got at the very end.
    found = drop_last(killed)
    print(f"  the newest version left is of step {found.step}, in {', '.join(found.tiers)}")
    finish(start(killed, options))
    agrees &= compare("resumed from object storage", killed, found.step + 1, truth)

    say("Every later loss is the uninterrupted run's, to the last bit." if agrees else "A loss differs.")
    return 0 if agrees else 1


def drop_last(place: Path) -> ts.VersionInfo:
    """Forget versions of the last step, so that there is something left to train."""
    for record in sorted((place / "object" / "versions" / "gpt").iterdir(), reverse=True):
        found = newest(place)
        if found.step < STEPS:
            return found
        record.unlink()
    sys.exit("object storage holds no version")


if __name__ == "__main__":
    sys.exit(main())
