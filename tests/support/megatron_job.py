"""Jobs with Megatron-core, started by torchrun: a small GPT, its distributed optimizer, and checkpoints both ways.

Megatron's optimizer and its queue of asynchronous saves ask for CUDA devices by name. `on_cpu` gives them the CPU
instead, so that their own code runs here. Gradients are made up, since its layers need CUDA's random generators.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

POLICY = "version: 1\nchunk: 64KiB\narena: {{size: 16MiB}}\ntiers: {{disk: {{type: nvme, path: {folder}/tier}}}}\n"


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what is asked to be on a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(args[0]).replace("torch.", "torch.cuda.")
        return func(*args, **options)


def begin() -> None:
    """Join the other ranks, and have Megatron run on the CPU."""
    warnings.simplefilter("ignore")  # it has deprecated things, and says what is not installed
    dist.init_process_group("gloo")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    OnCpu().__enter__()


def tiers(folder: str, text: str = POLICY) -> Any:
    import tierstate as ts
    from tierstate.integrations.megatron import TierCheckpoints

    return TierCheckpoints(ts.Policy.parse(text.format(folder=folder)), "job")


class Training:
    """A GPT and its optimizer with tensor and pipeline parallelism; what is left is data parallelism."""

    def __init__(self, tensor: int, pipeline: int, *, seed: int = 0, vocabulary: int = 32) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, pipeline)
        config = TransformerConfig(
            num_layers=4,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            gated_linear_unit=True,  # its weights are built by a ShardedTensorFactory
        )
        torch.manual_seed(seed)
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=vocabulary,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(config, settings, self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True), [wrapped]
        )
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.iteration = 0
        random.seed(seed)
        np.random.seed(seed)

    def step(self) -> None:
        for param in self.model.parameters():
            made_up = torch.sin(torch.arange(param.numel()) * 0.37 + self.iteration + random.random())
            param.main_grad.copy_(made_up.view(param.shape))
        self.optimizer.step()
        self.iteration += 1

    def state(self, *, loading: bool = False, kind: str = "fully_reshardable") -> dict[str, Any]:
        """A sharded state dict, as Megatron-LM and Megatron-Bridge make it."""
        from argparse import Namespace

        from megatron.core.dist_checkpointing import ShardedObject

        if loading and not self.iteration:
            self.step()  # before that there is nothing in the optimizer to be loaded into
        metadata = {
            "distrib_optim_sharding_type": kind,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self.group,
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        generators = [{"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
        rank, size = dist.get_rank(), dist.get_world_size()
        return {
            "args": Namespace(hidden_size=16, params_dtype=torch.float32, split="969, 30, 1"),
            "iteration": self.iteration,
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
            "rng_state": ShardedObject("rng_state", generators, (size,), (rank,)),
        }

    def take(self, state: dict[str, Any]) -> None:
        """Go on from a loaded state dict."""
        self.model.load_state_dict(state["model"])
        self.iteration = state["iteration"]
        (one,) = self.optimizer.chained_optimizers
        fill, step = type(one)._set_main_param_and_optimizer_states, torch.tensor(float(self.iteration))
        # torch's Adam has its step in each parameter's state, and Megatron's own, for GPUs, in the group.
        one._set_main_param_and_optimizer_states = lambda param, found: fill(one, param, found | {"step": step})
        self.optimizer.load_state_dict(state["optimizer"])
        for own in one.optimizer.state.values():
            own["step"] = step.clone()  # it has given all of them the same
        (generators,) = state["rng_state"]
        random.setstate(generators["random"])
        np.random.set_state(generators["numpy"])
        torch.set_rng_state(generators["torch"])

    def digest(self) -> str:
        """Of all that this rank has, to the last bit."""
        found = hashlib.sha256()
        for _, value in sorted(leaves(plain(self.state())), key=lambda one: one[0]):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def plain(value: Any) -> Any:
    """A state dict with the tensors in place of their shards."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, ShardedTensorFactory):
        return plain(value.build())
    return value.data if hasattr(value, "replica_id") else value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a state dict."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, one in items:
        if isinstance(one, torch.Tensor):
            yield f"{path}/{key}", one
        else:
            yield from leaves(one, f"{path}/{key}")


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Two loaded state dicts are the same, to the last bit."""
    assert type(one) is type(other), f"{path}: {type(one)} and {type(other)}"
    if isinstance(one, dict):
        assert list(map(repr, sorted(one, key=repr))) == list(map(repr, sorted(other, key=repr))), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{path}: {one.dtype} {other.dtype}"
        same = (
            one.detach().contiguous().view(-1).view(torch.uint8),
            other.detach().contiguous().view(-1).view(torch.uint8),
        )
        assert torch.equal(*same), path
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, path
        assert np.array_equal(one, other), path
    else:
        assert one == other or one is other, f"{path}: {one!r} and {other!r}"


def layouts(folder: str, *pairs: str) -> None:
    """Save with each layout, natively and to tiers, and load with each; both must give the same."""
    begin()
    from megatron.core import dist_checkpointing

    kept = tiers(folder)
    given = [tuple(map(int, pair.split("x"))) for pair in pairs]
    for number, saved in enumerate(given):
        first = Training(*saved, seed=1)
        for _ in range(2):
            first.step()
        name = "x".join(map(str, saved))
        native, tiered = (folders(folder, f"{kind}-{name}/iter_{number:07}") for kind in ("native", "tiered"))
        dist_checkpointing.save(first.state(), native)
        dist_checkpointing.save(first.state(), tiered, kept.save_strategy)
        for loaded in given:
            one, other = Training(*loaded, seed=2), Training(*loaded, seed=3)
            expected = dist_checkpointing.load(one.state(loading=True), native)
            found = dist_checkpointing.load(other.state(loading=True), tiered, kept.load_strategy)
            assert_same(expected, found)
            other.take(found)
            if loaded == saved:
                assert other.digest() == first.digest()
            other.step()
            print("same", name, "x".join(map(str, loaded)), sum(1 for _ in leaves(found)), flush=True)
    kept.close()


def load(folder: str, name: str, imported: str) -> None:
    """Load what `layouts` has saved with another number of ranks, and a version of Megatron's folder, by its id."""
    begin()
    from megatron.core import dist_checkpointing

    kept = tiers(folder)
    kept.make_folder(f"{folder}/imported", version=imported)
    found = []
    for seed, path in enumerate((f"{folder}/native-{name}", f"{folder}/tiered-{name}", f"{folder}/imported")):
        state = Training(1, 1, seed=seed).state(loading=True)
        del state["rng_state"]  # there is one for each rank
        found.append(dist_checkpointing.load(state, path, kept.load_strategy))
        assert_same(found[0], found[-1])
    print("same", sum(1 for _ in leaves(found)), flush=True)
    kept.close()


