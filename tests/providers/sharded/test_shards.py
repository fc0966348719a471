"""Shards: what all ranks give together is the whole tensor, once, and comes back on any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mesh_states import Boxes
from support.meshes import (
    coordinates,
    gathered,
    given_by,
    load,
    mesh_at,
    meshes,
    part_bytes,
    placements,
    pretended,
    spread,
)
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tierstate as ts
from tierstate.engine.capture.guard import Guard
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import CaptureError, StateMismatch
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.format.leaf_path import encode_path
from tierstate.providers.sharded.shards import ShardProvider
from tierstate.providers.tensors.tensors import TensorProvider, local_of
from tierstate.providers.tree.flatten import FlatState, flatten
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.tree.unflatten import plan_restore
from tierstate.providers.tree.walk import StateWalk

W = encode_path(("w",))


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with pretended():
        yield


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 251).to(dtype).view(shape)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=30)
def test_all_ranks_together_give_the_tensor_and_take_it_on_another_mesh(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex64]))
    source = whole(shape, dtype)
    mesh, other = data.draw(meshes(most=8)), data.draw(meshes(most=8))
    rules, others = data.draw(placements(mesh, len(shape))), data.draw(placements(other, len(shape)))
    trees = [flatten({"w": spread(source, mesh_at(mesh, at), rules)}) for at in coordinates(mesh)]
    assert all(tree.leaves == trees[0].leaves for tree in trees)
    assert torch.equal(gathered([given_by(tree) for tree in trees])[W], source)
    for at in coordinates(other):
        right = spread(source, mesh_at(other, at), others)
        given_one = DTensor.from_local(
            torch.zeros_like(right._local_tensor), right.device_mesh, others, shape=right.shape, stride=right.stride()
        )
        target = plan_restore(trees[0].leaves, into={"w": given_one})
        state = load(target, trees[0].leaves, {W: source})
        assert state["w"] is given_one
        assert torch.equal(given_one._local_tensor, right._local_tensor)


def test_uneven_rows_of_fsdp_over_tensor_parallelism_are_where_they_lie() -> None:
    source, trees = whole((9, 2)), []
    for d, t in coordinates((4, 2)):
        rows = source.chunk(2)[t]
        local = [*rows.chunk(4), rows[:0], rows[:0]][d].clone()
        rules = [_StridedShard(0, split_factor=2), Shard(0)]
        one = DTensor.from_local(
            local, mesh_at((4, 2), (d, t)), rules, run_check=False, shape=source.shape, stride=source.stride()
        )
        trees.append(flatten({"w": one}))
    assert torch.equal(gathered([given_by(tree) for tree in trees])[W], source)


def sharded(boxes: list[tuple[list[int], torch.Tensor]], shape: tuple[int, ...]) -> ShardedTensor:
    """A ShardedTensor of which this process has these shards."""
    rows = [ShardMetadata(at, list(tensor.shape), "rank:0/cpu") for at, tensor in boxes]
    rest = [ShardMetadata([4, 0], [shape[0] - 4, shape[1]], "rank:1/cpu")]
    found: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(tensor, row) for (_, tensor), row in zip(boxes, rows, strict=True)],
        ShardedTensorMetadata(rows + rest, torch.Size(shape)),
    )
    return found


def test_a_sharded_tensor_has_the_boxes_of_all_its_shards() -> None:
    first, second = whole((2, 3)), whole((2, 3)) + 6
    value = sharded([([0, 0], first), ([2, 0], second)], (6, 3))
    tree = flatten({"w": value, "again": value})
    assert [leaf.spec.kind for leaf in tree.leaves] == ["dict", "tensor", "tied"]
    ((shape, _, boxes),) = given_by(tree).values()
    assert shape == (6, 3)
    assert [box for box, _ in boxes] == [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert torch.equal(torch.cat([tensor for _, tensor in boxes]), whole((4, 3)))
    restored = load(plan_restore(tree.leaves, into={"w": value, "again": value}), tree.leaves, {W: whole((6, 3)) + 1})
    assert restored["w"] is value
    assert torch.equal(torch.cat([first, second]), whole((4, 3)) + 1)


def test_a_rank_outside_the_mesh_holds_nothing_and_restores() -> None:
    state = {"w": spread(whole((4, 2)), mesh_at((2,), None), [Shard(0)])}
    tree = flatten(state)
    assert tree.leaves[1].spec == Spec("tensor", "float32", 4, (4, 2))
    (node,) = [node for node in tree.nodes if node.provider is not None]
    assert node.provider is not None
    assert tuple(node.provider.parts) == ()
    target = plan_restore(tree.leaves, into=state)
    assert target.finish()["w"] is state["w"]


def test_a_box_is_the_global_part_and_its_bytes_the_local_tensors() -> None:
    state = {"w": spread(whole((5, 3)), mesh_at((2, 2), (1, 1)), [Shard(0), Shard(1)])}
    (node,) = [node for node in flatten(state).nodes if node.provider is not None]
    provider = node.provider
    assert isinstance(provider, ShardProvider)
    assert provider.spec.shape == (5, 3)
    assert provider.box == Box((3, 2), (2, 1))
    assert provider.nbytes == 8
    assert provider.value.data_ptr() == state["w"]._local_tensor.data_ptr()


@pytest.mark.filterwarnings("ignore")
def test_a_rank_reads_only_the_optimizer_states_that_it_owns() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of itself

    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (2, 5, 3)]
    optimizer = torch.optim.AdamW(parameters)
    sum(p.sum() for p in parameters).backward()
    optimizer.step()
    leaves = flatten(optimizer).leaves
    target = plan_restore(leaves, into=ZeroRedundancyOptimizer(parameters, torch.optim.AdamW))
    read = {leaves[i].path[1] for i, _ in target.ahead if leaves[i].path[0] == "state"}
    assert read == {1}, "the largest parameter belongs to the first rank"


def test_a_parameter_stays_one_and_says_so() -> None:
    parameter = torch.nn.Parameter(spread(whole((4, 2)), mesh_at((2,), (0,)), [Shard(0)]))
    tree = flatten({"w": parameter})
    assert dict(tree.leaves[1].spec.attrs) == {"requires_grad": True, "parameter": True}
    before = parameter._version
    restored = load(plan_restore(tree.leaves, into={"w": parameter}), tree.leaves, {W: whole((4, 2)) + 1})["w"]
    assert restored is parameter
    assert isinstance(restored, torch.nn.Parameter)
    assert restored.requires_grad
    assert parameter._version > before
    assert torch.equal(parameter._local_tensor, whole((4, 2))[:2] + 1)


def test_pending_sums_are_refused_with_path_and_remedy() -> None:
    pending = DTensor.from_local(torch.ones(2), mesh_at((2,), (0,)), [Partial()], run_check=False)
    with pytest.raises(CaptureError, match=r"^a\.b: .*still to be made.*redistribute"):
        flatten({"a": {"b": pending}})


def test_a_local_tensor_that_does_not_fit_its_placements_is_refused() -> None:
    odd = DTensor.from_local(
        torch.ones(1, 2), mesh_at((2,), (0,)), [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1)
    )
    with pytest.raises(CaptureError, match=r"^w: the local tensor has shape \(1, 2\).*is \(2, 2\).*ts\.Shard"):
        flatten({"w": odd})


def test_other_global_shapes_are_differences() -> None:
    leaves = flatten({"w": torch.zeros(4, 2)}).leaves
    with pytest.raises(StateMismatch, match=r"w: has shape \(5, 2\) here, \(4, 2\) in the version"):
        plan_restore(leaves, into={"w": spread(whole((5, 2)), mesh_at((2,), (0,)), [Shard(0)])})


def test_a_fresh_load_gives_the_plain_global_tensor() -> None:
    leaves = flatten({"w": spread(whole((5, 2)), mesh_at((2,), (0,)), [Shard(0)])}).leaves
    state = load(plan_restore(leaves), leaves, {W: whole((5, 2))})
    assert type(state["w"]) is torch.Tensor
    assert torch.equal(state["w"], whole((5, 2)))


# Ties


@pytest.mark.parametrize("at", coordinates((3,)))
def test_all_ranks_tie_alike_also_one_that_holds_nothing(at: tuple[int, ...]) -> None:
    one = spread(whole((2, 2)), mesh_at((3,), at), [Shard(0)])
    other = spread(whole((2, 2)), mesh_at((3,), at), [Shard(0)])
    tree = flatten({"a": one, "b": one.detach(), "c": other})
    assert [leaf.spec.kind for leaf in tree.leaves] == ["dict", "tensor", "tied", "tensor"]
    state = {"a": one, "b": one.detach(), "c": other}
    source = {encode_path(("a",)): whole((2, 2)) + 1, encode_path(("c",)): whole((2, 2)) + 2}
    load(plan_restore(tree.leaves, into=state), tree.leaves, source)
    rows = slice(at[0], at[0] + 1) if at[0] < 2 else slice(0, 0)
    assert torch.equal(state["b"]._local_tensor, whole((2, 2))[rows] + 1)
    assert torch.equal(state["c"]._local_tensor, whole((2, 2))[rows] + 2)


def test_the_same_memory_as_other_boxes_is_not_tied() -> None:
    memory = torch.zeros(2, 2)
    tree = flatten({"a": ts.Shard(memory, (0, 0), (4, 2)), "b": ts.Shard(memory, (2, 0), (4, 2))})
    assert [leaf.spec.kind for leaf in tree.leaves] == ["dict", "tensor", "tensor"]


def test_what_was_tied_comes_back_into_shards_that_are_not() -> None:
    table = torch.zeros(4, 2)
    leaves = flatten({"a": table, "b": table, "c": table}).leaves
    state: dict[str, Any] = {
        "a": spread(torch.zeros(4, 2), mesh_at((2,), (0,)), [Shard(0)]),
        "b": spread(torch.zeros(4, 2), mesh_at((2,), (1,)), [Shard(1)]),
        "c": torch.zeros(4, 2),
    }
    load(plan_restore(leaves, into=state), leaves, {encode_path(("a",)): whole((4, 2))})
    assert torch.equal(state["a"]._local_tensor, whole((4, 2))[:2])
    assert torch.equal(state["b"]._local_tensor, whole((4, 2))[:, 1:])
    assert torch.equal(state["c"], whole((4, 2)))


def test_a_part_of_anothers_memory_does_not_come_back_into_a_shard() -> None:
    table = torch.zeros(4, 2)
    leaves = flatten({"a": table, "b": table[1:]}).leaves
    state = {"a": torch.zeros(4, 2), "b": spread(torch.zeros(3, 2), mesh_at((2,), (0,)), [Shard(0)])}
    with pytest.raises(StateMismatch, match="b: shares memory with a in the version, but is not all of it"):
        plan_restore(leaves, into=state)


# ts.Shard


@given(st.data())
def test_boxes_that_are_said_are_saved_and_filled(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    cut = data.draw(st.integers(0, shape[0]))
    source = whole(shape)
    shards = [
        ts.Shard(source[:cut].clone(), (0,) * len(shape), shape),
        ts.Shard(source[cut:].clone(), (cut,) + (0,) * (len(shape) - 1), shape),
    ]
    trees = [flatten({"w": shard}) for shard in shards]
    assert torch.equal(gathered([given_by(tree) for tree in trees])[W], source)
    for shard in shards:
        memory = shard.tensor.zero_()
        state = load(plan_restore(trees[0].leaves, into={"w": shard}), trees[0].leaves, {W: source})
        assert state["w"] is shard
        assert shard.tensor is memory
    assert torch.equal(torch.cat([shard.tensor for shard in shards]), source)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((3, 0), (4, 2)), ((-1, 0), (4, 2)), ((0,), (4, 2)), ((0, 0), (4,)), ((0, 0, 0), (4, 2, 1)), ((0, 0), (4, 1))],
)
def test_a_box_outside_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not lie in"):
        ts.Shard(torch.zeros(2, 2), offset, shape)


def test_numbers_that_are_none_and_tensors_that_are_parts_already_are_refused() -> None:
    with pytest.raises(ValueError, match=r"offset=.*is no sequence of ints"):
        ts.Shard(torch.zeros(2), (0.5,), (4,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="DTensor"):
        ts.Shard(spread(whole((2,)), mesh_at((2,), (0,)), [Replicate()]), (0,), (4,))


# Steady saves


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two layers over a mesh of two, with an optimizer that has stepped."""
    mesh = mesh_at((2,), (1,))
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    for layer in module:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(spread(parameter.detach(), mesh, [Shard(0)])))
    optimizer = torch.optim.AdamW(module.parameters())
    step(optimizer)
    return module, optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.slow
