"""Hypothesis strategies for training states, copies of them with other contents, and a test for equality."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import struct
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from support.equality import bits, difference, positions, raw, same

from tierstate.providers.tensors.dtypes import TORCH_DTYPES

__all__ = [
    "ARRAY_DTYPES", "DTYPES", "KEYS", "PLAIN", "Point", "arrays", "bits", "difference", "make", "positions", "raw",
    "remake", "same", "scrambled", "states", "tensors", "views", "windows",
]  # fmt: skip
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = list(TORCH_DTYPES.values())
_NUMBERS = ["|b1", "|i1", "|u1", "<i2", ">i2", "<u4", "<i8", ">u8", "<f2", "<f4", ">f4", "<f8", "<f16", "<c8", ">c16"]
ARRAY_DTYPES = [np.dtype(name) for name in [*_NUMBERS, "<M8[ns]", "<m8[us]", "<U3", ">U2", "|S5", "|V3"]] + [
    np.dtype([("a", "<i2"), ("b", ">f8", (2,))]),
    np.dtype({"names": ["x", "y"], "formats": ["u1", "<f4"], "offsets": [5, 1], "itemsize": 9}),
    np.dtype([("n", [("p", "<i4"), ("q", "S3")]), ("é.", "?")], align=True),
]


_SIZES = st.sampled_from([2, 3, 1, 5, 4, 0])


class Point(NamedTuple):
    """A namedtuple that can be found again."""

    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    """A dataclass that can be found again."""

    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """A dataclass that nothing can be set in, and that has no dict."""

    x: Any
    y: Any = None


class Named(dict):  # type: ignore[type-arg]
    """A dict of which the items are attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Ordered(OrderedDict):  # type: ignore[type-arg]
    """A subclass of OrderedDict."""


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


def on_device(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes in the memory of a CUDA device."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).cuda().untyped_storage()


def remake(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """The same view as ``like``, over another storage."""
    pair = like.dtype.itemsize == 16  # no integer is as wide
    word = like.dtype if pair else WORDS[like.dtype.itemsize]
    made = torch.empty(0, dtype=word, device=storage.device).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )
    made = made.view(like.dtype).detach()
    made = made.conj() if like.is_conj() else made
    made = torch._neg_view(made) if like.is_neg() else made
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)
    return made.requires_grad_() if like.requires_grad else made


def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of any bits."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8) & (1 if dtype == torch.bool else 255)
    storage = torch.from_numpy(data.astype(np.uint8)).untyped_storage()
    if dtype.itemsize == 16:
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)
    return torch.empty(0, dtype=WORDS[dtype.itemsize]).set_(storage, 0, shape).view(dtype).detach()


