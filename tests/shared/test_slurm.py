"""Jobs that a real Slurm preempts and queues again: each goes on at the step at which it has ended."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.outcomes import until
from support.servers.packages import NotInstallable
from support.servers.slurm import Slurm, install_slurm

import tierstate as ts

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

POLICY = """
version: 1
chunk: 4KiB
arena: {size: 1MiB}
preemption: {grace: 20s}
tiers:
  host: {type: host, capacity: 64MiB, keep: {last: 2}}
  shared: {type: lustre, path: shared, every: 1000}
"""

SCRIPT = """#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=said
#SBATCH --partition=low
#SBATCH --ntasks-per-node=1
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + SLURM_JOB_ID)) GLOO_SOCKET_IFNAME=lo TIERSTATE_ADDRESS=127.0.0.1
srun bash -c 'export TIERSTATE_HOST=$SLURMD_NODENAME RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
exec "$0" -m shared.test_slurm' PYTHON
status=$?
case $status in
    75 | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $status
"""


def main() -> None:
    """One rank: goes on, saves each step, and ends with a status of its own when it is preempted."""
    import torch.distributed as dist
    from support.rank_jobs import advance, check, state_of

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with ts.Checkpointer("policy.yaml", "run", dist.group.WORLD if size > 1 else None) as ckpt:
        state = state_of(0, rank, size)
        ckpt.resume(into=state)
        print(f"begin {check(state, rank, size)}", flush=True)
        while not ckpt.preempted:
            advance(state, rank, size)
            ckpt.save(state, step=state["step"])
            dist.barrier()
            if state["step"] % 10 == 0:
                print(f"step {state['step']}", flush=True)
    print(f"end {state['step']}", flush=True)
    dist.destroy_process_group()
    sys.exit(75)


@pytest.fixture(scope="module")
def slurm(root: None) -> Iterator[Slurm]:
    """Slurm; its programs are installed where they are missing and can be."""
    try:
        install_slurm()
    except NotInstallable as reason:
        pytest.skip(str(reason))
    daemons = Slurm(Path(tempfile.mkdtemp(prefix="tierstate-slurm-")))
    try:
        daemons.create()
        yield daemons
    finally:
        daemons.stop()
        shutil.rmtree(daemons.folder, ignore_errors=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_preempted_job_goes_on_where_it_ended(
    slurm: Slurm, place: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The newest version was in memory only, of each rank's process."""
    monkeypatch.setenv("TIERSTATE_JOB_SECRET", secrets.token_hex(32))  # its MUNGE has a socket that only Slurm knows
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    (place / "policy.yaml").write_text(POLICY)
    (place / "script").write_text(SCRIPT.replace("PYTHON", sys.executable))
    said = place / "said"

    def told(word: str) -> list[int]:
        return [int(step) for step in re.findall(rf"^{word} (\d+)$", said.read_text() if said.exists() else "", re.M)]

    job = slurm.run("sbatch", "--parsable", f"--nodes={ranks}", "script", cwd=place)
    until(lambda: told("step"), 120)
    first = slurm.run(
        "sbatch", "--parsable", "-p", "high", "--nodes=3", "--ntasks-per-node=2", "-o", "/dev/null", "--wrap", "true"
    )
    until(lambda: slurm.job(first)["JobState"] == "COMPLETED", 120, 0.2)
    (ended,) = set(told("end"))
    with ts.Checkpointer(ts.Policy.parse(POLICY.replace("path: shared", f"path: {place}/shared")), "run") as ckpt:
        assert ckpt.versions()[-1].step == ended

    assert slurm.job(job)["Restarts"] == "1"
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: len(told("begin")) == 2 * ranks, 180, 0.2)
    assert set(told("begin")) == {0, ended}
    slurm.run("scancel", job)
    until(lambda: slurm.job(job)["JobState"] == "CANCELLED", 120, 0.2)


if __name__ == "__main__":
    main()
