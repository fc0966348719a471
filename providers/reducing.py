"""Reducing: which tensors of a state are saved with fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch

from tierstate.manifest.leaf import Path

from .base import Provider
from .fewer_bits import METHODS
from .lossy import FLOATS
from .survey import Place
from .tensors import TensorProvider

Methods: TypeAlias = Callable[[Path], str]
"""By which method the tensor at a path is saved with fewer bits; empty for none."""


class Lossy:
    """A tensor to be saved with fewer bits: ``{"exp_avg": ts.Lossy(tensor, "int8")}``.

    Restored, the tensor itself comes back, of its own type. A policy's rules say the same for whole leaves without a
    change of the state: ``{match: "**.exp_avg*", lossy: int8}``.

    Args:
        value: the tensor.
        method: ``bf16`` or ``int8``.

    Raises:
        ValueError: there is no such method.
    """

    def __init__(self, value: torch.Tensor, method: str) -> None:
        if method not in METHODS:
            raise ValueError(f"lossy method {method!r} is not known; known are {', '.join(METHODS)}")
        self.value, self.method = value, method

    def __state_provider__(self) -> Provider:
        return reduced(TensorProvider(self.value), self.method)


def reduced(provider: Provider, method: str) -> Provider:
    """The provider that saves a tensor with fewer bits; the given one where that cannot be: it is no tensor of a
    floating-point type, or its values do not suit the method.
    """
    if type(provider) is not TensorProvider or provider.value.dtype not in FLOATS:
        return provider
    found = METHODS[method](provider.value)
    return found if found.suits() else provider


def reduce_all(root: Place, shared: Collection[int], methods: Methods) -> None:
    """Have the tensors of a state saved with fewer bits where that was asked for.

    Args:
        shared: numbers of the leaves, among those with a provider, that share memory: these stay as they are.
    """
    for i, place in enumerate(place for place in root.walk() if place.provider is not None):
        if i not in shared and place.provider is not None and (method := methods(place.path)):
            place.provider = reduced(place.provider, method)
