"""Spots: the places of the last state, each with what is needed to know it again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstate.manifest.leaf import Path

from .base import Provider
from .lossy import LossyProvider
from .placing import Frame
from .shards import PLAIN, Near, ShardProvider, ShardsProvider, frame_of, storage_mark
from .stateful import Stateful
from .survey import Place, ident
from .tensors import TensorProvider
from .values import ValueProvider

UNKNOWN = object()
"""What no value is."""

_CONSTANT = frozenset({int, float, bool, str, bytes, complex, type(None)})
"""Types whose objects never change: the same object is the same value."""


@dataclass(slots=True, eq=False)
class Spot:
    """One place of the last state, with what is needed to know it again.

    Attributes:
        index: its leaf's index.
        path: the keys that lead there.
        kind: the type of the container that was walked; None for a leaf.
        keys, key_types, spots: a container's keys and what lies there.
        idents: the keys with their types, where equal ones need not be the same.
        how, thing: how a stateful thing gives its state, and its type.
        facts: of a tensor: all that its bytes, spec and ties depend on.
        shard: of a value that lies in shards: the same, and how its local tensor is found.
        frame: which boxes it is.
        inner: whether it is a container, or a stateful thing.
        leaf_kind: a leaf's kind.
        plain: of a value of a constant type: the value.
        tied: whether the leaf shares memory with another, so that it must stay where it is.
        mark: of a leaf that may share memory: what tells whether it does, as in `_mark`.
    """

    index: int
    path: Path
    kind: type | None = None
    keys: list[Any] = field(default_factory=list)
    key_types: list[type] = field(default_factory=list)
    idents: list[Any] | None = None
    spots: list[Spot] = field(default_factory=list)
    how: Stateful | None = None
    thing: type | None = None
    facts: tuple[Any, ...] | None = None
    shard: Lying | None = None
    frame: Frame | None = None
    inner: bool = False
    leaf_kind: str = ""
    plain: Any = UNKNOWN
    tied: bool = False
    mark: Hashable = None


@dataclass(slots=True, eq=False)
class Lying:
    """Where a value that lies in shards lay.

    Attributes:
        kind: the value's type.
        near: how its local tensor is found.
        facts: as `_facts_of_shard`.
    """

    kind: type
    near: Near
    facts: tuple[Any, ...]

    def again(self, value: Any) -> torch.Tensor | None:
        """The local tensor of a value that lies there still; None where it does not."""
        if type(value) is not self.kind:
            return None
        local, facts = _facts_of_shard(value, self.near)
        return local if facts == self.facts else None


def _facts_of_shard(value: Any, near: Near) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The local tensor, and all that its bytes, boxes, spec and ties depend on."""
    local, whole, layout = near(value)
    return local, (
        local.data_ptr() or local.untyped_storage()._cdata,  # one without elements has no address of its own
        local.dtype,
        local.shape,
        local.stride(),
        local.device,
        local.is_neg(),
        local.is_conj(),
        type(local),
        whole.requires_grad,
        type(whole),
        getattr(whole, "_is_param", False),
        layout,
    )


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a plain tensor's bytes, spec and ties depend on, but for what lies in its memory."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.requires_grad,
        tensor.is_neg(),
        tensor.is_conj(),
        type(tensor),
    )


def _mark(provider: Provider) -> Hashable:
    """What two leaves have in common that may share memory: tensors their storage, others their alias."""
    if isinstance(provider, (ShardProvider, ShardsProvider)):
        return None if provider.value is None else storage_mark(provider.value)
    if isinstance(provider, (TensorProvider, LossyProvider)):
        storage = provider.value.untyped_storage()
        return (provider.value.device, storage.data_ptr()) if storage.nbytes() else None
    alias: Hashable = getattr(provider, "alias", None)
    return alias


def spot_of(place: Place, indices: Iterator[int], leaves: Iterator[int], tied: set[int]) -> Spot:
    spot = Spot(next(indices), place.path)
    if place.stateful is not None:
        spot.how, spot.thing, spot.inner = place.stateful, type(place.value), True
    if place.provider is not None:
        inner = spot
        if spot.how is not None:
            inner = Spot(spot.index, place.path)
            spot.spots = [inner]
        inner.tied = next(leaves) in tied
        note(inner, place.tree, place.provider)
        return spot
    spot.kind, spot.inner = type(place.tree), True
    spot.keys = [key for key, _ in place.children.values()]
    spot.key_types = [*map(type, spot.keys)]
    if not {float, tuple}.isdisjoint(spot.key_types):
        spot.idents = [*map(ident, spot.keys)]
    spot.spots = [spot_of(child, indices, leaves, tied) for _, child in place.children.values()]
    return spot


def note(spot: Spot, value: Any, provider: Provider) -> None:
    """What tells a leaf again."""
    plain_tensor = type(provider) is TensorProvider and type(value) in PLAIN
    spot.facts = _facts(value) if plain_tensor else None
    near = provider.near if isinstance(provider, (ShardProvider, ShardsProvider)) else None
    spot.shard = Lying(type(value), near, _facts_of_shard(value, near)[1]) if near is not None else None
    spot.frame = frame_of(provider)
    spot.plain = value if type(value) in _CONSTANT and type(provider) is ValueProvider else UNKNOWN
    spot.mark, spot.leaf_kind = _mark(provider), provider.kind


def all_below(root: Spot) -> Iterator[Spot]:
    stack = [root]
    while stack:
        spot = stack.pop()
        yield spot
        stack += spot.spots
