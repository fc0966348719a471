"""CUDA: states on a device are saved beside what it computes, and restored, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import arena_of, policy, tier
from support.device_jobs import DeviceJob, on_the_host
from support.equality import difference

import tierstate as ts
from tierstate.engine.capture.capture import Capture

SPIN = 1 << 32
"""Cycles for which a device is kept busy: two seconds and more, far longer than the copies take."""

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


def test_training_and_copies_do_not_wait_for_each_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = policy({"nvme": tier("nvme", place)}, arena={"size": "1GiB"}, chunk="16MiB")
    begun, own = threading.Event(), Capture._check_memory

    def gated(capture: Capture) -> None:  # before what is guarded is copied
        assert begun.wait(60)
        own(capture)

    job = DeviceJob(4096)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.guard(job.optimizer)
        ckpt.save(job.state(), step=0).wait()
        job.step()
        truth = job.truth()
        monkeypatch.setattr(Capture, "_check_memory", gated)
        save = ckpt.save(job.state(), step=1)
        job.forward()
        torch.cuda.current_stream().synchronize()
        assert not save._save_state.captured.done(), "forward was done while no copy had begun"
        torch.cuda._sleep(SPIN)
        end = torch.cuda.Event()
        end.record()
        begun.set()
        save.wait_captured(60)
        assert not end.query(), "all was copied while the device was busy"
        end.synchronize()
        save.wait()
        assert difference(truth, on_the_host(ckpt.load())) == ""
