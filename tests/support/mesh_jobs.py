"""Jobs of real ranks, run by `processes.Gang`: a model is saved with one parallelism and restored with others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.checkpointer_worlds import policy, tier
from support.sharded_jobs import both, full, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tierstate as ts

Built = tuple[torch.nn.Module, torch.optim.Optimizer]


def _model(seed: int) -> torch.nn.Sequential:
    """That of `sharded_jobs.both`, on each rank alike."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def _fsdp(seed: int) -> Built:
    model = _model(seed)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _tp(seed: int) -> Built:
    model = _model(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _plain(seed: int) -> Built:
    model = _model(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def spec(place: Path) -> ts.Policy:
    """A disk of the host and a folder for all."""
    return policy(
        {"nvme": tier("nvme", place), "lustre": tier("lustre", place)}, ranks={"timeout": "60s", "silence": "5s"}
    )


def _rows(rank: int, size: int) -> ts.Shard:
    """A part of a table of 7 rows of 3; the last ranks may have none."""
    at, count = min(7, rank * -(-7 // size)), -(-7 // size)
    return ts.Shard(torch.zeros(max(0, min(count, 7 - at)), 3), (at, 0), (7, 3))


def _state(built: Built, rank: int, size: int) -> dict[str, Any]:
    model, optimizer = built
    own = ts.PerRank({"rank": rank, "size": size}, missing="keep")
    return {"model": model, "optimizer": optimizer, "table": _rows(rank, size), "own": own}


def _look(built: Built) -> dict[str, torch.Tensor]:
    model, optimizer = built
    found = {f"model.{name}": full(p).clone() for name, p in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": full(value).clone() for key, value in state.items()}
    return found


def chain(folder: str, name: str, names: str) -> None:
    """Restore what the job before saved into each of these parallelisms in turn, then train and save under one more.

    Args:
        folder: where the tiers are.
        name: the parallelism that saves.
        names: those that only restore, with commas between.
    """
    warnings.simplefilter("ignore")  # torch's own, about views
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    kinds = {
        "fsdp": _fsdp, "tp": _tp, "plain": _plain,
        "hsdp": both((size // 2 or 1, min(size, 2)), ("copies", "shards")),
        "both": both((size // 2 or 1, min(size, 2)), ("dp", "tp")),
    }  # fmt: skip
    truth = Path(folder) / "truth.pt"
    with ts.Checkpointer(spec(Path(folder)), "run", dist.group.WORLD) as ckpt:
        last = torch.load(truth) if truth.exists() else None
        built = kinds[name](3)
        for number, kind in enumerate([*filter(None, names.split(",")), name] if last is not None else []):
            built = kinds[kind](50 + number)
            state = _state(built, rank, size)
            ckpt.restore(state)
            found = _look(built)
            assert list(found) == list(last["found"]), (kind, list(found))
            assert all(torch.equal(found[key], value) for key, value in last["found"].items()), kind
            table = state["table"]
            assert torch.equal(table.tensor, last["table"][table.offset[0] :][: len(table.tensor)]), kind
            assert state["own"].value == {"rank": rank, "size": last["size"] if rank < last["size"] else size}
            print("restored", kind, flush=True)
        train(*built)
        state, step = _state(built, rank, size), 0 if last is None else last["step"] + 1
        whole = torch.arange(21.0).view(7, 3) + step
        state["table"].tensor.copy_(whole[state["table"].offset[0] :][: len(state["table"].tensor)])
        save = ckpt.save(state, step=step)
        save.wait("lustre")
        assert save.version == (ckpt.info(step=step).id if rank == 0 else "")
        found = _look(built)
        dist.barrier()
        if rank == 0:
            torch.save({"found": found, "table": whole, "size": size, "step": step}, truth)
    dist.destroy_process_group()