@st.composite
def tensors(draw: st.DrawFn, dtypes: Any = None) -> torch.Tensor:
    """Tensors of any dtype, shape, bits and strides; some are Parameters, some are expanded or lazily conjugated."""
    dtype = draw(dtypes if dtypes is not None else st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(_SIZES, max_size=4)))
    return draw(views(make(dtype, shape, draw(st.integers(0, 1 << 32)))))


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Views of a tensor."""
    view = base.detach()
    for change in draw(st.lists(st.sampled_from(["transpose", "slice", "expand", "select", "lazy"]), max_size=3)):
        view = draw(_changed(view, change))
    if view.is_floating_point() and draw(st.integers(0, 4)) == 0:
        return torch.nn.Parameter(view, requires_grad=draw(st.booleans()))
    return view


@st.composite
def windows(draw: st.DrawFn, storage: torch.UntypedStorage) -> torch.Tensor:
    """Views of 48 bytes of memory, of any dtype: what overlaps in every way."""
    dtype = draw(st.sampled_from([d for d in DTYPES if d.itemsize <= 8]))
    room = 48 // dtype.itemsize
    offset, shape, strides, reach = draw(st.integers(0, room - 1)), [], [], 0
    for _ in range(draw(st.integers(0, 2))):
        stride = draw(st.integers(0, 4))
        n = draw(st.integers(1, 1 + (room - 1 - offset - reach) // stride)) if stride else draw(st.integers(1, 2))
        reach += (n - 1) * stride
        shape.append(n)
        strides.append(stride)
    view = torch.empty(0, dtype=WORDS[dtype.itemsize]).set_(storage, offset, shape, strides).view(dtype).detach()
    return view.conj() if dtype == torch.complex64 and draw(st.booleans()) else view


@st.composite
def _changed(draw: st.DrawFn, view: torch.Tensor, change: str) -> torch.Tensor:
    if change == "lazy" and view.dtype in (torch.complex64, torch.complex128):
        return draw(st.sampled_from([view.conj(), torch._neg_view(view), view.conj().imag]))
    if change == "lazy" and view.dtype in (torch.float16, torch.float32, torch.float64):
        return torch._neg_view(view)
    if view.ndim == 0 or change == "lazy":
        return view
    dim = draw(st.integers(0, view.ndim - 1))
    n = view.shape[dim]
    if change == "transpose":
        return view.transpose(dim, draw(st.integers(0, view.ndim - 1)))
    if change == "slice":
        first = draw(st.integers(0, n))
        return _slice(view, dim, first, draw(st.integers(first, n)), draw(st.integers(1, 3)))
    if change == "select" and n:
        return _slice(view, dim, draw(st.integers(0, n - 1)), None, 1).select(dim, 0)
    if change == "expand" and n == 1:
        shape = list(view.shape)
        shape[dim] = draw(st.integers(0, 3))
        return view.expand(shape)
    return view


def _slice(view: torch.Tensor, dim: int, first: int, last: int | None, step: int) -> torch.Tensor:
    return view[(slice(None),) * dim + (slice(first, last, step),)]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """NumPy arrays of any dtype without objects, any bits, any strides."""
    dtype = draw(st.sampled_from(ARRAY_DTYPES))
    shape = tuple(draw(st.lists(_SIZES, max_size=3)))
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = bytearray(np.random.default_rng(draw(st.integers(0, 1 << 32))).bytes(nbytes))
    if dtype.kind in "bU" or dtype.names is not None:  # not any bytes are such elements
        data = bytearray(b & 1 if dtype.byteorder != ">" or i % 4 == 3 else 0 for i, b in enumerate(data))
        data = data if dtype.kind == "b" else bytearray(len(data))
    array = np.frombuffer(data, np.uint8).view(dtype).reshape(shape) if nbytes else np.empty(shape, dtype)
    for change in draw(st.lists(st.sampled_from(["T", "flip", "step", "fortran"]), max_size=2)):
        if change == "T":
            array = array.T
        elif change == "fortran":
            array = np.asfortranarray(array)
        elif array.ndim:
            array = array[::-1] if change == "flip" else array[..., ::2]
    return array


TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=6)
KEYS = st.recursive(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(["a.b", "a/b", '"', "0", "None", "storage", "to"]),
        st.integers(),
        st.booleans(),
        st.floats(),
        st.deferred(lambda: NANS),
        st.binary(max_size=4),
        st.none(),
    ),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
NANS = st.integers(1, (1 << 51) - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | n))[0])
_ZONES = st.one_of(
    st.none(),
    st.just(datetime.UTC),
    st.builds(datetime.timezone, st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)), TEXT),
    st.sampled_from([zoneinfo.ZoneInfo("Europe/Berlin"), zoneinfo.ZoneInfo("UTC")]),
)
_FOLDED = st.tuples(st.one_of(st.datetimes(timezones=_ZONES), st.times(timezones=_ZONES)), st.integers(0, 1))
_SAFE_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
_HASHABLE_STANDARD = st.one_of(
    st.sampled_from([*Colour, *Level, *Access, Access.READ | Access.WRITE, Access(0)]),
    st.dates(),
    _FOLDED.map(lambda pair: pair[0].replace(fold=pair[1])),
    st.timedeltas(),
    st.fractions(),
    st.uuids(),
    st.builds(pathlib.PurePosixPath, _SAFE_TEXT, _SAFE_TEXT),
    st.builds(pathlib.Path, _SAFE_TEXT),
    st.builds(pathlib.PureWindowsPath, _SAFE_TEXT),
)
STANDARD = st.one_of(
    _HASHABLE_STANDARD,
    _ZONES,
    st.decimals(),
    st.sampled_from([decimal.Decimal(text) for text in ("-0E+7", "sNaN12", "-NaN3", "1E-999999", "Infinity")]),
    st.sampled_from([uuid.uuid1(), ..., torch.channels_last, torch.strided, fractions.Fraction(-1, 3)]),
    st.sampled_from([*(np.dtype(name) for name in ("<f4", ">i2", "q", "M8[ns]")), np.dtype([("a", "<i2", (2,))])]),
    st.builds(slice, st.none() | st.integers(), st.floats(), TEXT),
    st.dictionaries(TEXT, st.floats(), max_size=2).map(lambda items: _filled(argparse.Namespace(), items)),
    st.dictionaries(TEXT, st.floats(), max_size=2).map(lambda items: _filled(types.SimpleNamespace(), items)),
)
"""Values of the standard library's types, Enums and dtypes."""


def _filled(namespace: Any, items: dict[str, Any]) -> Any:
    vars(namespace).update(items)
    return namespace


