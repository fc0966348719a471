"""A job whose DeepSpeed checkpoints go to another number of ranks: parameters of sizes that nothing divides."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.deepspeed_job import policy, prepare

LARGE = 37
TENSORS = ("fp32", "exp_avg", "exp_avg_sq")
"""What the optimizer has of a parameter."""


class Model(torch.nn.Module):
    """Two layers, a frozen one, a buffer of integers and one of float32; two groups of parameters.

    Each number of elements leaves a remainder for two ranks and for the alignment of ZeRO's partitions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, LARGE)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(LARGE))
        self.frozen = torch.nn.Linear(LARGE, 5).requires_grad_(False)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden = self.first(data)
        if self.training:
            self.calls += 1
            self.mean.lerp_(hidden.detach().mean(0).to(self.mean.dtype), 0.25)
        found: torch.Tensor = self.last(self.frozen((hidden - self.mean).to(hidden.dtype).relu()))
        return found


def begin(config: dict[str, Any], seed: int) -> Any:
    """A new engine."""
    prepare()
    import deepspeed

    torch.manual_seed(seed)
    model = Model()
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [one for name, one in named if not name.endswith("weight")], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,  # the norm of partitions is rounded in another way for another number of them
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
    }
    return deepspeed.initialize(model=model, model_parameters=groups, config=settings | config)[0]


def train(engine: Any) -> None:
    """One step, on all ranks with the same data: so that it is the same for any number of them."""
    random = torch.Generator().manual_seed(engine.global_steps)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    loss = engine(torch.randn(4, 7, generator=random).to(dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()


def state_of(engine: Any, tensors: Sequence[str] = TENSORS) -> dict[str, Any]:
    """All that a checkpoint has of the engine, whole on each rank."""
    import deepspeed

    found: dict[str, Any] = {"step": engine.global_steps, "scheduler": engine.lr_scheduler.state_dict()}
    found["groups"] = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    found |= {name: one.clone() for name, one in engine.module.named_buffers()}
    for name, one in engine.module.named_parameters():
        if one.requires_grad:
            found |= {f"{name}.{key}": whole(one, key, engine) for key in tensors}
        with deepspeed.zero.GatheredParameters([one]):
            found[name] = one.detach().clone()
    return found


def whole(parameter: Any, key: str, engine: Any) -> torch.Tensor:
    """A parameter's fp32 weights, or a moment, put together from the partitions of all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(parameter, "ds_id"):
        fp32 = key == "fp32"
        found = safe_get_full_fp32_param(parameter) if fp32 else safe_get_full_optimizer_state(parameter, key)
        return found.clone()
    # Not by these functions: they know the moments only after some steps, or after a load.
    result, part = torch.zeros(parameter.numel()), parameter._hp_mapping
    if part is not None:
        inner = engine.optimizer.optimizer
        flat = inner.param_groups[part.param_group_index]["params"][0]
        source = flat.detach() if key == "fp32" else inner.state[flat][key]
        held, into = part.hp_fragment_address, part.lp_fragment_address
        result[into.start : into.start + into.numel] = source[held.start : held.start + held.numel]
    torch.distributed.all_reduce(result)
    return result.reshape(parameter.shape)


def report(engine: Any, path: str, tensors: Sequence[str] = TENSORS) -> None:
    """Write `state_of` on rank 0."""
    found = state_of(engine, tensors)
    if torch.distributed.get_rank() == 0:
        torch.save(found, path)
    torch.distributed.barrier()


def end() -> None:
    """End at once, when all have come so far: gloo's threads abort some processes at their end, also without ours."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def save(folder: str, config: str) -> None:
    """Train, and save the same state as DeepSpeed does, and as a version."""
    engine = begin(json.loads(config), 0)
    from tierstate.integrations import deepspeed as integration

    for _ in range(3):
        train(engine)
    client = {"extra": {"text": "ü", "pair": (1, 2.5)}}
    engine.save_checkpoint(f"{folder}/native", tag="tag", client_state=client)
    tiers = integration.use(engine, policy(folder), "job")
    engine.save_checkpoint(f"{folder}/checkpoints", tag="tag", client_state=client)
    tiers.close()
    report(engine, f"{folder}/saved.pt")
    train(engine)
    report(engine, f"{folder}/next.pt")
    end()


def resume(folder: str, config: str, path: str) -> None:
    """Load a universal folder with DeepSpeed alone, and report."""
    engine = begin(json.loads(config) | {"checkpoint": {"load_universal": True}}, 1)
    found, client = engine.load_checkpoint(path)
    assert found
    assert client["extra"] == {"text": "ü", "pair": (1, 2.5)}
    report(engine, f"{folder}/resumed.pt")
    end()


def load(folder: str, config: str) -> None:
    """Load the version of another number of ranks in one step, and report."""
    import tierstate as ts

    engine = begin(json.loads(config), 1)
    from tierstate.integrations import deepspeed as integration

    tiers = integration.use(engine, policy(folder), "job")
    with pytest.raises(ts.StateMismatch, match="without custom_load_fn"):
        engine.load_checkpoint(f"{folder}/checkpoints", custom_load_fn=lambda src, dst: None)
    found, client = engine.load_checkpoint(f"{folder}/checkpoints")
    assert found
    assert client["extra"] == {"text": "ü", "pair": (1, 2.5)}
    report(engine, f"{folder}/resumed.pt")
    train(engine)
    report(engine, f"{folder}/went_on.pt")
    engine.save_checkpoint(f"{folder}/checkpoints", save_latest=False)
    tiers.close()
    assert not [name for name in os.listdir(f"{folder}/checkpoints") if name.startswith(".")]
    end()


def refuse(folder: str, config: str) -> None:
    """Try to load the newest checkpoint, where a newer version cannot be read."""
    engine = begin(json.loads(config), 1)
    import tierstate as ts
    from tierstate.integrations import deepspeed as integration

    integration.use(engine, policy(folder), "job")
    with pytest.raises(ts.Damaged, match="is the newest, and its record can"):
        engine.load_checkpoint(f"{folder}/checkpoints")
    assert engine.global_steps == 0
    end()


def load_weights(folder: str, config: str) -> None:
    """Load a version without the optimizer's state, and report."""
    engine = begin(json.loads(config), 1)
    from tierstate.integrations import deepspeed as integration

    tiers = integration.use(engine, policy(folder), "job")
    found, client = engine.load_checkpoint(f"{folder}/checkpoints", load_optimizer_states=False)
    assert found
    assert client["extra"] == {"text": "ü", "pair": (1, 2.5)}
    report(engine, f"{folder}/weights.pt", ["fp32"])
    tiers.close()
    end()
