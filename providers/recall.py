"""Recall: a state that is built like the last one is flattened by looking for what is different."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from tierstate.manifest.leaf import encode_path

from .base import Provider
from .per_rank import PerRank
from .reducing import Methods, reduce_all, reduced
from .registry import REGISTRY, Registry
from .shards import frame_of
from .spots import Spot, all_below, note, spot_of
from .stateful import stateful
from .survey import Leave, Place, Survey, ident, never
from .ties import Ties
from .tree import Tree, plant, ties_of
from .values import ValueProvider

log = logging.getLogger("tierstate")


class _Changed(Exception):
    """The state is not built like the last one."""


class Recall:
    """Flattens one state after the other, as `flatten` does.

    The states are compared place by place: the same keys and types, and tensors of the same address, shape, strides and
    dtype, which costs less than a microsecond each, and a few for a shard. Nothing of a state is held on to but its
    plain values.

    Args:
        allow_pickle: whether the value at a path, if it has no provider, may be pickled.
        lossy: by which method the tensor at a path is saved with fewer bits, if it shares no memory; empty for none.
        rank: under which number this process's own values are saved.
    """

    def __init__(
        self,
        *,
        registry: Registry = REGISTRY,
        allow_pickle: Leave = never,
        lossy: Methods = lambda _path: "",
        rank: int = 0,
    ) -> None:
        self._registry, self._allow_pickle, self._lossy, self._rank = registry, allow_pickle, lossy, rank
        self._root: Spot | None = None
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
        root = Survey(self._registry, self._allow_pickle, rank=self._rank).take(state)
        ties = ties_of(root)
        reduce_all(root, {*ties.specs, *ties.storages, *_roots(ties, root)}, self._lossy)
        tree = plant(root, ties)
        if not ties.storages and not _is_odd(root):
            self._learn(root, ties, tree)
        return tree

    def _learn(self, root: Place, ties: Ties, tree: Tree) -> None:
        indices, numbers = iter(range(len(tree.leaves))), iter(range(len(tree.leaves)))
        learned = spot_of(root, indices, numbers, {*ties.specs, *_roots(ties, root)})
        for spot in all_below(learned):
            self._forget_facts(spot)
        self._marks = Counter(spot.mark for spot in all_below(learned) if spot.mark is not None)
        self._tree = tree.without_memory()
        self._root = learned

    def _forget_facts(self, spot: Spot) -> None:
        """A tensor's values say anew, each time, whether they can be saved with fewer bits."""
        if spot.facts is not None and self._lossy(spot.path):
            spot.facts = None

    def _again(self, root: Spot, last: Tree, state: Any) -> Tree:
        values: list[Any] = [None] * len(last.leaves)
        moved: list[tuple[Spot, Any]] = []
        _match((root,), (state,), values, moved)
        tree = last.again(values, self._renewed(moved))
        self._tree = tree.without_memory()
        return tree

    def _renewed(self, moved: list[tuple[Spot, Any]]) -> dict[int, Provider]:
        """Providers of leaves whose bytes lie elsewhere now, or are others. None of them may share memory."""
        new = [(spot, value, self._provider(spot, value)) for spot, value in moved]
        left = [spot.mark for spot, _ in moved if spot.mark is not None]
        self._marks.subtract(left)
        for spot, value, provider in new:
            if frame_of(provider) != spot.frame:
                raise _Changed  # other boxes
            note(spot, value, provider)
            self._forget_facts(spot)
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

    def _provider(self, spot: Spot, value: Any) -> Provider:
        place = Survey(self._registry, self._allow_pickle, rank=self._rank).take(value, spot.path)
        if place.provider is None or place.stateful is not None:
            raise _Changed  # also since a list is a container only for what in it is no plain value
        method = "" if spot.tied else self._lossy(spot.path)
        provider = reduced(place.provider, method) if method else place.provider
        if provider.kind != spot.leaf_kind:
            raise _Changed
        return provider


def _match(spots: Iterable[Spot], values: Iterable[Any], tensors: list[Any], moved: list[tuple[Spot, Any]]) -> None:
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
        elif spot.shard is not None:
            local = spot.shard.again(value)
            if local is None:
                moved.append((spot, value))
            else:
                tensors[spot.index] = local
        elif spot.inner:
            _match_inner(spot, value, tensors, moved)
        elif value is not spot.plain:
            moved.append((spot, value))


def _match_inner(spot: Spot, value: Any, tensors: list[Any], moved: list[tuple[Spot, Any]]) -> None:
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


def _odd(spot: Spot, keys: list[Any]) -> bool:
    """Whether keys that are equal to Python are others all the same: 0.0 and -0.0, (1,) and (True,)."""
    return spot.idents is not None and [*map(ident, keys)] != spot.idents


def _state_of(spot: Spot, thing: Any) -> Any:
    if type(thing) is not spot.thing or (spot.thing is not PerRank and stateful(thing) is not spot.how):
        raise _Changed
    assert spot.how is not None
    return spot.how.get(thing)


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
