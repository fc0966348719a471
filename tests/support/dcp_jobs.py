"""Jobs of real ranks that save and load through torch.distributed.checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
from tierstate.dcp import TierReader, TierStager, TierWriter, close, routed, staging
from tierstate.dcp.engine import engine_of

WIDTH = 37
"""Odd, so that no mesh divides it evenly."""


def policy_text(place: Path) -> str:
    """A policy of one tier, with small chunks."""
    return f"version: 1\nchunk: 4KiB\narena: {{size: 1MiB}}\ntiers:\n  nvme: {{type: nvme, path: {place}/nvme}}\n"


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


def save_as_ranks(
    writers: list[TierWriter], states: list[Any], reuse: Callable[[list[dcp.SavePlan]], list[dcp.SavePlan]] = list
) -> None:
    """A save of several ranks in this process, as DCP makes it; each has its own part of the state.

    Args:
        writers: by rank. With a policy of its own each has the tiers opened for itself, as if in another process.
        reuse: puts plans of earlier saves in the place of some of the ranks' own.
    """
    planners = [DefaultSavePlanner() for _ in writers]
    plans = []
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        writer.set_up_storage_writer(rank == 0, rank=rank)
        planner.set_up_planner(states[rank], writer.storage_meta(), rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(reuse(plans))
    plans = writers[0].prepare_global_plan(plans)
    with ThreadPoolExecutor(len(writers)) as pool:
        made = list(
            pool.map(lambda writer, planner, plan: writer.write_data(plan, planner).wait(), writers, planners, plans)
        )
    writers[0].finish(metadata, made)


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
        close()
        if rank == 1:  # on one host a rank may load by itself
            alone = {"w": torch.zeros(64)}
            dcp.load(alone, storage_reader=TierReader(policy, "run"), no_dist=True)
            assert torch.equal(alone["w"], torch.arange(64.0))
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
        assert said.startswith("0: Damaged: leaf w of version "), said
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


def find_load_step(folder: Path) -> int:
    """As torchtitan looks for its newest checkpoint."""
    steps = [re.search(r"step-(\d+)", path.name) for path in folder.iterdir() if (path / ".metadata").is_file()]
    return max([int(step[1]) for step in steps if step is not None], default=-1)


def loaded(policy: str, made: Callable[[int], Any] = tp, **how: Any) -> dict[str, Any]:
    """The whole state that the ranks load together, with those entries that all of them want alike."""
    into = state_of(*made(5), 5)
    del into["loader"]
    dcp.load(into, storage_reader=TierReader(policy, "run", **how))
    return dict(full(into))


def hosts(policy: str) -> None:
    """Two hosts, each with a disk of its own, of which one is lost."""
    with job() as rank:
        place, name = Path(policy).parent, os.environ["TIERSTATE_HOST"]
        model, optimizer = fsdp(1)
        saved, apart = {}, dist.new_group(backend="gloo")
        for step in (2, 3):  # the tier that all see gets the first
            state = state_of(model, optimizer, step)
            saved[step] = full({key: value for key, value in state.items() if key != "loader"})
            writer = TierWriter(policy, "run", process_group=apart)
            dcp.save(state, checkpoint_id=step, storage_writer=writer, process_group=apart)
        # What each disk has is its rank's part, and neither has all.
        packs = [path for path in (place / f"disk-{name}" / "packs").rglob("*-*") if path.is_file()]
        assert {path.name.split("-")[1].lstrip("0") or "0" for path in packs} == {str(rank)}, packs
        saver = engine_of(ts.Policy.load(policy), "run")
        same(loaded(policy), saved[3])
        same(loaded(policy, fsdp, step=2), saved[2])
        assert engine_of(ts.Policy.load(policy), "run") is saver  # which may have saves under way
        dist.barrier()

        # What fails on one rank fails on both, and the next load goes well.
        half = {"model": {"up.bias": torch.zeros(64, dtype=torch.float16 if rank else torch.float32)}}
        said = failure(lambda: dcp.load(half, storage_reader=TierReader(policy, "run")))
        assert "1: StateMismatch" in said, said
        assert "0: RankFailed: rank 1: StateMismatch" in said, said
        said = failure(lambda: dcp.load({}, storage_reader=TierReader(policy, "run", step=9 + rank)))
        assert "they ask for different ones" in said, said
        said = failure(lambda: dcp.load({}, storage_reader=TierReader(policy, "run", step=9)))
        assert "no rank has it" in said, said
        said = failure(lambda: dcp.load({}, storage_reader=TierReader(policy, "run", step=3, alone=True)))
        assert "is not whole in disk" in said, said
        same(loaded(policy), saved[3])

        # A path with a name, and folders that the other host does not see: all hosts know of the version.
        folder = place / f"out-{name}"
        with routed(policy, "named", marker=True):
            for step, path in ((4, folder / "step-4"), (5, folder / "last.ckpt"), (7, folder / "last.ckpt")):
                dcp.save({"w": torch.full((3000,), float(step)), "n": [step]}, checkpoint_id=path)
            assert find_load_step(folder) == 4
            into: dict[str, Any] = {"w": torch.zeros(3000), "n": [0]}
            dcp.load(into, checkpoint_id=folder / "last.ckpt")
            assert (float(into["w"][0]), into["n"]) == (7.0, [7])
        close()
        dist.barrier()
        # Each host knows the tag by itself: its disk keeps the version for it.
        assert [path.name for path in (place / f"disk-{name}" / "tags" / "named").iterdir()] != []
        with ts.Checkpointer(policy, "named") as ckpt:
            assert [v.tags for v in ckpt.versions()] == [(), (), ("last.ckpt",)]
        dist.barrier()

        # The ranks have changed places; then another host, with an empty disk, takes the place of one.
        for homes, right in ((("b", "a"), 3), (("b", "c"), 2)):
            os.environ["TIERSTATE_HOST"] = homes[rank]
            same(loaded(policy), saved[right])
            if right == 2:
                state = state_of(model, optimizer, 6)
                dcp.save(state, checkpoint_id=6, storage_writer=TierWriter(policy, "run"))
                whole = full({key: value for key, value in state.items() if key != "loader"})
                same(loaded(policy), whole)
            close()
            dist.barrier()
            if rank == 0 and right == 3:
                shutil.rmtree(place / "disk-a")
            dist.barrier()


class _Held:
    """Copies of guarded tensors of this process begin when it is let go."""

    def __init__(self) -> None:
        self._go, copy = threading.Event(), staging._LazyCopy._copy

        def waiting(copying: Any) -> None:
            assert self._go.wait(60)
            copy(copying)

        staging._LazyCopy._copy = waiting  # type: ignore[method-assign]

    def let_go(self) -> None:
        self._go.set()

    def hold(self) -> None:
        self._go.clear()


def guarded(policy: str) -> None:
    """Lazy staging on every rank: a step waits for this rank's copy, and what changes on one rank fails all."""
    with job() as rank:
        model, optimizer = fsdp(1)
        held, stager = _Held(), TierStager(guard=optimizer)

        def save(step: int) -> tuple[Any, Any]:
            state = state_of(model, optimizer, step)
            whole = full({key: value for key, value in state.items() if key != "loader"})
            writer = TierWriter(policy, "run")
            return whole, dcp.async_save(
                state,
                checkpoint_id=step,
                storage_writer=writer,
                async_stager=stager,
                process_group=dist.new_group(backend="gloo"),
            )

        whole, response = save(1)
        stepping = threading.Thread(target=optimizer.step)
        stepping.start()
        stepping.join(0.2)
        assert stepping.is_alive()
        assert not response.staging_completion.done()
        held.let_go()
        stepping.join(60)
        assert not stepping.is_alive()
        response.upload_completion.result()
        same(loaded(policy), whole)

        # One rank changes something without a step.
        held.hold()
        _, response = save(2)
        if rank == 1:
            with torch.no_grad():
                model.up.weight.to_local().mul_(2)
        held.let_go()
        said = failure(response.upload_completion.result)
        assert said.startswith('1: CaptureError: model."up.weight": changed between the return of async_save and'), said
        whole, response = save(3)
        response.upload_completion.result()
        same(loaded(policy), whole)
        with ts.Checkpointer(policy, "run") as ckpt:
            assert [v.step for v in ckpt.versions()] == [1, 3]
        dist.barrier()
        stager.close()