def test_what_lies_where_it_lay_is_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = model()
    part = torch.zeros(2, 2)
    strided = spread(whole((8, 2)), mesh_at((2, 2), (0, 1)), [Shard(0), Shard(1)])

    def state() -> dict[str, Any]:
        own = {"rows": ts.Shard(part, (2, 0), (4, 2)), "mine": ts.PerRank({"t": part.view(4), "n": 5})}
        return {"model": module, "optimizer": optimizer, "strided": strided, **own}

    recall = FlattenCache(rank=3)
    first = recall.flatten(state())
    step(optimizer)
    part.add_(1)
    calls: list[Any] = []
    visit = StateWalk._visit
    monkeypatch.setattr(
        StateWalk, "_visit", lambda self, value, path: (calls.append(path), visit(self, value, path))[1]
    )
    again = recall.flatten(state())
    monkeypatch.undo()
    assert calls == [("optimizer", "param_groups")]  # a list of plain values, which may have changed
    assert again.token is first.token
    assert told(again) == told(flatten(state(), rank=3))


def moves() -> list[tuple[str, Any]]:
    """Other values for a leaf of shape (4, 2), by name."""
    source = whole((4, 2))
    near = spread(source, mesh_at((2,), (0,)), [Shard(0)])
    return [
        ("other memory", spread(source + 1, mesh_at((2,), (0,)), [Shard(0)])),
        ("other box", spread(source, mesh_at((2,), (1,)), [Shard(0)])),
        ("other dimension", spread(source, mesh_at((2,), (0,)), [Shard(1)])),
        ("other mesh", spread(source, mesh_at((2, 2), (0, 0)), [Shard(0), Shard(1)])),
        ("everywhere", spread(source, mesh_at((2,), (0,)), [Replicate()])),
        ("nowhere", spread(source, mesh_at((2,), None), [Shard(0)])),
        ("several boxes", spread(source, mesh_at((2,), (0,)), [_StridedShard(0, split_factor=2)])),
        ("plain", source.clone()),
        ("a parameter", torch.nn.Parameter(near)),
        ("said", ts.Shard(source[:2], (0, 0), (4, 2))),
        ("said otherwise", ts.Shard(source[:2], (2, 0), (4, 2))),
        ("another shape", spread(whole((6, 2)), mesh_at((2,), (0,)), [Shard(0)])),
        ("another type", spread(whole((4, 2), torch.int32), mesh_at((2,), (0,)), [Shard(0)])),
    ]


