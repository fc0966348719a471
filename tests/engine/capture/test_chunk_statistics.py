"""Statistics of chunks are those of their elements, for every type, wherever NaN, zeros and extremes lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.engine.capture import chunk_statistics
from tierstate.engine.capture.chunk_statistics import ElementTypes, element_type, statistics_of
from tierstate.manifest.format.leaf import Leaf, Spec

FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["int8", "int32", "int64", "uint8", "bool", "complex64"]
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, 448.0, 6e4, 1.0, -1.0]


def leaf(name: str, count: int) -> Leaf:
    return Leaf((name,), Spec("tensor", name, getattr(torch, name).itemsize, (count,)))


def expected(values: torch.Tensor) -> tuple[float, ...]:
    wide = (torch.view_as_real(values) if values.is_complex() else values).double().flatten()
    finite = wide[torch.isfinite(wide)]
    ordered = len(finite) > 0 and not values.is_complex()
    numbers = values.is_complex() or values.is_floating_point()
    return (
        int(torch.isnan(wide).sum()),
        int(torch.isinf(wide).sum()),
        float(finite.min()) if ordered else np.nan,
        float(finite.max()) if ordered else np.nan,
        float((finite * finite).sum()) if numbers else np.nan,
    )


def laid_out(tensors: list[torch.Tensor], gap: int) -> tuple[memoryview, Any, Any]:
    """The tensors in one piece of memory, at multiples of 16, with other bytes between them."""
    at, end = [], 0
    for tensor in tensors:
        at.append(end)
        end += -(-tensor.nbytes // 16) * 16 + gap * 16
    memory = np.full(end, 0xFF, "u1")
    for start, tensor in zip(at, tensors, strict=True):
        memory[start : start + tensor.nbytes] = tensor.view(torch.uint8).numpy()
    return memoryview(memory), np.array(at), np.array([t.nbytes for t in tensors])


def check(tensors: list[torch.Tensor], gap: int = 0) -> None:
    memory, at, nbytes = laid_out(tensors, gap)
    leaves = [leaf(str(t.dtype).removeprefix("torch."), len(t)) for t in tensors]
    types = ElementTypes(leaves, np.arange(len(leaves)))
    found = statistics_of(memory, at, nbytes, types.codes, types.known)
    for i, tensor in enumerate(tensors):
        mine = [float(column[i]) for column in found]
        np.testing.assert_allclose(mine, expected(tensor), rtol=1e-5, err_msg=f"{leaves[i].name}: {tensor}")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = getattr(torch, draw(st.sampled_from([*FLOATS, *OTHERS])))
    count = draw(st.integers(1, 60))
    values = torch.randn(count, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    values = values.abs() * draw(st.sampled_from([1.0, -1.0])) if draw(st.booleans()) else values
    if not (dtype.is_floating_point or dtype.is_complex):
        return (values.abs() * 20).to(dtype)
    for where, value in draw(st.lists(st.tuples(st.integers(0, count - 1), st.sampled_from(SPECIAL)), max_size=4)):
        values[where] = value
    return values.to(dtype)


@given(st.lists(tensors(), min_size=1, max_size=12), st.integers(0, 300))
def test_short_chunks_are_read_together(made: list[torch.Tensor], gap: int) -> None:
    check(made, gap)


@given(tensors(), st.integers(0, 40_000), st.sampled_from([1.0, 1e-20, 1e25]))
@example(torch.tensor([float("nan")]), 9000, 1.0)
@example(torch.tensor([-float("inf"), 1.0], dtype=torch.bfloat16), 20_001, 1.0)
def test_long_chunks_are_read_one_by_one(some: torch.Tensor, more: int, scale: float) -> None:
    rest = torch.randn(more, generator=torch.Generator().manual_seed(more))
    if some.dtype.is_floating_point:
        rest *= scale
    elif not some.dtype.is_complex:
        rest = (rest.abs() * 10).clamp(0, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_statistics, "ALONE", 0)
        patch.setattr(chunk_statistics, "PIECE", 5000)
        check([torch.cat([some, rest.to(some.dtype)])])


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_sums_of_many_squares_are_exact_to_some_millionths(name: str) -> None:
    # A plain sum of float32 would be wrong by a part in a thousand.
    values = torch.full((1_500_001,), 1.1).to(getattr(torch, name))
    memory, at, nbytes = laid_out([values], 0)
    kind = element_type(leaf(name, len(values)))
    assert kind is not None
    found = float(statistics_of(memory, at, nbytes, np.zeros(1, int), [kind]).squares[0])
    assert found == pytest.approx(len(values) * float(values[0].double()) ** 2, rel=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("value"),
        Spec("object"),
        Spec("tensor", "float32", 4, (3,), {"lossy": {"method": "bf16"}}),
        Spec("array", "|V8", 8, (3,), {"fields": {}}),
        Spec("array", ">f4", 4, (3,)),
        Spec("array", "<U3", 12, (3,)),
        Spec("array", "<M8[s]", 8, (3,)),
        Spec("tensor", "no_such_type", 4, (3,)),
    ],
)
def test_of_what_is_no_number_nothing_is_known(spec: Spec) -> None:
    assert element_type(Leaf(("x",), spec)) is None


@pytest.mark.parametrize("name", ["<f4", "<f8", "<f2", "<i2", "|b1", "<c8"])
def test_arrays_are_read_as_tensors_are(name: str) -> None:
    kind = element_type(Leaf(("x",), Spec("array", name, np.dtype(name).itemsize, (2,))))
    assert kind is not None
    data = np.array([1, 0], name)
    found = statistics_of(
        memoryview(data.tobytes()), np.zeros(1, int), np.array([data.nbytes]), np.zeros(1, int), [kind]
    )
    assert float(found.low[0]) == 0.0 or name == "<c8"
