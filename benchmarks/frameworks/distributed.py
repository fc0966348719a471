"""Frameworks for many ranks, with one: torch DCP, torchtitan, Megatron-core, Ray Train, torch_checkpointing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierstate.dcp
from benchmarks.frameworks.training import EVERY, STEPS, Job, Saved, batch, clocked, policy, timed
from benchmarks.rounds import HOUSE
from tierstate.dcp import TierReader, TierStager, TierWriter

LAST = STEPS // EVERY * EVERY
"""The step of the last save."""


class Loop(Job):
    """A loop of one's own around a framework's functions that save and load.

    Attributes:
        durable: waits until the last save is durable.
    """

    durable: Callable[[], object]

    def prepare(self) -> None:
        """Make what saves and loads."""
        raise NotImplementedError

    def save(self, step: int) -> None:
        """Save the state of a step, as the framework's users do."""
        raise NotImplementedError

    def load(self) -> None:
        """Load the newest state."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Called before the optimizer's step."""

    def close(self) -> None:
        """After the training."""

    def train(self) -> None:
        """Train."""
        self.adamw()
        self.durable = self.sync
        self.prepare()
        save = clocked(self.clock, self.save, lambda: self.durable())
        for step in range(1, STEPS + 1):
            self.net(batch()).backward()
            self.before_step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.clock.step()
            if step % EVERY == 0:
                save(step)
        self.clock.finish()
        self.close()

    def resume(self) -> float:
        """The call that loads."""
        self.adamw()
        self.prepare()
        found: list[float] = []
        with timed(found):
            self.load()
        self.close()
        return found[0]

    def begin_alone(self) -> None:
        """A process group of this process alone."""
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class TorchDcp(Loop):
    """`dcp.save`, which returns when all is written and synced."""

    title, package = "torch DCP, `save`", "torch"

    def prepare(self) -> None:
        """Begin."""
        self.begin_alone()
        self.stager: Any = None

    def folder(self, step: int) -> str:
        """Of a step."""
        return str(self.place / f"step-{step}")

    def state_dict(self) -> dict[str, Any]:
        """What DCP saves, and fills in place."""
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def writer(self) -> Any:
        """None for its own."""
        return TierWriter(policy(self.place), "job") if self.ours else None

    def save(self, step: int) -> None:
        """Save."""
        dcp.save(self.state_dict(), checkpoint_id=self.folder(step), storage_writer=self.writer())
        self.durable = lambda: None

    def load(self) -> None:
        """Load, and take it over."""
        import torch.distributed.checkpoint as dcp

        state = self.state_dict()
        reader = TierReader(policy(self.place), "job") if self.ours else None
        dcp.load(state, checkpoint_id=self.folder(LAST), storage_reader=reader)
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def close(self) -> None:
        """Close the tiers."""
        if self.stager is not None:
            self.stager.close()
        tierstate.dcp.close()


class DcpAsync(TorchDcp):
    """`dcp.async_save`; ours also with the lazy capture that its own stager has not."""

    title = "torch DCP, `async_save`"

    def save(self, step: int) -> None:
        """Save."""
        if self.ours and self.stager is None:
            self.stager = TierStager(guard=self.optimizer)
        saved = dcp.async_save(
            self.state_dict(),
            checkpoint_id=self.folder(step),
            storage_writer=self.writer(),
            async_stager=self.stager,
        )
        self.durable = getattr(saved, "upload_completion", saved).result


