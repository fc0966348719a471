"""Flattens a state that is saved again and again: only values that have changed since the last save get new providers.

Each value is compared with the one of the last save.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstate.manifest.format.leaf_path import Path, encode_path
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY, Registry
from tierstate.providers.sharded.mesh import LocalBoxes
from tierstate.providers.sharded.shards import (
    FindLocal,
    ShardProvider,
    ShardsProvider,
    local_boxes_of,
    storage_id,
)
from tierstate.providers.tensors.lossy import LossyProvider
from tierstate.providers.tensors.tensors import PLAIN_TENSORS, TensorProvider
from tierstate.providers.values.classes import FORM
from tierstate.providers.values.modules import copied_metadata
from tierstate.providers.values.stateful import PerRank, Stateful, stateful
from tierstate.providers.values.values import ValueProvider

from .flatten import FlatState, flat_state, ties_of
from .lossy_rules import LossyRule, apply_lossy_rules, lossy_provider
from .ties import Ties
from .walk import PickleAllowed, StateNode, StateWalk, container_attrs, container_items, no_pickle, typed_key

_NO_VALUE = object()
"""Sentinel for 'no value': equal to nothing in a state."""


_CONSTANT = frozenset({int, float, bool, str, bytes, complex, type(None)})
"""Types whose objects never change: the same object is the same value."""


log = logging.getLogger("tierstate")


@dataclass(slots=True, eq=False)
class CachedPlace:
    """One node of the last state, with what is needed to see whether it has changed.

    Attributes:
        index: its leaf's index.
        path: its keys from the root.
        kind: the type of the container that was walked; None for a leaf.
        attrs: the attributes of a container with a class of its own; otherwise empty.
        keys, key_types, children: a container's keys, their types, and the nodes below.
        idents: the keys with their types, where keys that compare equal may still differ.
        metadata: what torch keeps about the modules of a state dict (`metadata_of`).
        how, thing: for a stateful object, how its state is read, and its type.
        facts: for a tensor, all that its bytes, spec and ties depend on (`_facts`).
        shard: for a sharded tensor, the same, and how its local tensor is found.
        frame: for a sharded tensor, its boxes.
        inner: whether it is a container or a stateful object.
        leaf_kind: a leaf's kind.
        plain: the value itself, if its type is immutable.
        tied: whether the leaf shares memory with another leaf; then its memory must not change.
        mark: for a leaf that may share memory, the key by which sharing is found (`_mark`).
    """

    index: int
    path: Path
    kind: type | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    keys: list[Any] = field(default_factory=list)
    key_types: list[type] = field(default_factory=list)
    idents: list[Any] | None = None
    children: list[CachedPlace] = field(default_factory=list)
    metadata: dict[str, Any] | None = None
    how: Stateful | None = None
    thing: type | None = None
    facts: tuple[Any, ...] | None = None
    shard: ShardLocation | None = None
    frame: LocalBoxes | None = None
    inner: bool = False
    leaf_kind: str = ""
    plain: Any = _NO_VALUE
    tied: bool = False
    mark: Hashable = None


@dataclass(slots=True, eq=False)
class ShardLocation:
    """Where the local tensor of a sharded tensor was at the last save.

    Attributes:
        kind: the type of the sharded tensor.
        near: returns its local tensor.
        facts: those of `_facts_of_shard`.
    """

    kind: type
    near: FindLocal
    facts: tuple[Any, ...]

    def again(self, value: Any) -> torch.Tensor | None:
        """The local tensor of the value, if it has the same type, memory and boxes as before; otherwise None."""
        if type(value) is not self.kind:
            return None
        local, facts = _facts_of_shard(value, self.near)
        return local if facts == self.facts else None


def _facts_of_shard(value: Any, near: FindLocal) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The local tensor of a sharded one, and all that its bytes, boxes, spec and ties depend on."""
    local, whole, layout = near(value)
    return local, (
        local.data_ptr() or local.untyped_storage()._cdata,  # an empty tensor has no address
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
    """All that a plain tensor's bytes, spec and ties depend on, except the content of its memory."""
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
    """A key that is equal for leaves that may share memory: of tensors the storage, of other values the alias."""
    if isinstance(provider, (ShardProvider, ShardsProvider)):
        return None if provider.value is None else storage_id(provider.value)
    if isinstance(provider, (TensorProvider, LossyProvider)):
        storage = provider.value.untyped_storage()
        return (provider.value.device, storage.data_ptr()) if storage.nbytes() else None
    alias: Hashable = getattr(provider, "alias", None)
    return alias


def _cached_place(place: StateNode, indices: Iterator[int], leaves: Iterator[int], tied: set[int]) -> CachedPlace:
    cached = CachedPlace(next(indices), place.path)
    if place.stateful is not None:
        cached.how, cached.thing, cached.inner = place.stateful, type(place.value), True
    if place.provider is not None:
        inner = cached
        if cached.how is not None:
            inner = CachedPlace(cached.index, place.path)
            cached.children = [inner]
        inner.tied = next(leaves) in tied
        _note_facts(inner, place.tree, place.provider)
        return cached
    cached.kind, cached.inner = type(place.tree), True
    cached.attrs = place.attrs if FORM in place.attrs else {}
    cached.metadata = None if cached.attrs else copied_metadata(place.tree)
    cached.keys = [key for key, _ in place.children.values()]
    cached.key_types = [*map(type, cached.keys)]
    if not {float, tuple}.isdisjoint(cached.key_types):
        cached.idents = [*map(typed_key, cached.keys)]
    cached.children = [_cached_place(child, indices, leaves, tied) for _, child in place.children.values()]
    return cached


def _note_facts(cached: CachedPlace, value: Any, provider: Provider) -> None:
    """Store the facts by which a later save recognises a leaf as unchanged."""
    plain_tensor = type(provider) is TensorProvider and type(value) in PLAIN_TENSORS
    cached.facts = _facts(value) if plain_tensor else None
    near = provider.near if isinstance(provider, (ShardProvider, ShardsProvider)) else None
    cached.shard = ShardLocation(type(value), near, _facts_of_shard(value, near)[1]) if near is not None else None
    cached.frame = local_boxes_of(provider)
    cached.plain = value if type(value) in _CONSTANT and type(provider) is ValueProvider else _NO_VALUE
    cached.mark, cached.leaf_kind = _mark(provider), provider.kind


def _walk_cached(root: CachedPlace) -> Iterator[CachedPlace]:
    stack = [root]
    while stack:
        cached = stack.pop()
        yield cached
        stack += cached.children


class _Changed(Exception):
    """The state has another structure than the last one, so that it is flattened from the start."""


class FlattenCache:
    """Flattens successive states as `flatten` does, and reuses the work of the last call.

    Each node is compared with the last state: keys and types, and for tensors address, shape, strides and dtype. This
    costs less than a microsecond per tensor, and a few for a sharded one. Of a state only plain values are kept.

    Args:
        allow_pickle: whether the value at a path, if it has no provider, may be pickled.
        lossy: the lossy method for the tensor at a path, used if it shares no memory; empty for none.
        rank: this process's rank, under which its `PerRank` values are saved.
    """

    def __init__(
        self,
        *,
        registry: Registry = REGISTRY,
        allow_pickle: PickleAllowed = no_pickle,
        lossy: LossyRule = lambda _path: "",
        rank: int = 0,
    ) -> None:
        self._registry, self._allow_pickle, self._lossy, self._rank = registry, allow_pickle, lossy, rank
        self._root: CachedPlace | None = None
        self._tree: FlatState | None = None
        self._marks: Counter[Hashable] = Counter()
        self._known = -1

    def flatten(self, state: Any) -> FlatState:
        """Flatten a state into leaves.

        Raises:
            CaptureError: as `flatten`.
        """
        # The cache is empty until all is done, so that an interrupt leaves no half-filled cache.
        last, self._root = self._root, None
        if last is not None and self._tree is not None and self._known == self._registry.changes:
            try:
                tree = self._again(last, self._tree, state)
            except Exception as error:
                # The full walk below gets the same error again, and raises it with its path.
                log.debug("the state is flattened anew: %r", error)
            else:
                self._root = last
                return tree
        self._known = self._registry.changes
        root = StateWalk(self._registry, self._allow_pickle, rank=self._rank).take(state)
        ties = ties_of(root)
        apply_lossy_rules(root, {*ties.specs, *ties.storages, *_roots(ties, root)}, self._lossy)
        tree = flat_state(root, ties)
        if not ties.storages and not _is_odd(root):
            self._learn(root, ties, tree)
        return tree

    def _learn(self, root: StateNode, ties: Ties, tree: FlatState) -> None:
        indices, numbers = iter(range(len(tree.leaves))), iter(range(len(tree.leaves)))
        learned = _cached_place(root, indices, numbers, {*ties.specs, *_roots(ties, root)})
        for cached in _walk_cached(learned):
            self._forget_facts(cached)
        self._marks = Counter(cached.mark for cached in _walk_cached(learned) if cached.mark is not None)
        self._tree = tree.without_memory()
        self._root = learned

    def _forget_facts(self, cached: CachedPlace) -> None:
        """Do not reuse a lossy leaf: whether the lossy method can encode it depends on its values at each save."""
        if cached.facts is not None and self._lossy(cached.path):
            cached.facts = None

    def _again(self, root: CachedPlace, last: FlatState, state: Any) -> FlatState:
        values: list[Any] = [None] * len(last.leaves)
        moved: list[tuple[CachedPlace, Any]] = []
        _match((root,), (state,), values, moved)
        tree = last.again(values, self._renewed(moved))
        self._tree = tree.without_memory()
        return tree

    def _renewed(self, moved: list[tuple[CachedPlace, Any]]) -> dict[int, Provider]:
        """New providers of leaves whose memory or value has changed. None of these may share memory."""
        new = [(cached, value, self._provider(cached, value)) for cached, value in moved]
        left = [cached.mark for cached, _ in moved if cached.mark is not None]
        self._marks.subtract(left)
        for cached, value, provider in new:
            if local_boxes_of(provider) != cached.frame:
                raise _Changed  # other boxes
            _note_facts(cached, value, provider)
            self._forget_facts(cached)
            if cached.tied:
                raise _Changed
            if cached.mark is not None:
                if self._marks[cached.mark] > 0:
                    raise _Changed
                self._marks[cached.mark] += 1
        for mark in left:
            if not self._marks[mark]:
                del self._marks[mark]
        return {cached.index: provider for cached, _, provider in new}

    def _provider(self, cached: CachedPlace, value: Any) -> Provider:
        place = StateWalk(self._registry, self._allow_pickle, rank=self._rank).take(value, cached.path)
        if place.provider is None or place.stateful is not None:
            raise _Changed  # a list of plain values only would be one value, not a container
        method = "" if cached.tied else self._lossy(cached.path)
        provider = lossy_provider(place.provider, method) if method else place.provider
        if provider.kind != cached.leaf_kind:
            raise _Changed
        return provider


def _match(
    children: Iterable[CachedPlace], values: Iterable[Any], tensors: list[Any], moved: list[tuple[CachedPlace, Any]]
) -> None:
    """Compare values with those of the last state at these nodes. Raises _Changed where the structure differs."""
    for cached, value in zip(children, values, strict=True):
        facts = cached.facts
        if facts is not None:
            # Same as `_facts`, inlined: a call for each of thousands of tensors would double the time.
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
                tensors[cached.index] = value
            else:
                moved.append((cached, value))
        elif cached.shard is not None:
            local = cached.shard.again(value)
            if local is None:
                moved.append((cached, value))
            else:
                tensors[cached.index] = local
        elif cached.inner:
            _match_inner(cached, value, tensors, moved)
        elif value is not cached.plain:
            moved.append((cached, value))


def _match_inner(cached: CachedPlace, value: Any, tensors: list[Any], moved: list[tuple[CachedPlace, Any]]) -> None:
    if cached.how is not None:
        value = _state_of(cached, value)
        if cached.kind is None:
            _match(cached.children, (value,), tensors, moved)
            return
    if type(value) is not cached.kind or _has_more(cached, value):
        raise _Changed
    items: Any = _items_of_own_class(cached, value) if cached.attrs else value
    # Copied, at one moment: another thread may change it between a look at its keys and one at its values.
    if isinstance(items, dict):
        items = dict(items)
        keys = list(items)
        if keys != cached.keys or [*map(type, keys)] != cached.key_types or _odd(cached, keys):
            raise _Changed
        if not cached.attrs and getattr(value, "_metadata", None) != cached.metadata:
            raise _Changed
        items = items.values()
    elif len(items := tuple(items)) != len(cached.children):
        raise _Changed
    _match(cached.children, items, tensors, moved)


def _has_more(cached: CachedPlace, value: Any) -> bool:
    """Whether a container has got attributes of its own, for which the full walk refuses it."""
    return not cached.attrs and len(getattr(value, "__dict__", ())) > (cached.metadata is not None)


def _items_of_own_class(cached: CachedPlace, value: Any) -> dict[Any, Any]:
    """The items of a container with a class of its own."""
    if container_attrs(value) != cached.attrs:
        raise _Changed
    return dict(container_items(value))


def _odd(cached: CachedPlace, keys: list[Any]) -> bool:
    """Whether keys that compare equal in Python still differ: 0.0 and -0.0, (1,) and (True,)."""
    return cached.idents is not None and [*map(typed_key, keys)] != cached.idents


def _state_of(cached: CachedPlace, thing: Any) -> Any:
    if type(thing) is not cached.thing or (cached.thing is not PerRank and stateful(thing) is not cached.how):
        raise _Changed
    assert cached.how is not None
    return cached.how.get(thing)


def _roots(ties: Ties, root: StateNode) -> set[int]:
    """Indices of the leaves to which other leaves are tied."""
    paths = {spec.attrs["to"] for spec in ties.specs.values()}
    if not paths:
        return set()
    leaves = (place for place in root.walk() if place.provider is not None)
    return {i for i, place in enumerate(leaves) if encode_path(place.path) in paths}


def _is_odd(root: StateNode) -> bool:
    """Whether a list or tuple has only plain values, but is not saved as one value; a later state may differ."""
    return any(
        isinstance(place.tree, (list, tuple, deque))
        and place.provider is None
        and all(type(below.provider) is ValueProvider for below in place.walk() if below.provider is not None)
        for place in root.walk()
    )
