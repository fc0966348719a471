"""A version's leaves as the tree they came from, checked, and containers built anew from it."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tierstate.manifest.errors import FormatError
from tierstate.manifest.leaf import CONTAINERS, STORAGE, Leaf, encode_path, matches_any

from .survey import MAX_DEPTH, Ident, ident


@dataclass(slots=True, eq=False)
class Stem:
    """A leaf in its place in the tree.

    Attributes:
        index: the leaf's index in the version.
        children: what a container holds, in order.
    """

    index: int
    leaf: Leaf
    children: dict[Ident, Stem] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """A container's kind; empty for a leaf."""
        return self.leaf.spec.kind if self.leaf.spec.kind in CONTAINERS else ""

    @property
    def key(self) -> Any:
        """The last key of the path."""
        return self.leaf.path[-1]

    def walk(self) -> Iterator[Stem]:
        """This stem and all below, each container before what it holds."""
        stack = [self]
        while stack:
            stem = stack.pop()
            yield stem
            stack += reversed(stem.children.values())


def grow(leaves: Sequence[Leaf]) -> tuple[Stem, dict[str, int]]:
    """The root of the tree, and the index of each encoded path. The leaves may come from anybody.

    Raises:
        FormatError: they are no tree: no root first, a path twice, a parent that is missing or holds nothing, keys
            that their container cannot have.
    """
    if not leaves or leaves[0].path or leaves[0].spec.kind == STORAGE:
        raise FormatError(f"a version starts with the leaf of the whole state, not {_first(leaves)}")
    root, index = Stem(0, leaves[0]), {encode_path(()): 0}
    for i, leaf in enumerate(leaves[1:], 1):
        if len(leaf.path) > MAX_DEPTH + 1:
            raise FormatError(f"leaf {i} lies {len(leaf.path)} keys deep; at most {MAX_DEPTH} can be")
        text = encode_path(leaf.path)
        if index.setdefault(text, i) != i:
            raise FormatError(f"leaf {leaf.name} is there twice, as number {index[text]} and {i}")
        if leaf.spec.kind != STORAGE:  # backs others, and is no value of the state
            parent = _parent(root, leaf)
            parent.children[ident(leaf.path[-1])] = Stem(i, leaf)
    for stem in root.walk():
        _check_keys(stem)
    return root, index


def _first(leaves: Sequence[Leaf]) -> str:
    return f"{leaves[0].name} of kind {leaves[0].spec.kind!r:.20}" if leaves else "nothing"


def _parent(root: Stem, leaf: Leaf) -> Stem:
    stem: Stem | None = root
    for key in leaf.path[:-1]:
        stem = stem.children.get(ident(key)) if stem is not None else None
    if stem is None:
        raise FormatError(f"leaf {leaf.name} comes without, or before, the container that holds it")
    if not stem.kind:
        raise FormatError(
            f"leaf {leaf.name} lies in {stem.leaf.name}, which is {stem.leaf.spec.kind!r:.20} and no container"
        )
    return stem


def _check_keys(stem: Stem) -> None:
    kind, keys = stem.kind, list(stem.children)
    if kind in ("list", "tuple"):
        right: list[Ident] = [(int, i) for i in range(len(keys))]
    elif kind == "namedtuple":
        _check_named(stem)
        right = [(str, name) for name in stem.leaf.spec.attrs["fields"]]
    else:
        return
    if keys != right:
        found = ", ".join(repr(key[-1]) for key in keys[:8])
        raise FormatError(f"{stem.leaf.name}: the {kind} has other keys than it can have: {found}")


def _check_named(stem: Stem) -> None:
    attrs = stem.leaf.spec.attrs
    fields = attrs.get("fields")
    if (
        not isinstance(fields, list)
        or not all(isinstance(f, str) for f in fields)
        or type(attrs.get("type")) is not str
    ):
        raise FormatError(f"{stem.leaf.name}: the namedtuple has no type and fields: {dict(attrs)!r:.80}")


def select(root: Stem, only: Sequence[str] | None) -> set[int]:
    """Indices of the leaves that are wanted; with what matches a container, everything in it."""
    chosen: set[int] = set()

    def visit(stem: Stem, hit: bool) -> None:
        hit = hit or only is None or matches_any(only, stem.leaf.path)
        if hit and not stem.children:
            chosen.add(stem.index)
        for child in stem.children.values():
            visit(child, hit)

    visit(root, False)
    return chosen


def build(stem: Stem, items: dict[Any, Any]) -> Any:
    """A container of a stem's kind with these items, in the order of the version.

    A list or tuple (or namedtuple) of which not all items are given becomes a dict from index (or field) to value.

    Raises:
        FormatError: a namedtuple of a type that cannot be made.
    """
    kind = stem.kind
    if kind == "odict":
        return OrderedDict(items)
    if kind == "dict" or len(items) < len(stem.children):
        return items
    if kind == "list":
        return list(items.values())
    if kind == "tuple":
        return tuple(items.values())
    try:
        named = named_type(stem.leaf.spec.attrs["type"], tuple(stem.leaf.spec.attrs["fields"]))
    except (ValueError, TypeError) as error:
        raise FormatError(f"{stem.leaf.name}: no such namedtuple can be made: {error}") from error
    return tuple.__new__(named, items.values())


def named_type(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The namedtuple of that name (``module:qualname``) if its module is already imported, otherwise one like it.

    Nothing is imported and no code of the class is run.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return _equivalent(module, qualname, fields)


@lru_cache(maxsize=1024)
def _equivalent(module: str, qualname: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    made = namedtuple(qualname.rpartition(".")[2], fields, module=module)  # type: ignore[misc]
    made.__qualname__ = qualname  # saved again, it is what it was
    return made
