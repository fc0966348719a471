"""`guard` with the optimizers of real frameworks: every version is the state at its call."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_jobs import STEPS, GuardedRun, network, slow_checkpointer
from support.processes import Gang

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # what a framework warns of is its own affair
]


@pytest.mark.parametrize(("precision", "accumulate"), [("no", 1), ("bf16", 2), ("scaled", 2)])
def test_accelerate(precision: str, accumulate: int) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_steps=accumulate,
    )
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if precision == "scaled" else None
    model, optimizer, schedule = accelerator.prepare(model, inner, schedule)
    if scaler is not None:  # as on a GPU in half precision
        optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with slow_checkpointer() as ckpt:
        run = GuardedRun(ckpt, optimizer)
        for _ in range(STEPS * accumulate):
            with accelerator.accumulate(model):
                loss = model(torch.randn(8, 64)).float().square().mean()
                accelerator.backward(loss if scaler is None else scaler.scale(loss))
                if accelerator.sync_gradients and scaler is None:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.save(state)
        run.check()
        before = copy.deepcopy(model.state_dict())
        assert ckpt.restore(into=state, step=0) is state
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("half", "accumulate"), [(False, 1), (True, 2)])
def test_the_trainer_of_transformers(
    half: bool, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    random.seed(0)
    data = [dict.fromkeys(("input_ids", "labels"), torch.randint(0, 64, (8,))) for _ in range(32)]
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, bf16=half, gradient_accumulation_steps=accumulate, max_grad_norm=0.1,
        max_steps=STEPS, per_device_train_batch_size=2, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    with slow_checkpointer() as ckpt:

        class Saves(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
            run: GuardedRun

            def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
                self.run = GuardedRun(ckpt, optimizer)

            def on_step_end(self, *_: Any, model: Any, optimizer: Any, lr_scheduler: Any, **__: Any) -> None:
                self.run.save({"model": model, "optimizer": optimizer, "schedule": lr_scheduler})

        saves = Saves()
        transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[saves]).train()
        saves.run.check()


def test_deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    with Gang(1, "support.framework_jobs:deepspeed", env={"PYTHONWARNINGS": "ignore"}) as gang:
        gang.wait()


def test_fsdp1() -> None:
    with Gang(2, "support.framework_jobs:fsdp1") as gang:
        gang.wait()
