"""Jobs of torchtitan's own trainer on CPU, one process per rank: Llama 3 of two small layers on text.

torchtitan knows GPUs only. Here it is told of the CPU, by the function of torch by which it finds its device, and the
CPU gets what a GPU has to say of its memory. All else is torchtitan's.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._utils

warnings.simplefilter("ignore")  # of torchtitan and what it imports
torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan is imported
for _name, _answer in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 30),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "current_device": 0,
}.items():
    setattr(torch.cpu, _name, lambda *_args, _answer=_answer: _answer)

import torch.distributed as dist

if not hasattr(
    dist, "set_timeout"
):  # of a newer torch than 2.13; the trainer shortens the timeouts of its groups by it
    dist.set_timeout = lambda *_args: None
from datasets import Dataset
from support.equality import difference
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

import tierstate as ts
from tierstate.integrations.torchtitan import TierCheckpointManager

STEPS = 6


class Letters(BaseTokenizer):
    """Each byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, **_ends: bool) -> list[int]:
        return [0, *text.encode(), 0]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def _texts(_path: str) -> Dataset:
    draw = random.Random(3)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(20, 90))) for _ in range(64)]
    return Dataset.from_dict({"text": texts})


DATASETS["letters"] = DatasetConfig(path="", loader=_texts, sample_processor=lambda sample: sample["text"])


def _small_llama(**_backends: Any) -> Any:
    """Llama 3 of two layers, with an attention that needs no compiler."""
    dim = 32
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=dim,
        n_heads=2,
        hidden_dim=64,
        rope=llama3.ComplexRoPE.Config(dim=dim // 2, max_seq_len=128, theta=10000),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=256,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=256, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=dim, out_features=256, param_init=llama3._output_linear_init(dim)),
        layers=layers,
    )


llama3.llama3_configs["small"] = _small_llama


