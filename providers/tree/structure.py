"""The tree of a version's leaves: it is checked, searched by glob, and turned into containers again by a restore.

`drop_other_ranks` removes the leaves that other ranks restore.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence, Set
from functools import lru_cache
from typing import Any

from tierstate.manifest.errors import FormatError, untrusted
from tierstate.manifest.format.globs import GlobWalk, check_globs
from tierstate.manifest.format.leaf import CONTAINERS, STORAGE, Leaf
from tierstate.manifest.format.leaf_path import Path, encode_path
from tierstate.manifest.format.version import Version
from tierstate.providers.values.classes import CLASS, FORM, build_form, check_classes, imported_class
from tierstate.providers.values.modules import set_metadata

from .walk import MAX_PATH_DEPTH, StateNode, TypedKey, typed_key


class VersionNode:
    """A leaf of a version as a node of the tree.

    Attributes:
        index: the leaf's index in the version.
        children: the items of a container, in order.
        kind: a container's kind; empty for a leaf.
    """

    # No dataclass, which would take two more calls for each node: a version may have tens of thousands.
    __slots__ = ("children", "index", "kind", "leaf")

    def __init__(self, index: int, leaf: Leaf) -> None:
        self.index = index
        self.children: dict[TypedKey, VersionNode] = {}
        self.become(leaf)

    def become(self, leaf: Leaf) -> None:
        """Be the node of another leaf, with the same children."""
        kind = leaf.spec.kind
        self.leaf, self.kind = leaf, kind if kind in CONTAINERS else ""

    @property
    def key(self) -> Any:
        """The last key of the path."""
        return self.leaf.path[-1]

    def has_any(self, chosen: Set[int]) -> bool:
        """Whether this node, or one below it, is one of these leaves."""
        if not self.children:  # nearly all
            return self.index in chosen
        return self.index in chosen or any(child.has_any(chosen) for child in self.children.values())

    def walk(self) -> Iterator[VersionNode]:
        """This node and all below it, each container before its items."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack += reversed(node.children.values())


def version_tree(leaves: Sequence[Leaf]) -> VersionNode:
    """The root of the tree. The leaves may be untrusted.

    Raises:
        FormatError: the leaves do not form a tree: the first is not the root, a path occurs twice, a parent is missing
            or is not a container, or a container cannot have such keys.
    """
    if not leaves or leaves[0].path or leaves[0].spec.kind == STORAGE:
        raise FormatError(f"a version starts with the leaf of the whole state, not {_first(leaves)}")
    tree = _Tree(VersionNode(0, leaves[0]))
    for i, leaf in enumerate(leaves[1:], 1):
        node = VersionNode(i, leaf)
        twin = tree.add(node)
        if twin is not node:
            raise _twice(twin, node)
    for storage in tree.storages.values():
        if (other := _find(tree.root, storage.leaf.path)) is not None:
            raise _twice(other, storage)
    for node in tree.containers:
        _check_keys(node)
    return tree.root


class _Tree:
    """The nodes of a version so far.

    Attributes:
        root: of the tree.
        containers: the nodes that may hold others.
        storages: these only have the bytes of tied leaves, which name them by their paths.
    """

    def __init__(self, root: VersionNode) -> None:
        self.root = self._parent = root
        self.containers = [root]
        self.storages: dict[TypedKey, VersionNode] = {}
        self._above: Path | None = None

    def add(self, node: VersionNode) -> VersionNode:
        """Add a node. Returns it; or the one that is there already, under the same path."""
        leaf = node.leaf
        path = leaf.path
        if len(path) > MAX_PATH_DEPTH + 1:
            raise FormatError(f"leaf {node.index} lies {len(path)} keys deep; at most {MAX_PATH_DEPTH} can be")
        if not path:
            return self.root
        if leaf.spec.kind == STORAGE:
            return self.storages.setdefault(typed_key(path), node)
        if path[:-1] != self._above:  # most leaves have the same parent as the one before
            self._parent, self._above = _parent(self.root, leaf), path[:-1]
            if not all(type(key) is str for key in self._above):
                self._above = None  # 1, True and 1.0 are equal, and are not the same key
        if node.kind:
            self.containers.append(node)
        return self._parent.children.setdefault(typed_key(path[-1]), node)


def _find(root: VersionNode, path: Path) -> VersionNode | None:
    node: VersionNode | None = root
    for key in path:
        node = node.children.get(typed_key(key)) if node is not None else None
    return node


def _twice(one: VersionNode, other: VersionNode) -> FormatError:
    return FormatError(f"leaf {other.leaf.name} is there twice, as number {one.index} and {other.index}")


def _first(leaves: Sequence[Leaf]) -> str:
    return f"{leaves[0].name} of kind {leaves[0].spec.kind!r:.20}" if leaves else "nothing"


def _parent(root: VersionNode, leaf: Leaf) -> VersionNode:
    node = _find(root, leaf.path[:-1])
    if node is None:
        raise FormatError(f"leaf {leaf.name} comes without, or before, the container that holds it")
    if not node.kind:
        raise FormatError(
            f"leaf {leaf.name} lies in {node.leaf.name}, which is {node.leaf.spec.kind!r:.20} and no container"
        )
    return node


