"""A version's leaves held against a given state: what fits where, and everything that does not."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.leaf import STORAGE, Leaf, Spec, encode_path, format_path, matches_any

from .base import Provider
from .lossy import LossyProvider
from .objects import ObjectProvider
from .per_rank import PerRank
from .retie import Placement, Tie, placement
from .structure import Stem
from .survey import Place
from .ties import find_ties
from .values import ValueProvider

log = logging.getLogger("tierstate")

_LISTED = 20


class Comparison:
    """What a walk over both trees found.

    Attributes:
        matched: index of a wanted leaf -> the place whose value takes it.
        missing, unexpected, differ: lines about leaves that are only in the state, only in the version, or in both
            but not alike.
        elsewhere: indices of wanted leaves that are only in the version, where that is no error.
        within: index of a wanted leaf -> the thing whose state it becomes a part of, and has not yet.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        ties: Mapping[int, Tie],
        chosen: set[int],
        only: Sequence[str] | None,
        classes: Mapping[int, type[Provider]],
        elsewhere: bool = False,
    ) -> None:
        self.matched: dict[int, Place] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.differ: list[str] = []
        self._leaves, self._ties, self._chosen, self._only = leaves, ties, chosen, only
        self._classes = classes
        self.elsewhere: list[int] = []
        self.within: dict[int, Place] = {}
        self._may_be_elsewhere = elsewhere
        self._both: dict[int, int] = {}  # id of a place -> index of the leaf of its path
        self._renewable: set[int] = set()  # ids of places whose value may be replaced instead of filled

    def run(self, stem: Stem, place: Place) -> None:
        """Compare all.

        Raises:
            StateMismatch: they do not fit; the message lists everything that is wrong.
        """
        self._visit(stem, place, self._only is None, saved=None)
        self._compare_memory(place)
        self._judge()

    def effective(self, index: int) -> Spec:
        """What the leaf is as a value: its spec, or what it is tied as."""
        tie = self._ties.get(index)
        return tie.spec if tie is not None else self._leaves[index].spec

    def _hit(self, place: Place, hit: bool) -> bool:
        return hit or (self._only is not None and matches_any(self._only, place.path))

    def _visit(self, stem: Stem, place: Place, hit: bool, saved: Place | None) -> None:
        hit = self._hit(place, hit)
        if place.stateful is not None:
            saved = place if replaces(place, stem, self._chosen) else None
        if type(place.value) is PerRank and stem.kind == place.kind and stem.children.keys() != place.children.keys():
            self._note_no_own(place, hit, saved)
        elif not stem.kind and not place.kind:
            self._compare_leaf(stem, place, saved)
        elif stem.kind and place.kind and (saved or _alike(stem, place)):
            self._compare_children(stem, place, hit, saved)
        elif not saved and (hit or self._wanted(stem)):
            found = place.kind or (place.provider.kind if place.provider else "unknown")
            self.differ.append(f"{place.name}: is {found} here, {stem.leaf.spec.kind} in the version")

    def _compare_children(self, stem: Stem, place: Place, hit: bool, saved: Place | None) -> None:
        for mark, child in stem.children.items():
            if mark in place.children:
                self._visit(child, place.children[mark][1], hit, saved)
            else:
                self._note_absent([s for s in child.walk() if s.index in self._chosen], saved)
        for mark, (_, extra) in place.children.items():
            if mark not in stem.children:
                self._note_extra(extra, hit, saved)

    def _note_absent(self, stems: list[Stem], saved: Place | None) -> None:
        """Note leaves that only the version has."""
        if saved is not None:
            self.within.update((stem.index, saved) for stem in stems)
        elif self._may_be_elsewhere:
            self.elsewhere += [stem.index for stem in stems]
        else:
            self.unexpected += [stem.leaf.name for stem in stems]

    def _note_no_own(self, place: Place, hit: bool, saved: Place | None) -> None:
        """Note that of a value that each rank has its own of, the version has none of this rank."""
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

    def _note_extra(self, place: Place, hit: bool, saved: Place | None) -> None:
        hit = self._hit(place, hit)
        if type(place.value) is PerRank:
            self._note_no_own(place, hit, saved)
            return
        if hit and not place.children and not saved:
            self.missing.append(place.name)
        for _, child in place.children.values():
            self._note_extra(child, hit, saved)

    def _wanted(self, stem: Stem) -> bool:
        return any(s.index in self._chosen for s in stem.walk())

    def _compare_leaf(self, stem: Stem, place: Place, saved: Place | None) -> None:
        self._both[id(place)] = stem.index
        if saved:
            self._renewable.add(id(place))
        if stem.index not in self._chosen:
            return
        spec = self.effective(stem.index)
        cls = self._classes.get(stem.index)
        if cls is not None and place.provider is not None and place.provider.kind != spec.kind:
            place.provider = cls.over(_exact(place.provider), spec)
        replaced = saved or _replaced(place, spec)
        if place.provider is None or (place.provider.kind != spec.kind and replaced):
            reason = "" if replaced else place.problem
        else:
            reason = place.provider.mismatch(spec)
            if not reason and not (saved and stem.index in self._ties):  # a saved state also brings its ties
                self.matched[stem.index] = place
        if reason:
            self.differ.append(f"{place.name}: {reason}")

    def _compare_memory(self, root: Place) -> None:
        """Leaves that share memory here must be tied in the same way in the version, or one would overwrite another."""
        places = [place for place in root.walk() if place.provider is not None]
        ties = find_ties([(place.path, _exact(place.provider)) for place in places if place.provider is not None])
        groups: dict[Any, list[tuple[Place, Placement]]] = defaultdict(list)
        by_path = {encode_path(place.path): at for at, place in enumerate(places)} if ties.specs else {}
        for at, spec in ties.specs.items():
            to = spec.attrs["to"]
            if not groups[to]:
                self._add_root(groups[to], places, by_path.get(to))
            groups[to].append((places[at], placement(to, spec, spec.attrs)))
        for group in groups.values():
            here = [(place, spot) for place, spot in group if id(place) in self._both]
            if any(self._both[id(place)] in self.matched for place, _ in here):
                fixed = [(place, spot) for place, spot in here if id(place) not in self._renewable]
                self.differ += self._conflicts(fixed)
                if any(self._conflicts(here)):
                    for place, _ in here:
                        if id(place) in self._renewable:
                            self.matched.pop(self._both[id(place)], None)

    def _add_root(self, group: list[tuple[Place, Placement]], places: list[Place], at: int | None) -> None:
        """Add the leaf that the group's others are tied to, unless they are tied to a leaf of raw bytes."""
        provider = places[at].provider if at is not None else None
        if at is not None and provider is not None:
            group.append((places[at], placement(None, provider.spec, {})))

    def _conflicts(self, group: list[tuple[Place, Placement]]) -> Iterator[str]:
        if not group:
            return
        first, here = group[0]
        there = self._placed(first)
        for other, spot in group[1:]:
            twin = self._placed(other)
            if spot[1:] == here[1:]:
                fits = twin == there
            else:
                layout = (here[2:], spot[2:]) == (there[2:], twin[2:])
                shift = here.offset - there.offset == spot.offset - twin.offset
                fits = twin.root == there.root and layout and shift
            if not fits:
                yield f"{other.name}: shares memory with {first.name} here, but not (or otherwise) in the version"

    def _placed(self, place: Place) -> Placement:
        index = self._both[id(place)]
        tie = self._ties.get(index)
        if tie is None:
            return placement(index, self._leaves[index].spec, {})
        return placement(tie.root, tie.spec, self._leaves[index].spec.attrs)

    def _judge(self) -> None:
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
    """What shares memory as the tensor itself does."""
    return provider.tensor if isinstance(provider, LossyProvider) else provider


