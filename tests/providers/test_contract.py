"""The contract suite for providers: the built-in ones keep it, and each broken promise is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import tierstate as ts
from tierstate.manifest.chunk import Buffer, Chunk
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import Provider
from tierstate.providers.hdf5 import DatasetProvider
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.testing import ContractBroken, ProviderContract
from tierstate.providers.values.values import ObjectProvider, ValueProvider


class TestTensors(ProviderContract):
    checks_bounds = False

    def values(self) -> Sequence[Any]:
        base = torch.arange(1200, dtype=torch.float32)
        return [
            base.clone(),
            torch.empty(0, 3),
            torch.tensor(True),
            base.clone().view(60, 20).t(),
            base.clone().view(3, 400)[:, ::7].to(torch.bfloat16),
            torch.complex(base[:40], -base[:40]).conj(),
        ]

    def provider(self, value: Any) -> Provider:
        return TensorProvider(value)

    def empty(self, value: Any) -> Any:
        return torch.zeros_like(value)


class TestArrays(ProviderContract):
    checks_bounds = False

    def values(self) -> Sequence[Any]:
        base = np.arange(600, dtype="<f8")
        odd = np.zeros(5, np.dtype([("a", "<i2"), ("b", ">f8", (2,))]))
        odd["b"] = 3.5
        return [base.copy(), np.empty((0, 2)), np.array(7), base.reshape(60, 10).T.copy("F"), odd, base[::-3].copy()]

    def provider(self, value: Any) -> Provider:
        return ArrayProvider(value)

    def empty(self, value: Any) -> Any:
        return np.zeros_like(value)


class TestValues(ProviderContract):
    def values(self) -> Sequence[Any]:
        return [None, -0.0, "text", (1, {2.5, b"x"}), list(range(600))]

    def provider(self, value: Any) -> Provider:
        return ValueProvider(value)

    def empty(self, value: Any) -> Any:
        return 0


class TestObjects(ProviderContract):
    allow_pickle = ("**",)

    def values(self) -> Sequence[Any]:
        return [Fraction(1, 3), Fraction(7**5000, 3)]

    def provider(self, value: Any) -> Provider:
        return ObjectProvider(value)

    def empty(self, value: Any) -> Any:
        return Fraction(0)


class TestDatasets(ProviderContract):
    checks_bounds = False

    @pytest.fixture(autouse=True)
    def _open(self, tmp_path: Path) -> Iterator[None]:
        with h5py.File(tmp_path / "data.h5", "w") as self.file:
            yield

    def _dataset(self, data: Any, **how: Any) -> h5py.Dataset:
        return self.file.create_dataset(f"set{len(self.file)}", data=data, **how)

    def values(self) -> Sequence[Any]:
        base = np.arange(1200, dtype="<f4")
        return [self._dataset(base), self._dataset(base.reshape(60, 20), chunks=(7, 11)), self._dataset(np.int64(5))]

    def provider(self, value: Any) -> Provider:
        return DatasetProvider(value)

    def empty(self, value: Any) -> Any:
        return self._dataset(np.zeros(value.shape, value.dtype))

    def fresh(self, spec: Spec, provider: Provider) -> Provider | None:
        return None


# Providers that break one promise each


class Text:
    """A value that changes in place."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)