class Torchtitan(Loop):
    """torchtitan's manager, without its trainer, which wants a GPU; ``async`` mode."""

    title, package = "torchtitan, `CheckpointManager`", "torchtitan"

    def prepare(self) -> None:
        """A manager, as the trainer makes it."""
        torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
        torch.cpu.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
        self.begin_alone()
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        from tierstate.integrations.torchtitan import TierCheckpointManager

        options: dict[str, Any] = {"interval": EVERY, "last_save_model_only": False}
        if self.ours:
            file = self.place / "policy.yaml"
            file.write_text(policy(self.place).dump())
            config = TierCheckpointManager.Config(policy=str(file), run="job", **options)
        else:
            config = CheckpointManager.Config(enable=True, async_mode="async", keep_latest_k=2, **options)
        optimizers = default_adamw(lr=1e-4).build(model_parts=[self.net])
        (self.optimizer,) = optimizers
        schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=STEPS)
        self.manager = config.build(
            dataloader=None, model_parts=[self.net], optimizers=optimizers, lr_schedulers=schedulers, states={},
            sd_adapter=None, base_folder=str(self.place),
        )  # fmt: skip

    def before_step(self) -> None:
        """As the trainer does."""
        self.manager.maybe_wait_for_staging()

    def save(self, step: int) -> None:
        """Save."""
        self.manager.save(step)
        future = self.manager.save_future
        self.durable = future.wait if self.ours else lambda: (future.result(), self.sync())

    def load(self) -> None:
        """Load the newest."""
        if not self.manager.load():
            raise ValueError("there was nothing to load")

    def close(self) -> None:
        """Close."""
        self.manager.close()


class MegatronCore(Loop):
    """`dist_checkpointing`, as it is called without asynchronous saves."""

    title, package = "Megatron-core, `dist_checkpointing`", "megatron-core"

    def prepare(self) -> None:
        """Begin; ours makes its strategies."""
        self.begin_alone()
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda device=None: None
        from megatron.core import dist_checkpointing, parallel_state

        self.checkpointing = dist_checkpointing
        parallel_state.initialize_model_parallel()
        from tierstate.integrations.megatron import TierCheckpoints

        self.tiers = TierCheckpoints(policy(self.place), "job") if self.ours else None

    def sharded(self) -> dict[str, Any]:
        """The state, each tensor whole on this rank."""
        from megatron.core.dist_checkpointing import ShardedTensor

        def of(key: str, tensor: Any) -> Any:
            return ShardedTensor.from_rank_offsets(key, tensor)

        moments = ("exp_avg", "exp_avg_sq")
        names = dict(self.net.named_parameters())
        model = {name: of(name, one.data) for name, one in names.items()}
        states = {name: self.optimizer.state[one] for name, one in names.items()}
        return {
            "model": model,
            "optimizer": {f"{m}.{n}": of(f"optimizer.{m}.{n}", one[m]) for n, one in states.items() for m in moments},
        }

    def folder(self, step: int) -> str:
        """Of a step."""
        path = self.place / f"iter_{step:07}"
        path.mkdir(exist_ok=True)
        return str(path)

    def save(self, step: int) -> None:
        """Save."""
        given = () if self.tiers is None else (self.tiers.save_strategy,)
        self.checkpointing.save(self.sharded(), self.folder(step), *given)
        self.durable = self.sync if self.tiers is None else lambda: None

    def load(self) -> None:
        """Load, and copy it to where it belongs, as the optimizer and the model of Megatron do."""
        for one in self.net.parameters():
            self.optimizer.state[one] = {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.zeros_like(one),
            }  # fmt: skip
        given = () if self.tiers is None else (self.tiers.load_strategy,)
        found = self.checkpointing.load(self.sharded(), self.folder(LAST), *given)
        with torch.no_grad():
            for name, one in self.net.named_parameters():
                one.copy_(found["model"][name])
                for moment in ("exp_avg", "exp_avg_sq"):
                    self.optimizer.state[one][moment].copy_(found["optimizer"][f"{moment}.{name}"])

    def close(self) -> None:
        """Close."""
        if self.tiers is not None:
            self.tiers.close()