def folders(folder: str, name: str) -> str:
    """A folder that the first rank makes."""
    path = f"{folder}/{name}"
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()
    return path


def main(folder: str, tensor: str, pipeline: str, steps: str, how: str, halt: str = "") -> None:
    """Train, with a checkpoint and a tracker for each step; after the capture of step halt, wait to be killed."""
    begin()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    kept, queue = tiers(folder), AsyncCallsQueue()
    training = Training(int(tensor), int(pipeline))
    tracker = Path(folder, "latest_checkpointed_iteration.txt")
    if tracker.exists():
        newest = f"{folder}/iter_{int(tracker.read_text()):07}"
        training.take(dist_checkpointing.load(training.state(loading=True), newest, kept.load_strategy))
    print("begins", training.iteration, training.digest() if training.iteration else "-", flush=True)
    while training.iteration < int(steps):
        training.step()
        step = training.iteration
        print("state", step, training.digest(), flush=True)
        path = folders(folder, f"iter_{step:07}")

        def track(step: int = step) -> None:
            if dist.get_rank() == 0:
                tracker.write_text(str(step))

        if how == "sync":
            dist_checkpointing.save(training.state(), path, kept.save_strategy)
            track()
        else:
            queue.maybe_finalize_async_calls(blocking=True)  # of the step before
            request = dist_checkpointing.save(training.state(), path, kept.save_strategy, async_sharded_save=True)
            request.add_finalize_fn(track)
            queue.schedule_async_request(request)
        if str(step) == halt:
            print("halts", flush=True)
            time.sleep(600)  # here it is killed
    queue.close()
    kept.close()
    print("done", flush=True)


