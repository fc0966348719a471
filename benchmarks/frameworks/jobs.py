"""The frameworks. Each is imported only when its turn comes, since every environment has some of them."""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

from torch import Tensor

from benchmarks.frameworks.distributed import DcpAsync, MegatronCore, RayTrain, TorchCheckpointing, TorchDcp, Torchtitan
from benchmarks.frameworks.training import EVERY, STEPS, Clock, Job, batch, clocked, policy, timed

SAMPLES = 2 * STEPS


class Transformers(Job):
    """The Trainer of transformers."""

    title, package = "transformers, `Trainer`", "transformers"

    def _trainer(self) -> Any:
        from torch import nn
        from transformers import Trainer, TrainingArguments

        from tierstate.integrations.transformers import use

        net = self.net

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {"loss": self.net(x)}

        arguments = TrainingArguments(
            output_dir=str(self.place / "job"), max_steps=STEPS, per_device_train_batch_size=1, save_steps=EVERY,
            logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
            save_total_limit=2,
        )  # fmt: skip
        rows = [{"x": batch()[0]} for _ in range(SAMPLES)]
        trainer = Trainer(Model(), arguments, train_dataset=rows, optimizers=(self.adamw(), None))
        if self.ours:
            use(trainer, policy(self.place), "job")
        return trainer

    def train(self) -> None:
        """Train."""
        from transformers import TrainerCallback

        clock = self.clock

        class Steps(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.step()
                control.should_save = state.global_step % EVERY == 0  # and not at the end

        trainer = self._trainer()
        trainer.add_callback(Steps())
        durable = trainer._versions.wait_published if self.ours else self.sync
        trainer._save_checkpoint = clocked(clock, trainer._save_checkpoint, durable)
        trainer.train()

    def resume(self) -> float:
        """From the call of `train` until its first step."""
        from transformers import TrainerCallback

        class Ready(TrainerCallback):
            at = 0.0

            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                Ready.at = time.perf_counter()
                raise _Resumed

        trainer = self._trainer()
        trainer.add_callback(Ready())
        start = time.perf_counter()
        try:
            trainer.train(resume_from_checkpoint=True)
        except _Resumed:
            return Ready.at - start
        raise ValueError("it did not begin")


class _Resumed(Exception):
    """The training can begin: that is all that was wanted."""


class Accelerate(Job):
    """accelerate in a loop of one's own."""

    title, package = "accelerate", "accelerate"

    def _made(self) -> tuple[Any, Any, Any, Any]:
        from accelerate import Accelerator

        from tierstate.integrations.accelerate import use

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(self.net, self.adamw())
        return accelerator, model, optimizer, use(accelerator, policy(self.place), "job") if self.ours else None

    def train(self) -> None:
        """Train."""
        accelerator, model, optimizer, versions = self._made()
        save = clocked(self.clock, accelerator.save_state, versions.wait if versions else self.sync)
        for step in range(1, STEPS + 1):
            accelerator.backward(model(batch()))
            optimizer.step()
            optimizer.zero_grad()
            self.clock.step()
            if step % EVERY == 0:
                save(str(self.place / f"step-{step}"))
        self.clock.finish()
        accelerator.end_training()

    def resume(self) -> float:
        """The call of `load_state`."""
        accelerator, *_ = self._made()
        found: list[float] = []
        with timed(found):
            accelerator.load_state(str(self.place / f"step-{STEPS // EVERY * EVERY}"))
        return found[0]


class Lightning(Job):
    """The Trainer of Lightning."""

    title, package = "Lightning, `Trainer`", "lightning"

    def _fit(self, *callbacks: Any, resume: str | None = None, clock: Clock | None = None) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader

        from tierstate.integrations.lightning import TierCheckpointIO

        job = self

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = job.net

            def training_step(self, x: Tensor, _: int) -> Tensor:
                return self.net(x)

            def configure_optimizers(self) -> Any:
                return job.adamw()

        plugins = [TierCheckpointIO(policy(self.place), "job")] if self.ours else []
        folder = self.place / "checkpoints"
        saver = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=1, save_last=False)
        trainer = pl.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=self.place, plugins=plugins, callbacks=[saver, *callbacks],
        )  # fmt: skip
        if clock is not None:
            durable = plugins[0]._versions.settle if plugins else self.sync
            trainer.save_checkpoint = clocked(clock, trainer.save_checkpoint, durable)  # type: ignore[method-assign]
        newest = str(max(folder.glob("*.ckpt"), key=os.path.getmtime)) if resume else None
        trainer.fit(Module(), DataLoader([batch()[0] for _ in range(SAMPLES)], batch_size=1), ckpt_path=newest)

    def train(self) -> None:
        """Train."""
        import lightning.pytorch as pl

        clock = self.clock

        class Steps(pl.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, *_: Any) -> None:
                clock.step()

        self._fit(Steps(), clock=clock)

    def resume(self) -> float:
        """From the call of `fit` until its first step."""
        import lightning.pytorch as pl

        class Ready(pl.Callback):  # type: ignore[misc]
            at = 0.0

            def setup(self, *_: Any, **__: Any) -> None:
                Ready.at = -time.perf_counter()

            def on_train_start(self, *_: Any) -> None:
                Ready.at += time.perf_counter()
                raise _Resumed

        try:
            self._fit(Ready(), resume="newest")
        except _Resumed:
            return Ready.at
        raise ValueError("it did not begin")


class DeepSpeed(Job):
    """DeepSpeed's engine with ZeRO-1, of one rank."""

    title, package = "DeepSpeed, ZeRO-1", "deepspeed"

    def _made(self) -> tuple[Any, Any]:
        os.environ |= {
            "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        }  # fmt: skip
        import deepspeed
        import deepspeed.ops
        import torch.distributed as dist

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, for minutes
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        }
        engine = deepspeed.initialize(model=self.net, model_parameters=self.net.parameters(), config=settings)[0]
        self.optimizer = engine.optimizer.optimizer
        if not self.ours:
            return engine, None
        from tierstate.integrations import deepspeed as tiered

        return engine, tiered.use(engine, policy(self.place), "job")

    def train(self) -> None:
        """Train."""
        engine, tiers = self._made()
        save = clocked(self.clock, engine.save_checkpoint, tiers.wait if tiers else self.sync)
        for step in range(1, STEPS + 1):
            engine.backward(engine(batch()))
            engine.step()
            self.clock.step()
            if step % EVERY == 0:
                save(str(self.place / "checkpoints"))
        self.clock.finish()
        if tiers:
            tiers.close()

    def resume(self) -> float:
        """The call of `load_checkpoint`."""
        engine, _ = self._made()
        found: list[float] = []
        with timed(found):
            engine.load_checkpoint(str(self.place / "checkpoints"))
        return found[0]


JOBS: dict[str, type[Job]] = {
    "transformers": Transformers,
    "accelerate": Accelerate,
    "lightning": Lightning,
    "deepspeed": DeepSpeed,
    "dcp": TorchDcp,
    "dcp-async": DcpAsync,
    "torchtitan": Torchtitan,
    "megatron": MegatronCore,
    "ray": RayTrain,
    "torch_checkpointing": TorchCheckpointing,
}


def quiet() -> None:
    """What frameworks say of CPUs and of loaders without workers is not of interest."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
