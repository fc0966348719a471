"""Two ranks of a Trainer's, or accelerate's, training under torchrun: ``hugging_face_ranks.py KIND FOLDER``.

Trains, then resumes twice (from a folder; and after all folders are lost), and compares the losses to the last bit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch.distributed as dist
from support import accelerate_job, trainer_job


def run_trainer(place: Path) -> None:
    """Data parallel, with buffers that differ by rank between forward passes."""
    output = place / "job"
    whole, losses, last = trainer_job.Losses(), trainer_job.Losses(), trainer_job.Losses()
    trainer_job.trainer(output, whole, ddp_backend="gloo").train()
    dist.barrier()
    trainer_job.trainer(output, losses, ddp_backend="gloo").train(str(output / "checkpoint-8"))
    assert losses.found == {step: whole.found[step] for step in range(9, 13)}
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in output.glob("checkpoint-*"):
            shutil.rmtree(folder)
    dist.barrier()
    trainer_job.trainer(output, last, max_steps=14, ddp_backend="gloo").train(True)
    assert sorted(last.found) == [13, 14]


def run_accelerate(place: Path, **given: bool) -> None:
    """Data parallel, or sharded."""
    policy = place / "policy.yaml"
    policy.write_text(f"version: 1\narena: {{size: 64MiB}}\ntiers: {{nvme: {{type: nvme, path: '{place}/tier'}}}}\n")
    whole: dict[int, str] = {}
    first = accelerate_job.Job(place, str(policy), **given)
    assert first.accelerator.num_processes == 2
    first.train(whole.__setitem__, save=[2, 4])
    assert first.versions is not None
    first.versions.wait()
    first.versions.close()
    dist.barrier()
    losses: dict[int, str] = {}
    again = accelerate_job.Job(place, str(policy), **given)
    again.accelerator.load_state(str(place / "step_2"))
    again.train(losses.__setitem__, done=2, save=[])
    assert losses == {step: loss for step, loss in whole.items() if step > 2}
    assert again.versions is not None
    again.versions.close()


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "trainer":
        run_trainer(folder)
    else:
        run_accelerate(folder, **{"sharded": True} if kind == "fsdp2" else {})
    print("as without interruption", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
