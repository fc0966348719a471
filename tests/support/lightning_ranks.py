"""Small trainings by Lightning on several ranks, whose model is sharded: each function is run by every rank.

Losses of all steps are appended to ``losses-RANK.txt`` in the folder, one line ``step loss`` each, in full precision.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from support.lightning_job import EPOCHS, Points, checkpoints
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapped
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import tierstate as ts
from tierstate.integrations.lightning import RngState, TierCheckpointIO
from tierstate.integrations.lightning_strategies import TierFSDPStrategy, TierModelParallelStrategy
from tierstate.integrations.lightning_versions import PathVersions

POLICY = """
version: 1
arena: {{size: 32MiB}}
ranks: {{timeout: 60s, silence: 20s}}
tiers:
  fast: {{type: nvme, path: {place}/fast}}
  slow: {{type: nvme, path: {place}/slow}}
"""


def shard(module: Any) -> None:
    """By FSDP2, or by tensor parallelism where the mesh has that."""
    mesh = module.device_mesh
    if mesh["tensor_parallel"].size() > 1:
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(module.layers, mesh["tensor_parallel"], plan)
    else:
        for layer in module.children():
            fully_shard(layer, mesh=mesh["data_parallel"])


class Sharded(pl.LightningModule):
    """A network that FSDP2 shards, or FSDP1."""

    def __init__(
        self, folder: str = "", kill_after: int = -1, *, wrapped: bool = False, more: bool = False, seed: int = 5
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.save_hyperparameters({"width": 10})
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 10), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(10, 8)
        )
        if more:
            self.extra = torch.nn.Linear(3, 3)
        self._folder, self._kill_after, self._wrapped = folder, kill_after, wrapped

    def configure_model(self) -> None:
        if self._wrapped:
            if not isinstance(self.layers, Wrapped):
                self.layers = Wrapped(self.layers, device_id=torch.device("cpu"), use_orig_params=True)
        elif self.device_mesh is not None and not any(isinstance(p, DTensor) for p in self.parameters()):
            shard(self)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.layers(batch) - batch).square().mean()
        self.log("score", float((self.global_step * 7) % 5), sync_dist=False)
        if self._folder:
            with open(f"{self._folder}/losses-{self.global_rank}.txt", "a", encoding="utf-8") as file:
                file.write(f"{self.global_step} {loss.item().hex()}\n")
        if self.global_step == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """For `Trainer.validate`, which loads a checkpoint."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


def loader() -> Any:
    """Each rank its part of the points, always in the same order; a position in it is saved."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return batches(4 // ranks, ranks, rank)


def batches(size: int, ranks: int = 1, rank: int = 0) -> Any:
    sampler = DistributedSampler(Points(), num_replicas=ranks, rank=rank, shuffle=False)
    return StatefulDataLoader(Points(), batch_size=size, sampler=sampler)


def policy(place: Path) -> ts.Policy:
    return ts.Policy.parse(POLICY.format(place=place))


def strategy(place: Path, kind: str = "") -> Any:
    """FSDP2 over all ranks; ``tensor``: tensor parallelism; ``wrapped``: FSDP1."""
    size = int(os.environ["WORLD_SIZE"])
    if kind == "wrapped":
        return TierFSDPStrategy(policy(place), run="small")
    sizes = (1, size) if kind == "tensor" else (size, 1)
    return TierModelParallelStrategy(
        policy(place), run="small", data_parallel_size=sizes[0], tensor_parallel_size=sizes[1]
    )


def trainer(place: Path, *callbacks: Any, plan: Any = None, **more: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "strategy": plan or strategy(place),
        "use_distributed_sampler": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(place),
        "callbacks": [*callbacks, RngState()],
    }
    return pl.Trainer(**{**given, **more})


def seeded(place: Path, *callbacks: Any, **more: Any) -> pl.Trainer:
    """A trainer; random numbers differ by rank, the model does not."""
    torch.set_num_threads(1)
    made = trainer(place, *callbacks, **more)
    pl.seed_everything(5, verbose=False)
    return made


class OwnNumbers(pl.Callback):
    """Lets each rank draw random numbers of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        torch.manual_seed(100 + trainer.global_rank)


def train(folder: str, kind: str, kill_after: str = "-1", kill_rank: str = "all") -> None:
    """Train to the end, from the last checkpoint if there is one; or until ranks are killed."""
    place, mine = Path(folder), kill_rank in ("all", os.environ["RANK"])
    wrapped = kind == "wrapped"
    model = Sharded(folder, int(kill_after) if mine else -1, wrapped=wrapped)
    job = seeded(place, OwnNumbers(), checkpoints(place, "steps" if wrapped else kind), plan=strategy(place, kind))
    job.fit(model, loader(), ckpt_path="last")
    finish(place, job)


def finish(place: Path, job: Any) -> None:
    """Write down what the state is at the end."""
    state = full_state(job)
    if job.global_rank == 0:
        torch.save(state, place / f"state-{job.world_size}.pt")
    print("ended", job.global_step, flush=True)
    leave()


def leave() -> None:
    """End the process group, which Lightning does not with gloo: its threads may abort the process at its end."""
    dist.barrier()
    dist.destroy_process_group()


def full(value: Any) -> Any:
    """A copy of a state with whole tensors in place of shards."""
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.clone() if isinstance(whole, torch.Tensor) else whole


def full_state(job: Any) -> dict[str, Any]:
    """Model and optimizer as whole tensors."""

    plan = job.strategy
    return {
        "model": full(plan.lightning_module_state_dict()),
        "optimizer": full(plan.optimizer_state(plan.optimizers[0])["state"]),
        "step": job.global_step,
    }