def trainer(place: str, checkpoint: BaseCheckpointManager.Config, **more: Any) -> Trainer:
    """The trainer of this rank."""
    config = Trainer.Config(
        model_spec=llama3.model_registry("small"),
        dump_folder=f"{place}/outputs",
        tokenizer=Letters.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=256),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=50),
        training=TrainingConfig(
            local_batch_size=2, seq_len=32, steps=more.pop("steps", STEPS), disable_cuda_graphs=True
        ),
        # The other way of torchtitan to shard, "spmd_types", needs a newer torch than 2.13.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **more.pop("parallelism", {})),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="letters"),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=5, deterministic=True),
        checkpoint=checkpoint,
        **more,
    )
    made = config.build()
    for module in made.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    log = made.metrics_processor.log

    def tell(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        print("loss", step, loss.hex(), flush=True)
        log(step, loss, *args, **kwargs)

    made.metrics_processor.log = tell
    return made


def train(place: str, options: str = "{}", more: str = "{}") -> None:
    """Train, with these options of the manager (JSON), and end as torchtitan's own `main` does."""
    torch.set_num_threads(1)
    job = trainer(place, manager(place, run="llama", **json.loads(options)), **json.loads(more))
    job.train()
    job.close()
    dist.destroy_process_group()


def resume(place: str) -> None:
    """Load the newest version with another number of ranks, and check each tensor and what is no tensor."""
    torch.set_num_threads(1)
    with ts.Checkpointer(f"{place}/policy.yaml", "llama") as ckpt:
        right = ckpt.load()
    options = {"run": "llama", "exclude_from_loading": ["dataloader"]}
    job = trainer(place, manager(place, **options))
    assert job.checkpointer.load()
    assert (job.step, job.lr_schedulers.schedulers[0].last_epoch) == (STEPS, STEPS)
    for part in ("model", "optimizer"):
        here = job.checkpointer.states[part].state_dict()
        assert difference(right[part], {name: _full(value) for name, value in here.items()}) == ""
    job.close()


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def manager(place: str, **options: Any) -> TierCheckpointManager.Config:
    """The line that switches tierstate on, with these options."""
    wanted = {"policy": f"{place}/policy.yaml", "run": "one", "interval": 2, "last_save_model_only": False}
    return TierCheckpointManager.Config(**wanted | options)


def trained(place: str, steps: int = STEPS, **options: Any) -> Trainer:
    """A trainer that has trained and is closed."""
    job = trainer(place, manager(place, **options), steps=steps)
    job.train()
    assert job.checkpointer.checkpointer._guard.lazy, "the training waits while its state is captured"
    job.close()
    return job


def steps(place: str, run: str = "one") -> list[int]:
    """The steps of the versions of a run."""
    with ts.Checkpointer(f"{place}/policy.yaml", run) as ckpt:
        return [version.step for version in ckpt.versions()]


def loaded(place: str, checkpoint: BaseCheckpointManager.Config, step: int = -1) -> Trainer:
    """A new trainer that has loaded something and is closed."""
    job = trainer(place, checkpoint)
    assert job.checkpointer.load(step)
    job.close()
    return job


def weights(job: Trainer) -> dict[str, torch.Tensor]:
    """The parameters of a trainer, copied."""
    return {name: _full(value).clone() for name, value in job.model_parts[0].state_dict().items()}


def when_and_how_many(place: str) -> None:
    """`interval`, `enable_first_step_checkpoint`, `keep_latest_k`, `load_only`, `enable`."""
    trained(place, 5, enable_first_step_checkpoint=True)
    assert steps(place) == [1, 2, 4, 5]
    trained(place, 7, load_only=True, enable_first_step_checkpoint=True)
    assert steps(place) == [1, 2, 4, 5]
    trained(place, 8, keep_latest_k=2)
    assert steps(place) == [6, 8]
    off = trainer(place, TierCheckpointManager.Config(enable=False))
    assert not off.checkpointer.save(2)
    assert not off.checkpointer.load()
    off.checkpointer.maybe_wait_for_staging()
    off.close()


def last_step(place: str) -> None:
    """`last_save_model_only`, `export_dtype`, `load_step`."""
    job = trained(place, last_save_model_only=True, export_dtype="bfloat16")
    with ts.Checkpointer(f"{place}/policy.yaml", "one") as ckpt:
        last = ckpt.load()
        names = {leaf.name for leaf in ckpt.leaves(step=4)}
    assert sorted(last) == ["contents", "model", "ranks"]
    right = {name: value.to(torch.bfloat16) for name, value in weights(job).items()}
    assert difference(right, dict(last["model"])) == ""
    assert any(name.startswith("dataloader.dp_rank_0.") for name in names)  # and no pickle of it
    again = trainer(place, manager(place))
    with pytest.raises(ts.StateMismatch, match="step 6 of run one has only the model"):
        again.checkpointer.load()
    assert again.checkpointer.load(step=4)
    assert again.step == 4
    with pytest.raises(ts.NotFound, match="5"):
        again.checkpointer.load(step=5)
    again.close()


def left_out(place: str) -> None:
    """`exclude_from_loading`."""
    job = trained(place)
    other = loaded(place, manager(place, exclude_from_loading=["optimizer", "lr_scheduler", "train_state", "rng"]))
    assert difference(weights(job), weights(other)) == ""
    assert other.step == 0
    assert other.lr_schedulers.schedulers[0].last_epoch == 0
    assert all(not state for one in other.optimizers for state in one.state.values())
    with pytest.raises(ValueError, match="there is no nonsense; there are train_state, model"):
        trainer(place, manager(place, exclude_from_loading=["nonsense"]))


def seed(place: str) -> None:
    """`create_seed_checkpoint`, as torchtitan's `main` makes it; step 0 has the model only."""
    job = trainer(place, manager(place, create_seed_checkpoint=True, last_save_model_only=True))
    right = weights(job)
    assert job.checkpointer.save(curr_step=0, last_step=True)
    job.close()
    other = trainer(place, manager(place))
    with torch.no_grad():
        for param in other.model_parts[0].parameters():
            param.zero_()
    assert other.checkpointer.load()
    assert difference(right, weights(other)) == ""
    other.close()


def from_its_own(place: str) -> None:
    """`initial_load_path` with a folder of torchtitan's own manager; and a job that changes over to tierstate."""
    own = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    job = trainer(place, own)
    job.train()
    job.close()
    path = f"{place}/outputs/checkpoint/step-{STEPS}"
    other = loaded(place, manager(place, folder="elsewhere", initial_load_path=path))
    assert (difference(weights(job), weights(other)), other.step) == ("", 0)
    other = loaded(place, manager(place))
    assert (difference(weights(job), weights(other)), other.step) == ("", STEPS)
    assert not steps(place)
    assert loaded(place, manager(place), step=4).step == 4
    with pytest.raises(ts.NotFound, match="5"):
        loaded(place, manager(place), step=5)
    trained(place, STEPS + 2)
    assert steps(place) == [STEPS + 2]
    assert loaded(place, manager(place), step=4).step == 4
    assert loaded(place, manager(place)).step == STEPS + 2
    job = trainer(place, own, steps=STEPS + 6)  # a while without tiers
    job.train()
    job.close()
    other = loaded(place, manager(place))
    assert (difference(weights(job), weights(other)), other.step) == ("", STEPS + 6)
    assert loaded(place, manager(place), step=STEPS + 4).step == STEPS + 4
    trained(place, STEPS + 8)
    assert steps(place) == [STEPS + 2, STEPS + 8]
    assert loaded(place, manager(place)).step == STEPS + 8


def hugging_face(place: str) -> None:
    """`last_save_in_hf`, `initial_load_in_hf`."""
    job = trained(place, last_save_model_only=True, last_save_in_hf=True)
    assert steps(place) == [2, 4]
    path = f"{place}/outputs/checkpoint/step-{STEPS}"
    other = loaded(
        place, manager(place, run="other", folder="elsewhere", initial_load_path=path, initial_load_in_hf=True)
    )
    assert difference(weights(job), weights(other)) == ""


def wrong(place: str) -> None:
    """What cannot be done is refused with what to do."""
    with pytest.raises(ValueError, match="needs policy and run"):
        TierCheckpointManager.Config()
    with pytest.raises(TypeError, match="async_mode"):
        TierCheckpointManager.Config(policy="policy.yaml", run="one", async_mode="async")
    path = Path(place) / "policy.yaml"
    path.write_text(path.read_text().rstrip()[:-1] + ", keep: {last: 2}}\n")
    with pytest.raises(ts.PolicyError, match="keep_latest_k=3, and all tiers"):
        trainer(place, manager(place, keep_latest_k=3))


def generators(place: str) -> None:
    """Random generators go on where they were, also the one from which the iterator of the loader draws."""
    job = trainer(place, manager(place), steps=3)
    job.train()  # saves at 2, and at 3 at last
    right = torch.rand(3)
    job.close()
    other = loaded(place, manager(place))
    iter(other.dataloader)
    assert torch.equal(torch.rand(3), right)


def moments_keep_their_bits(place: str) -> None:
    """Moments of another dtype than their parameters come back as they were, in the tensors that the optimizer has."""
    job = trainer(place, manager(place), steps=2)
    job.train()
    for one in job.optimizers:
        for state in one.state.values():
            state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    right = {name: _full(value) for name, value in job.optimizers.state_dict().items()}
    job.checkpointer.save(4)
    job.close()
    other = trainer(place, manager(place))
    other.optimizers.state_dict()  # makes the states
    for one in other.optimizers:
        for state in one.state.values():
            state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    before = {id(state["exp_avg"]) for one in other.optimizers for state in one.state.values()}
    assert other.checkpointer.load()
    assert difference(right, {name: _full(value) for name, value in other.optimizers.state_dict().items()}) == ""
    assert before == {id(state["exp_avg"]) for one in other.optimizers for state in one.state.values()}
    other.close()


def alone(place: str, function: str) -> None:
    """Run one of the functions above in a process that is the only rank."""
    torch.set_num_threads(1)
    globals()[function](place)
    dist.destroy_process_group()
