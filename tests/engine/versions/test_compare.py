"""Numeric differences, against NumPy's own arithmetic on every type of element."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.engine.versions.compare import ValueDifference, values_of
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.format.leaf import Spec
from tierstate.manifest.history.diff import ElementDiff

FLOATS = [
    "bfloat16", "float16", "float32", "float64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
COMPLEX = ["complex32", "complex64", "complex128"]
ARRAYS = ["<f4", ">f4", ">f8", "<f2", ">i2", "<u8", ">i8", "|b1", ">c8", "<c16", "|i1"]


def spec_of(name: str, nbytes: int) -> Spec:
    size = np.dtype(name).itemsize if name[0] in "<>|" else getattr(torch, name).itemsize
    return Spec("array" if name[0] in "<>|" else "tensor", name, size, (nbytes // size,))


def oracle(name: str, data: bytes) -> list[Any]:
    """The elements as Python's own numbers."""
    if name[0] in "<>|":
        return list(np.frombuffer(data, name).tolist())
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    typed = tensor.view(getattr(torch, name))
    if name == "bool":
        return list((tensor != 0).tolist())
    if name in FLOATS and typed.dtype.itemsize < 4:
        typed = typed.to(torch.float32)
    if name == "complex32":
        typed = typed.to(torch.complex64)
    return list(typed.tolist())


def parts(value: Any) -> list[float]:
    return [value.real, value.imag] if isinstance(value, complex) else [value]


def expected(name: str, old: bytes, new: bytes) -> ElementDiff:
    """Element by element, in Python's arithmetic."""
    size = spec_of(name, len(old)).itemsize
    pairs = list(zip(oracle(name, old), oracle(name, new), strict=True))
    hit = [i for i in range(len(pairs)) if old[i * size : (i + 1) * size] != new[i * size : (i + 1) * size]]
    nan, inf, apart = [0, 0], [0, 0], []
    for i in hit:
        if name in INTEGERS or name in ("bool", "|b1") or name[1:2] in "iu":
            apart.append(abs(int(pairs[i][0]) - int(pairs[i][1])))
            continue
        for k, value in enumerate(pairs[i]):
            nan[k] += any(map(math.isnan, parts(value)))
            inf[k] += any(map(math.isinf, parts(value)))
        if all(math.isfinite(p) for value in pairs[i] for p in parts(value)):
            one, other = (np.complex128(v) if isinstance(v, complex) else np.float64(v) for v in pairs[i])
            with np.errstate(over="ignore"):
                gap = one - other
                apart.append(math.hypot(gap.real, gap.imag))
    largest = max(apart, default=0.0)
    if math.isinf(largest):
        rms = math.inf
    else:  # exactly, and then rounded once
        total = sum(Fraction(a) ** 2 for a in apart)
        mean = total / max(1, len(pairs))
        scale = Fraction(largest) if largest else Fraction(1)
        rms = math.sqrt(mean / scale**2) * float(largest)
    return ElementDiff(len(pairs), len(hit), largest, rms, (nan[0], nan[1]), (inf[0], inf[1]))


def measured(spec: Spec, old: bytes, new: bytes, cuts: list[int] = []) -> ElementDiff:  # noqa: B006 - never changed
    tally = ValueDifference(spec)
    ends = sorted({0, len(old), *(min(c * spec.itemsize, len(old)) for c in cuts)})
    for a, b in pairwise(ends):
        tally.add(as_buffer(bytearray(old[a:b])), as_buffer(bytearray(new[a:b])))
    return tally.numbers()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, bytes, bytes]:
    """Two runs of bytes of a type, some elements the same, some that mean something special."""
    name = draw(st.sampled_from([*FLOATS, *INTEGERS, *COMPLEX, *ARRAYS, "bool"]))
    size = spec_of(name, 0).itemsize
    special = st.sampled_from(
        [b"\0" * size, b"\xff" * size, b"\0" * (size - 1) + b"\x80", b"\x01" + b"\0" * (size - 1)]
    )
    huge = st.sampled_from([b"\xff" * (size - 1) + b"\x7f", b"\0" * (size - 2) + b"\xf0\x7f" if size > 1 else b"\x7c"])
    element = st.one_of(st.binary(min_size=size, max_size=size), special, huge)
    both = draw(st.lists(st.tuples(element, element, st.booleans()), max_size=12))
    return name, b"".join(a for a, _, _ in both), b"".join(a if same else b for a, b, same in both)