def by_path(policy: str, executor: str) -> None:
    """Code that names only a path, at once and in the background, in a thread or the process that DCP saves by."""
    with job() as rank:
        model, optimizer = fsdp(1)
        out = Path(policy).parent / f"out-{rank}"
        for step, kind in enumerate((None, AsyncCheckpointerType(executor)), 1):
            state = state_of(model, optimizer, step)
            whole = full({key: value for key, value in state.items() if key != "loader"})
            with routed(policy, "run", marker=True, process_group=dist.group.WORLD):
                if kind is None:
                    dcp.save(state, checkpoint_id=out / f"step-{step}")
                else:
                    made = dcp.async_save(
                        state,
                        checkpoint_id=out / f"step-{step}",
                        async_checkpointer_type=kind,
                        process_group=dist.group.WORLD,
                    )
                    made.result()
                assert find_load_step(out) == step
                into = state_of(*tp(5), 5)
                del into["loader"]
                dcp.load(into, checkpoint_id=out / f"step-{step}")
            same(full(into), whole)


def killed(policy: str) -> None:
    """Asynchronous saves to a fast tier and a slow one, until a rank is killed; begins where the one before ended."""
    with job():
        # No two chunks of it are equal, or a slow tier would get one of them for all and be as fast as the others.
        values = torch.arange(WIDTH * 9000.0).reshape(WIDTH, 9000)
        state = {"w": distribute_tensor(values.clone(), init_device_mesh("cpu", (2,)), [Shard(0)]), "n": [0]}
        with suppress(CheckpointException):
            dcp.load(state, storage_reader=TierReader(policy, "run"))
        begun = state["n"][0]
        assert torch.equal(state["w"].full_tensor(), values + begun)
        print("ready", begun, flush=True)
        stager = TierStager()
        for step in range(begun + 1, begun + 1 + int(os.environ["STEPS"])):
            state["n"][0] = step
            state["w"].to_local().add_(1)
            dcp.async_save(
                state,
                checkpoint_id=step,
                storage_writer=TierWriter(policy, "run"),
                async_stager=stager,
                process_group=dist.group.WORLD,
            ).result()
            print("durable", step, flush=True)
        stager.close()


def wait_to_be_killed(policy: str, steps: str) -> None:
    """Save so many steps, and say so when the last one is in the durable tier; slower tiers may lack it yet."""
    with job():
        model, optimizer = fsdp(1)
        for step in range(1, int(steps) + 1):
            state = state_of(model, optimizer, step)
            dcp.save(state, checkpoint_id=step, storage_writer=TierWriter(policy, "run"))
        if dist.get_rank() == 0:
            torch.save(full(state), Path(policy).parent / "whole.pt")
        else:
            full(state)
        print("durable", flush=True)
        threading.Event().wait(100)
