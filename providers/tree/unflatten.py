"""Restores a state from a version's leaves: decides which provider receives each leaf's bytes, and rebuilds the state.

`plan_restore` compares the version with the given state before anything is changed. The engine then loads the bytes
into the providers of the returned `Target`, and `Target.finish` builds the state from them, in place where possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import torch

from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch, Unsafe
from tierstate.manifest.format.leaf import LOSSY, Leaf
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY, Registry
from tierstate.providers.sharded.shards import TiedShards, local_boxes_of
from tierstate.providers.tensors.host_memory import HostAllocator
from tierstate.providers.tensors.tensors import StorageProvider, TensorProvider

from .compare import Comparison, no_match_error, replaces_state
from .lossy_rules import Lossy
from .structure import VersionNode, build_container, drop_other_ranks, select_leaves, version_tree
from .ties import OverlapStaging, TiedLeaf, copy_value, read_ties
from .walk import PickleAllowed, StateNode, StateWalk, no_pickle


class NewValues:
    """Creates values for leaves that the given state does not have.

    Args:
        registry: where providers are looked up.
        device: the device of new tensors (default: host).
        within: index of a leaf -> the stateful object whose state it becomes a part of.
    """

    def __init__(self, registry: Registry, device: torch.device | None, within: Mapping[int, StateNode]) -> None:
        self._registry, self._device, self._within = registry, device, within
        self._blocks = HostAllocator()
        self._makers: dict[int, Callable[..., Any]] = {}

    def provider(self, index: int, leaf: Leaf, cls: type[Provider]) -> Provider:
        """A provider of class ``cls`` that receives the leaf's bytes into a new value.

        Raises:
            FormatError: the leaf's spec is not valid.
            MemoryError: there is not enough memory.
        """
        try:
            own = self._own(index, leaf)
            if own is not None:
                return own.receiver(leaf.spec)
            if cls in (TensorProvider, StorageProvider):
                return cls.fresh(leaf.spec, self._device, self._blocks)
            return cls.fresh(leaf.spec, self._device)
        except (FormatError, MemoryError) as error:
            raise type(error)(f"{leaf.name}: {error}") from error

    def _own(self, index: int, leaf: Leaf) -> Provider | None:
        """A provider of a value that the stateful object itself creates for the leaf (`Stateful.anew`)."""
        thing = self._within.get(index)
        if thing is None or thing.stateful is None or thing.stateful.anew is None:
            return None
        if id(thing) not in self._makers:
            self._makers[id(thing)] = thing.stateful.anew(thing.value)
        value = self._makers[id(thing)](leaf.path[len(thing.path) :], leaf.spec)
        return None if value is None else self._registry.exact(value)


def join_tied_shards(
    wanted: dict[int, Provider], leaves: Sequence[Leaf], ties: Mapping[int, TiedLeaf], matched: Mapping[int, StateNode]
) -> set[int]:
    """Load tied leaves together with their root where one of them is a shard (`TiedShards`). The two may be cut into
    different boxes, so a tied leaf cannot be copied from the loaded root afterwards.

    Args:
        wanted: index of a leaf -> the provider that receives its bytes; changed here.
        ties: the tied leaves among the wanted ones.
        matched: index of a leaf -> the node of the state whose value receives it.

    Returns:
        Indices of the tied leaves that are loaded this way.

    Raises:
        StateMismatch: a leaf is tied to a part of another leaf's memory, and one of them is a shard in the state.
    """
    others: dict[int, dict[int, Provider]] = defaultdict(dict)
    sharded: set[int] = set()
    for i, tie in ties.items():
        root, at = wanted[tie.root], matched.get(i)
        receiver = at.provider.receiver(tie.spec) if at is not None and at.provider is not None else None
        shard = _in_boxes(root) or (receiver is not None and _in_boxes(receiver))
        if shard and tie.offset is not None:
            raise StateMismatch(
                f"{leaves[i].name}: shares memory with {leaves[tie.root].name} in the version, but is not all of it; "
                "such leaves are restored into plain tensors, not into shards"
            )
        if shard:
            sharded.add(tie.root)
        if receiver is not None and at is not None and receiver is at.provider and not _same(root, receiver):
            others[tie.root][i] = receiver
    for index in sharded & others.keys():
        whole = {i: receiver for i, receiver in others[index].items() if ties[i].offset is None}
        wanted[index] = TiedShards(wanted[index], list(whole.values()))
    return {i for index in sharded for i in others.get(index, {}) if ties[i].offset is None}


def _in_boxes(provider: Provider) -> bool:
    return local_boxes_of(provider) is not None


def _same(one: Provider, other: Provider) -> bool:
    alias = getattr(one, "alias", None)
    return alias is not None and alias == getattr(other, "alias", None)


class _New(Enum):
    NEW = "a fresh state"


NEW: Final = _New.NEW
"""Restore without a given state: all values are created."""


def plan_restore(
    leaves: Sequence[Leaf],
    *,
    into: Any = NEW,
    only: Sequence[str] | None = None,
    registry: Registry = REGISTRY,
    device: torch.device | None = None,
    allow_pickle: PickleAllowed = no_pickle,
    allow_lossy: bool = False,
    rank: int = 0,
    elsewhere: bool = False,
) -> Target:
    """Plan a restore: decide which provider receives each leaf. The state is not changed before the first ``load``.

    Args:
        leaves: the version's leaves; they may be untrusted.
        into: the state to restore into, in place; `NEW` (the default) creates all values.
        only: globs of leaf paths. A glob that matches a container selects everything in it.
        device: the device of new tensors (default: host).
        allow_pickle: whether the leaf at a path may be unpickled.
        allow_lossy: whether leaves that were saved with a lossy method may be restored.
        rank: this process's rank, by which its `PerRank` values are found.
        elsewhere: whether leaves that only the version has belong to other ranks and are no error. They are listed in
            `Target.elsewhere`.

    Raises:
        FormatError: the leaves do not form a tree, or name an unknown provider.
        StateMismatch: the given state and the version differ (all differences are listed), or no glob matches.
        Unsafe: a wanted leaf is of an unsafe kind, or lossy, and this is not allowed.
    """
    root, index = version_tree(leaves)
    ties = read_ties(leaves, index)
    place = None
    if into is not NEW:
        place = StateWalk(registry, lenient=True, rank=rank).take(into)
        drop_other_ranks(root, place)
    chosen = select_leaves(root, only)
    if only is not None and not chosen:
        raise no_match_error(leaves, only)
    needed = _needed(ties, chosen)
    classes = {
        i: _provider_class(leaves[i], registry, allow_pickle) for i in sorted(needed) if leaves[i].spec.has_bytes
    }
    if not allow_lossy:
        _check_exact([leaves[i] for i in sorted(needed)])
    matched: dict[int, StateNode] = {}
    within: dict[int, StateNode] = {}
    absent: Sequence[int] = ()
    if place is not None:
        comparison = Comparison(leaves, ties, chosen, only, classes, elsewhere)
        comparison.run(root, place)
        matched, within, absent = comparison.matched, comparison.within, comparison.elsewhere
    chosen -= set(absent)
    needed = _needed(ties, chosen)
    fresh = NewValues(registry, device, within)
    wanted: dict[int, Provider] = {}
    for i in sorted(needed & classes.keys()):
        at = matched.get(i)
        if at is not None and at.provider is not None:
            wanted[i] = at.provider.receiver(leaves[i].spec)
        else:
            wanted[i] = fresh.provider(i, leaves[i], classes[i])
    joined = join_tied_shards(wanted, leaves, {i: tie for i, tie in ties.items() if i in chosen}, matched)
    return Target(leaves, root, wanted, ties, chosen, place, matched, registry, joined, absent)


def _needed(ties: Mapping[int, TiedLeaf], chosen: set[int]) -> set[int]:
    """Indices of the leaves whose bytes the chosen leaves need: themselves, or the roots of tied ones."""
    return {ties[i].root if i in ties else i for i in chosen}


def _provider_class(leaf: Leaf, registry: Registry, allow_pickle: PickleAllowed) -> type[Provider]:
    try:
        cls = registry.by_kind(leaf.spec.kind)
    except FormatError as error:
        raise FormatError(f"{leaf.name}: {error}") from error
    if cls.unsafe and not allow_pickle(leaf.path):
        what = leaf.spec.attrs.get("type", leaf.spec.kind)
        raise Unsafe(
            f"{leaf.name}: {what!s:.80} {cls.unsafe}; if you trust where it comes from, allow pickle for this leaf"
        )
    return cls


def _check_exact(leaves: Sequence[Leaf]) -> None:
    """Raises Unsafe where one of these leaves was saved with a lossy method."""
    lossy = [leaf for leaf in leaves if LOSSY in leaf.spec.attrs]
    if lossy:
        more = f" and {len(lossy) - 1} more leaves were" if len(lossy) > 1 else " was"
        how = lossy[0].spec.attrs[LOSSY]
        raise Unsafe(
            f"{lossy[0].name}{more} saved with fewer bits ({how!s:.120}), so that a restore is not exact; "
            "allow that by allow_lossy=True"
        )


class Target:
    """A planned restore.

    Attributes:
        wanted: index of a leaf -> the provider that receives its bytes, through its ``parts`` if it has several boxes.
        elsewhere: indices of leaves that only the version has: they belong to other ranks.
        is_new: whether no state was given, so that all values are created.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        root: VersionNode,
        wanted: dict[int, Provider],
        ties: Mapping[int, TiedLeaf],
        chosen: set[int],
        place: StateNode | None,
        matched: Mapping[int, StateNode],
        registry: Registry,
        joined: set[int],
        elsewhere: Sequence[int],
    ) -> None:
        self.wanted, self.elsewhere = wanted, tuple(elsewhere)
        self.is_new = place is None
        self._leaves, self._root, self._ties, self._chosen = leaves, root, ties, chosen
        self._place, self._matched, self._registry = place, matched, registry
        self._joined, self._staging = joined, OverlapStaging(wanted)
        self._values: dict[int, Any] = {}
        self._pending: list[tuple[StateNode, VersionNode, Any]] = []

    def finish(self) -> Any:
        """Complete a restore after all bytes were loaded, and return the state: the given one, if it is mutable.

        Stateful objects get their state last, in order, so that random generators are set only if all else succeeded.

        Raises:
            StateMismatch: a value does not accept what was saved; the message names it.
            FormatError: the bytes of a plain value cannot be decoded.
        """
        for i, provider in self.wanted.items():
            self._values[i] = self._done(i, provider)
        self._values |= self._staging.copy_back(self._leaves)
        for i in sorted(self._chosen):
            if i in self._ties:
                self._values[i] = self._tie(i, self._ties[i])
        state = self._put(self._root, self._place, renew=False)
        for place, node, tree in self._pending:
            self._apply(place, node, tree)
        return state

    def _done(self, index: int, provider: Provider) -> Any:
        try:
            return provider.done()
        except (StateMismatch, FormatError) as error:
            raise type(error)(f"{self._leaves[index].name}: {error}") from error

    def _tie(self, index: int, tie: TiedLeaf) -> Any:
        """The value of a tied leaf, from the value of its root."""
        root, place = self._values[tie.root], self._matched.get(index)
        saved = self._leaves[tie.root].spec
        if place is None or place.provider is None:
            return tie.of(root, saved)
        receiver = place.provider.receiver(tie.spec)
        if receiver is not place.provider:  # the value is replaced, not filled
            return tie.of(root, saved)
        if index in self._joined:  # already filled together with its root
            return self._done(index, receiver)
        source = self.wanted[tie.root] if tie.offset is None else TensorProvider(tie.view(root))
        alias = getattr(source, "alias", None)
        if alias is None or alias != getattr(receiver, "alias", None):
            copy_value(source, receiver)
        return self._done(index, receiver)

    def _put(self, node: VersionNode, place: StateNode | None, renew: bool) -> Any:
        """The value for a node of the state: the given one after its change, or a new one."""
        if place is None or place.stateful is None:
            return self._assemble(node, place, renew)
        if self._wanted(node):
            tree = self._assemble(node, place, replaces_state(place, node, self._chosen))
            self._pending.append((place, node, tree))
        return place.value

    def _assemble(self, node: VersionNode, place: StateNode | None, renew: bool) -> Any:
        if not node.kind:
            if place is not None and isinstance(place.value, Lossy):
                return place.value  # its tensor was filled in place
            return self._values.get(node.index, place.value if place is not None else None)
        if place is None or renew:
            kids = place.children if place is not None else {}
            return build_container(
                node,
                {
                    child.key: self._put(child, kids[mark][1] if mark in kids else None, renew)
                    for mark, child in node.children.items()
                    if self._wanted(child)
                },
            )
        changed = {}
        for mark, child in node.children.items():
            if mark in place.children and self._wanted(child):
                key, at = place.children[mark]
                value = self._put(child, at, renew)
                if value is not at.value:
                    changed[key] = value
        return _changed(place, changed)

    def _wanted(self, node: VersionNode) -> bool:
        return any(s.index in self._chosen for s in node.walk())

    def _apply(self, place: StateNode, node: VersionNode, tree: Any) -> None:
        """Set the state of a stateful object, and check that it kept the values exactly."""
        how = place.stateful
        assert how is not None
        values = [self._values[s.index] for s in node.walk() if s.index in self._values]
        if how.settled(place.value, values):
            return
        try:
            how.put(place.value, tree)
        except Exception as error:
            kind = type(place.value).__qualname__
            raise StateMismatch(f"{place.name}: the {kind} does not take the saved state: {error}") from error
        if not how.strict:
            self._check_kept(place, node)

    def _check_kept(self, place: StateNode, node: VersionNode) -> None:
        """Raises StateMismatch where dtype or shape has changed: optimizers cast values to their parameters' dtype."""
        try:
            again = StateWalk(self._registry, lenient=True).take(place.value, place.path)
        except CaptureError as error:
            raise StateMismatch(f"{place.name}: cannot be read after its state was set: {error}") from error
        kept = {at.path: at for at in again.walk() if at.provider is not None}
        for leaf in (s for s in node.walk() if s.index in self._values):
            spec = self._ties[leaf.index].spec if leaf.index in self._ties else leaf.leaf.spec
            at = kept.get(leaf.leaf.path)
            if at is not None and at.provider is not None and at.provider.kind == spec.kind:
                reason = at.provider.mismatch(spec)
                if reason:
                    raise StateMismatch(f"{leaf.leaf.name}: after the saved state was set, {reason}: it was cast")


def _changed(place: StateNode, changed: Mapping[Any, Any]) -> Any:
    """The container with some items changed: itself, if it is mutable."""
    container = place.tree
    if not changed:
        return place.value if place.stateful is None else container
    if place.kind in ("tuple", "namedtuple"):
        keys = [key for key, _ in place.children.values()]
        items = (changed.get(key, item) for key, item in zip(keys, container, strict=True))
        return tuple.__new__(type(container), items)
    for key, value in changed.items():
        container[key] = value
    return container
