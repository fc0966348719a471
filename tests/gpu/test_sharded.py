"""Sharded tensors on a device: DTensors, and a model under FSDP2, as one rank of one has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier
from support.device_jobs import on_the_host
from support.equality import difference
from support.fake_cuda import EAGER, LATE, RANDOM, is_installed, timing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tierstate as ts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    if is_installed():  # NCCL has no fake devices
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    else:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


class Job:
    """A small model under FSDP2 and its optimizer, whose moments are DTensors too."""

    def __init__(self, mesh: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4)).cuda()
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(2, 8, device="cuda")

    def step(self) -> None:
        self.model(self.batch).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def truth(self) -> Any:
        return local({"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()})


def local(value: Any) -> Any:
    """The values on the host, with the local tensors in place of DTensors."""
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    if isinstance(value, list):
        return [local(item) for item in value]
    value = value.to_local() if isinstance(value, DTensor) else value
    return on_the_host(value.detach().clone()) if isinstance(value, torch.Tensor) else value


@settings(max_examples=12)
@given(st.integers(0, 1 << 30), st.sampled_from([LATE, EAGER, RANDOM]), st.booleans(), st.booleans())
def test_every_version_is_the_state_at_its_call(mesh: Any, seed: int, when: int, lazy: bool, gpu: bool) -> None:
    timing(when, seed)
    torch.manual_seed(seed)
    job, truth = Job(mesh), {}
    with scratch() as place:
        tiers = {**({"gpu": {"type": "gpu", "keep": {"last": 1}}} if gpu else {}), "nvme": tier("nvme", place)}
        with ts.Checkpointer(policy(tiers), "run") as ckpt:
            if lazy:
                ckpt.guard(job.optimizer)
            for step in range(3):
                job.step()
                truth[step] = job.truth()
                save = ckpt.save(job.state(), step=step)
                job.step()
                save.wait()
            for step in (1, 2):
                job.step()
                ckpt.restore(job.state(), step=step)
                assert difference(truth[step], job.truth()) == ""
            job.step()


def test_a_sharded_state_goes_to_the_host_and_to_another_device(mesh: Any, place: Path) -> None:
    job = Job(mesh)
    job.step()
    truth = job.truth()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(job.state(), step=1).wait()
        assert difference(truth["model"], dict(ckpt.load()["model"])) == ""
        last = torch.device("cuda", torch.cuda.device_count() - 1)
        there = ckpt.load(device=str(last))["model"]
        assert there["0.weight"].device == last
        assert difference(truth["model"], on_the_host(dict(there))) == ""
