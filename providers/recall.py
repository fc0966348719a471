"""Recall: a state that is built like the last one is flattened by looking for what is different."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstate.manifest.leaf import Path, encode_path

from .base import Provider
from .registry import REGISTRY, Registry
from .stateful import Stateful, stateful
from .survey import Leave, Place, Survey, ident, never
from .tensors import TensorProvider
from .ties import Ties
from .tree import Tree, plant, ties_of
from .values import ValueProvider

log = logging.getLogger("tierstate")

_CONSTANT = frozenset({int, float, bool, str, bytes, complex, type(None)})
"""Types whose objects never change: the same object is the same value."""


class _Changed(Exception):
    """The state is not built like the last one."""


@dataclass(slots=True, eq=False)
class _Spot:
    """One place of the last state, with what is needed to know it again.

    Attributes:
        index: its leaf's index.
        path: the keys that lead there.
        kind: the type of the container that was walked; None for a leaf.
        keys, key_types, spots: a container's keys and what lies there.
        idents: the keys with their types, where equal ones need not be the same.
        how, thing: how a stateful thing gives its state, and its type.
        facts: of a tensor: all that its bytes, spec and ties depend on.
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
    spots: list[_Spot] = field(default_factory=list)
    how: Stateful | None = None
    thing: type | None = None
    facts: tuple[Any, ...] | None = None
    inner: bool = False
    leaf_kind: str = ""
    plain: Any = _Changed
    tied: bool = False
    mark: Hashable = None


class Recall:
    """Flattens one state after the other, as `flatten` does.

    The states are compared place by place: the same keys and types, and tensors of the same address, shape, strides and
    dtype, which costs less than a microsecond each. Nothing of a state is held on to but its plain values.

    Args:
        allow_pickle: whether the value at a path, if it has no provider, may be pickled.
    """

    def __init__(self, *, registry: Registry = REGISTRY, allow_pickle: Leave = never) -> None:
        self._registry, self._allow_pickle = registry, allow_pickle
        self._root: _Spot | None = None
        self._tree: Tree | None = None
        self._marks: Counter[Hashable] = Counter()
        self._known = -1

    def flatten(self, state: Any) -> Tree:
        """A state as leaves.

        Raises:
            CaptureError: as `flatten`.
        """
        # Forgotten until all is done, so that nothing half learned is left behind by an interrupt.
        last, self._root = self._root, None
        if last is not None and self._tree is not None and self._known == self._registry.changes:
            try:
                tree = self._again(last, self._tree, state)
            except Exception as error:
                # Whatever it is, it is met again, and told, when the state is looked at anew.
                log.debug("the state is flattened anew: %r", error)
            else:
                self._root = last
                return tree
        self._known = self._registry.changes
        root = Survey(self._registry, self._allow_pickle).take(state)
        ties = ties_of(root)
        tree = plant(root, ties)
        if not ties.storages and not _is_odd(root):
            self._learn(root, ties, tree)
        return tree

    def _learn(self, root: Place, ties: Ties, tree: Tree) -> None:
        indices, numbers = iter(range(len(tree.leaves))), iter(range(len(tree.leaves)))
        learned = _spot(root, indices, numbers, {*ties.specs, *_roots(ties, root)})
        self._marks = Counter(spot.mark for spot in _all(learned) if spot.mark is not None)
        self._tree = tree.without_memory()
        self._root = learned

    def _again(self, root: _Spot, last: Tree, state: Any) -> Tree:
        values: list[Any] = [None] * len(last.leaves)
        moved: list[tuple[_Spot, Any]] = []
        _match((root,), (state,), values, moved)
        tree = last.again(values, self._renewed(moved))
        self._tree = tree.without_memory()
        return tree

    def _renewed(self, moved: list[tuple[_Spot, Any]]) -> dict[int, Provider]:
        """Providers of leaves whose bytes lie elsewhere now, or are others. None of them may share memory."""
        new = [(spot, value, self._provider(spot, value)) for spot, value in moved]
        left = [spot.mark for spot, _ in moved if spot.mark is not None]
        self._marks.subtract(left)
        for spot, value, provider in new:
            _note(spot, value, provider)
            if spot.tied:
                raise _Changed
            if spot.mark is not None:
                if self._marks[spot.mark] > 0:
                    raise _Changed
                self._marks[spot.mark] += 1
        for mark in left:
            if not self._marks[mark]:
                del self._marks[mark]
        return {spot.index: provider for spot, _, provider in new}

    def _provider(self, spot: _Spot, value: Any) -> Provider:
        place = Survey(self._registry, self._allow_pickle).take(value, spot.path)
        if place.provider is None or place.stateful is not None or place.provider.kind != spot.leaf_kind:
            raise _Changed  # also since a list is a container only for what in it is no plain value
        return place.provider