def refusals(folder: str) -> None:
    """What cannot be loaded, what fits only nearly, and folders without a version."""
    begin()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    import tierstate as ts

    rank, size = dist.get_rank(), dist.get_world_size()
    kept = tiers(folder)

    def of(key: str, rows: int, dtype: torch.dtype = torch.float32, **options: Any) -> ShardedTensor:
        whole = torch.arange(rows * size * 3, dtype=dtype).view(rows * size, 3) / 7
        mine = whole[rank * rows : (rank + 1) * rows].clone()
        return ShardedTensor.from_rank_offsets(key, mine, (0, rank, size), **options)

    native, tiered = folders(folder, "native"), folders(folder, "tiered/iter_0000003")
    for path, strategy in ((native, None), (tiered, kept.save_strategy)):
        dist_checkpointing.save({"a": of("layer.a", 4, allow_shape_mismatch=True), "b": of("b*[0]", 2)}, path, strategy)
    for state, message in (
        ({"a": of("layer.a", 4), "c": of("layer.c", 1)}, "layer.c is not in the version"),
        (
            {"b": of("b*[0]", 3)},
            rf"b\*\[0\] has the global shape \({2 * size}, 3\) in the version, and \({3 * size}, 3\)",
        ),
    ):
        with pytest.raises((ts.StateMismatch, ts.RankFailed), match=message):
            dist_checkpointing.load(state, tiered, kept.load_strategy)
    for rows in (2, 7):  # a vocabulary that is padded otherwise
        expected, found = (
            dist_checkpointing.load({"a": of("layer.a", rows, allow_shape_mismatch=True)}, path, strategy)
            for path, strategy in ((native, None), (tiered, kept.load_strategy))
        )
        assert_same(expected, found)
    expected, found = (
        dist_checkpointing.load({"b": of("b*[0]", 2, torch.bfloat16)}, path, strategy)
        for path, strategy in ((native, None), (tiered, kept.load_strategy))
    )
    assert_same(expected, found)
    more = {"a": of("layer.a", 4), "c": of("layer.c", 1)}
    state, missing, unexpected = dist_checkpointing.load(more, tiered, kept.load_strategy, strict="return_all")
    assert (set(state), missing, unexpected) == ({"a"}, {"b*[0]"}, {"layer.c"})
    assert dist_checkpointing.load_tensors_metadata(tiered, kept.load_strategy)["layer.a"].global_shape == (4 * size, 3)
    empty = folders(folder, "empty")
    if rank == 0:
        Path(empty, "metadata.json").write_text(Path(tiered, "metadata.json").read_text())
        Path(empty, "common.pt").write_bytes(Path(tiered, "common.pt").read_bytes())
    dist.barrier()
    with pytest.raises(ts.NotFound, match="refers to no version of a run"):
        dist_checkpointing.load(more, empty, kept.load_strategy)
    dist_checkpointing.load({"a": of("layer.a", 4)}, native, kept.load_strategy)  # its own folders load as ever
    # The last save into a folder counts, also where the files of one in the other format still lie there.
    both = folders(folder, "both/iter_0000004")
    for times, strategy in enumerate((kept.save_strategy, None, kept.save_strategy), 2):
        shard = of("layer.a", 4)
        shard.data *= times
        dist_checkpointing.save({"a": shard, "times": times}, both, strategy)
        found = dist_checkpointing.load({"a": of("layer.a", 4)}, both, kept.load_strategy)
        assert_same(found, {"a": of("layer.a", 4).data * times, "times": times})
    # A save into the same folder that cannot be made leaves it without a version, and not with the one before.
    bad = {"a": of("layer.a", 4), "r": ShardedObject("rng", object(), (size,), (rank,))}
    with pytest.raises((ts.CaptureError, ts.RankFailed), match="rng/shard"):
        dist_checkpointing.save(bad, tiered, kept.save_strategy)
    assert not Path(tiered, "metadata.json").exists()
    # One that only one rank cannot make is told once, and the next one is made.
    bad["r"] = ShardedObject("rng", object() if rank else 1, (size,), (rank,))
    for request in (False, True):
        with pytest.raises((ts.CaptureError, ts.RankFailed), match="rng/shard"):
            dist_checkpointing.save(bad, tiered, kept.save_strategy, async_sharded_save=request)
    dist_checkpointing.save(more, tiered, kept.save_strategy)
    assert dist_checkpointing.load({"c": of("layer.c", 1)}, tiered, kept.load_strategy)
    kept.close()
    # Where a full disk or a cleaner takes the file that Megatron's process waits by, nothing waits for ever.
    gone = tiers(folder)
    gone._marks.cleanup()
    request = dist_checkpointing.save(more, tiered, gone.save_strategy, async_sharded_save=True)
    request.execute_sync()
    assert dist_checkpointing.load({"c": of("layer.c", 1)}, tiered, gone.load_strategy)
    gone.close()
    # A save that fails raises on all ranks, and its folder is no checkpoint: Megatron's tracker stays where it was.
    small = tiers(f"{folder}/small", POLICY.replace("{folder}/tier", "{folder}/tier, capacity: 8KiB"))
    path = folders(folder, "small/iter_0000001")
    with pytest.raises((ts.TierFull, ts.RankFailed), match=r"8192|8 KiB|8KiB"):
        dist_checkpointing.save({"a": of("layer.a", 4000)}, path, small.save_strategy)
    assert os.listdir(path) == ["common.pt"]
    small.close()
    print("refused", flush=True)


