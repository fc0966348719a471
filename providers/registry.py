"""Which provider is for which type of value, and for which kind of leaf."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import numpy as np
import torch

from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.leaf import CONTAINERS, TIED

from .arrays import ArrayProvider
from .base import Provider
from .encoding import PLAIN
from .fewer_bits import METHODS
from .objects import ObjectProvider
from .tensors import StorageProvider, TensorProvider
from .values import ValueProvider

GROUP = "tierstate.providers"
"""Entry-point group in which an installed distribution names its providers, each under its kind."""

LATE = {
    "h5py": "hdf5",
    "torch.distributed.tensor": "dtensors",
    "torch.distributed._shard": "sharded_tensors",
    "torch.distributed.optim": "zero",
}
"""Rooms that know the types of another library, by its package; imported when one of these is met."""


class Registry:
    """Providers by the type of a value and by the kind of a leaf; a new one knows the built-in ones."""

    def __init__(self) -> None:
        built_in: tuple[type[Provider], ...] = (
            TensorProvider,
            StorageProvider,
            ArrayProvider,
            ValueProvider,
            ObjectProvider,
            *METHODS.values(),
        )
        self._kinds: dict[str, type[Provider]] = {cls.kind: cls for cls in built_in}
        self._types: dict[type, Callable[[Any], Provider]] = {
            torch.Tensor: TensorProvider,
            np.ndarray: ArrayProvider,
            np.generic: ValueProvider,
        }
        self._types |= dict.fromkeys(PLAIN, ValueProvider)
        self.changes = 0
        """How often something was registered."""
        for container in (list, tuple, dict, OrderedDict):  # one value, or a holder of leaves: the tree says which
            del self._types[container]

    def register(self, value_type: type, provider: type[Provider]) -> None:
        """Use this provider for values of this type and of its subclasses that have none of their own.

        Raises:
            ValueError: the provider's kind is empty, reserved, or another class's.
        """
        kind = getattr(provider, "kind", "")
        if not kind or kind in CONTAINERS or kind == TIED:
            raise ValueError(f"{provider.__qualname__}.kind is {kind!r}; give it a name that is not taken by the tree")
        known = self._kinds.get(kind, provider)
        if (known.__module__, known.__qualname__) != (provider.__module__, provider.__qualname__):
            raise ValueError(f"kind {kind!r} belongs to {known.__module__}.{known.__qualname__}; choose another")
        self._kinds[kind] = provider
        self._types[value_type] = cast("Callable[[Any], Provider]", provider)
        self.changes += 1

    def exact(self, value: Any) -> Provider | None:
        """A provider for the value: its own, or the one of its very type; None where there is none."""
        own = getattr(type(value), "__state_provider__", None)
        if own is None:
            cls = self._types.get(type(value)) or self._late(type(value))
            return None if cls is None else cls(value)
        provider = own(value)
        if not isinstance(provider, Provider):
            raise CaptureError(f"__state_provider__() of {type(value).__qualname__} gave {provider!r:.60}, no Provider")
        return provider

    def _late(self, value_type: type) -> Callable[[Any], Provider] | None:
        """The provider that another library's own room has for one of its types."""
        for base in value_type.__mro__:
            room = _room(base.__module__)
            if room:
                self._types = import_module(f".{room}", __package__).PROVIDERS | self._types
        return self._types.get(value_type)

    def inherited(self, value: Any) -> Provider | None:
        """A provider for the nearest base class of the value's type; None where there is none."""
        for base in type(value).__mro__[1:]:
            if base in self._types:
                return self._types[base](value)
        return None

    def by_kind(self, kind: str) -> type[Provider]:
        """The provider of leaves of this kind; those of other distributions are imported when first asked for.

        Raises:
            FormatError: no provider has this kind; the message lists the known ones.
        """
        if kind not in self._kinds:
            points = {point.name: point for point in entry_points(group=GROUP)}
            if kind not in points:
                known = ", ".join(sorted({*self._kinds, *points}))
                raise FormatError(f"no provider has kind {kind!r:.40}; known are {known}")
            self._kinds[kind] = _load(points[kind])
        return self._kinds[kind]


@cache
def _room(module: str) -> str:
    """Which late room knows the types of this module; empty where none does."""
    return next((room for package, room in LATE.items() if f"{module}.".startswith(f"{package}.")), "")


def _load(point: EntryPoint) -> type[Provider]:
    found = point.load()
    if not isinstance(found, type) or not issubclass(found, Provider) or found.kind != point.name:
        raise TypeError(f"entry point {point.name} = {point.value} in {GROUP} is no Provider of kind {point.name!r}")
    return found


REGISTRY = Registry()
"""The registry that is used where no other is given."""


def register_provider(value_type: type, provider: type[Provider]) -> None:
    """Use this provider for values of this type, in every state of this process. See `Registry.register`."""
    REGISTRY.register(value_type, provider)
