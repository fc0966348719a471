"""NumPy arrays of any dtype and stride, bit for bit, and dtypes from anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, tier
from support.equality import same
from support.state_strategies import ARRAY_DTYPES, arrays
from support.transfer import again, feed, stream

import tierstate as ts
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.tensors.arrays import MAX_ARRAY_DIMS, ArrayProvider
from tierstate.providers.tensors.dtypes import numpy_dtype, numpy_name

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 99), st.text(max_size=4), st.sampled_from(["<f4", "|O", "U3"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["names", "formats", "offsets", "itemsize", "aligned", "base", "shape"]), inner
        ),
    ),
)


def through_text(spec: Spec) -> Spec:
    return again(Leaf((), spec)).spec


@given(arrays(), st.integers(1, 5), st.integers(1, 70), st.integers(0, 9))
@settings(deadline=None)
def test_any_array_comes_back(array: np.ndarray, grains: int, piece: int, seed: int) -> None:
    provider = ArrayProvider(array)
    data = stream(provider, 16 * grains)
    fresh = ArrayProvider.fresh(through_text(provider.spec))
    feed(fresh, data, piece, seed)
    made = fresh.done()
    assert same(made, array)
    assert made.flags.writeable
    assert np.isfortran(made) == np.isfortran(array)
    steps = tuple(slice(None, None, -2) for _ in array.shape)
    strided = np.zeros([2 * n for n in array.shape], array.dtype)[(*steps, ...)]
    mine = ArrayProvider(strided)
    assert mine.mismatch(through_text(provider.spec)) == ""
    feed(mine, data, piece, seed)
    assert mine.done() is strided
    assert same(strided, array)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_new_array_has_the_memory_order_of_the_saved_one(order: Any) -> None:
    array = np.array([[1, 2, 3], [4, 5, 6]], order=order)
    provider = ArrayProvider(array)
    fresh = ArrayProvider.fresh(through_text(provider.spec))
    feed(fresh, stream(provider))
    assert same(fresh.done(), array)
    assert fresh.done().strides == array.strides


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=str)
def test_dtypes_come_back(dtype: np.dtype[Any]) -> None:
    assert numpy_dtype(numpy_name(dtype)) == dtype


def test_broadcast_and_mapped_arrays_can_be_saved(tmp_path: Path) -> None:
    wide = np.broadcast_to(np.arange(3), (4, 3))
    assert stream(ArrayProvider(wide), 16) == wide.tobytes()
    mapped = np.memmap(tmp_path / "a", np.int32, "w+", shape=(5,))
    mapped[:] = range(5)
    assert stream(ArrayProvider(mapped), 16) == np.arange(5, dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.zeros(2, [("a", "O")]),
        np.ma.masked_array([1]),
        np.zeros(2, np.dtype("V70000")),
        np.rec.array([(1,)], dtype=[("a", "i4")]),
        np.zeros(2, [(("title", "name"), "i4")]),
    ],
)
def test_what_does_not_come_back_exactly_is_refused(array: np.ndarray) -> None:
    with pytest.raises(CaptureError):
        ArrayProvider(array)


def test_targets_that_cannot_take_it_say_why() -> None:
    array = np.zeros((2, 3))
    array.flags.writeable = False
    spec = ArrayProvider(np.ones((2, 3))).spec
    assert ArrayProvider(array).mismatch(spec) == "is read-only here; give a copy of it, as by np.array(it)"
    shared = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
    assert "share memory" in ArrayProvider(shared).mismatch(spec)
    assert "dtype" in ArrayProvider(np.zeros((2, 3), ">f8")).mismatch(spec)
    fields = ArrayProvider(np.zeros(2, [("a", "<i4")]))
    assert "fields" in fields.mismatch(ArrayProvider(np.zeros(2, [("b", "<i4")])).spec)


@given(json_values)
@settings(max_examples=300)
def test_a_dtype_from_anybody_is_a_format_error_or_has_no_objects(described: Any) -> None:
    try:
        dtype = numpy_dtype(described)
    except FormatError:
        return
    assert not dtype.hasobject


@pytest.mark.parametrize(
    "spec",
    [
        Spec("array", "|O", 8, (1,)),
        Spec("array", "<f4", 8, (1,)),
        Spec("array", "<f4", 4, (-1,)),
        Spec("array", "<f4", 4, (1,) * 65),
        Spec("array", "<f4", 4, (1,), {"order": "K"}),
        Spec("array", "<f4,O", 4, (1,)),
        Spec("array", "|V8", 8, (1,), {"fields": {"names": ["a"], "formats": ["|O"]}}),
        Spec("array", "|V8", 8, (1,), {"fields": {"base": "<f4", "shape": [2]}}),
    ],
)
def test_specs_from_anybody(spec: Spec) -> None:
    with pytest.raises(FormatError):
        ArrayProvider.fresh(spec)


@pytest.mark.skipif(MAX_ARRAY_DIMS < 64, reason="NumPy 1 has at most 32 dimensions")
@pytest.mark.parametrize("ndim", [32, 33, 64])
def test_an_array_of_as_many_dimensions_as_numpy_has_comes_back(place: Path, ndim: int) -> None:
    value = np.arange(4.0).reshape((2, *(1 for _ in range(ndim - 2)), 2))
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save({"a": value}, step=1).wait()
        into = {"a": np.zeros_like(value)}
        ckpt.restore(into)
        for found in (into["a"], ckpt.load()["a"]):
            assert found.shape == value.shape
            assert (found == value).all()