def _check_keys(node: VersionNode) -> None:
    kind, keys = node.kind, list(node.children)
    if kind in ("list", "tuple"):
        right: list[TypedKey] = [(int, i) for i in range(len(keys))]
    elif kind == "namedtuple":
        _check_named(node)
        right = [(str, name) for name in node.leaf.spec.attrs["fields"]]
    else:
        return
    if keys != right:
        found = ", ".join(repr(key[-1]) for key in keys[:8])
        raise FormatError(f"{node.leaf.name}: the {kind} has other keys than it can have: {found}")


def _check_named(node: VersionNode) -> None:
    attrs = node.leaf.spec.attrs
    fields = attrs.get("fields")
    if (
        not isinstance(fields, list)
        or not all(isinstance(f, str) for f in fields)
        or type(attrs.get("type")) is not str
    ):
        raise FormatError(f"{node.leaf.name}: the namedtuple has no type and fields: {dict(attrs)!r:.80}")


def select_leaves(root: VersionNode, only: Sequence[str] | None) -> set[int]:
    """Indices of the leaves that the globs select. A glob that matches a container selects everything in it.

    Raises:
        TypeError, ValueError: as `check_globs`.
    """
    only = None if only is None else check_globs(only)
    chosen: set[int] = set()
    stack = [(root, GlobWalk(["**"] if only is None else only))]
    while stack:
        node, globs = stack.pop()
        if globs.hit:
            chosen.update(below.index for below in node.walk() if not below.children)
        elif globs.alive:
            stack += [(child, globs.down(child.key)) for child in node.children.values()]
    return chosen


def build_container(node: VersionNode, items: dict[Any, Any]) -> Any:
    """A container of a node's kind with these items, in the order of the version.

    A list, tuple or namedtuple of which some items are missing becomes a dict from index (or field) to value.

    Raises:
        FormatError: the type of a namedtuple cannot be created, or the attributes are not valid.
        Unsafe: the class of the container is not known here.
        StateMismatch: the dataclass has other fields here.
    """
    kind, attrs = node.kind, node.leaf.spec.attrs
    if FORM in attrs:
        with untrusted(node.leaf):
            return build_form(kind, attrs, items, len(items) == len(node.children))
    if kind == "odict":
        state = OrderedDict(items)
        set_metadata(state, node.leaf.spec.attrs, node.leaf.name)
        return state
    if kind == "dict" or len(items) < len(node.children):
        return items
    if kind == "list":
        return list(items.values())
    if kind == "tuple":
        return tuple(items.values())
    try:
        named = named_type(node.leaf.spec.attrs["type"], tuple(node.leaf.spec.attrs["fields"]))
    except (ValueError, TypeError) as error:
        raise FormatError(f"{node.leaf.name}: no such namedtuple can be made: {error}") from error
    return tuple.__new__(named, items.values())


def named_type(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The namedtuple type of that name (``module:qualname``) if its module is imported, otherwise a new equal type.

    Nothing is imported and no code of the class is run.
    """
    found = imported_class(name)
    if found is not None and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    module, _, qualname = name.partition(":")
    return _equivalent(module, qualname, fields)


@lru_cache(maxsize=1024)
def _equivalent(module: str, qualname: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    # Renamed fields, as `_1`, are those of a type that was made in this way too.
    made = namedtuple(qualname.rpartition(".")[2], fields, module=module, rename=True)  # type: ignore[misc]
    if made._fields != fields:
        raise ValueError(f"{', '.join(fields):.200} are no fields that it can have")
    made.__qualname__ = qualname  # so that a later save writes the same name
    return made


def check_known_classes(
    node: VersionNode, place: StateNode | None, wanted: Callable[[VersionNode], bool], created: bool = False
) -> None:
    """Check that the classes of the values that a restore creates are known here, before anything is restored.

    Args:
        place: what the state has at the node; None if it has nothing there.
        wanted: whether something of a node is restored.
        created: whether the node is part of a state that a stateful object is given anew.

    Raises:
        Unsafe: one is not; the message names the leaf and the class.
    """
    created = created or place is None or place.stateful is not None
    if (created or not node.kind) and CLASS in node.leaf.spec.attrs and wanted(node):
        with untrusted(node.leaf):
            check_classes(node.leaf.spec.attrs)
    for mark, below in node.children.items():
        if not below.children and CLASS not in below.leaf.spec.attrs:
            continue
        known = place.children.get(mark) if place is not None else None
        check_known_classes(below, known[1] if known is not None else None, wanted, created)


def drop_other_ranks(node: VersionNode, place: StateNode) -> None:
    """Remove from the tree the leaves that stateful objects of the given state leave to other ranks."""
    if place.stateful is not None and place.stateful.takes is not None:
        takes = place.stateful.takes(place.value)
        pending: list[tuple[VersionNode, Path]] = [(node, ())]
        while pending:
            at, path = pending.pop()
            at.children = {mark: below for mark, below in at.children.items() if takes((*path, below.key))}
            pending += [(below, (*path, below.key)) for below in at.children.values()]
    for mark, below in node.children.items():
        known = place.children[mark][1] if mark in place.children else None
        if known is not None and known.may_hold_objects:
            drop_other_ranks(below, known)


def selected_paths(version: Version, only: Sequence[str] | None) -> set[str]:
    """Encoded paths of the leaves that the globs select, with all leaves of selected containers; all without globs."""
    if only is None:
        return set(version.leaf_index)
    return {encode_path(version.leaves[i].path) for i in select_leaves(version_tree(version.leaves), only)}
