"""CUDA: states on a device are saved beside what it computes, and restored, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import arena_of, policy, tier
from support.device_jobs import DeviceJob, on_the_host
from support.equality import difference

import tierstate as ts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("lazy", [False, True])
def test_versions_are_the_state_at_the_call(place: Path, lazy: bool) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"})
    job, truth = DeviceJob(), {}
    with ts.Checkpointer(spec, "run") as ckpt:
        if lazy:
            ckpt.guard(job.optimizer)
        for _ in range(4):
            job.step()
            truth[job.steps] = job.truth()
            job.forward()  # still queued on the device while the state is copied
            save = ckpt.save(job.state(), step=job.steps)
            job.host += 1
            job.odd.add_(1)
            save.wait()
        for step, state in truth.items():
            assert difference(state, on_the_host(ckpt.load(step=step))) == ""
        assert arena_of(ckpt).in_flight == 0


def test_a_restore_fills_the_device_and_a_load_puts_tensors_there(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"})
    job = DeviceJob()
    with ts.Checkpointer(spec, "run") as ckpt:
        job.step()
        truth = job.truth()
        ckpt.save(job.state(), step=1).wait()
        job.step()
        job.forward()
        job.steps = ckpt.restore(into=job.state())["steps"]
        assert difference(truth, job.truth()) == ""
        loaded = ckpt.load(device="cuda")
        assert loaded["model"]["0.weight"].is_cuda
        assert difference(truth, on_the_host(loaded)) == ""


def test_slabs_are_pinned_once_cuda_is_in_use(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"})
    job = DeviceJob()
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            ckpt.save(job.state(), step=step).wait()
        free = arena_of(ckpt)._free
        assert free
        assert all(slab.pinned for slab in free)


def test_the_device_computes_while_the_state_is_copied(place: Path) -> None:
    """By the device's own clock: what is queued before and after a lazy save does not wait for its copies."""
    spec = policy({"nvme": tier("nvme", place)}, arena={"size": "512MiB"}, chunk="16MiB")
    job = DeviceJob(4096)
    job.step()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.guard(job.optimizer)
        ckpt.save(job.state(), step=0).wait()
        job.step()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        save = ckpt.save(job.state(), step=1)
        start.record()
        job.forward()
        end.record()
        assert not end.query() or save.done(), "save has returned before all was computed"
        end.synchronize()
        save.wait()
        assert difference(job.truth(), on_the_host(ckpt.load())) == ""
