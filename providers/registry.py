"""The registry of providers: by the type of a value that is saved, and by the kind of a leaf that is restored."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import numpy as np
import torch

from tierstate.manifest.arguments import check_class
from tierstate.manifest.errors import CaptureError, FormatError
from tierstate.manifest.format.leaf import CONTAINERS, TIED
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.lossy import LOSSY_METHODS
from tierstate.providers.tensors.tensors import StorageProvider, TensorProvider
from tierstate.providers.values.classes import trust_class
from tierstate.providers.values.encoding import PLAIN_TYPES
from tierstate.providers.values.values import ObjectProvider, ValueProvider

from .base import Provider

PROVIDER_GROUP = "tierstate.providers"
"""Entry-point group of provider plug-ins: an installed distribution lists its provider classes there, by kind."""


LAZY_MODULES = {
    "h5py": "hdf5",
    "torch.distributed.tensor": "sharded.dtensor",
    "torch.distributed._shard": "sharded.sharded_tensor",
    "torch.distributed.optim": "sharded.zero",
}
"""Package of another library -> our module with providers for its types; imported when such a type is first seen."""


class Registry:
    """Providers by the type of a value and by the kind of a leaf. A new registry has the built-in providers."""

    def __init__(self) -> None:
        built_in: tuple[type[Provider], ...] = (
            TensorProvider,
            StorageProvider,
            ArrayProvider,
            ValueProvider,
            ObjectProvider,
            *LOSSY_METHODS.values(),
        )
        self._kinds: dict[str, type[Provider]] = {cls.kind: cls for cls in built_in}
        self._types: dict[type, Callable[[Any], Provider]] = {
            torch.Tensor: TensorProvider,
            np.ndarray: ArrayProvider,
            np.generic: ValueProvider,
        }
        self._types |= dict.fromkeys(PLAIN_TYPES, ValueProvider)
        self.changes = 0
        """Number of registrations so far; a cache of providers is stale when it has changed."""
        for container in (
            list,
            tuple,
            dict,
            OrderedDict,
            deque,
            defaultdict,
        ):  # `StateWalk` decides: one value, or a container
            del self._types[container]

    def register(self, value_type: type, provider: type[Provider]) -> None:
        """Use this provider for values of this type, and of its subclasses without a provider of their own.

        Raises:
            TypeError: one of them is no class, or the provider none that is derived from `Provider`.
            ValueError: the provider's kind is empty, reserved, or used by another class.
        """
        check_class(value_type, "value_type", object)
        check_class(provider, "provider", Provider)
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
        """A provider from the value's ``__state_provider__``, or the one for exactly its type; None without one."""
        own = getattr(type(value), "__state_provider__", None)
        if own is None:
            cls = self._types.get(type(value)) or self._late(type(value))
            return None if cls is None else cls(value)
        provider = own(value)
        if not isinstance(provider, Provider):
            raise CaptureError(f"__state_provider__() of {type(value).__qualname__} gave {provider!r:.60}, no Provider")
        return provider

    def _late(self, value_type: type) -> Callable[[Any], Provider] | None:
        """The provider for a type of another library; the module with it is imported now."""
        for base in value_type.__mro__:
            module = _module_for(base.__module__)
            if module:
                self._types = import_module(f".{module}", __package__).PROVIDERS | self._types
        return self._types.get(value_type)

    def inherited(self, value: Any) -> Provider | None:
        """A provider for the nearest base class of the value's type; None without one."""
        for base in type(value).__mro__[1:]:
            if base in self._types:
                return self._types[base](value)
        return None

    def by_kind(self, kind: str) -> type[Provider]:
        """The provider class for leaves of this kind; a plug-in's class is imported on first use.

        Raises:
            FormatError: no provider has this kind; the message lists the known ones.
        """
        if kind not in self._kinds:
            points = {point.name: point for point in entry_points(group=PROVIDER_GROUP)}
            if kind not in points:
                known = ", ".join(sorted({*self._kinds, *points}))
                raise FormatError(f"no provider has kind {kind!r:.40}; known are {known}")
            self._kinds[kind] = _load(points[kind])
        return self._kinds[kind]


@cache
def _module_for(module: str) -> str:
    """The lazily imported module with providers for types of this module; empty if there is none."""
    return next((late for package, late in LAZY_MODULES.items() if f"{module}.".startswith(f"{package}.")), "")


def _load(point: EntryPoint) -> type[Provider]:
    found = point.load()
    if not isinstance(found, type) or not issubclass(found, Provider) or found.kind != point.name:
        raise TypeError(
            f"entry point {point.name} = {point.value} in {PROVIDER_GROUP} is no Provider of kind {point.name!r}"
        )
    return found


REGISTRY = Registry()
"""The default registry."""


def register_provider(value_type: type, provider: type[Provider] | None = None) -> None:
    """Use this provider for values of this type, in every state of this process. See `Registry.register`.

    Without a provider: let versions make values of this class, a dataclass, an Enum or a subclass of dict. It is saved
    as its fields, name or items; ``load`` makes no value of a class that only the version names.
    """
    if provider is None:
        check_class(value_type, "value_type", object)
        trust_class(value_type)
    else:
        REGISTRY.register(value_type, provider)
