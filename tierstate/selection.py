"""Selections: some leaves of a version, as a state that stands by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tierstate.manifest.leaf import STORAGE, Leaf, Spec, encode_path
from tierstate.providers.compare import nothing_matches
from tierstate.providers.retie import Tie, read_ties
from tierstate.providers.structure import Stem, grow, select

NO_BYTES = -1


class Selected(NamedTuple):
    """One leaf of a selection.

    Attributes:
        leaf: what it is there.
        source: index of the version's leaf whose bytes it has; NO_BYTES where it has none.
    """

    leaf: Leaf
    source: int


class Selection:
    """Some leaves of a version, with the containers that hold them.

    Args:
        leaves: the version's leaves; they may come from anybody.
        only: globs of leaf paths; None for all.

    Raises:
        FormatError: the leaves are no tree.
        StateMismatch: nothing matches.
    """

    def __init__(self, leaves: Sequence[Leaf], only: Sequence[str] | None = None) -> None:
        self._leaves = leaves
        self._root, index = grow(leaves)
        self._ties = read_ties(leaves, index)
        self._chosen = select(self._root, only)
        if only is not None and not self._chosen:
            raise nothing_matches(leaves, only)

    def values(self) -> Iterator[Leaf]:
        """The chosen leaves as values, tied ones as what they are tied as; no containers."""
        for i in sorted(self._chosen):
            if i in self._ties:
                yield Leaf(self._leaves[i].path, self._ties[i].spec)
            elif self._leaves[i].spec.has_bytes:
                yield self._leaves[i]

    def drop(self, out: Callable[[Leaf], bool]) -> list[Leaf]:
        """Leave out every leaf of which this is true; those that were left out."""
        gone = [leaf for leaf in self.values() if out(leaf)]
        paths = {encode_path(leaf.path) for leaf in gone}
        self._chosen = {i for i in self._chosen if encode_path(self._leaves[i].path) not in paths}
        return gone

    def leaves(self) -> list[Selected]:
        """The leaves as a tree of their own, in the version's order.

        A list or tuple of which not all items are there is a dict from index to value, as when a version is loaded in
        part. Where a leaf is not there to which others are tied, the first of them takes its bytes.
        """
        moved = self._moved_roots()
        found: list[Selected] = []
        for stem in self._root.walk():
            leaf = self._leaves[stem.index]
            if not self._wanted(stem):
                continue
            if stem.kind:
                whole = all(map(self._wanted, stem.children.values()))
                found.append(Selected(leaf if whole or stem.kind == "odict" else _as_dict(leaf), NO_BYTES))
            elif stem.index in self._ties:
                found += self._tied(stem.index, moved)
            else:
                found.append(Selected(leaf, stem.index))
        return found + self._storages(moved)

    def _wanted(self, stem: Stem) -> bool:
        return any(s.index in self._chosen for s in stem.walk())

    def _moved_roots(self) -> dict[int, tuple[int, Leaf]]:
        """Index of a root that is not chosen -> the tied leaf that comes in its place, or the raw bytes."""
        moved: dict[int, tuple[int, Leaf]] = {}
        ties = {i: tie for i, tie in sorted(self._ties.items()) if i in self._chosen and tie.root not in self._chosen}
        for i, tie in ties.items():
            if tie.offset is None:
                moved.setdefault(tie.root, (i, Leaf(self._leaves[i].path, tie.spec)))
        for i, tie in ties.items():
            root = self._leaves[tie.root]
            if tie.root not in moved:
                path = root.path if root.spec.kind == STORAGE else (*self._leaves[i].path, STORAGE)
                moved[tie.root] = (NO_BYTES, Leaf(path, Spec(STORAGE, shape=(root.spec.nbytes,))))
        return moved

    def _tied(self, index: int, moved: Mapping[int, tuple[int, Leaf]]) -> Iterator[Selected]:
        leaf, tie = self._leaves[index], self._ties[index]
        at, root = moved.get(tie.root, (NO_BYTES, self._leaves[tie.root]))
        if at == index:
            yield Selected(root, tie.root)
            return
        attrs = {**leaf.spec.attrs, "to": encode_path(root.path)}
        yield Selected(replace(leaf, spec=replace(leaf.spec, attrs=attrs)), NO_BYTES)

    @staticmethod
    def _storages(moved: Mapping[int, tuple[int, Leaf]]) -> list[Selected]:
        return [Selected(leaf, root) for root, (at, leaf) in moved.items() if at == NO_BYTES]


def ties_of(found: Sequence[Leaf]) -> dict[int, Tie]:
    """The tied leaves among these, by index."""
    return read_ties(found, {encode_path(leaf.path): i for i, leaf in enumerate(found)})


def _as_dict(leaf: Leaf) -> Leaf:
    return Leaf(leaf.path, Spec("dict"))