class TextProvider(Provider):
    """Keeps the contract."""

    kind = "contract-text"

    def __init__(self, value: Text) -> None:
        self.value = value

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, "uint8", 1, (len(self.value.data),), {"of": ["text"]})

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start in range(0, len(self.value.data), size):
            nbytes = min(size, len(self.value.data) - start)
            yield Chunk(start, nbytes, lambda out, start=start: self.fill(start, out))

    def fill(self, start: int, out: Buffer) -> None:
        out.numpy()[:] = np.frombuffer(bytes(self.value.data[start : start + out.numel()]), np.uint8)

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Any:
        return cls(Text(bytes(spec.shape[0])))

    def load(self, start: int, data: Buffer) -> None:
        if start + data.numel() > len(self.value.data):
            raise ValueError("the data ends behind the text")
        self.value.data[start : start + data.numel()] = data.numpy().tobytes()

    def done(self) -> Any:
        return self.value


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests alone: others look at what is registered."""
    monkeypatch.setattr(REGISTRY, "_kinds", dict(REGISTRY._kinds))
    monkeypatch.setattr(REGISTRY, "_types", dict(REGISTRY._types))
    ts.register_provider(Text, TextProvider)


class Texts(ProviderContract):
    """The contract for a class of provider that is given."""

    def __init__(self, cls: type[TextProvider]) -> None:
        self.cls = cls

    def values(self) -> Sequence[Any]:
        return [Text(b""), Text(bytes(i % 251 for i in range(5000)))]

    def provider(self, value: Any) -> Provider:
        return self.cls(value)

    def empty(self, value: Any) -> Any:
        return Text(bytes(len(value.data)))


def _zero(out: Buffer, byte: int = 0) -> None:
    out.fill_(byte)


class Gap(TextProvider):
    def chunks(self, size: int) -> Iterator[Chunk]:
        return (chunk for chunk in super().chunks(size) if chunk.start != size)


class Overruns(TextProvider):
    def fill(self, start: int, out: Buffer) -> None:
        super().fill(start, out)
        torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage(), 0, (1,), (1,)).fill_(7)


class Short(TextProvider):
    def fill(self, start: int, out: Buffer) -> None:
        super().fill(start, out[:-1])


class Once(TextProvider):
    def chunks(self, size: int) -> Iterator[Chunk]:
        for chunk in super().chunks(size):
            left = [chunk.fill]
            yield chunk._replace(fill=lambda out, left=left: left.pop()(out) if left else _zero(out))


class Numbered(TextProvider):
    def chunks(self, size: int) -> Iterator[Chunk]:
        for chunk in super().chunks(size):
            yield chunk._replace(fill=lambda out, size=size: _zero(out, size % 251))


class Tuples(TextProvider):
    @property
    def spec(self) -> Spec:
        return Spec(self.kind, "uint8", 1, (len(self.value.data),), {"of": ("text",)})


class OtherMemory(TextProvider):
    def memory(self) -> Buffer:
        return torch.zeros(len(self.value.data), dtype=torch.uint8)


class InOrder(TextProvider):
    at = 0

    def load(self, start: int, data: Buffer) -> None:
        super().load(self.at, data)
        self.at = (self.at + data.numel()) % len(self.value.data)


class Lends(TextProvider):
    """Its fill keeps the buffer, and writes into it again when the value changes."""

    lent: list[tuple[int, Buffer]]

    def fill(self, start: int, out: Buffer) -> None:
        super().fill(start, out)
        self.__dict__.setdefault("lent", []).append((start, out))

    def load(self, start: int, data: Buffer) -> None:
        super().load(start, data)
        for at, out in self.__dict__.get("lent", ()):
            super().fill(at, out)


class Unfinished(TextProvider):
    def done(self) -> Any:
        return Text(b"nothing")


class Lenient(TextProvider):
    def load(self, start: int, data: Buffer) -> None:
        self.value.data[start : start + data.numel()] = data.numpy().tobytes()[: max(len(self.value.data) - start, 0)]


@pytest.mark.parametrize(
    ("cls", "test"),
    [
        (Gap, "chunks_cover_the_value_in_order"),
        (Overruns, "fill_writes_its_bytes_and_no_others"),
        (Short, "fill_writes_its_bytes_and_no_others"),
        (Once, "fills_come_in_any_order_and_again"),
        (Numbered, "bytes_are_the_same_for_every_chunk_size"),
        (Tuples, "spec_is_stable_and_plain"),
        (OtherMemory, "memory_is_the_bytes_that_chunks_give"),
        (OtherMemory, "load_through_memory"),
        (InOrder, "load_restores_a_fresh_value"),
        (InOrder, "load_restores_in_place"),
        (Lends, "what_was_filled_stays_when_the_value_changes"),
        (Unfinished, "load_restores_in_place"),
        (Lenient, "bytes_beyond_the_end_are_refused"),
    ],
)
def test_a_broken_promise_is_found(cls: type[TextProvider], test: str) -> None:
    getattr(Texts(TextProvider), f"test_{test}")()
    with pytest.raises(ContractBroken, match=cls.__qualname__):
        getattr(Texts(cls), f"test_{test}")()


def test_a_registered_provider_makes_a_round_trip(tmp_path: Path) -> None:
    Texts(TextProvider).test_round_trip_through_a_checkpointer(tmp_path)