SCALARS = st.one_of(
    STANDARD,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    NANS,
    st.complex_numbers(),
    TEXT,
    st.binary(max_size=8),
    st.binary(max_size=8).map(bytearray),
    st.sampled_from([-0.0, 1 << 200, -(1 << 63), range(0), range(3, 9, 2), np.float32(1.5), np.float64("nan")]),
    st.sampled_from([np.int8(-3), np.longlong(3), np.bool_(True), np.str_("a\0"), np.bytes_(b"\0"), np.void(b"abc")]),
    st.sampled_from(
        [np.datetime64("2020-01-01", "D"), np.timedelta64(3, "ns"), np.longdouble(1) / 3, np.complex64(1j)]
    ),
    st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([])]),
)
_HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.binary(max_size=4), _HASHABLE_STANDARD),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)


FACTORIES = st.sampled_from([None, int, list, dict, str, deque, OrderedDict])


def _deques(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(deque, st.lists(items, max_size=3), st.none() | st.integers(0, 4))


def _dicts(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any], max_size: int) -> st.SearchStrategy[Any]:
    """Dicts of which no two keys are the same NaN: those cannot be told apart as paths."""
    found = st.dictionaries(keys, values, max_size=max_size)
    return found.filter(lambda items: len({repr(_bits(key)) for key in items}) == len(items))


def _bits(key: Any) -> Any:
    if isinstance(key, float):
        return struct.pack("<d", key)
    return tuple(map(_bits, key)) if isinstance(key, tuple) else (type(key), key)


def _plain(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(SCALARS, st.sets(_HASHABLE, max_size=3), st.lists(st.integers(), min_size=8, max_size=12)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            _deques(inner),
            _dicts(keys, inner, 3),
            _dicts(keys, inner, 3).map(OrderedDict),
            _dicts(keys, st.integers(), 3).map(Counter),
            st.builds(defaultdict, FACTORIES, _dicts(keys, inner, 3)),
        ),
        max_leaves=6,
    )


PLAIN = _plain(_HASHABLE)
"""Plain values; their dicts may have keys that no path can have, so they are values only inside a list or tuple."""


class _Pick(NamedTuple):
    """Stands for a tensor or array: drawn last, so that the strategy of trees is made once, and prints."""

    index: int


_PICKS = st.builds(_Pick, st.integers(0, 16))
_TREES = st.recursive(
    st.one_of(_PICKS, _PICKS, _plain(KEYS)),
    lambda inner: st.one_of(
        _dicts(KEYS, inner, 4),
        _dicts(KEYS, inner, 4).map(OrderedDict),
        _dicts(KEYS, inner, 2).map(Named),
        _dicts(KEYS, inner, 2).map(Ordered),
        st.builds(defaultdict, FACTORIES, _dicts(KEYS, inner, 2)),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        _deques(inner),
        st.builds(Point, inner, inner),
        st.builds(Settings, inner, inner),
        st.builds(Fixed, inner, inner),
    ),
    max_leaves=12,
)


@st.composite
def states(draw: st.DrawFn) -> Any:
    """States of any shape, whose tensors are new, the same again, or views of each other."""
    pool: list[Any] = []
    for base in draw(st.lists(tensors(), max_size=2)):
        pool += [base, *draw(st.lists(views(base), max_size=3))]
    memory = make(torch.uint8, (48,), draw(st.integers(0, 9))).untyped_storage()
    pool += draw(st.lists(windows(memory), max_size=4))
    pool += draw(st.lists(arrays(), max_size=2))
    return _picked(draw(_TREES), pool)


def _picked(value: Any, pool: list[Any]) -> Any:
    if isinstance(value, _Pick):
        return pool[value.index % len(pool)] if pool else value.index
    return _mapped(value, lambda item: _picked(item, pool), value)


def _mapped(value: Any, change: Any, other: Any) -> Any:
    """A container with its items changed; ``other`` for all else."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: change(item) for key, item in value.items()})
    if type(value) in (dict, OrderedDict, Named, Ordered):
        return type(value)((key, change(item)) for key, item in value.items())
    if isinstance(value, deque):
        return deque(map(change, value), value.maxlen)
    if dataclasses.is_dataclass(value):
        return type(value)(change(value.x), change(value.y))
    if isinstance(value, Point):
        return Point(*map(change, value))
    return type(value)(map(change, value)) if type(value) in (list, tuple) else other


def scrambled(state: Any) -> Any:
    """A state with the same tensors, arrays, containers and shared memory, and other contents."""
    return _scrambled(state, {})


def _scrambled(value: Any, memo: dict[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() not in memo:
            fresh = torch.from_numpy(np.random.default_rng(0).integers(0, 255, storage.nbytes(), np.uint8))
            memo[storage.data_ptr()] = (fresh.untyped_storage(), value)
        return remake(memo[storage.data_ptr()][0], value)
    if isinstance(value, np.ndarray):
        if id(value) not in memo:
            memo[id(value)] = np.zeros(value.shape, value.dtype)
        return memo[id(value)]
    return _mapped(value, lambda item: _scrambled(item, memo), "scrambled")
