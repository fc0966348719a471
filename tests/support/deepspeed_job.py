"""A training job with DeepSpeed, started by torchrun: prints its losses, and resumes from where a killed one was.

``main(folder, config, steps, every, halt)``: config is that of DeepSpeed, as JSON; after step halt it waits.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

POLICY = "version: 1\nchunk: 64KiB\narena: {{size: 16MiB}}\ntiers: {{disk: {{type: nvme, path: {folder}/tier}}}}\n"


def prepare() -> None:
    """DeepSpeed on the CPU, with this process as one of its ranks."""
    # Its calls of collectives that torch has renamed; here a warning would be an error.
    warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, for minutes
    deepspeed.init_distributed("gloo")


def begin(config: dict[str, Any]) -> Any:
    """A new engine; like every engine of this configuration, also of a job that was killed."""
    prepare()
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 4))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings | config)[0]


def train(engine: Any) -> str:
    """One step. Its loss, exactly."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else torch.float32
    random = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
    loss = engine(torch.randn(4, 8, generator=random).to(dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach()).hex()


def policy(folder: str) -> Any:
    """The policy of the job."""
    import tierstate as ts

    return ts.Policy.parse(POLICY.format(folder=folder))


def main(folder: str, config: str, steps: str, every: str, halt: str = "") -> None:
    engine = begin(json.loads(config))  # first, since it says on which device DeepSpeed runs
    from tierstate.integrations import deepspeed as integration

    tiers = integration.use(engine, policy(folder), "job")
    path, client = engine.load_checkpoint(f"{folder}/checkpoints")
    print("begins", engine.global_steps, client["extra"] if path else None, flush=True)
    while engine.global_steps < int(steps):
        step = engine.global_steps
        print("loss", step, train(engine), flush=True)
        if str(step) == halt:
            time.sleep(600)  # here it is killed
        if engine.global_steps % int(every) == 0:
            extra = {"text": "ü", "pair": (1, 2.5), "step": engine.global_steps}
            engine.save_checkpoint(f"{folder}/checkpoints", client_state={"extra": extra})
            if engine.global_steps == int(every):
                tiers.wait()  # so that there is one to resume from, however early the job is killed
    tiers.close()
    print("done", flush=True)


def check(folder: str, config: str) -> None:
    """What `use` promises about folders, tags, pickles and files, by an engine that saves and loads."""
    import tierstate as ts

    engine = begin(json.loads(config))  # first, since it says on which device DeepSpeed runs
    from tierstate.integrations import deepspeed as integration

    path = f"{folder}/checkpoints"
    tiers = integration.use(engine, policy(folder), "job", allow_pickle=["**.allowed"])
    _refused(lambda: integration.use(engine, policy(folder), "other"), ValueError, "run 'job' already")
    assert engine.load_checkpoint(path) == (None, None)

    train(engine)
    engine.save_checkpoint(path, tag="one")
    train(engine)
    engine.save_checkpoint(path, tag="best", save_latest=False, client_state={"allowed": slice_of_code})
    tiers.wait()
    _refused(lambda: engine.load_checkpoint(f"{folder}/elsewhere"), ts.NotFound, f"{path}/best")
    _refused(lambda: engine.load_checkpoint(path, tag="two"), ts.NotFound, "'two'")
    of_each = "two" if engine.global_rank else "one"
    _refused(lambda: engine.load_checkpoint(path, tag=of_each), ValueError, "ask for different")
    unknown = {"sampler": slice_of_code}
    _refused(lambda: engine.save_checkpoint(path, tag="refused", client_state=unknown), ts.TierstateError, "sampler")
    engine.save_checkpoint(path, tag="after", save_latest=False)

    _clear(path)  # the folder is not needed
    found, _ = engine.load_checkpoint(path)
    assert "/one/" in found
    assert engine.global_steps == 1
    _, client = engine.load_checkpoint(path, tag="best")
    assert client["allowed"] is slice_of_code
    assert engine.global_steps == 2

    with tiers.loading(path, "one", [engine._get_ckpt_name(path, "one")], None) as tag:  # the other file by itself
        partition = tiers.load(engine._get_zero_ckpt_name(path, tag))
        assert type(partition["optimizer_state_dict"]["loss_scaler"]).__name__ == "LossScaler"
        _refused(lambda: tiers.load(f"{path}/one/none.pt"), ts.NotFound, "no such file")
    _refused(lambda: tiers.load(f"{path}/one/none.pt"), ts.NotFound, "load_checkpoint")

    assert engine.save_16bit_model(folder, "model.pt")
    torch.distributed.barrier()
    assert torch.load(f"{folder}/model.pt")["0.weight"].shape == (33, 8)
    tiers.close()
    print("done", flush=True)


def slice_of_code() -> None:
    """A value that only a pickle can save."""


def _refused(call: Any, error: type[Exception] | tuple[type[Exception], ...], text: str) -> None:
    """It raises this, on every rank."""
    with pytest.raises(error, match=re.escape(text)):
        call()


def _clear(path: str) -> None:
    """Delete a folder, by one rank and before any other goes on."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(path)
    torch.distributed.barrier()


def change_over(folder: str, config: str) -> None:
    """What DeepSpeed has saved is loaded by DeepSpeed, unless the run has a later one. Warnings are printed."""
    import tierstate as ts

    logging.getLogger("tierstate").addHandler(logging.StreamHandler(sys.stdout))

    path, settings = f"{folder}/checkpoints", json.loads(config)
    native = begin(settings)  # first, since it says on which device DeepSpeed runs
    from tierstate.integrations import deepspeed as integration

    train(native)
    native.save_checkpoint(path, client_state={"by": "deepspeed"})

    def resumed(tag: str | None = None) -> tuple[Any, Any, int]:
        engine = begin(settings)
        tiers = integration.use(engine, policy(folder), "job")
        try:
            found, client = engine.load_checkpoint(path, tag=tag)
            if client is not None and tag is None:
                train(engine)
                engine.save_checkpoint(path, client_state={"by": "tierstate"})
            return found and found.split("/")[-2], client and client["by"], engine.global_steps
        finally:
            tiers.close()

    _mark_latest(path, native, "global_step9", integration)  # as a save leaves it that was killed before it was durable
    _refused(resumed, ts.NotFound, "DeepSpeed's own: global_step1")
    assert resumed("global_step1") == ("global_step1", "deepspeed", 1)
    _refused(lambda: resumed("global_step9"), ts.NotFound, "'global_step9'")
    _write_latest(path, "global_step1")
    assert resumed() == ("global_step1", "deepspeed", 2)
    _write_latest(path, "global_step1")  # now there is a version
    assert resumed() == ("global_step2", "tierstate", 3)
    assert resumed("global_step1") == ("global_step1", "deepspeed", 1)

    alone = begin(settings)  # a while without tiers
    for _ in range(5):
        train(alone)
    alone.save_checkpoint(path, client_state={"by": "deepspeed again"})
    assert resumed("global_step5") == ("global_step5", "deepspeed again", 5)
    assert resumed() == ("global_step5", "deepspeed again", 6)
    assert resumed() == ("global_step6", "tierstate", 7)
    print("done", flush=True)


def _mark_latest(path: str, engine: Any, tag: str, integration: Any) -> None:
    tiers = integration.use(engine, policy(f"{path}/other"), "job")
    tiers.save({}, engine._get_ckpt_name(path, tag))
    tiers.close()
    _write_latest(path, tag)


def _write_latest(path: str, tag: str) -> None:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        Path(path, "latest").write_text(tag)
    torch.distributed.barrier()


def stages(folder: str, config: str) -> None:
    """What a pipeline of two stages has saved with ZeRO is refused by one of one stage, on all ranks."""
    prepare()  # first, since it says on which device DeepSpeed runs
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import tierstate as ts
    from tierstate.integrations import deepspeed as integration

    def pipeline(stages: int) -> Any:
        layers = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)]
        module = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        }
        config_of = settings | json.loads(config)
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config_of)[0]

    for count in (2, 1):
        engine = pipeline(count)
        tiers = integration.use(engine, policy(folder), "job")
        if count == 2:
            engine.train_batch(iter([(torch.ones(4, 8), torch.zeros(4, 8))]))
            engine.save_checkpoint(f"{folder}/checkpoints")
        else:
            refusal = (ts.FormatError, ts.RankFailed)
            _refused(lambda engine=engine: engine.load_checkpoint(f"{folder}/checkpoints"), refusal, "of a pipeline")
        tiers.close()
    print("done", flush=True)


def load(folder: str, config: str) -> None:
    """Load what another number of ranks has saved: without partitions, and what is refused since it has a pickle."""
    import tierstate as ts

    engine = begin(json.loads(config))  # first, since it says on which device DeepSpeed runs
    from tierstate.integrations import deepspeed as integration

    path = f"{folder}/checkpoints"
    integration.use(engine, policy(folder), "job", allow_pickle=["**.allowed"])
    _refused(lambda: engine.load_checkpoint(path, tag="best"), ts.StateMismatch, "mp_rank_00_model_states.allowed")
    assert not [name for name in os.listdir(path) if name.startswith(".")]
    engine.load_checkpoint(path, tag="one", load_optimizer_states=False)
    print("loaded", engine.global_steps, flush=True)
