"""A job of four ranks, FSDP2 by two and tensor parallel by two, loses one to SIGKILL and goes on with two, then one.

    python examples/demo_ranks.py

Takes about a minute on two cores, writes under .demo/ranks (or $TIERSTATE_DEMO), and exits 1 if the losses part.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("TIERSTATE_DEMO", ".demo/ranks")).resolve()
STEPS, EVERY, KILL_FROM, NEXT = 40, 5, 17, 30
CLOSE = 1e-3
"""Nats by which the losses of different numbers of ranks may differ: sums are taken in another order."""


def start(place: Path, size: int, tensor: int, steps: int) -> subprocess.Popen[bytes]:
    """The job on so many ranks, its tiers under ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
    command += [HERE / "train_ranks.py", "--tensor", tensor, "--steps", steps, "--every", EVERY]
    command += ["--losses", place / "loss.jsonl"]
    env = {**os.environ, "TIERSTATE_DEMO": str(place), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(list(map(str, command)), env=env)


def run(place: Path, size: int, tensor: int, steps: int) -> None:
    """The job on so many ranks, to its end."""
    if start(place, size, tensor, steps).wait() != 0:
        sys.exit(f"the job on {size} ranks failed")


def losses(place: Path) -> dict[int, float]:
    """The loss of each step that was logged, the last one counting."""
    log = place / "loss.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return {row["step"]: row["loss"] for row in (json.loads(line) for line in lines if line.endswith("}"))}


def ranks_of(job: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the job's ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def lose_a_rank(job: subprocess.Popen[bytes], place: Path) -> None:
    """SIGKILL one of the ranks after step KILL_FROM; the job ends as torchrun ends it."""
    while job.poll() is None and max(losses(place), default=0) < KILL_FROM:
        time.sleep(0.05)
    if job.poll() is not None:
        sys.exit("the job ended before a rank could be killed")
    os.kill(ranks_of(job)[-1], signal.SIGKILL)
    if job.wait() == 0:
        sys.exit("the job went on without one of its ranks")


def main() -> int:
    """Run the demo; 0 if the losses of the job that was killed are those of the job that was not."""
    shutil.rmtree(ROOT, ignore_errors=True)
    plain, killed = ROOT / "uninterrupted", ROOT / "killed"

    print(f"1. Train {STEPS} steps on four ranks (2 x FSDP2, 2 x tensor parallel), never interrupted.", flush=True)
    run(plain, 4, 2, STEPS)
    print("\n2. The same again; one of the ranks is killed.", flush=True)
    lose_a_rank(start(killed, 4, 2, STEPS), killed)
    print(f"\n3. Two ranks go on, sharded otherwise, up to step {NEXT}; then one alone.", flush=True)
    run(killed, 2, 1, NEXT)
    run(killed, 1, 1, STEPS)

    truth, found = losses(plain), losses(killed)
    apart = max(abs(truth[step] - found.get(step, float("inf"))) for step in truth)
    print(f"\nThe losses of all {len(truth)} steps agree to {apart:.1e} nats ({truth[STEPS]:.4f} at the end).")
    return 0 if apart < CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