class Stop(pl.Callback):
    """Writes down the state before the first step, and ends the training there."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = full_state(trainer)
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


def resume(folder: str, path: str, kind: str = "") -> None:
    """Resume from a checkpoint, and write down what was restored, before a step."""
    place, stop = Path(folder), Stop()
    job = seeded(place, stop, plan=strategy(place, kind), enable_checkpointing=False)
    job.fit(Sharded(seed=7), batches(2), ckpt_path=path)  # no shorter than what was saved
    if job.global_rank == 0:
        torch.save(stop.state, place / f"resumed-{job.world_size}.pt")
    print("ended", flush=True)
    leave()


def best_and_last(folder: str) -> None:
    """The paths that Lightning keeps are loaded by it, by a module alone, and without a strategy."""
    place = Path(folder)
    keeping = checkpoints(place, "steps")
    job = seeded(place, keeping)
    job.fit(Sharded(), loader())
    truth = full_state(job)
    assert Path(keeping.best_model_path).name == "step=6.ckpt", keeping.best_model_path

    found = {}
    for which in ("best", "last"):
        model = Sharded(seed=7)
        job.validate(model, loader(), ckpt_path=which, verbose=False)
        found[which] = {name: full(tensor) for name, tensor in model.state_dict().items()}
    best, last = found["best"], found["last"]
    assert all(torch.equal(last[name], tensor) for name, tensor in truth["model"].items())
    assert not any(torch.equal(best[name], tensor) for name, tensor in truth["model"].items())
    alone = Sharded.load_from_checkpoint(place / "ckpt" / "step=6.ckpt")
    assert all(torch.equal(best[name], tensor) for name, tensor in alone.state_dict().items())
    job.strategy.teardown()
    io = TierCheckpointIO(policy(place), run="small")
    whole = io.load_checkpoint(place / "ckpt" / "last.ckpt")
    io.teardown()
    assert whole["global_step"] == 30
    assert {"loops", "callbacks", "lr_schedulers", "hyper_parameters", "tierstate_rng"} <= set(whole)
    for number, moments in truth["optimizer"].items():
        for name, tensor in moments.items():
            assert torch.equal(whole["optimizer_states"][0]["state"][number][name], tensor)
    print("ended", flush=True)
    leave()


def one_rank_fails(folder: str, which: str) -> None:
    """A save that fails on one rank raises on all; the next one succeeds."""
    place = Path(folder)

    class Failing(pl.Callback):
        said = ""

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if trainer.global_step == 4 and trainer.global_rank == int(which):
                mesh = pl_module.device_mesh["data_parallel"]
                checkpoint["state_dict"]["bad"] = DTensor.from_local(torch.ones(3), mesh, [Partial()])

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step not in (2, 4, 6):
                return
            try:
                trainer.save_checkpoint(place / f"{trainer.global_step}.ckpt")
            except ts.TierstateError as error:
                Failing.said = f"{trainer.global_step} {type(error).__name__} {error}"

    job = seeded(place, Failing(), max_epochs=1, enable_checkpointing=False)
    job.fit(Sharded(), loader())
    print("said", Failing.said.replace("\n", " "), flush=True)
    leave()


def goes_on(folder: str) -> None:
    """After a restore, save while tiers are slow, before SLURM requeues the job, and with a module in the checkpoint;
    say of each whether the version was durable when the save returned."""
    place, wait, gate = Path(folder), PathVersions._wait, threading.Event()

    def slow(self: Any, save: Any) -> Any:
        gate.wait()
        time.sleep(0.5)
        return wait(self, save)

    class Saves(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            PathVersions._wait = slow  # type: ignore[method-assign]
            for name in ("step.ckpt", "hpc_ckpt_1.ckpt", "odd.ckpt"):
                self.odd = name == "odd.ckpt"
                try:
                    trainer.save_checkpoint(place / name)
                except ts.TierstateError as error:
                    print(name, type(error).__name__, error, flush=True)
                else:
                    (target,) = json.loads((place / name).read_text())["targets"]
                    print(name, "durable" if target["version"] else "captured", flush=True)
                gate.set()
            trainer.should_stop = True

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if self.odd:
                checkpoint["model"] = torch.nn.Linear(2, 2)

    job = seeded(place, Saves(), max_epochs=4, enable_checkpointing=False)
    job.fit(Sharded(), loader(), ckpt_path=place / "ckpt" / "last.ckpt")
    leave()


def wrong(folder: str) -> None:
    """What does not fit, or is not there, is an error on all ranks, unless the module says that it need not fit."""
    place = Path(folder)
    job = seeded(place, checkpoints(place, "steps"))
    job.fit(Sharded(), loader())
    truth = full_state(job)["model"]
    last = place / "ckpt" / "last.ckpt"
    for path, model in ((place / "none.ckpt", Sharded()), (last, Sharded(more=True))):
        try:
            seeded(place, max_epochs=4).fit(model, loader(), ckpt_path=path)
        except (FileNotFoundError, ts.TierstateError) as error:
            print("refused", type(error).__name__, flush=True)
    loose = Sharded(more=True, seed=7)
    loose.strict_loading = False
    job.validate(loose, loader(), ckpt_path=last, verbose=False)
    found = {name: full(tensor) for name, tensor in loose.state_dict().items()}
    assert set(found) > set(truth)
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
    print("ended", flush=True)
    leave()