class TorchCheckpointing(Loop):
    """The manager of torch_checkpointing, saving asynchronously; on a CPU it stages without pinned memory."""

    title, package = "torch_checkpointing, `CheckpointManager`", "torch_checkpointing"

    def prepare(self) -> None:
        """A manager."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        from tierstate.integrations.torch_checkpointing import TierStorageConfig

        on_cpu = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        own = LocalFileSystemStorageConfig(use_direct_io=False)  # with it a save fails, where blocks count
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=on_cpu),
                storage_config=TierStorageConfig(policy(self.place), "job") if self.ours else own,
            )
        )

    def folder(self, step: int) -> str:
        """Of a step."""
        return str(self.place / f"step_{step}")

    def before_step(self) -> None:
        """What is staged may change when it is."""
        with self.manager.lock():
            pass

    def save(self, step: int) -> None:
        """Save."""
        saved = self.manager.save(self.folder(step), self._state())
        self.durable = saved.result if self.ours else lambda: (saved.result(), self.sync())

    def _state(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self) -> None:
        """Load, and take it over."""
        found = self.manager.load(self.folder(LAST), dict.fromkeys(("model", "optimizer")))
        self.net.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])

    def close(self) -> None:
        """Close."""
        from tierstate.integrations.torch_checkpointing import close

        self.manager.close()
        close()


class RayTrain(Loop):
    """Ray Train with one worker, which trains; the times are taken there."""

    title, package = "Ray Train, `report`", "ray"

    def train(self) -> None:
        """Start Ray, and train in its worker."""
        import ray
        from ray.train import CheckpointConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        env = {"PYTHONPATH": str(HOUSE), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
        given = {"place": str(self.place), "ours": self.ours, "nbytes": self.nbytes}
        TorchTrainer(
            _in_worker,
            train_loop_config=given,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="job", storage_path=f"{self.place}/ray", checkpoint_config=CheckpointConfig(num_to_keep=2)
            ),
        ).fit()
        ray.shutdown()
        told = json.loads((self.place / "told.json").read_text())
        fingerprint = told.pop("fingerprint")
        self.clock = SimpleNamespace(last=lambda: Saved(**told), fingerprint=fingerprint)  # type: ignore[assignment]

    def train_in_worker(self) -> None:
        """What the worker does."""
        super().train()
        told = self.clock.last()._asdict() | {"fingerprint": self.clock.fingerprint}
        (self.place / "told.json").write_text(json.dumps(told))

    def prepare(self) -> None:
        """Open the tiers."""
        import ray.train

        import tierstate as ts
        from tierstate.integrations import ray as tiered

        self.ray, self.tiered = ray, tiered
        self.ckpt = ts.Checkpointer(policy(self.place), "job") if self.ours else None
        if self.ckpt is not None:
            self.ckpt.guard(self.optimizer)

    def save(self, step: int) -> None:
        """Save and report."""
        if self.ckpt is None:
            self._save_natively(step)
            return
        save = self.ckpt.save({"model": self.net, "optimizer": self.optimizer}, step=step)
        self.tiered.report({"step": step}, save)
        self.durable = save.wait

    def _save_natively(self, step: int) -> None:
        train = self.ray.train
        with tempfile.TemporaryDirectory(dir=self.place) as folder:
            torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, f"{folder}/state.pt")
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))

    def load(self) -> None:
        """Load the newest checkpoint in Ray's folder, outside of Ray."""
        newest = max(Path(self.place, "ray/job").glob("checkpoint_2*"), key=os.path.getmtime)
        checkpoint = self.ray.train.Checkpoint(str(newest))
        if self.ckpt is not None:
            self.tiered.restore(self.ckpt, checkpoint, {"model": self.net, "optimizer": self.optimizer})
            return
        with checkpoint.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt")
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Close the tiers."""
        if self.ckpt is not None:
            self.ckpt.close()


def _in_worker(given: dict[str, Any]) -> None:
    """Ray calls it in its worker."""
    RayTrain(Path(given["place"]), given["ours"], given["nbytes"]).train_in_worker()
