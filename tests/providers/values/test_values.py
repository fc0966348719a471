"""Plain values: exact, canonical, and safe to read from anybody."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import pickle
import re
import tracemalloc
from collections import Counter, OrderedDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.equality import difference
from support.state_strategies import PLAIN
from support.transfer import feed, stream

from tierstate.manifest.errors import CaptureError, FormatError, Unsafe
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.tensors.dtypes import TORCH_DTYPES
from tierstate.providers.values.encoding import MAX_VALUE_DEPTH, decode_value, encode_value
from tierstate.providers.values.values import ObjectProvider, ValueProvider


class Colour(enum.IntEnum):
    RED = 1


@given(PLAIN, st.integers(1, 70))
@settings(deadline=None, max_examples=300)
def test_any_plain_value_comes_back(value: Any, piece: int) -> None:
    provider = ValueProvider(value)
    receiver = ValueProvider(None).receiver(provider.spec)
    feed(receiver, stream(provider, 16), piece)
    assert difference(receiver.done(), value) == ""


@given(PLAIN)
@settings(deadline=None)
def test_equal_values_have_equal_bytes(value: Any) -> None:
    assert encode_value(decode_value(encode_value(value))) == encode_value(value)


@given(st.sets(st.one_of(st.integers(), st.text())))
def test_sets_have_no_order(value: set[Any]) -> None:
    assert encode_value(set(sorted(value, key=repr))) == encode_value(set(sorted(value, key=repr, reverse=True)))


@pytest.mark.parametrize("capitals", [0, 1])
def test_decimals_do_not_depend_on_the_context_of_the_thread(capitals: int) -> None:
    """By ``capitals`` of it ``str`` writes the exponent with e or E."""
    value = decimal.Decimal("-1.50E+300")
    with decimal.localcontext(decimal.Context(capitals=capitals, prec=1)):
        data = encode_value(value)
    with decimal.localcontext(decimal.Context(capitals=1 - capitals, prec=1)):
        found = decode_value(data)
    assert found.as_tuple() == value.as_tuple()
    assert data == encode_value(value)


def test_every_dtype_of_torch_comes_back() -> None:
    """A quantized module has its quantized dtype in its state dict, as a value."""
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    assert torch.qint8 in dtypes
    assert decode_value(encode_value(dtypes)) == dtypes


def test_types_are_told_apart() -> None:
    values = [1, True, 1.0, 1 + 0j, "1", b"1", bytearray(b"1"), [1], (1,), {1}, frozenset({1}), {1: 1}, np.int64(1)]
    values += [OrderedDict({1: 1}), Counter({1: 1}), torch.Size([1]), range(1), np.longlong(1), 0.0, -0.0, None, False]
    assert len({encode_value(value) for value in values}) == len(values)


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x01l\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(b"\x01d\x01lN")
@example(b"\x01" + b"l\x01" * 500 + b"N")
@settings(max_examples=500)
def test_any_bytes_are_a_value_or_a_format_error(data: bytes) -> None:
    for candidate in (data, b"\x01" + data):
        try:
            decode_value(candidate)
        except FormatError:
            continue


@given(PLAIN, st.data())
@settings(deadline=None, max_examples=300)
def test_damaged_bytes_are_a_value_or_a_format_error(value: Any, data: st.DataObject) -> None:
    raw = bytearray(encode_value(value))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    for candidate in (raw, raw[:at], raw + b"N"):
        try:
            decode_value(bytes(candidate))
        except (FormatError, Unsafe):  # unsafe: the name of another class
            continue


def test_cut_and_extended_bytes_are_refused() -> None:
    raw = encode_value([1, "two", {3: 4.0}])
    for at in range(len(raw)):
        with pytest.raises(FormatError):
            decode_value(raw[:at])
    with pytest.raises(FormatError, match="has"):
        decode_value(raw + b"N")


def test_a_length_beyond_the_end_is_refused_before_memory_is_allocated() -> None:
    cut = encode_value([None] * 100_000)[:-1]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode_value(cut)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(cut)


def test_repeated_keys_and_elements_are_refused() -> None:
    with pytest.raises(FormatError, match="equal keys"):
        decode_value(b"\x01d\x02NTNF")
    with pytest.raises(FormatError, match="equal elements"):
        decode_value(b"\x01S\x02NN")


@pytest.mark.parametrize(
    "value",
    [
        namedtuple("P", "x")(1),
        object(),
        [1, {2: object()}],
        int,
        type("Later", (datetime.datetime,), {})(2020, 1, 1),
        type("Deque", (deque,), {})(),
        type("Path", (pathlib.PosixPath,), {})("x"),
        np.zeros(1, [("a", "i4")])[0],
    ],
)
def test_subclasses_are_not_turned_into_their_base(value: Any) -> None:
    with pytest.raises(CaptureError, match="not a plain value"):
        encode_value(value)


def test_nesting_is_limited() -> None:
    value: Any = None
    for _ in range(MAX_VALUE_DEPTH):
        value = [value]
    assert decode_value(encode_value(value)) == value
    with pytest.raises(CaptureError, match="nested"):
        encode_value([value])


def test_padding_of_long_doubles_is_no_content() -> None:
    raw = np.frombuffer(bytes(10) + b"abcdef", np.longdouble)
    assert encode_value(raw[0]) == encode_value(np.longdouble(0))


@pytest.mark.parametrize(
    "spec", [Spec("value", "int8", 1, (2,)), Spec("value", "uint8", 2, (2,)), Spec("value"), Spec("value", shape=(-1,))]
)
@pytest.mark.parametrize("cls", [ValueProvider, ObjectProvider])
def test_specs_from_anybody(cls: type[ValueProvider], spec: Spec) -> None:
    with pytest.raises(FormatError):
        cls.fresh(spec)


def test_objects_come_back() -> None:
    provider = ObjectProvider(Colour.RED)
    assert provider.spec.attrs["type"].endswith("Colour")
    receiver = provider.receiver(provider.spec)
    feed(receiver, stream(provider), 3)
    assert receiver.done() is Colour.RED
    with pytest.raises(CaptureError, match="cannot be pickled"):
        _ = ObjectProvider(lambda: None).spec


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support")
@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_objects_with_tensors_of_every_dtype_come_back(name: str) -> None:
    """What torch 2.13 writes in a pickle for a tensor of a new dtype (uint16, float8 ...), it cannot read."""
    dtype = TORCH_DTYPES[name]
    raw = torch.zeros(32, dtype=torch.uint8) if dtype is torch.bool else torch.arange(32, dtype=torch.uint8)
    tensor = raw.view(dtype)[1:]
    tensor.note = "kept"  # type: ignore[attr-defined]
    held = {"t": tensor, "s": tensor.untyped_storage(), "bare": SimpleNamespace(t=tensor)}
    provider = ObjectProvider(held)
    try:
        data = stream(provider)
    except CaptureError:
        assert re.fullmatch("u?int[1-7]", name)  # torch refuses to write these
        return
    receiver = provider.receiver(provider.spec)
    feed(receiver, data)
    again = receiver.done()
    assert difference(again["t"], tensor) == "" == difference(again["bare"].t, tensor)
    assert again["t"].note == "kept"
    assert type(again["s"]) is torch.UntypedStorage
    assert bytes(again["s"]) == bytes(raw.numpy())


def test_a_broken_pickle_is_a_format_error() -> None:
    raw = pickle.dumps([1, 2, 3], 5)[:-1]
    fresh = ObjectProvider.fresh(Spec("object", shape=(len(raw),)))
    feed(fresh, raw)
    with pytest.raises(FormatError, match="pickle"):
        fresh.done()