def replaces(place: Place, stem: Stem, chosen: set[int]) -> bool:
    """Whether the saved state of a stateful thing takes the place of its own whole state."""
    assert place.stateful is not None
    return not place.stateful.strict and all(s.children or s.index in chosen for s in stem.walk())


def _replaced(place: Place, spec: Spec) -> bool:
    """Whether an object takes the place of a plain value, or of one that has no provider: nothing is filled."""
    return spec.kind == ObjectProvider.kind and (place.provider is None or place.provider.kind == ValueProvider.kind)


def _alike(stem: Stem, place: Place) -> bool:
    """Whether containers are of one kind; dicts and OrderedDicts are, as who saves through DCP has no say in which."""
    if stem.kind == "namedtuple" == place.kind:
        return bool(stem.leaf.spec.attrs["fields"] == place.attrs["fields"])
    return stem.kind == place.kind or {stem.kind, place.kind} == {"dict", "odict"}


def nothing_matches(leaves: Sequence[Leaf], only: Sequence[str]) -> StateMismatch:
    """The error for patterns that match no leaf."""
    some = ", ".join(format_path(leaf.path) for leaf in leaves if leaf.spec.has_bytes and leaf.spec.kind != STORAGE)
    return StateMismatch(f"no leaf of the version matches {', '.join(only)}; it has {some:.400}")