def stand_in_for_bridge() -> None:
    """A module in place of Megatron-Bridge's, which needs CUDA: how its manager uses strategies, and nothing else."""
    import sys
    from types import ModuleType, SimpleNamespace

    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    module: Any = ModuleType("megatron.bridge.training.checkpointing")

    class DefaultCheckpointManager:
        def __init__(self, checkpoint_config: Any) -> None:
            self.config, self.checkpointing_context = checkpoint_config, dict[str, Any]()
            self.tracker = Path(checkpoint_config.save, "latest_checkpointed_iteration.txt")

        def save(self, ctx: Any, callback_manager: Any) -> None:
            path = folders(self.config.save, f"iter_{ctx.state.iteration:07}")
            dist_checkpointing.save(ctx.state.state(), path, self.checkpointing_context["save_strategy"])
            if dist.get_rank() == 0:
                self.tracker.write_text(str(ctx.state.iteration))
            dist.barrier()

        def load(self, ctx: Any) -> tuple[int, int]:
            if not self.tracker.exists():
                return 0, 0
            path = f"{self.config.load}/iter_{int(self.tracker.read_text()):07}"
            assert dist_checkpointing.check_is_distributed_checkpoint(path)
            iteration = dist_checkpointing.load_common_state_dict(path)["iteration"]
            strategy = module.TorchDistLoadShardedStrategy()
            ctx.state.take(dist_checkpointing.load(ctx.state.state(loading=True), path, strategy))
            return iteration, 0

        def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
            pass

    module.DefaultCheckpointManager = DefaultCheckpointManager
    module.TorchDistLoadShardedStrategy = TorchDistLoadShardedStrategy
    module.get_pg_collection = lambda model: SimpleNamespace(
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    training: Any = ModuleType("megatron.bridge.training")
    training.checkpointing = module
    sys.modules |= {"megatron.bridge": ModuleType("megatron.bridge"), "megatron.bridge.training": training}
    sys.modules["megatron.bridge.training.checkpointing"] = module


def bridge(folder: str) -> None:
    """Save and load by the manager for Megatron-Bridge, with contexts of the form that Bridge gives."""
    from types import SimpleNamespace

    begin()
    stand_in_for_bridge()
    from tierstate.integrations.megatron import TierCheckpointManager

    config = SimpleNamespace(
        ckpt_format="torch_dist", save=folders(folder, "gpt"), load=f"{folder}/gpt", fully_parallel_save=True
    )
    with pytest.raises(ValueError, match="TIERSTATE_POLICY"):
        TierCheckpointManager(config)
    if dist.get_rank() == 0:
        Path(folder, "policy.yaml").write_text(POLICY.format(folder=folder))
    dist.barrier()
    os.environ["TIERSTATE_POLICY"] = f"{folder}/policy.yaml"
    manager = TierCheckpointManager(config)
    training = Training(1, 1)
    context = SimpleNamespace(state=training, model=[training.model], pg_collection=None)
    assert manager.load(context) == (0, 0)
    for _ in range(2):
        training.step()
        manager.save(context, None)
        manager.finalize_async_saves(training)
    other = Training(1, 1, seed=9)
    assert manager.load(SimpleNamespace(state=other, model=[other.model], pg_collection=None)) == (2, 0)
    assert other.digest() == training.digest()
    assert [one.step for one in manager.tiers.ckpt.versions()] == [1, 2]
    assert manager.tiers.ckpt.run == "gpt"
    manager.finalize_async_saves(training, blocking=True, terminate=True)
    manager.tiers.close()
