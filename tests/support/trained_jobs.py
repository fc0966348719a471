"""Jobs of the example that trains on many ranks: a version saved on one mesh is restored on another bit for bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tierstate as ts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

STEPS = 3


def whole(job: Any) -> dict[str, Any]:
    """Each parameter and moment of all ranks together, and what the example has besides."""
    optimizer = job.optimizer.state_dict()
    return {
        "model": {name: _full(value) for name, value in job.model.state_dict().items()},
        "moments": {key: {name: _full(v) for name, v in state.items()} for key, state in optimizer["state"].items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]],
        "schedule": {k: v for k, v in job.schedule.state_dict().items() if k != "lr_lambdas"},
        "data": job.data.state_dict(),
        "step": job.step,
    }


def _full(value: Any) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def drawn() -> list[tuple[float, float]]:
    """The numbers that each rank draws next."""
    own = (torch.rand(()).item(), random.random())
    everyone: list[Any] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def same(one: Any, two: Any, where: str = "state") -> None:
    """Raise AssertionError where two states differ in a bit."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype, where
        assert one.detach().numpy().tobytes() == two.detach().numpy().tobytes(), where
    elif isinstance(one, dict | list):
        keys = one if isinstance(one, dict) else range(len(one))
        assert len(one) == len(two), f"{where} has {len(two)} of {len(one)}"
        for key in keys:
            same(one[key], two[key], f"{where}.{key}")
    else:
        assert one == two, f"{where}: {two!r} instead of {one!r}"


def new_job(mesh: Any) -> Any:
    """The example's job at its beginning, each rank's generators in a state of their own."""
    from train_ranks import Job

    job = Job(mesh)
    torch.manual_seed(100 + dist.get_rank())
    random.seed(100 + dist.get_rank())
    return job


def save(place: str, tensor: str) -> None:
    """Train, save while the next step is made, and leave in ``right.pt`` what was to be saved, and came next."""
    from train_ranks import ranks

    torch.set_num_threads(1)
    with ranks(int(tensor)) as mesh:
        job = new_job(mesh)
        with ts.Checkpointer(str(EXAMPLES / "ranks.yaml"), "gpt", process_group=dist.group.WORLD) as ckpt:
            ckpt.guard(job.optimizer)
            for _ in range(STEPS):
                job.advance()
                right = whole(job)
                ckpt.save(job.state(), step=job.step)
            right["drawn"] = drawn()
            job.advance()  # waits until all is captured
            right["next"] = whole(job)
        if dist.get_rank() == 0:
            torch.save(right, Path(place) / "right.pt")


def restore(place: str, tensor: str, same_mesh: str = "") -> None:
    """Restore into a job that never made a step, and compare; say what came from where."""
    from train_ranks import ranks

    torch.set_num_threads(1)
    right = torch.load(Path(place) / "right.pt", weights_only=True)
    following, numbers = right.pop("next"), right.pop("drawn")
    with ranks(int(tensor)) as mesh:
        own = (new_job(mesh), drawn())[1]
        job = new_job(mesh)
        assert not job.optimizer.state
        with ts.Checkpointer(str(EXAMPLES / "ranks.yaml"), "gpt", process_group=dist.group.WORLD) as ckpt:
            ckpt.guard(job.optimizer)
            job.step = ckpt.restore(into=job.state())["step"]
            same(right, whole(job))
            here = numbers[: len(own)] + own[len(numbers) :]  # a rank that was not there keeps its own
            assert drawn() == here
            for parameter, state in job.optimizer.state.items():
                assert isinstance(state["exp_avg"], DTensor)
                assert state["exp_avg"].placements == parameter.placements
            assert job.model.head.weight is job.model.embedding.weight
            job.advance()
            if same_mesh:
                same(following, whole(job))
