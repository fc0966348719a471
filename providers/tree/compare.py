"""Compares the leaves of a version with a given state: which value receives which leaf, and a list of all mismatches.

Used by `plan_restore` before anything is read or changed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.globs import matches_any
from tierstate.manifest.format.leaf import STORAGE, Leaf, Spec
from tierstate.manifest.format.leaf_path import Path, encode_path, format_path
from tierstate.providers.base import Provider
from tierstate.providers.sharded.shards import ShardsProvider, storage_id
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.dtypes import torch_name
from tierstate.providers.tensors.lossy import LossyProvider
from tierstate.providers.tensors.strided import overlaps_itself
from tierstate.providers.tensors.tensors import TensorProvider, is_meta
from tierstate.providers.values.classes import FORM
from tierstate.providers.values.stateful import PerRank, changed_objects
from tierstate.providers.values.values import ObjectProvider, ValueProvider

from .rename import wrapped_differently
from .structure import VersionNode
from .ties import TiedLeaf, ViewLayout, find_ties, view_layout
from .walk import MAY_HAVE_ATTRIBUTES, StateNode, typed_key

log = logging.getLogger("tierstate")


_LISTED = 20


_COMPARED_ELSEWHERE = (TensorProvider, ShardsProvider, LossyProvider, ArrayProvider, ValueProvider, ObjectProvider)
"""Providers of values that are compared by their memory, or that are replaced and not changed."""


Content: TypeAlias = Callable[[int], Any]
"""Index of a leaf with bytes -> something that is equal for two leaves only if their bytes are equal."""


class Comparison:
    """Walks the tree of a version and the tree of a given state together, and collects matches and mismatches.

    Attributes:
        matched: index of a wanted leaf -> the node of the state whose value receives it.
        missing, unexpected, differ: one message line per leaf that is only in the state, only in the version, or in
            both but with a different spec.
        elsewhere: indices of wanted leaves that only the version has, where this is allowed (other ranks have them).
        within: index of a wanted leaf that the state lacks -> the stateful object that will get it (a new optimizer
            has no moments yet, for example).
        like: index of a wanted leaf that a stateful object gets in memory of its own -> the node of its present value.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        ties: Mapping[int, TiedLeaf],
        chosen: set[int],
        only: Sequence[str] | None,
        classes: Mapping[int, type[Provider]],
        elsewhere: bool = False,
        content: Content = lambda index: index,
        hint: bool = True,
    ) -> None:
        self.matched: dict[int, StateNode] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.differ: list[str] = []
        self._leaves, self._ties, self._chosen, self._only = leaves, ties, chosen, only
        self._classes = classes
        self.elsewhere: list[int] = []
        self.within: dict[int, StateNode] = {}
        self.like: dict[int, StateNode] = {}
        self._may_be_elsewhere, self._content, self._hint = elsewhere, content, hint
        self._alone: tuple[list[Path], list[Path]] = ([], [])  # only in the state, only in the version
        self._both: dict[int, int] = {}  # id of a node -> index of the leaf with its path
        self._renewable: set[int] = set()  # ids of nodes whose value may be replaced instead of filled
        self._written: set[int] = set()  # ids of nodes into whose memory the stateful object copies what it gets
        self._nodes: dict[int, VersionNode] = {}  # id of a node of the state -> the node of the version

    def run(self, node: VersionNode, place: StateNode) -> None:
        """Compare the two trees from these roots down.

        Raises:
            StateMismatch: version and state differ; the message lists all differences.
        """
        self._visit(node, place, self._only is None, saved=None)
        self._compare_memory(place)
        self._compare_objects(place)
        self.differ += self._expanded()
        self._raise_mismatches()

    def effective(self, index: int) -> Spec:
        """The spec of the leaf's value: its own spec, or for a tied leaf the spec of the tied value."""
        tie = self._ties.get(index)
        return tie.spec if tie is not None else self._leaves[index].spec

    def _hit(self, place: StateNode, hit: bool) -> bool:
        return hit or (self._only is not None and matches_any(self._only, place.path))

    def _visit(self, node: VersionNode, place: StateNode, hit: bool, saved: StateNode | None) -> None:
        self._nodes[id(place)] = node
        if place.provider is not None and place.stateful is None and not node.kind:  # nearly all
            self._compare_leaf(node, place, saved)
            return
        hit = self._hit(place, hit)
        whole = FORM in place.attrs or place.kind in MAY_HAVE_ATTRIBUTES
        if whole and node.leaf.spec.kind == ObjectProvider.kind:
            place.kind, place.attrs, place.children = "", {}, {}  # it was pickled as a whole, and comes back so
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
        if self._object_decides(saved):
            self.within.update((node.index, saved) for node in nodes if saved is not None)
        elif self._may_be_elsewhere:
            self.elsewhere += [node.index for node in nodes]
            self._alone[1].extend(node.leaf.path for node in nodes)
        else:
            self._alone[1].extend(node.leaf.path for node in nodes)
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
        if hit and not place.children and not self._object_decides(saved):
            self.missing.append(place.name)
            self._alone[0].append(place.path)
        for _, child in place.children.values():
            self._note_extra(child, hit, saved)

    def _object_decides(self, saved: StateNode | None) -> bool:
        """Whether a stateful object gets all that the version has for it, be it more or less than it has now.

        Not so for modules of several ranks, where other ranks may have the other leaves.
        """
        return saved is not None and not (self._may_be_elsewhere and isinstance(saved.value, torch.nn.Module))

    def _wanted(self, node: VersionNode) -> bool:
        return node.has_any(self._chosen)

    def _compare_leaf(self, node: VersionNode, place: StateNode, saved: StateNode | None) -> None:
        wanted, spec = node.index in self._chosen, self.effective(node.index)
        if wanted and place.own_memory:
            self.like[node.index] = place
        if place.own_memory and saved:
            reason = self._compare_given(node, place, saved)
        else:
            self._both[id(place)] = node.index
            if saved:
                self._renewable.add(id(place))
            if is_meta(place.value):
                reason = _unlike(place.value, spec)
            else:
                reason = self._compare_value(node, place, saved, spec) if wanted else ""
        if wanted and reason:
            self.differ.append(f"{place.name}: {reason}")

    def _compare_given(self, node: VersionNode, place: StateNode, saved: StateNode) -> str:
        """Why a stateful object should not get the leaf. Only what a module would round is not left to the object."""
        if not isinstance(saved.value, torch.nn.Module):
            return ""
        self._both[id(place)] = node.index
        self._written.add(id(place))
        return _cast(place, self.effective(node.index))

    def _compare_value(self, node: VersionNode, place: StateNode, saved: StateNode | None, spec: Spec) -> str:
        """Why a wanted leaf does not fit the present value; if it does, note the two as matched where it is filled."""
        cls = self._classes.get(node.index)
        if cls is not None and place.provider is not None and place.provider.kind != spec.kind:
            place.provider = cls.wrap(_exact(place.provider), spec)
        if place.provider is None or place.provider.kind != spec.kind:
            replaced = saved or _replaced(place, spec)
            if place.provider is None or replaced:
                return "" if replaced else place.problem
        reason = place.provider.mismatch(spec)
        # A saved state that replaces the present one also brings its ties.
        if not reason and not place.own_memory and not (saved and node.index in self._ties):
            self.matched[node.index] = place
            self._written.add(id(place))
        return reason

    def _expanded(self) -> Iterator[str]:
        """Tied leaves that are filled from memory elsewhere, and whose elements share memory here: whether these are
        equal in the version is known only when the root is loaded, after other values were overwritten.
        """
        for index, place in self.matched.items():
            tie, provider = self._ties.get(index), place.provider
            if tie is None or not isinstance(provider, TensorProvider):
                continue
            value, root = provider.value, self.matched.get(tie.root)
            near = root.provider if root is not None else None
            beside = isinstance(near, TensorProvider) and storage_id(near.value) == storage_id(value)
            if overlaps_itself(tuple(value.shape), value.stride()) and not beside and value.stride() != tie.strides:
                yield f"{place.name}: has elements that share memory here (strides {value.stride()})"

    def _compare_objects(self, root: StateNode) -> None:
        """An object that is in the state twice must be equal in the version, or the last place would win."""
        first: dict[int, StateNode] = {}
        pending = [root]
        while pending:
            place = pending.pop()
            if place.stateful is None and isinstance(place.provider, _COMPARED_ELSEWHERE):
                continue  # before all else: most places are such
            again = False
            for one, at in _objects(place):
                other = first.setdefault(id(one), at)
                if other is not at:
                    again = True
                    if not self._equal(other, at):
                        self.differ.append(
                            f"{at.name}: is the same object as {other.name} here, and not equal to it in the version"
                        )
            if not again and (place.stateful is None or place.stateful.transparent):
                pending += [child for _, child in reversed(place.children.values())]

    def _equal(self, one: StateNode, other: StateNode) -> bool:
        """Whether the version has the same leaves at these two nodes, as far as they are wanted."""
        nodes = self._nodes.get(id(one)), self._nodes.get(id(other))
        return nodes[0] is None or nodes[1] is None or self._same(nodes[0], nodes[1])

    def _same(self, one: VersionNode, other: VersionNode) -> bool:
        if one.kind != other.kind:
            return False
        if not one.kind:
            both = one.index in self._chosen and other.index in self._chosen
            return not both or self._content_of(one.index) == self._content_of(other.index)
        marks = {*one.children, *other.children}
        return all(
            self._same(one.children[mark], other.children[mark])
            if mark in one.children and mark in other.children
            else not self._wanted(one.children.get(mark) or other.children[mark])
            for mark in marks
        )

    def _content_of(self, index: int) -> tuple[Any, ...]:
        spec, tie = self.effective(index), self._ties.get(index)
        what = (spec.kind, spec.dtype, spec.shape)
        if tie is None:
            return (*what, self._content(index), None)
        place = None if tie.offset is None else (tie.root, tie.offset, tie.strides, tie.conj, tie.neg)
        return (*what, self._content(tie.root), place)

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
            if any(id(place) in self._written for place, _ in here):
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
            if self._hint and (renamed := wrapped_differently(*self._alone)):
                lines.append(
                    f"{renamed} of these names differ only by what a wrapper of a module adds (module., _orig_mod.): "
                    "give rename=ts.unwrapped"
                )
            raise StateMismatch("\n".join(lines))


