"""Jobs of real ranks that save and load through torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tierstate as ts
from tierstate.dcp import TierReader, TierStager, TierWriter, close

WIDTH = 37
"""Odd, so that no mesh divides it evenly."""


@contextmanager
def job() -> Iterator[int]:
    """A process group of gloo; gives the rank."""
    # Of torch itself, about what it does.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        close()
        dist.destroy_process_group()


class Net(nn.Module):
    """Two layers, and a norm whose one element some ranks have nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.down(torch.relu(self.up(x)))


def fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module sharded over all ranks, and an optimizer that has made steps."""
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, stepped(model, seed)


def tp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same module, cut by columns and rows."""
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))
    return model, stepped(model, seed)


def stepped(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """An optimizer with moments for every parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (seed + 1))
    generator = torch.Generator().manual_seed(seed + 100)
    for _ in range(2):
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.grad = distribute_tensor(whole, mesh, placements)
        optimizer.step()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Any]:
    """What a trainer saves, as torchtitan does."""
    found, moments = get_state_dict(model, optimizer)
    return {
        "model": found,
        "optim": moments,
        "train": {"step": torch.tensor(seed), "seen": 17 * seed, "name": "run", "none": None},
        "schedule": {"last_lr": [1e-3 * seed, 0.5], "betas": (0.9, seed), "lambdas": [{}, {}]},
        "loader": {f"rank_{dist.get_rank()}": bytes([seed, dist.get_rank()])},
    }


def full(state: Any) -> Any:
    """A copy of the state, with whole tensors in place of sharded ones; all ranks call it."""
    if isinstance(state, torch.Tensor):
        return state.full_tensor() if isinstance(state, DTensor) else state.clone()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return [full(value) for value in state] if type(state) is list else state


def same(one: Any, other: Any, at: str = "") -> None:
    """Raises AssertionError unless two states are equal, to the bit."""
    assert type(one) is type(other), f"{at}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, at
        assert torch.equal(one, other), at
    elif isinstance(one, dict):
        assert list(one) == list(other), f"{at}: {list(one)} and {list(other)}"
        for key in one:
            same(one[key], other[key], f"{at}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{at}.{i}")
    else:
        assert one == other, f"{at}: {one!r} and {other!r}"


def failure(work: Callable[[], Any]) -> str:
    """What DCP says of each rank's failure; work must fail."""
    try:
        work()
    except CheckpointException as error:
        return "; ".join(f"{rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
    raise AssertionError("that went well")


def rounds(policy: str) -> None:
    """Save a sharded state, and load it into others."""
    with job() as rank:
        model, optimizer = fsdp(1)
        state = state_of(model, optimizer, 1)
        whole = full(state)
        dcp.save(state, checkpoint_id="out/step-1", storage_writer=TierWriter(policy, "run", metadata={"loss": 1.5}))
        for made in (fsdp, tp):
            other, moments = made(5)
            into = state_of(other, moments, 5)
            dcp.load(into, checkpoint_id=1, storage_reader=TierReader(policy, "run"))
            same(full(into), whole)
            set_state_dict(other, moments, model_state_dict=into["model"], optim_state_dict=into["optim"])
            again = state_of(other, moments, 1)
            same(full({k: again[k] for k in ("model", "optim")}), {k: whole[k] for k in ("model", "optim")})
        # From the other mesh, with plans that are cached, by the next number; unchanged chunks are not written again.
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = TierWriter(policy, "run")
        for step in (2, 3):
            state["train"]["step"].fill_(step)
            state["model"]["down.bias"].to_local().add_(1)
            dcp.save(state, storage_writer=writer, planner=planner)
            into = state_of(*fsdp(5), 5)
            dcp.load(into, storage_reader=TierReader(policy, "run"))
            same(full(into), full(state))
        # As the state was, also for those who ask for it now.
        into = state_of(*tp(5), 5)
        dcp.load(into, storage_reader=TierReader(policy, "run", step=1))
        same(full(into), whole)
        natively(policy, whole)
        if rank == 0:
            torch.save(whole, Path(policy).parent / "whole.pt")
        dist.barrier()


def natively(policy: str, whole: dict[str, Any]) -> None:
    """A team restores what was saved through DCP, into another mesh, and saves it; and DCP loads that."""
    into = state_of(*tp(5), 5)
    del into["schedule"]["lambdas"]  # of empty dicts, of which DCP tells nothing
    with ts.Checkpointer(policy, "run", process_group=dist.group.WORLD) as ckpt:
        ckpt.restore(into, step=1)
    into["schedule"]["lambdas"] = [{}, {}]
    same(full(into), whole)
    with ts.Checkpointer(policy, "native", process_group=dist.group.WORLD) as ckpt:
        ckpt.save(into, step=8).wait()
    for made in (fsdp, tp):
        into = state_of(*made(6), 6)
        dcp.load(into, storage_reader=TierReader(policy, "native"))
        same(full(into), whole)


def later(policy: str) -> None:
    """Saves that go on while the state changes already, by a thread and by a process."""
    with job():
        model, optimizer = fsdp(1)
        stager = TierStager(shared=True)
        for step, kind in enumerate((AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS), 1):
            pending = []
            for more in (0, 10):
                state = state_of(model, optimizer, step + more)
                whole = full(state)
                future = dcp.async_save(
                    state,
                    checkpoint_id=step + more,
                    storage_writer=TierWriter(policy, "run"),
                    async_checkpointer_type=kind,
                    async_stager=stager,
                    process_group=dist.group.WORLD,
                )
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.to_local().mul_(-1.5)
                future.result()
                pending.append((step + more, whole))
            for number, then in pending:
                into = state_of(*tp(5), 5)
                dcp.load(into, checkpoint_id=number, storage_reader=TierReader(policy, "run"))
                same(full(into), then)
        stager.close()


class Failing:
    """What cannot be saved."""


def failing(policy: str) -> None:
    """What goes wrong on one rank is told to all, and nothing is committed."""
    with job() as rank:
        folder = Path(policy).parent
        state: dict[str, Any] = {"w": distribute_tensor(torch.arange(64.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
        writer = TierWriter(policy, "run")
        dcp.save(state, checkpoint_id=1, storage_writer=writer)
        other = {"w": state["w"] + 1}
        bad = {**other, **({f"bad{rank}": Failing()} if rank == 1 else {})}
        said = failure(lambda: dcp.save(bad, checkpoint_id=2, storage_writer=writer))
        assert said.startswith("1: CaptureError: bad1: a support.dcp_jobs.Failing has no provider; allow pickle"), said
        said = failure(lambda: dcp.save(other, checkpoint_id=2 + rank, storage_writer=writer))
        assert "StateMismatch: ranks save different steps: 2, 3" in said, said
        into = {"w": distribute_tensor(torch.zeros(64), init_device_mesh("cpu", (2,)), [Shard(0)])}
        said = failure(lambda: dcp.load(dict(into), checkpoint_id=7, storage_reader=TierReader(policy, "run")))
        assert "run 'run' has no version with step 7" in said, said
        said = failure(lambda: dcp.load(dict(into), storage_reader=TierReader(policy, "other")))
        assert "run 'other' has no version" in said, said
        half = {"w": distribute_tensor(torch.zeros(64).half(), init_device_mesh("cpu", (2,)), [Shard(0)])}
        said = failure(lambda: dcp.load(half, storage_reader=TierReader(policy, "run")))
        assert "StateMismatch" in said, said
        assert "w: has dtype torch.float16 here, float32 in the version" in said, said
        short = {"w": distribute_tensor(torch.zeros(60), init_device_mesh("cpu", (2,)), [Shard(0)])}
        assert "Size mismatch" in failure(lambda: dcp.load(short, storage_reader=TierReader(policy, "run")))
        dcp.load(into, storage_reader=TierReader(policy, "run"))
        same(full(into), full(state))
        dist.barrier()
        # Damaged on one tier, it comes from the other; on both, every rank is told.
        for tier in ("nvme", "lustre"):
            if rank == 0:
                named = ts.Checkpointer(policy, "run")
                packs = {key for holding in named._find().holdings for key in holding.layout.objects}
                named.close()
                for pack in packs:
                    if (path := folder / tier / pack).exists():
                        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
            dist.barrier()
            if tier == "nvme":
                into["w"].to_local().zero_()
                dcp.load(into, storage_reader=TierReader(policy, "run"))
                same(full(into), full(state))
                # What was mended is gone again.
                for mend in (folder / "nvme").rglob("*-mend-*") if rank == 0 else ():
                    mend.unlink()
                close()
                dist.barrier()
        said = failure(lambda: dcp.load(into, storage_reader=TierReader(policy, "run")))
        assert said.startswith("0: Damaged: leaf w of version 1 (step 1, "), said
        assert "1: Damaged: leaf w" in said, said


def dying(policy: str) -> None:
    """One rank dies when it has written, before the coordinator knows."""
    with job() as rank:
        state = {"w": distribute_tensor(torch.arange(64.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
        writer = TierWriter(policy, "run")
        write = writer.write_data

        def wrote(plan: Any, planner: Any) -> Any:
            done = write(plan, planner)
            print("wrote", rank, flush=True)
            if rank == 1:
                import time

                time.sleep(60)
            return done

        writer.write_data = wrote  # type: ignore[method-assign]
        dcp.save(state, checkpoint_id=1, storage_writer=writer)


def peers(folder: str) -> None:
    """What torch's own writer makes of a sharded state, for the import."""
    with job() as rank:
        model, optimizer = tp(1)
        state = state_of(model, optimizer, 1)
        whole = full(state)
        dcp.save(state, checkpoint_id=Path(folder) / "tp", storage_writer=dcp.FileSystemWriter(Path(folder) / "tp"))
        model, optimizer = fsdp(2)
        other = state_of(model, optimizer, 2)
        both = full(other)
        dcp.save(other, checkpoint_id=Path(folder) / "fsdp")
        if rank == 0:
            torch.save({"tp": whole, "fsdp": both}, Path(folder) / "whole.pt")
        dist.barrier()
