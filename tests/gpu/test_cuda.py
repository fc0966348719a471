"""CUDA: states on a device are saved beside what it computes, and restored, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import arena_of, policy, tier
from support.equality import difference

import tierstate as ts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Job:
    """A model on the device, and a leaf of each other kind on the host."""

    def __init__(self, width: int = 1024) -> None:
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(512, width, device="cuda")
        self.host = torch.randn(300_000)
        self.odd = torch.randn(700, 900, device="cuda").t()[::2]
        self.steps = 0

    def state(self) -> dict[str, Any]:
        here = {"host": self.host, "odd": self.odd, "steps": self.steps, "rng": torch.cuda.get_rng_state()}
        return {"model": self.model, "optimizer": self.optimizer, **here}

    def truth(self) -> Any:
        torch.cuda.synchronize()
        state = {**self.state(), "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(_on_host(state))

    def forward(self) -> None:
        for _ in range(20):
            self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.host += 1
        self.odd.mul_(1.5)
        self.steps += 1


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return type(value)((k, _on_host(v)) for k, v in value.items())
    return value


@pytest.mark.parametrize("lazy", [False, True])
def test_versions_are_the_state_at_the_call(place: Path, lazy: bool) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"})
    job, truth = Job(), {}
    with ts.Checkpointer(spec, "run") as ckpt:
        if lazy:
            ckpt.guard(job.optimizer)
        for _ in range(4):
            job.step()
            truth[job.steps] = job.truth()
            job.forward()  # still queued on the device while the state is copied
            ckpt.save(job.state(), step=job.steps)
            job.host += 1
            job.odd.add_(1)
        for step, state in truth.items():
            assert difference(state, _on_host(ckpt.load(step=step))) == ""
        assert arena_of(ckpt).in_flight == 0


def test_a_restore_fills_the_device_and_a_load_puts_tensors_there(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"})
    job = Job()
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
        assert difference(truth, _on_host(loaded)) == ""


def test_slabs_are_pinned_once_cuda_is_in_use(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"})
    job = Job()
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            ckpt.save(job.state(), step=step).wait()
        free = arena_of(ckpt)._free
        assert free
        assert all(slab.pinned for slab in free)


def test_the_device_computes_while_the_state_is_copied(place: Path) -> None:
    """By the device's own clock: what is queued before and after a lazy save does not wait for its copies."""
    spec = policy({"nvme": tier("nvme", place)}, arena={"size": "512MiB"}, chunk="16MiB")
    job = Job(4096)
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
        assert difference(job.truth(), _on_host(ckpt.load())) == ""
