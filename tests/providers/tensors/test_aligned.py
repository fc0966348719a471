"""States in memory that direct I/O can read into."""

from __future__ import annotations

import json
import os
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstate as ts
from tierstate.engine.restore.fetch import Fetch

PAGE = 4096
Pair = namedtuple("Pair", ["one", "other"])

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.int64])
TENSORS = st.builds(
    lambda shape, dtype, turned: (
        torch.zeros(shape, dtype=dtype).t() if turned and len(shape) == 2 else torch.zeros(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 4), max_size=3),
    DTYPES,
    st.booleans(),
)
STATES = st.recursive(
    TENSORS | st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, with tensors of the same kind."""
    if isinstance(one, torch.Tensor):
        about = [(t.shape, t.dtype, t.stride(), t.requires_grad, type(t), t.device) for t in (one, other)]
        return about[0] == about[1]
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@given(STATES)
def test_the_structure_is_the_same(state: Any) -> None:
    assert alike(state, ts.aligned_like(state))


def test_long_tensors_begin_at_a_page_and_can_be_trained() -> None:
    model = torch.nn.Linear(1024, 1024)
    before = model(torch.ones(1024)).sum()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.data = ts.aligned_like(parameter.data).copy_(parameter.data)
    assert model.weight.data_ptr() % PAGE == 0
    assert model(torch.ones(1024)).sum() == before
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1024)).sum().backward()
    optimizer.step()
    assert ts.aligned_like(model.weight).requires_grad
    assert type(ts.aligned_like(model.weight)) is torch.nn.Parameter


def test_a_tensor_that_comes_twice_is_one_and_defaults_stay() -> None:
    tensor = torch.ones(3)
    state = {"a": tensor, "b": [tensor], "c": defaultdict(list, x=1)}
    found = ts.aligned_like(state)
    assert found["a"] is found["b"][0]
    assert found["a"] is not tensor
    assert found["c"]["y"] == []
    assert state["c"] == {"x": 1}


def test_what_is_not_dense_or_not_plain_is_made_by_torch() -> None:
    odd = [torch.ones(8)[::2], torch.ones(3).to_sparse(), torch.ones(1).expand(4), torch.ones(2, device="meta")]
    for one, found in zip(odd, ts.aligned_like(odd), strict=True):
        assert (found.shape, found.dtype, found.layout, found.device) == (one.shape, one.dtype, one.layout, one.device)


def test_a_child_process_sees_what_its_parent_had() -> None:
    tensor = ts.aligned_like(torch.empty(1 << 20)).fill_(7)
    right = tensor.numpy().tobytes()
    if not (child := os.fork()):
        os._exit(0 if tensor.numpy().tobytes() == right else 1)  # torch's threads are not in the child
    assert os.waitpid(child, 0)[1] == 0


def beside_a_block(count: int) -> torch.Tensor:
    """So many floats that do not begin at a multiple of 512 bytes."""
    memory = torch.empty(count + 256)
    start = (-memory.data_ptr() % 512 + 64) // 4
    return memory[start : start + count]


@pytest.mark.parametrize("aligned", [True, False])
def test_a_restore_reads_straight_into_aligned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    """Counted by the chunks that are read to where they belong, as on a drive that transfers to multiples of 512."""
    direct = Fetch._direct
    counted: list[int] = []

    def count(layout: Any, rows: Any, targets: Any, grain: Any) -> Any:
        found = direct(layout, rows, targets, grain._replace(memory=512))
        counted.append(int(found.sum()))
        return found

    monkeypatch.setattr(Fetch, "_direct", staticmethod(count))
    policy = ts.Policy.parse(json.dumps({"version": 1, "tiers": {"disk": {"type": "nvme", "path": str(tmp_path)}}}))
    state = {"w": torch.randn(1 << 20), "b": torch.randn(1 << 20)}
    with ts.Checkpointer(policy, "run") as ckpt:
        ckpt.save(state, step=1).wait()
        into = ts.aligned_like(state) if aligned else {k: beside_a_block(1 << 20) for k in state}
        for tensor in into.values():
            tensor.zero_()
        ckpt.restore(into)
    assert all(torch.equal(into[key], state[key]) for key in state)
    assert sum(counted) == (2 if aligned else 0)
