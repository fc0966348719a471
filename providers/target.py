"""The restore side: which providers take a version's bytes, and how the state is put together from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import torch

from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch, Unsafe
from tierstate.manifest.leaf import LOSSY, Leaf

from .base import Provider
from .compare import Comparison, nothing_matches, replaces
from .reducing import Lossy
from .registry import REGISTRY, Registry
from .retie import Tie, pour, read_ties
from .shadows import Shadows
from .sinks import Fresh, join
from .structure import Stem, build, grow, select
from .survey import Leave, Place, Survey, never
from .taking import withhold
from .tensors import TensorProvider


class _New(Enum):
    NEW = "a fresh state"


NEW: Final = _New.NEW
"""Restore into nothing: build the state anew."""


def plan_restore(
    leaves: Sequence[Leaf],
    *,
    into: Any = NEW,
    only: Sequence[str] | None = None,
    registry: Registry = REGISTRY,
    device: torch.device | None = None,
    allow_pickle: Leave = never,
    allow_lossy: bool = False,
    rank: int = 0,
    elsewhere: bool = False,
) -> Target:
    """Decide where a version's bytes go. Nothing of the given state is touched before the first ``load``.

    Args:
        leaves: the version's leaves; they may come from anybody.
        into: the state to restore into, in place; without it the state is built anew.
        only: globs of leaf paths; what matches a container takes everything in it.
        device: where tensors go that are built anew (default: host).
        allow_pickle: whether the leaf at a path may be read though it is a pickle.
        allow_lossy: whether leaves may be read that are not all that was there.
        rank: under which number this process's own values lie.
        elsewhere: whether leaves that only the version has are other ranks', and no error: `Target.elsewhere` has them.

    Raises:
        FormatError: the leaves are no tree, or name a provider that is not known.
        StateMismatch: the given state and the version differ (all differences are listed), or nothing matches.
        Unsafe: a wanted leaf is of an unsafe kind, or lossy, and that is not allowed.
    """
    root, index = grow(leaves)
    ties = read_ties(leaves, index)
    place = None
    if into is not NEW:
        place = Survey(registry, lenient=True, rank=rank).take(into)
        withhold(root, place)
    chosen = select(root, only)
    if only is not None and not chosen:
        raise nothing_matches(leaves, only)
    needed = _needed(ties, chosen)
    classes = {
        i: _provider_class(leaves[i], registry, allow_pickle) for i in sorted(needed) if leaves[i].spec.has_bytes
    }
    if not allow_lossy:
        _check_exact([leaves[i] for i in sorted(needed)])
    matched: dict[int, Place] = {}
    within: dict[int, Place] = {}
    absent: Sequence[int] = ()
    if place is not None:
        comparison = Comparison(leaves, ties, chosen, only, classes, elsewhere)
        comparison.run(root, place)
        matched, within, absent = comparison.matched, comparison.within, comparison.elsewhere
    chosen -= set(absent)
    needed = _needed(ties, chosen)
    fresh = Fresh(registry, device, within)
    wanted: dict[int, Provider] = {}
    for i in sorted(needed & classes.keys()):
        at = matched.get(i)
        if at is not None and at.provider is not None:
            wanted[i] = at.provider.receiver(leaves[i].spec)
        else:
            wanted[i] = fresh.provider(i, leaves[i], classes[i])
    joined = join(wanted, leaves, {i: tie for i, tie in ties.items() if i in chosen}, matched)
    return Target(leaves, root, wanted, ties, chosen, place, matched, registry, joined, absent)


def _needed(ties: Mapping[int, Tie], chosen: set[int]) -> set[int]:
    """The leaves that have the bytes of what is chosen."""
    return {ties[i].root if i in ties else i for i in chosen}


def _provider_class(leaf: Leaf, registry: Registry, allow_pickle: Leave) -> type[Provider]:
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
    """Raises Unsafe where some of these leaves are not all that was there."""
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
        wanted: index of a leaf -> the provider that takes its bytes, by its ``parts`` where it has others than itself.
        elsewhere: indices of leaves that only the version has, and so are other ranks'.
        is_new: the state is built anew.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        root: Stem,
        wanted: dict[int, Provider],
        ties: Mapping[int, Tie],
        chosen: set[int],
        place: Place | None,
        matched: Mapping[int, Place],
        registry: Registry,
        joined: set[int],
        elsewhere: Sequence[int],
    ) -> None:
        self.wanted, self.elsewhere = wanted, tuple(elsewhere)
        self.is_new = place is None
        self._leaves, self._root, self._ties, self._chosen = leaves, root, ties, chosen
        self._place, self._matched, self._registry = place, matched, registry
        self._joined, self._shadows = joined, Shadows(wanted)
        self._values: dict[int, Any] = {}
        self._pending: list[tuple[Place, Stem, Any]] = []

    def finish(self) -> Any:
        """Complete a restore whose bytes were all loaded, and return the state: the given one, if it is mutable.

        Things that have a state get it last, in order, so that generators are set only when all else succeeded.

        Raises:
            StateMismatch: a value does not take what was saved; the message names it.
            FormatError: bytes that are no encoded value.
        """
        for i, provider in self.wanted.items():
            self._values[i] = self._done(i, provider)
        self._values |= self._shadows.settle(self._leaves)
        for i in sorted(self._chosen):
            if i in self._ties:
                self._values[i] = self._tie(i, self._ties[i])
        state = self._put(self._root, self._place, renew=False)
        for place, stem, tree in self._pending:
            self._apply(place, stem, tree)
        return state

    def _done(self, index: int, provider: Provider) -> Any:
        try:
            return provider.done()
        except (StateMismatch, FormatError) as error:
            raise type(error)(f"{self._leaves[index].name}: {error}") from error

    def _tie(self, index: int, tie: Tie) -> Any:
        """The value of a tied leaf, which has no bytes of its own."""
        root, place = self._values[tie.root], self._matched.get(index)
        saved = self._leaves[tie.root].spec
        if place is None or place.provider is None:
            return tie.of(root, saved)
        sink = place.provider.receiver(tie.spec)
        if sink is not place.provider:  # replaced, not filled
            return tie.of(root, saved)
        if index in self._joined:  # and filled along with it
            return self._done(index, sink)
        source = self.wanted[tie.root] if tie.offset is None else TensorProvider(tie.view(root))
        alias = getattr(source, "alias", None)
        if alias is None or alias != getattr(sink, "alias", None):
            pour(source, sink)
        return self._done(index, sink)

    def _put(self, stem: Stem, place: Place | None, renew: bool) -> Any:
        """The value for a place: the given one, changed, or a new one."""
        if place is None or place.stateful is None:
            return self._assemble(stem, place, renew)
        if self._wanted(stem):
            tree = self._assemble(stem, place, replaces(place, stem, self._chosen))
            self._pending.append((place, stem, tree))
        return place.value

    def _assemble(self, stem: Stem, place: Place | None, renew: bool) -> Any:
        if not stem.kind:
            if place is not None and isinstance(place.value, Lossy):
                return place.value  # whose tensor was filled
            return self._values.get(stem.index, place.value if place is not None else None)
        if place is None or renew:
            kids = place.children if place is not None else {}
            return build(
                stem,
                {
                    child.key: self._put(child, kids[mark][1] if mark in kids else None, renew)
                    for mark, child in stem.children.items()
                    if self._wanted(child)
                },
            )
        changed = {}
        for mark, child in stem.children.items():
            if mark in place.children and self._wanted(child):
                key, at = place.children[mark]
                value = self._put(child, at, renew)
                if value is not at.value:
                    changed[key] = value
        return _changed(place, changed)

    def _wanted(self, stem: Stem) -> bool:
        return any(s.index in self._chosen for s in stem.walk())

    def _apply(self, place: Place, stem: Stem, tree: Any) -> None:
        """Give a thing its state, and see that it kept it."""
        how = place.stateful
        assert how is not None
        values = [self._values[s.index] for s in stem.walk() if s.index in self._values]
        if how.settled(place.value, values):
            return
        try:
            how.put(place.value, tree)
        except Exception as error:
            kind = type(place.value).__qualname__
            raise StateMismatch(f"{place.name}: the {kind} does not take the saved state: {error}") from error
        if not how.strict:
            self._check_kept(place, stem)

    def _check_kept(self, place: Place, stem: Stem) -> None:
        """Optimizers cast what they are given to their parameters' dtype; that is no exact restore."""
        try:
            again = Survey(self._registry, lenient=True).take(place.value, place.path)
        except CaptureError as error:
            raise StateMismatch(f"{place.name}: cannot be read after its state was set: {error}") from error
        kept = {at.path: at for at in again.walk() if at.provider is not None}
        for leaf in (s for s in stem.walk() if s.index in self._values):
            spec = self._ties[leaf.index].spec if leaf.index in self._ties else leaf.leaf.spec
            at = kept.get(leaf.leaf.path)
            if at is not None and at.provider is not None and at.provider.kind == spec.kind:
                reason = at.provider.mismatch(spec)
                if reason:
                    raise StateMismatch(f"{leaf.leaf.name}: after the saved state was set, {reason}: it was cast")


def _changed(place: Place, changed: Mapping[Any, Any]) -> Any:
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
