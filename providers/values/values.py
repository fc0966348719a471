"""Providers of plain values (numbers, text, dates, paths, Enums, sequences, sets and dicts of them), and of pickles.

Plain values are encoded without pickle. An object is pickled only where the user allows it, and marked in the manifest.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.chunk import Buffer, Chunk, as_buffer, empty_buffer, spans, to_bytes
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import Provider

from .classes import CLASS, check_classes
from .encoding import decode_value, encode_value


class EncodedProvider(Provider):
    """A value that is saved as encoded bytes. A restore replaces it, and never changes it in place."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._bytes: Buffer | None = None

    @property
    def data(self) -> Buffer:
        """The encoded value, shape ``(nbytes,)``."""
        if self._bytes is None:
            self._bytes = as_buffer(self._encode(self._value))
        return self._bytes

    @staticmethod
    def _encode(value: Any) -> bytes:
        raise NotImplementedError

    @staticmethod
    def _decode(data: bytes) -> Any:
        raise NotImplementedError

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, "uint8", 1, (self.data.numel(),))

    def chunks(self, size: int) -> Iterator[Chunk]:
        data = self.data
        for start, nbytes in spans(data.numel(), size):
            yield Chunk(start, nbytes, partial(self._fill, start))

    def _fill(self, start: int, out: Buffer) -> None:
        out.copy_(self.data[start : start + out.numel()])

    def memory(self) -> Buffer:
        return self.data

    @classmethod
    def fresh(cls, spec: Spec, device: object = None) -> Self:
        if spec.dtype != "uint8" or spec.itemsize != 1 or len(spec.shape) != 1 or not 0 <= spec.shape[0] < 1 << 56:
            raise FormatError(
                f"a leaf of kind {cls.kind} is a run of uint8, not {spec.dtype!r:.20} of {spec.shape!r:.40}"
            )
        provider = cls.__new__(cls)
        try:
            provider._value, provider._bytes = None, empty_buffer(spec.shape[0])
        except RuntimeError as error:  # torch's out-of-memory error
            raise MemoryError(f"a {cls.kind} of {spec.shape[0]} bytes is more than the host has room for") from error
        return provider

    def mismatch(self, spec: Spec) -> str:
        """Always empty: any value may replace any other."""
        return "" if spec.kind == self.kind else f"is {self.kind} here, {spec.kind} in the version"

    def receiver(self, spec: Spec) -> Provider:
        return self.fresh(spec)

    def load(self, start: int, data: Buffer) -> None:
        self.data[start : start + data.numel()].copy_(data)

    def done(self) -> Any:
        return self._decode(to_bytes(self.data))


class ValueProvider(EncodedProvider):
    """A plain value, encoded as it is when the provider is made (`tierstate.providers.values.encoding`).

    Raises:
        CaptureError: the value, or a value inside it, is of a type that cannot be encoded exactly.
        Unsafe: by `fresh`: the value has an Enum that is not known here.
    """

    kind: ClassVar[str] = "value"

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        classes: set[str] = set()
        self._bytes = as_buffer(encode_value(value, classes))
        self._attrs = {CLASS: sorted(classes)} if classes else {}

    @property
    def spec(self) -> Spec:
        return replace(super().spec, attrs=self._attrs)

    @classmethod
    def fresh(cls, spec: Spec, device: object = None) -> Self:
        check_classes(spec.attrs)
        provider = super().fresh(spec, device)
        provider._attrs = {CLASS: spec.attrs[CLASS]} if CLASS in spec.attrs else {}
        return provider

    @staticmethod
    def _decode(data: bytes) -> Any:
        return decode_value(data)


class ObjectProvider(EncodedProvider):
    """An object as a pickle of protocol 5. It is pickled at the first call for its spec or bytes.

    Raises:
        CaptureError: at that call, if the object cannot be pickled.
    """

    kind: ClassVar[str] = "object"
    unsafe: ClassVar[str] = "is a pickle, which can run any code while it is read"

    @property
    def spec(self) -> Spec:
        kind = type(self._value)
        return Spec(self.kind, "uint8", 1, (self.data.numel(),), {"type": f"{kind.__module__}.{kind.__qualname__}"})

    @staticmethod
    def _encode(value: Any) -> bytes:
        out = io.BytesIO()
        try:
            _Pickler(out, protocol=5).dump(value)
            return out.getvalue()
        except Exception as error:
            raise CaptureError(f"a {type(value).__qualname__} cannot be pickled: {error}") from error

    @staticmethod
    def _decode(data: bytes) -> Any:
        try:
            return pickle.loads(data)
        except Exception as error:
            raise FormatError(f"a pickle cannot be read here: {type(error).__name__}: {error}") from error


class _Pickler(pickle.Pickler):
    """Writes tensors of every dtype so that they can be read. Those of uint16, uint32, uint64, float8, complex32 and
    other new dtypes have an untyped storage, and what torch 2.13 writes for one by itself, it cannot read.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.UntypedStorage:
            return methodcaller("untyped_storage"), (
                torch.empty(0, dtype=torch.uint8, device=value.device).set_(value),
            )
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        return _typed(value.__reduce_ex__(5))  # type: ignore[no-untyped-call]


def _typed(part: Any) -> Any:
    """A part of what torch makes of a tensor, with the storage in it typed, as ``torch.load`` hands it over."""
    if type(part) is tuple:
        return tuple(map(_typed, part))
    if type(part) is torch.UntypedStorage:
        return torch.storage.TypedStorage(wrap_storage=part, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]
    return part