def told(tree: FlatState) -> list[Any]:
    """All that is saved of a state on this rank."""
    found: list[Any] = []
    for node in tree.nodes:
        boxes = [(part.box, part) for part in node.provider.parts] if node.provider is not None else []
        found.append((node.leaf, [(box, part_bytes(part)) for box, part in boxes]))
    return found


@given(st.lists(st.integers(0, 12), min_size=2, max_size=5), st.booleans())
@settings(max_examples=40)
def test_whatever_moves_the_next_save_is_as_if_it_were_the_first(order: list[int], tied: bool) -> None:
    values, recall, boxes = moves(), FlattenCache(), {}
    for which in order:
        name, value = values[which]
        state = {"w": value, "same": values[0][1], **({"v": value} if tied else {})}
        tree = recall.flatten(state)
        assert told(tree) == told(flatten(state)), name
        here = [[box for box, _ in parts] for _, parts in told(tree)]
        assert boxes.setdefault(id(tree.token), (tree.token, here))[1] == here  # a plan for one is one for the other


# Optimizers


def test_states_of_an_optimizer_that_never_stepped_come_back_as_their_parameters_lie() -> None:
    module, optimizer = model()
    leaves = flatten({"optimizer": optimizer}).leaves
    sources, values = {}, {}
    for leaf in leaves:
        if leaf.spec.kind == "tensor":
            sources[encode_path(leaf.path)] = torch.rand(leaf.spec.shape)
    for node in flatten({"optimizer": optimizer}).nodes:
        if node.provider is not None and node.leaf.spec.kind != "tensor":
            values[encode_path(node.leaf.path)] = part_bytes(node.provider)
    fresh = torch.optim.AdamW(module.parameters())
    load(plan_restore(leaves, into={"optimizer": fresh}), leaves, sources, values)
    moment = fresh.state_dict()["state"][0]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Shard(0),)
    path = encode_path(("optimizer", "state", 0, "exp_avg"))
    assert torch.equal(moment._local_tensor, sources[path][3:])
    step(fresh)


