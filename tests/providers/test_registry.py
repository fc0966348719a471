"""Providers by type and by kind, of this house and of others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch
from support.transfer import restore, transfer

from tierstate.manifest.chunk import Buffer, Chunk
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers import registry as room
from tierstate.providers.base import Provider
from tierstate.providers.registry import Registry
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.flatten import flatten


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = torch.tensor(degrees)


class CelsiusProvider(Provider):
    kind: ClassVar[str] = "celsius"

    def __init__(self, value: Celsius) -> None:
        self._value, self._inner = value, TensorProvider(value.degrees)

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, "float32", 4, ())

    def chunks(self, size: int) -> Iterator[Chunk]:
        return self._inner.chunks(size)

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> CelsiusProvider:
        return cls(Celsius(0.0))

    def load(self, start: int, data: Buffer) -> None:
        self._inner.load(start, data)

    def done(self) -> Celsius:
        return self._value


class Own(Celsius):
    def __state_provider__(self) -> Provider:
        return CelsiusProvider(self)


class Liar(Celsius):
    def __state_provider__(self) -> Any:
        return 5


def test_a_registered_type_goes_there_and_back() -> None:
    registry = Registry()
    registry.register(Celsius, CelsiusProvider)
    registry.register(Celsius, CelsiusProvider)

    class Warmer(Celsius): ...

    state = {"a": Celsius(20.5), "b": [Warmer(3.0), 1]}
    tree = flatten(state, registry=registry)
    assert [leaf.spec.kind for leaf in tree.leaves] == ["dict", "celsius", "list", "celsius", "value"]
    leaves, data = transfer(tree)
    assert restore(leaves, data, registry=registry)["a"].degrees == 20.5
    target = {"a": Celsius(0.0), "b": [Celsius(0.0), 2]}
    inner = target["a"]
    assert restore(leaves, data, registry=registry, into=target)["a"] is inner
    assert inner.degrees == 20.5
    with pytest.raises(CaptureError):
        flatten(state)
    with pytest.raises(
        FormatError, match=r"a: no provider has kind 'celsius'; known are array, cast, object, .*quantized, storage"
    ):
        restore(leaves, data)


def test_the_values_own_provider_wins() -> None:
    registry = Registry()
    tree = flatten([Own(7.0)], registry=registry)
    assert tree.leaves[1].spec.kind == "celsius"
    with pytest.raises(CaptureError, match=r"0: .*gave 5, no Provider"):
        flatten([Liar(1.0)], registry=registry)


def test_a_constructor_that_fails_names_the_path() -> None:
    class Failing(CelsiusProvider):
        kind = "failing"

        def __init__(self, value: Any) -> None:
            raise OSError("gone")

    registry = Registry()
    registry.register(Celsius, Failing)
    with pytest.raises(CaptureError, match=r"a\.0: .*Celsius failed while it was read: OSError"):
        flatten({"a": [Celsius(1.0)]}, registry=registry)


@pytest.mark.parametrize("kind", ["", "dict", "tied", "tensor", "storage"])
def test_kinds_that_are_taken(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        Registry().register(Celsius, type("Taken", (CelsiusProvider,), {"kind": kind}))


def test_entry_points_are_loaded_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("celsius", f"{__name__}:CelsiusProvider", room.PROVIDER_GROUP),
        EntryPoint("other", f"{__name__}:CelsiusProvider", room.PROVIDER_GROUP),
        EntryPoint("broken", "no_such_module:X", room.PROVIDER_GROUP),
    ]
    monkeypatch.setattr(EntryPoint, "load", lambda self: CelsiusProvider)
    monkeypatch.setattr(room, "entry_points", lambda group: points)
    registry = Registry()
    assert registry.by_kind("celsius") is CelsiusProvider
    with pytest.raises(TypeError, match="no Provider of kind 'other'"):
        registry.by_kind("other")
    with pytest.raises(FormatError, match=r"'nothing'; known are .*broken, cast, celsius, object, other"):
        registry.by_kind("nothing")


def test_the_built_in_kinds_are_entry_points() -> None:
    registry = Registry()
    for point in room.entry_points(group=room.PROVIDER_GROUP):
        assert point.load() is registry.by_kind(point.name)
