"""Placings: what a rank holds by the pure rules is what torch cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.meshes import coordinates, meshes, placements
from torch.distributed.tensor.placement_types import Placement

from tierstate.providers.sharded.mesh import Cut, LocalBoxes, local_boxes, local_shape, strided_last


def cuts_of(mesh: Sequence[int], rules: Sequence[Placement], at: Sequence[int]) -> tuple[Cut, ...]:
    return tuple(
        Cut(rule.dim, n, i, getattr(rule, "split_factor", 1))  # type: ignore[attr-defined]
        for rule, n, i in zip(rules, mesh, at, strict=True)
        if not rule.is_replicate()
    )


def cut_by_torch(
    whole: torch.Tensor, mesh: Sequence[int], rules: Sequence[Placement], at: Sequence[int]
) -> torch.Tensor:
    for rule, n, i in zip(rules, mesh, at, strict=True):
        if not rule.is_replicate():
            whole = rule._split_tensor(whole, n, with_padding=False)[0][i]  # type: ignore[attr-defined]
    return whole


def put_together(held: LocalBoxes, whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The local tensor, from its boxes of the global one."""
    local = torch.full(tuple(shape), -1.0, dtype=whole.dtype)
    for box, at in held.pieces:
        local[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = whole[box.slices()]
    return local


@given(st.data())
def test_the_boxes_of_a_rank_make_up_its_local_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = data.draw(meshes())
    rules = data.draw(placements(mesh, len(shape)))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    seen = torch.zeros(shape)
    for at in coordinates(mesh):
        cuts = cuts_of(mesh, rules, at)
        local = cut_by_torch(whole, mesh, rules, at)
        held = local_boxes(shape, cuts)
        assert local_shape(shape, cuts) == tuple(local.shape)
        assert torch.equal(put_together(held, whole, local.shape), local)
        assert bool(held.pieces) == bool(local.numel())
        first = all(i == 0 for rule, i in zip(rules, at, strict=True) if rule.is_replicate())
        for box, _ in held.pieces if first else ():
            seen[box.slices()] += 1
    assert bool((seen == 1).all())  # by the ranks that are no copies of others


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_strided_cuts_from_the_right_are_those_of_fsdp_over_tensor_parallelism(n: int, data: int, tensor: int) -> None:
    whole = torch.arange(n)
    for d in range(data):
        for t in range(tensor):
            rows = [*whole.chunk(tensor), *([whole[:0]] * tensor)][t]
            local = [*rows.chunk(data), *([whole[:0]] * data)][d]
            cuts = strided_last((Cut(0, data, d, tensor), Cut(0, tensor, t)) if tensor > 1 else (Cut(0, data, d),))
            held = local_boxes((n,), cuts)
            assert torch.equal(put_together(held, whole.float(), local.shape), local.float())
            assert len(held.pieces) == bool(local.numel())
