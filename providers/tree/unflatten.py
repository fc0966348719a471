"""Restores a state from a version's leaves: decides which provider receives each leaf's bytes, and rebuilds the state.

`plan_restore` compares the version with the given state before anything is changed. The engine then loads bytes into
the providers of the returned `Target`: first into new memory, from which stateful objects get their state and may
refuse it, and then into the state's own memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import torch

from tierstate.manifest.errors import StateMismatch, Unsafe, untrusted
from tierstate.manifest.format.leaf import LOSSY, Leaf, Spec
from tierstate.manifest.format.leaf_path import Path
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY, Registry
from tierstate.providers.sharded.shards import TiedShards, local_boxes_of
from tierstate.providers.tensors.devices import uploads_wait_once
from tierstate.providers.tensors.host_memory import HostAllocator
from tierstate.providers.tensors.tensors import PLAIN_TENSORS, StorageProvider, TensorProvider
from tierstate.providers.values.copies import copy_state

from .compare import Comparison, Content, no_match_error
from .rename import Rename, rename_leaves
from .structure import VersionNode, check_known_classes, drop_other_ranks, select_leaves, version_tree
from .target import Target
from .ties import TiedLeaf, read_ties
from .walk import PickleAllowed, StateNode, StateWalk, no_pickle, pickle_remedy


class NewValues:
    """Creates values for leaves that the given state does not have.

    Args:
        registry: where providers are looked up.
        device: the device of new tensors (default: host).
        within: index of a leaf -> the stateful object whose state it becomes a part of.
        like: index of a leaf -> the node with a present value, on whose device the new one goes.
    """

    def __init__(
        self,
        registry: Registry,
        device: torch.device | None,
        within: Mapping[int, StateNode],
        like: Mapping[int, StateNode],
    ) -> None:
        self._registry, self._device, self._within, self._like = registry, device, within, like
        self._blocks = HostAllocator()
        self._makers: dict[int, Callable[..., Any]] = {}

    def provider(self, index: int, leaf: Leaf, cls: type[Provider]) -> Provider:
        """A provider of class ``cls`` that receives the leaf's bytes into a new value.

        Raises:
            FormatError: the leaf's spec is not valid.
            OutOfMemory: there is not enough memory.
        """
        with untrusted(leaf):
            own = self._own(index, leaf)
            if own is not None:
                return own.receiver(leaf.spec)
            near = self._like.get(index)
            if near is not None and near.provider is not None and _in_boxes(near.provider):
                own = self._registry.exact(copy_state(near.value))
                if own is not None and not own.mismatch(leaf.spec):
                    return own.receiver(leaf.spec)
            device = _device_of(near.value) if near is not None else None
            if cls in (TensorProvider, StorageProvider):
                return cls.fresh(leaf.spec, device or self._device, self._blocks)
            return cls.fresh(leaf.spec, device or self._device)

    def _own(self, index: int, leaf: Leaf) -> Provider | None:
        """A provider of a value that the stateful object itself creates for the leaf (`Stateful.anew`)."""
        thing = self._within.get(index)
        if thing is None or thing.stateful is None or thing.stateful.anew is None:
            return None
        if id(thing) not in self._makers:
            self._makers[id(thing)] = thing.stateful.anew(thing.value)
        value = self._makers[id(thing)](leaf.path[len(thing.path) :], leaf.spec)
        return None if value is None else self._registry.exact(value)


def _device_of(value: Any) -> torch.device | None:
    """The device of a plain tensor that has memory; None for other values."""
    return value.device if type(value) in PLAIN_TENSORS and not value.is_meta else None


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
        receiver = _receiver(at, leaves[i], tie.spec)
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


def _receiver(at: StateNode | None, leaf: Leaf, spec: Spec) -> Provider | None:
    """The provider that receives a leaf of this spec in place of the value at a node; None if there is no value."""
    if at is None or at.provider is None:
        return None
    try:
        return at.provider.receiver(spec)
    except Exception:
        with untrusted(leaf):  # not around each call, which would double the time
            raise


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
    content: Content = lambda index: index,
    rename: Rename | None = None,
) -> Target:
    """Plan a restore: decide which provider receives each leaf. The state is not changed.

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
        content: returns for a leaf something that is equal for leaves with equal bytes.
        rename: how the version's leaves are renamed first (see `rename_leaves`); ``only`` matches the new names, and
            ``allow_pickle`` is asked for the saved ones.

    Raises:
        FormatError: the leaves do not form a tree, name an unknown provider, or are not what its values can be.
        OutOfMemory: a new value has no room in memory.
        StateMismatch: the given state and the version differ (all differences are listed), or no glob matches.
        Unsafe: a wanted leaf is of an unsafe kind, or lossy, and this is not allowed.
    """
    saved, place = leaves, None
    if into is not NEW:
        place = StateWalk(registry, lenient=True, rank=rank).take(into)
    root, ties, leaves = _read_version(saved, rename, place)
    if place is not None:
        drop_other_ranks(root, place)
        _decide_memory(place, [leaves[i].path for i in ties])
    chosen = select_leaves(root, only)
    if only is not None and not chosen:
        raise no_match_error(leaves, only)
    needed = _needed(ties, chosen)
    classes = _provider_classes(saved, sorted(needed), registry, allow_pickle)
    if not allow_lossy:
        _check_exact([leaves[i] for i in sorted(needed)])
    comparison = Comparison(leaves, ties, chosen, only, classes, elsewhere, content, hint=rename is None)
    if place is not None:
        with untrusted("the version's leaves", named=False):
            comparison.run(root, place)
    matched, absent = comparison.matched, comparison.elsewhere
    chosen -= set(absent)
    check_known_classes(root, place, lambda node: node.has_any(chosen))
    given = set(_given(root, place, chosen)) if place is not None else set()
    fresh = NewValues(registry, device, comparison.within, comparison.like)
    ahead: dict[int, Provider] = {}
    wanted: dict[int, Provider] = {}
    later = chosen - given
    tied = {i: tie for i, tie in ties.items() if i in later}
    with uploads_wait_once():
        for i in sorted(_needed(ties, later) & classes.keys()):
            at = matched.get(i)
            found = _receiver(at, leaves[i], leaves[i].spec)
            filled = found is not None and at is not None and found is at.provider
            (wanted if filled or place is None else ahead)[i] = found or fresh.provider(i, leaves[i], classes[i])
        for i in sorted(_needed(ties, given) & classes.keys() - ahead.keys()):
            ahead[i] = fresh.provider(i, leaves[i], classes[i])
        receivers = ahead | wanted
        joined = join_tied_shards(receivers, leaves, tied, matched)
    wanted |= {i: provider for i, provider in receivers.items() if i in wanted or provider is not ahead[i]}
    return Target(leaves, root, ahead, wanted, ties, chosen, given, place, matched, registry, joined, absent)


def _read_version(
    leaves: Sequence[Leaf], rename: Rename | None, place: StateNode | None
) -> tuple[VersionNode, dict[int, TiedLeaf], Sequence[Leaf]]:
    """The tree of a version, its ties, and its leaves, renamed."""
    with untrusted("the version's leaves", named=False):
        root, ties = version_tree(leaves), read_ties(leaves)
    if rename is not None:
        root, leaves = rename_leaves(root, leaves, rename, place)
    return root, ties, leaves


def _decide_memory(place: StateNode, tied: Sequence[Path], own: bool = False) -> None:
    """Mark the nodes whose values stateful objects get in memory of their own, because code of theirs takes part.

    Args:
        tied: paths of the version's tied leaves. A tied value of an object that gets its state before anything is
            filled cannot be a view of what is filled later.
    """
    how = place.stateful
    if how is not None and not how.transparent:
        suits = how.in_place is not None and how.in_place.suits(place.value, place.tree)
        own = not suits or (not how.strict and any(path[: len(place.path)] == place.path for path in tied))
    place.own_memory = own
    for _, child in place.children.values():
        if own or child.may_hold_objects:
            _decide_memory(child, tied, own)


def _given(node: VersionNode, place: StateNode, chosen: set[int], inside: bool = False) -> list[int]:
    """Indices of the chosen leaves that stateful objects get in memory of their own."""
    if place.stateful is not None and not place.stateful.transparent:
        inside = place.own_memory
    found = [node.index] if inside and node.index in chosen else []
    for mark, child in node.children.items():
        if mark in place.children:
            at = place.children[mark][1]
            if inside or at.may_hold_objects:
                found += _given(child, at, chosen, inside)
        elif inside:
            found += [below.index for below in child.walk() if below.index in chosen]
    return found


def _needed(ties: Mapping[int, TiedLeaf], chosen: set[int]) -> set[int]:
    """Indices of the leaves whose bytes the chosen leaves need: themselves, or the roots of tied ones."""
    return {ties[i].root if i in ties else i for i in chosen}


def _provider_classes(
    leaves: Sequence[Leaf], indices: Iterable[int], registry: Registry, allow_pickle: PickleAllowed
) -> dict[int, type[Provider]]:
    """The provider's class of each of these leaves that has bytes. Raises as `_provider_class`."""
    found, safe = {}, dict[str, type[Provider]]()
    for i in indices:
        spec = leaves[i].spec
        if spec.has_bytes:
            found[i] = safe.get(spec.kind) or _provider_class(leaves[i], registry, allow_pickle)
            if not found[i].unsafe:
                safe[spec.kind] = found[i]
    return found


def _provider_class(leaf: Leaf, registry: Registry, allow_pickle: PickleAllowed) -> type[Provider]:
    with untrusted(leaf):
        cls = registry.by_kind(leaf.spec.kind)
    if cls.unsafe and not allow_pickle(leaf.path):
        what = leaf.spec.attrs.get("type", leaf.spec.kind)
        raise Unsafe(
            f"{leaf.name}: {what!s:.80} {cls.unsafe}; if you trust where it comes from, {pickle_remedy(leaf.path)}"
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