def test_the_optimizer_of_flat_parameters_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match=r"optimizer: .*FSDP\.optim_state_dict"):
        flatten({"optimizer": torch.optim.SGD([parameter])})


def test_a_raw_flat_parameter_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="w: a flat parameter of FSDP1"):
        flatten({"w": parameter})


def test_a_guarded_step_covers_what_lies_on_a_mesh() -> None:
    module, optimizer = model()
    guard = Guard()
    guard.add(optimizer)
    strided = spread(whole((8, 2)), mesh_at((2, 2), (0, 1)), [Shard(0), Shard(1)])
    covers, before = guard.covers(), [local_of(tensor).data_ptr() for tensor in guard.tensors()]
    tree = flatten({"model": module, "optimizer": optimizer, "other": strided})
    covered = {
        node.leaf.path[0]: covers(node.provider)
        for node in tree.nodes
        if node.provider is not None and node.leaf.spec.shape[:1] != (1,)
    }
    by_path = {node.leaf.path: covers(node.provider) for node in tree.nodes if node.provider is not None}
    assert all(is_covered for path, is_covered in by_path.items() if path[-1] in ("0.weight", "exp_avg", "exp_avg_sq"))
    assert covered["other"] is False
    assert [local_of(tensor).data_ptr() for tensor in guard.tensors()] == before
    assert 0 not in before
    guard.close()