@given(pair=pairs(), cuts=st.lists(st.integers(0, 12), max_size=3))
@example(pair=("int64", b"\0" * 7 + b"\x80", b"\xff" * 7 + b"\x7f"), cuts=[])
@example(pair=("uint64", b"\0" * 8, b"\xff" * 8), cuts=[])
@example(pair=("float64", np.float64(-1.7e308).tobytes(), np.float64(1.7e308).tobytes()), cuts=[])
@example(pair=("float64", np.array([5e-324, 0]).tobytes(), np.array([0, 1e-323]).tobytes()), cuts=[1])
@example(pair=("float64", np.array([1e200, 1.0]).tobytes(), np.array([0, 3e200]).tobytes()), cuts=[1])
@example(pair=("float32", np.float32([0.0]).tobytes(), np.float32([-0.0]).tobytes()), cuts=[])
@example(pair=("float32", b"", b""), cuts=[])
def test_every_type_of_number_is_compared_as_its_arithmetic_has_it(
    pair: tuple[str, bytes, bytes], cuts: list[int]
) -> None:
    name, old, new = pair
    found, right = measured(spec_of(name, len(old)), old, new, cuts), expected(*pair)
    assert (found.elements, found.changed, found.nan, found.inf) == (
        right.elements,
        right.changed,
        right.nan,
        right.inf,
    )
    if "c" in name:
        assert found.largest == pytest.approx(right.largest, rel=1e-15, abs=0)
    else:
        assert found.largest == right.largest
    assert found.rms == pytest.approx(right.rms, rel=1e-12, abs=0)
    if name in INTEGERS:
        assert isinstance(found.largest, int)


@given(old=st.binary(max_size=40), data=st.data())
def test_what_is_no_number_is_compared_by_bytes(old: bytes, data: st.DataObject) -> None:
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    for kind, dtype in (("object", "uint8"), ("storage", "uint8"), ("tensor", "float4_e2m1fn_x2"), ("array", "|S1")):
        found = measured(Spec(kind, dtype, 1, (len(old),)), old, new)
        assert found == ElementDiff(len(old), sum(a != b for a, b in zip(old, new, strict=True)))


def test_types_that_are_none_of_numbers_are_known() -> None:
    for dtype in ("<M8[ns]", "|V3", "<U3", "<f16", {"names": []}, "no such type", "O"):
        assert values_of(Spec("array", dtype, 4)) is None  # type: ignore[arg-type]
    assert values_of(Spec("array", "<f4", 4, attrs={"fields": {}})) is None
    assert values_of(Spec("tensor", "quint8")) is None


def test_long_runs_are_the_sum_of_their_blocks() -> None:
    generator = np.random.default_rng(3)
    old = generator.standard_normal(600_001).astype("f4")
    new = old.copy()
    new[::7] += 1e-3
    new[5] = np.nan
    found = measured(spec_of("float32", old.nbytes), old.tobytes(), new.tobytes())
    apart = np.nan_to_num(new.astype("f8") - old.astype("f8"))
    assert found.changed == np.count_nonzero(old.view("u4") != new.view("u4"))
    assert found.largest == np.abs(apart).max()
    assert found.rms == pytest.approx(np.sqrt(np.mean(apart**2)), rel=1e-9)
    assert (found.nan, found.inf) == ((0, 1), (0, 0))
