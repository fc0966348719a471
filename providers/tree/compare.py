"""Compares the leaves of a version with a given state: which value receives which leaf, and a list of all mismatches.

Used by `plan_restore` before anything is read or changed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import STORAGE, Leaf, Spec, encode_path, format_path, matches_any
from tierstate.providers.base import Provider
from tierstate.providers.tensors.lossy import LossyProvider
from tierstate.providers.values.stateful import PerRank
from tierstate.providers.values.values import ObjectProvider, ValueProvider

from .structure import VersionNode
from .ties import TiedLeaf, ViewLayout, find_ties, view_layout
from .walk import StateNode

log = logging.getLogger("tierstate")


_LISTED = 20


class Comparison:
    """Walks the tree of a version and the tree of a given state together, and collects matches and mismatches.

    Attributes:
        matched: index of a wanted leaf -> the node of the state whose value receives it.
        missing, unexpected, differ: one message line per leaf that is only in the state, only in the version, or in
            both but with a different spec.
        elsewhere: indices of wanted leaves that only the version has, where this is allowed (other ranks have them).
        within: index of a wanted leaf that the state lacks -> the stateful object that will get it (a new optimizer
            has no moments yet, for example).
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        ties: Mapping[int, TiedLeaf],
        chosen: set[int],
        only: Sequence[str] | None,
        classes: Mapping[int, type[Provider]],
        elsewhere: bool = False,
    ) -> None:
        self.matched: dict[int, StateNode] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.differ: list[str] = []
        self._leaves, self._ties, self._chosen, self._only = leaves, ties, chosen, only
        self._classes = classes
        self.elsewhere: list[int] = []
        self.within: dict[int, StateNode] = {}
        self._may_be_elsewhere = elsewhere
        self._both: dict[int, int] = {}  # id of a node -> index of the leaf with its path
        self._renewable: set[int] = set()  # ids of nodes whose value may be replaced instead of filled

    def run(self, node: VersionNode, place: StateNode) -> None:
        """Compare the two trees from these roots down.

        Raises:
            StateMismatch: version and state differ; the message lists all differences.
        """
        self._visit(node, place, self._only is None, saved=None)
        self._compare_memory(place)
        self._raise_mismatches()

    def effective(self, index: int) -> Spec:
        """The spec of the leaf's value: its own spec, or for a tied leaf the spec of the tied value."""
        tie = self._ties.get(index)
        return tie.spec if tie is not None else self._leaves[index].spec

    def _hit(self, place: StateNode, hit: bool) -> bool:
        return hit or (self._only is not None and matches_any(self._only, place.path))

    def _visit(self, node: VersionNode, place: StateNode, hit: bool, saved: StateNode | None) -> None:
        hit = self._hit(place, hit)
        if place.stateful is not None:
            saved = place if replaces_state(place, node, self._chosen) else None
        if type(place.value) is PerRank and node.kind == place.kind and node.children.keys() != place.children.keys():
            self._note_no_own(place, hit, saved)
        elif not node.kind and not place.kind:
            self._compare_leaf(node, place, saved)
        elif node.kind and place.kind and (saved or _alike(node, place)):
            self._compare_children(node, place, hit, saved)
        elif not saved and (hit or self._wanted(node)):
            found = place.kind or (place.provider.kind if place.provider else "unknown")
            self.differ.append(f"{place.name}: is {found} here, {node.leaf.spec.kind} in the version")

    def _compare_children(self, node: VersionNode, place: StateNode, hit: bool, saved: StateNode | None) -> None:
        for mark, child in node.children.items():
            if mark in place.children:
                self._visit(child, place.children[mark][1], hit, saved)
            else:
                self._note_absent([s for s in child.walk() if s.index in self._chosen], saved)
        for mark, (_, extra) in place.children.items():
            if mark not in node.children:
                self._note_extra(extra, hit, saved)

    def _note_absent(self, nodes: list[VersionNode], saved: StateNode | None) -> None:
        """Collect the leaves that only the version has."""
        if saved is not None:
            self.within.update((node.index, saved) for node in nodes)
        elif self._may_be_elsewhere:
            self.elsewhere += [node.index for node in nodes]
        else:
            self.unexpected += [node.leaf.name for node in nodes]

    def _note_no_own(self, place: StateNode, hit: bool, saved: StateNode | None) -> None:
        """Collect the mismatch that a `PerRank` value has no entry of this rank in the version."""
        if not hit or saved is not None:
            return
        own: PerRank = place.value
        (rank,) = place.tree
        if own.missing == "keep":
            log.warning("%s: the version has no entry of rank %d; its value is kept as it is", place.name, rank)
        else:
            self.missing.append(
                f"{place.name}: the version has no entry of rank {rank}; "
                'with ts.PerRank(value, missing="keep") the value is kept as it is'
            )

    def _note_extra(self, place: StateNode, hit: bool, saved: StateNode | None) -> None:
        hit = self._hit(place, hit)
        if type(place.value) is PerRank:
            self._note_no_own(place, hit, saved)
            return
        if hit and not place.children and not saved:
            self.missing.append(place.name)
        for _, child in place.children.values():
            self._note_extra(child, hit, saved)

    def _wanted(self, node: VersionNode) -> bool:
        return any(s.index in self._chosen for s in node.walk())

    def _compare_leaf(self, node: VersionNode, place: StateNode, saved: StateNode | None) -> None:
        self._both[id(place)] = node.index
        if saved:
            self._renewable.add(id(place))
        if node.index not in self._chosen:
            return
        spec = self.effective(node.index)
        cls = self._classes.get(node.index)
        if cls is not None and place.provider is not None and place.provider.kind != spec.kind:
            place.provider = cls.wrap(_exact(place.provider), spec)
        replaced = saved or _replaced(place, spec)
        if place.provider is None or (place.provider.kind != spec.kind and replaced):
            reason = "" if replaced else place.problem
        else:
            reason = place.provider.mismatch(spec)
            if not reason and not (saved and node.index in self._ties):  # a saved state also brings its ties
                self.matched[node.index] = place
        if reason:
            self.differ.append(f"{place.name}: {reason}")

    def _compare_memory(self, root: StateNode) -> None:
        """Leaves that share memory in the state must be tied alike in the version, or one would overwrite another."""
        places = [place for place in root.walk() if place.provider is not None]
        ties = find_ties([(place.path, _exact(place.provider)) for place in places if place.provider is not None])
        groups: dict[Any, list[tuple[StateNode, ViewLayout]]] = defaultdict(list)
        by_path = {encode_path(place.path): at for at, place in enumerate(places)} if ties.specs else {}
        for at, spec in ties.specs.items():
            to = spec.attrs["to"]
            if not groups[to]:
                self._add_root(groups[to], places, by_path.get(to))
            groups[to].append((places[at], view_layout(to, spec, spec.attrs)))
        for group in groups.values():
            here = [(place, view) for place, view in group if id(place) in self._both]
            if any(self._both[id(place)] in self.matched for place, _ in here):
                fixed = [(place, view) for place, view in here if id(place) not in self._renewable]
                self.differ += self._conflicts(fixed)
                if any(self._conflicts(here)):
                    for place, _ in here:
                        if id(place) in self._renewable:
                            self.matched.pop(self._both[id(place)], None)

    def _add_root(self, group: list[tuple[StateNode, ViewLayout]], places: list[StateNode], at: int | None) -> None:
        """Add the leaf to which the other leaves of the group are tied, unless that is a leaf of kind ``storage``."""
        provider = places[at].provider if at is not None else None
        if at is not None and provider is not None:
            group.append((places[at], view_layout(None, provider.spec, {})))

    def _conflicts(self, group: list[tuple[StateNode, ViewLayout]]) -> Iterator[str]:
        if not group:
            return
        first, here = group[0]
        there = self._placed(first)
        for other, view in group[1:]:
            twin = self._placed(other)
            if view[1:] == here[1:]:
                fits = twin == there
            else:
                layout = (here[2:], view[2:]) == (there[2:], twin[2:])
                shift = here.offset - there.offset == view.offset - twin.offset
                fits = twin.root == there.root and layout and shift
            if not fits:
                yield f"{other.name}: shares memory with {first.name} here, but not (or otherwise) in the version"

    def _placed(self, place: StateNode) -> ViewLayout:
        index = self._both[id(place)]
        tie = self._ties.get(index)
        if tie is None:
            return view_layout(index, self._leaves[index].spec, {})
        return view_layout(tie.root, tie.spec, self._leaves[index].spec.attrs)

    def _raise_mismatches(self) -> None:
        parts = {
            "only in the given state": self.missing,
            "only in the version": self.unexpected,
            "not alike": self.differ,
        }
        count = sum(map(len, parts.values()))
        if count:
            lines = [f"the given state and the version differ in {count} leaves; nothing was restored"]
            for title, found in parts.items():
                lines += [f"{title} ({len(found)}):"] if found else []
                lines += [f"  {line}" for line in found[:_LISTED]]
                lines += [f"  and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
            raise StateMismatch("\n".join(lines))


def _exact(provider: Provider) -> Provider:
    """The provider of the exact tensor inside a lossy provider; this one shares memory with other leaves."""
    return provider.tensor if isinstance(provider, LossyProvider) else provider


def replaces_state(place: StateNode, node: VersionNode, chosen: set[int]) -> bool:
    """Whether the saved state of a stateful object replaces its present state as a whole."""
    assert place.stateful is not None
    return not place.stateful.strict and all(s.children or s.index in chosen for s in node.walk())


def _replaced(place: StateNode, spec: Spec) -> bool:
    """Whether the saved object replaces a plain value, or a value without a provider, so that nothing is filled."""
    return spec.kind == ObjectProvider.kind and (place.provider is None or place.provider.kind == ValueProvider.kind)


def _alike(node: VersionNode, place: StateNode) -> bool:
    """Whether two containers are of the same kind. dict and OrderedDict count as the same: DCP may change one into
    the other.
    """
    if node.kind == "namedtuple" == place.kind:
        return bool(node.leaf.spec.attrs["fields"] == place.attrs["fields"])
    return node.kind == place.kind or {node.kind, place.kind} == {"dict", "odict"}


def no_match_error(leaves: Sequence[Leaf], only: Sequence[str]) -> StateMismatch:
    """The error for patterns that match no leaf."""
    some = ", ".join(format_path(leaf.path) for leaf in leaves if leaf.spec.has_bytes and leaf.spec.kind != STORAGE)
    return StateMismatch(f"no leaf of the version matches {', '.join(only)}; it has {some:.400}")