# Other ranks' leaves


def test_leaves_of_other_ranks_are_listed_where_that_is_allowed() -> None:
    leaves = flatten({"first": {"w": torch.zeros(2)}, "second": {"w": torch.zeros(3), "more": [torch.zeros(1)]}}).leaves
    state = {"first": {"w": torch.ones(2)}}
    with pytest.raises(StateMismatch, match="only in the version"):
        plan_restore(leaves, into=state)
    target = plan_restore(leaves, into=state, elsewhere=True)
    assert [leaves[i].name for i in target.elsewhere] == ["second.w", "second.more.0"]
    assert [leaves[i].name for i in target.wanted] == ["first.w"]
    restored = load(target, leaves, {encode_path(("first", "w")): torch.full((2,), 5.0)})
    assert restored is state
    assert list(state) == ["first"]
    assert state["first"]["w"].tolist() == [5.0, 5.0]
    with pytest.raises(StateMismatch, match="only in the given state"):
        plan_restore(leaves, into={**state, "third": torch.zeros(1)}, elsewhere=True)


def test_lossy_rules_leave_shards_as_they_are() -> None:
    tree = FlattenCache(lossy=lambda _path: "int8").flatten(
        {"w": spread(whole((4, 2)), mesh_at((2,), (0,)), [Shard(0)]), "plain": whole((4, 2))}
    )
    assert [leaf.spec.kind for leaf in tree.leaves] == ["dict", "tensor", "quantized"]


def test_what_was_saved_with_fewer_bits_does_not_come_back_into_a_shard() -> None:
    leaves = FlattenCache(lossy=lambda _path: "int8").flatten({"w": whole((4, 2))}).leaves
    with pytest.raises(StateMismatch, match="w: is tensor here, quantized in the version"):
        plan_restore(leaves, into={"w": spread(whole((4, 2)), mesh_at((2,), (0,)), [Shard(0)])}, allow_lossy=True)


def test_a_shard_without_a_box_is_the_whole() -> None:
    provider = ShardProvider(torch.zeros(3))
    assert provider.spec == TensorProvider(torch.zeros(3)).spec
    assert provider.box == Box.whole((3,))


def test_what_has_no_elements_is_tied_to_nothing_whatever_holds_it() -> None:
    """So that it restores from one kind of holder into any other."""
    none = torch.zeros(4, 0)
    for value in (ts.Shard(none, (0, 0), (4, 0)), Boxes(none.dtype, (4, 0), [(Box((0, 0), (4, 0)), none)]), none):
        assert [leaf.spec.kind for leaf in flatten({"a": value, "b": value}).leaves] == ["dict", "tensor", "tensor"]