def _match(spots: Iterable[_Spot], values: Iterable[Any], tensors: list[Any], moved: list[tuple[_Spot, Any]]) -> None:
    """Compare values with what lay at these spots; raises _Changed where the structure is another."""
    for spot, value in zip(spots, values, strict=True):
        facts = spot.facts
        if facts is not None:
            # As in _facts; a call for each of thousands of tensors would double the time.
            if type(value) is facts[8] and facts == (
                value.data_ptr(),
                value.dtype,
                value.shape,
                value.stride(),
                value.device,
                value.requires_grad,
                value.is_neg(),
                value.is_conj(),
                facts[8],
            ):
                tensors[spot.index] = value
            else:
                moved.append((spot, value))
        elif spot.inner:
            _match_inner(spot, value, tensors, moved)
        elif value is not spot.plain:
            moved.append((spot, value))


def _match_inner(spot: _Spot, value: Any, tensors: list[Any], moved: list[tuple[_Spot, Any]]) -> None:
    if spot.how is not None:
        value = _state_of(spot, value)
        if spot.kind is None:
            _match(spot.spots, (value,), tensors, moved)
            return
    if type(value) is not spot.kind:
        raise _Changed
    items: Any = value
    if isinstance(value, dict):
        keys = list(value)
        if keys != spot.keys or [*map(type, keys)] != spot.key_types or _odd(spot, keys):
            raise _Changed
        items = value.values()
    elif len(items) != len(spot.spots):
        raise _Changed
    _match(spot.spots, items, tensors, moved)


def _odd(spot: _Spot, keys: list[Any]) -> bool:
    """Whether keys that are equal to Python are others all the same: 0.0 and -0.0, (1,) and (True,)."""
    return spot.idents is not None and [*map(ident, keys)] != spot.idents


def _state_of(spot: _Spot, thing: Any) -> Any:
    if type(thing) is not spot.thing or stateful(thing) is not spot.how:
        raise _Changed
    assert spot.how is not None
    return spot.how.get(thing)


_TENSORS = (torch.Tensor, torch.nn.Parameter)


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
    if isinstance(provider, TensorProvider):
        storage = provider.value.untyped_storage()
        return (provider.value.device, storage.data_ptr()) if storage.nbytes() else None
    alias: Hashable = getattr(provider, "alias", None)
    return alias


def _spot(place: Place, indices: Iterator[int], leaves: Iterator[int], tied: set[int]) -> _Spot:
    spot = _Spot(next(indices), place.path)
    if place.stateful is not None:
        spot.how, spot.thing, spot.inner = place.stateful, type(place.value), True
    if place.provider is not None:
        inner = spot
        if spot.how is not None:
            inner = _Spot(spot.index, place.path)
            spot.spots = [inner]
        inner.tied = next(leaves) in tied
        _note(inner, place.tree, place.provider)
        return spot
    spot.kind, spot.inner = type(place.tree), True
    spot.keys = [key for key, _ in place.children.values()]
    spot.key_types = [*map(type, spot.keys)]
    if not {float, tuple}.isdisjoint(spot.key_types):
        spot.idents = [*map(ident, spot.keys)]
    spot.spots = [_spot(child, indices, leaves, tied) for _, child in place.children.values()]
    return spot


def _note(spot: _Spot, value: Any, provider: Provider) -> None:
    """What tells a leaf again."""
    plain_tensor = type(provider) is TensorProvider and type(value) in _TENSORS
    spot.facts = _facts(value) if plain_tensor else None
    spot.plain = value if type(value) in _CONSTANT and type(provider) is ValueProvider else _Changed
    spot.mark, spot.leaf_kind = _mark(provider), provider.kind


def _roots(ties: Ties, root: Place) -> set[int]:
    """Numbers of the leaves that others are tied to."""
    paths = {spec.attrs["to"] for spec in ties.specs.values()}
    if not paths:
        return set()
    leaves = (place for place in root.walk() if place.provider is not None)
    return {i for i, place in enumerate(leaves) if encode_path(place.path) in paths}


def _is_odd(root: Place) -> bool:
    """Whether a list or tuple holds plain values alone and is none itself: nobody knows when it will be one."""
    return any(
        isinstance(place.tree, (list, tuple))
        and place.provider is None
        and all(type(below.provider) is ValueProvider for below in place.walk() if below.provider is not None)
        for place in root.walk()
    )


def _all(root: _Spot) -> Iterator[_Spot]:
    stack = [root]
    while stack:
        spot = stack.pop()
        yield spot
        stack += spot.spots