def _exact(provider: Provider) -> Provider:
    """The provider of the exact tensor inside a lossy provider; this one shares memory with other leaves."""
    return provider.tensor if isinstance(provider, LossyProvider) else provider


def replaces_state(place: StateNode, node: VersionNode, chosen: set[int]) -> bool:
    """Whether the saved state of a stateful object replaces its present state as a whole."""
    assert place.stateful is not None
    whole = not place.stateful.strict or (place.own_memory and not place.stateful.transparent)
    return whole and all(s.children or s.index in chosen for s in node.walk())


def _objects(place: StateNode) -> Iterator[tuple[Any, StateNode]]:
    """The objects that a restore changes at a node, each with the node of its state."""
    if place.stateful is not None and not place.stateful.transparent:
        for key, one in changed_objects(place.value):
            child = place.children.get(typed_key(key)) if key is not None else None
            yield one, child[1] if child is not None else place
        return
    custom = place.provider is not None and not isinstance(place.provider, _COMPARED_ELSEWHERE)
    if place.kind in ("dict", "odict", "list") or place.stateful is not None or custom:
        yield place.value, place


def _cast(place: StateNode, spec: Spec) -> str:
    """Why a module would round the saved values; empty where it would not."""
    if place.provider is not None:
        kind, dtype = place.provider.spec.kind, place.provider.spec.dtype
    elif isinstance(place.value, torch.Tensor):  # without memory as yet, on the meta device or of a lazy module
        kind, dtype = TensorProvider.kind, torch_name(place.value.dtype)
    else:
        return ""
    return f"has dtype {dtype} here, {spec.dtype} in the version" if kind == spec.kind and dtype != spec.dtype else ""


def _unlike(value: torch.Tensor, spec: Spec) -> str:
    """Why a saved leaf cannot replace a tensor on the meta device; empty where it can."""
    if spec.kind != TensorProvider.kind:
        return f"is {TensorProvider.kind} here, {spec.kind} in the version"
    if (dtype := torch_name(value.dtype)) != spec.dtype:
        return f"has dtype {dtype} here, {spec.dtype} in the version"
    return f"has shape {tuple(value.shape)} here, {spec.shape} in the version" if value.shape != spec.shape else ""


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
    return StateMismatch(f"no leaf of the version matches {', '.join(only) or 'an empty list'}; it has {some:.400}")
