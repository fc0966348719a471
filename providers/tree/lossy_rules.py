"""Lossy saving: which tensors of a state are saved with fewer bits, by `Lossy` in the state or by a policy's rules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch

from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.base import Provider
from tierstate.providers.tensors.lossy import FLOATS, LOSSY_METHODS
from tierstate.providers.tensors.tensors import TensorProvider

from .walk import StateNode

LossyRule: TypeAlias = Callable[[Path], str]
"""Path of a tensor -> the lossy method with which it is saved; empty for none."""


class Lossy:
    """A tensor to be saved with fewer bits: ``{"exp_avg": ts.Lossy(tensor, "int8")}``.

    A restore returns a tensor of the original dtype. A rule of the policy does the same without a change of the state:
    ``{match: "**.exp_avg*", lossy: int8}``.

    Args:
        value: the tensor.
        method: ``bf16`` or ``int8``.

    Raises:
        ValueError: there is no such method.
    """

    def __init__(self, value: torch.Tensor, method: str) -> None:
        if method not in LOSSY_METHODS:
            raise ValueError(f"lossy method {method!r} is not known; known are {', '.join(LOSSY_METHODS)}")
        self.value, self.method = value, method

    def __state_provider__(self) -> Provider:
        return lossy_provider(TensorProvider(self.value), self.method)


def lossy_provider(provider: Provider, method: str) -> Provider:
    """The provider that saves a tensor with a lossy method; the given provider itself where this is not possible: the
    value is not a floating-point tensor, or the method cannot encode its values within the error bound.
    """
    if type(provider) is not TensorProvider or provider.value.dtype not in FLOATS:
        return provider
    found = LOSSY_METHODS[method](provider.value)
    return found if found.suits() else provider


def apply_lossy_rules(root: StateNode, shared: Collection[int], methods: LossyRule) -> None:
    """Replace the providers of a state's tensors by lossy ones where the rules ask for it.

    Args:
        shared: indices, among the leaves with a provider, of those that share memory: they are saved without loss.
    """
    for i, place in enumerate(place for place in root.walk() if place.provider is not None):
        if i not in shared and place.provider is not None and (method := methods(place.path)):
            place.provider = lossy_provider(place.provider, method)
