"""Jobs of real ranks: together they save every element of sharded states exactly once, and restore it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.meshes import gathered, given_by, load, part_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapped
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.unflatten import plan_restore

Layers = torch.nn.Sequential


def network(seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    return Layers(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()


class Version:
    """What all ranks gave of a state, as each of them could read it."""

    def __init__(self, state: Any) -> None:
        tree = flatten(state, rank=dist.get_rank())
        values = {
            encode_path(node.leaf.path): part_bytes(node.provider)
            for node in tree.nodes
            if node.provider is not None and node.leaf.spec.kind != "tensor"
        }
        own = (tree.leaves, given_by(tree), values)
        everyone: list[Any] = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self.leaves: list[Leaf] = []
        self.values: dict[str, bytes] = {}
        for leaves, _, more in everyone:
            self.leaves += [leaf for leaf in leaves if leaf not in self.leaves]
            self.values |= more
        self.whole = gathered([given for _, given, _ in everyone])

    def into(self, state: Any, **options: Any) -> Any:
        target = plan_restore(self.leaves, into=state, rank=dist.get_rank(), **options)
        return load(target, self.leaves, self.whole, self.values)

    def tensor(self, *path: Any) -> torch.Tensor:
        return self.whole[encode_path(path)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def check(build: Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]) -> None:
    """A state that is given whole comes back into a model of other weights and an optimizer that never stepped."""
    model, optimizer = build(0)
    train(model, optimizer)
    version = Version({"model": model, "optimizer": optimizer})
    right = {name: full(p).clone() for name, p in model.named_parameters()}
    for name, parameter in right.items():
        assert torch.equal(version.tensor("model", name), parameter), name
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(version.tensor("optimizer", "state", number, "exp_avg"), full(state["exp_avg"]))
    other, fresh = build(1)
    assert any(not torch.equal(full(p), right[name]) for name, p in other.named_parameters())
    version.into({"model": other, "optimizer": fresh})
    assert all(torch.equal(full(p), right[name]) for name, p in other.named_parameters())
    train(model, optimizer)
    train(other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(one), full(two))


def fully_sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network(seed)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def in_parallel(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def both(shape: Sequence[int], names: Sequence[str]) -> Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = Layers(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
        if "tp" in names:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"] if "tp" in names else mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    return build


def wrapped(original: bool) -> None:
    """FSDP1, by its own words."""

    def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = Wrapped(network(seed), use_orig_params=original, device_id=torch.device("cpu"))
        Wrapped.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build(0)
    train(model, optimizer)
    version = Version({"model": model, "optimizer": Wrapped.optim_state_dict(model, optimizer)})
    with Wrapped.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        right = copy.deepcopy(model.state_dict())
        moments = copy.deepcopy(Wrapped.optim_state_dict(model, optimizer))["state"]
    for name, tensor in right.items():
        assert torch.equal(version.tensor("model", name), tensor), name
        found = version.tensor("optimizer", "state", name, "exp_avg")
        if not original:  # of original parameters torch itself gives exp_avg_sq under the name of exp_avg here
            assert dist.get_rank() or torch.equal(found, moments[name]["exp_avg"])
    other, fresh = build(1)
    train(other, fresh, 1)
    states = {"model": other, "optimizer": Wrapped.optim_state_dict(other, fresh)}
    version.into(states)
    fresh.load_state_dict(Wrapped.optim_state_dict_to_load(other, fresh, states["optimizer"]))
    train(model, optimizer)
    train(other, fresh)
    with Wrapped.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        right = copy.deepcopy(model.state_dict())
    with Wrapped.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        assert all(torch.equal(tensor, right[name]) for name, tensor in other.state_dict().items())
    refused({"optimizer": optimizer}, "optim_state_dict")
    if not original:
        with Wrapped.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            refused({"model": model}, "SHARDED_STATE_DICT")


def refused(state: Any, remedy: str) -> None:
    with pytest.raises(CaptureError, match=remedy):
        flatten(state)


def zero() -> None:
    """An optimizer whose states are spread over the ranks, restored by as many ranks and by one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of itself

    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    version = Version({"model": model, "optimizer": optimizer})
    own = flatten({"optimizer": optimizer})
    assert 0 < sum(leaf.path[-1:] == ("exp_avg",) for leaf in own.leaves) < 4
    plain_model = network()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    train(plain_model, plain)
    for number, state in plain.state_dict()["state"].items():
        assert torch.equal(version.tensor("optimizer", "state", number, "exp_avg"), state["exp_avg"])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain.param_groups[0]["lr"] = 0.25
    train(plain_model, plain)
    for group in (None, alone):
        other = network(1)
        fresh = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=0.1, process_group=group)
        version.into({"model": other, "optimizer": fresh})
        held = flatten(fresh).leaves
        assert sum(leaf.path[-1:] == ("exp_avg",) for leaf in held) == (4 if group else len(own_numbers(fresh)))
        train(other, fresh)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), plain_model.parameters(), strict=True))
    fourth = torch.optim.AdamW(network(1).parameters(), lr=0.1)
    version.into({"optimizer": fourth}, only=["optimizer.**"])  # an ordinary one takes all
    assert len(fourth.state) == 4


def own_numbers(optimizer: Any) -> list[int]:
    return [i for p, i in optimizer._param_to_index.items() if optimizer._param_to_rank[p] == optimizer.rank]


def two() -> None:
    """All that two ranks can show."""
    warnings.simplefilter("ignore")  # torch's own, about FSDP1 and ZeRO
    dist.init_process_group("gloo")
    for name, job in {
        "fully sharded": lambda: check(fully_sharded),
        "in parallel": lambda: check(in_parallel),
        "hybrid": lambda: check(both((2, 1), ("copies", "shards"))),
        "wrapped": lambda: wrapped(original=False),
        "wrapped, original": lambda: wrapped(original=True),
        "zero": zero,
    }.items():
        print(name, flush=True)
        job()
    dist.destroy_process_group()


def four() -> None:
    """Meshes of two dimensions."""
    warnings.simplefilter("ignore")  # torch's own, about views
    dist.init_process_group("gloo")
    check(both((2, 2), ("dp", "tp")))
    check(both((2, 2), ("copies", "shards")))
    dist.destroy_process_group()
