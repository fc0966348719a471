"""Renames the leaves of a version while it is restored, loaded or exported, to the names that a state has now.

Names change where a model is wrapped or no longer wrapped (``module.``, ``_orig_mod.``), and where code is reorganised.
Only names change: which bytes a leaf has, and which leaves share memory, stays as it was saved.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from tierstate.manifest.errors import CaptureError, StateMismatch
from tierstate.manifest.format.globs import match_key, split_glob
from tierstate.manifest.format.leaf import METADATA, Leaf, Spec
from tierstate.manifest.format.leaf_path import Path, encode_path, format_key, format_path
from tierstate.providers.values.classes import FORM

from .structure import VersionNode
from .walk import MAX_PATH_DEPTH, StateNode, typed_key

RenameStep: TypeAlias = Callable[[Path], Path] | Mapping[str, str] | tuple[str, str]


Rename: TypeAlias = RenameStep | Sequence[RenameStep]
"""How leaves are renamed: a function of a path, a mapping from patterns to replacements, or a list of functions,
mappings and pairs, each applied to what the one before returned. See `compile_rename`."""


WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes in which DistributedDataParallel (and DataParallel, DeepSpeed), torch.compile, FSDP and activation
checkpointing hold the module that they wrap."""


_LISTED = 10


def unwrapped(path: Path) -> Path:
    """The path without the names that wrappers of modules add: ``model."module.fc.weight"`` -> ``model."fc.weight"``.

    For ``rename=``. A restore into a given state compares names without wrappers on both sides, so that it does not
    matter whether the model is wrapped here, was wrapped when it was saved, or both. A leaf whose name is in the given
    state as it was saved keeps it. `load` and ``export`` remove the wrappers.
    """
    found = []
    for key in path[:-1]:
        if isinstance(key, str):
            key = ".".join(part for part in key.split(".") if part not in WRAPPERS)
            if not key:
                continue
        found.append(key)
    last = path[-1:]
    if last and isinstance(last[0], str):
        *before, name = last[0].split(".")  # a wrapper holds the module, and is never the leaf itself
        last = (".".join([*(part for part in before if part not in WRAPPERS), name]),)
    return (*found, *last)


def compile_rename(rename: Rename) -> list[Callable[[Path], Path]]:
    """The functions that rename a leaf, in order.

    In a mapping or pair, a pattern is a glob of the leading keys of a path (as in ``only=``), so that
    ``model.encoder`` renames all leaves below it. Each ``*`` (one key) and ``**`` (any number) of the pattern is again
    in the replacement, in the same order, and stands for what it matched; ``.`` is the empty path. Of a mapping the
    first pattern that matches counts.

    Raises:
        TypeError: it is none of the forms that `Rename` names.
        ValueError: a pattern or a replacement is not valid.
    """
    if callable(rename):
        return [rename]
    if isinstance(rename, Mapping):
        return [_first_of([_Rule.parse(*item) for item in rename.items()])]
    if isinstance(rename, tuple) and len(rename) == 2 and all(isinstance(text, str) for text in rename):
        return [_first_of([_Rule.parse(*rename)])]
    if isinstance(rename, Sequence) and not isinstance(rename, str | bytes):
        steps: Sequence[Any] = rename
        return [call for step in steps for call in compile_rename(step)]
    raise TypeError(
        f"rename: {rename!r:.80} is none; give a function of paths, a mapping of patterns to names, or a list of these"
    )


class _Rule(NamedTuple):
    """One pattern and its replacement, as keys."""

    pattern: tuple[str, ...]
    replacement: tuple[str, ...]

    @classmethod
    def parse(cls, pattern: str, replacement: str) -> _Rule:
        if not (isinstance(pattern, str) and isinstance(replacement, str)):
            raise TypeError(f"rename {pattern!r:.40} to {replacement!r:.40}: both are text, as in 'model.encoder'")
        old, new = split_glob(pattern), split_glob(replacement)
        wild = [[part for part in parts if part in ("*", "**")] for parts in (old, new)]
        if wild[0] != wild[1]:
            raise ValueError(
                f"rename {pattern!r} to {replacement!r}: each * and ** of the pattern is again in the name, in order"
            )
        if old[-1:] == new[-1:] == ("**",):  # all below what a pattern matches is renamed anyway
            old, new = old[:-1], new[:-1]
        return cls(old, new)

    def __call__(self, path: Path) -> Path | None:
        """The new path; None if the pattern does not match."""
        # A key with dots is the keys between them, or else one key: so it is printed, in quotes.
        cut = [(part, at) for at, key in enumerate(path) for part in _parts(key)]
        new = self._renamed(path, cut)
        return self._renamed(path, [(key, at) for at, key in enumerate(path)]) if new is None else new

    def _renamed(self, path: Path, parts: Sequence[tuple[Any, int]]) -> Path | None:
        found = _capture(self.pattern, [part for part, _ in parts])
        if found is None:
            return None
        caught, used = iter(found[0]), found[1]
        new = [key for part in self.replacement for key in (next(caught) if part in ("*", "**") else [_literal(part)])]
        if not used:
            return (*new, *path)
        last = parts[used - 1][1]  # the key in which what was matched ends
        inside = [part for part, at in parts if at == last]
        if len(inside) == 1:
            return (*new, *path[last + 1 :])
        # It is one key with dots, as in a state dict, and stays one: so many keys as were matched before it are whole.
        before = sum(at < last for _, at in parts)
        joined = [*new[before:], *inside[used - before :]]
        key = joined if len(joined) < 2 else [".".join(map(str, joined))]
        return (*new[:before], *key, *path[last + 1 :])


def _first_of(rules: Sequence[_Rule]) -> Callable[[Path], Path]:
    return lambda path: next((new for rule in rules if (new := rule(path)) is not None), path)


def _parts(key: Any) -> list[Any]:
    return key.split(".") if isinstance(key, str) else [key]


def _capture(pattern: Sequence[str], keys: Sequence[Any]) -> tuple[list[Sequence[Any]], int] | None:
    """What each wildcard matched at the beginning of the keys, as few as possible, and how many keys were matched."""
    if not pattern:
        return [], 0
    if pattern[0] == "**":
        for n in range(len(keys) + 1):
            if (rest := _capture(pattern[1:], keys[n:])) is not None:
                return [keys[:n], *rest[0]], n + rest[1]
        return None
    if not keys or not match_key(pattern[0], keys[0]) or (rest := _capture(pattern[1:], keys[1:])) is None:
        return None
    return [*([keys[:1]] if pattern[0] == "*" else []), *rest[0]], 1 + rest[1]


def _literal(part: str) -> Any:
    """The key that a segment of a replacement writes: as printed, 0 is a number and "0" is text."""
    if part.startswith('"'):
        return json.loads(part)
    return int(part) if part.isascii() and part.isdigit() else part


def _flat(path: Path) -> tuple[str, ...]:
    """The path's keys as text, those with dots apart: equal for names that differ only in how they are cut."""
    return tuple(text for key in path for text in (key.split(".") if isinstance(key, str) else (format_key(key),)))


def wrapped_differently(here: Iterable[Path], there: Iterable[Path]) -> int:
    """How many of these paths of a state are among those of a version, but for wrappers."""
    bare = {_flat(unwrapped(path)) for path in there}
    return sum(_flat(unwrapped(path)) in bare for path in here)


class _GivenNames:
    """The paths of a given state, by several notations."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._exact: set[tuple[Any, ...]] = set()
        self._flat: dict[tuple[str, ...], list[Path]] = defaultdict(list)
        self._bare: dict[tuple[str, ...], list[Path]] = defaultdict(list)
        for path in paths:
            self._exact.add(tuple(map(typed_key, path)))
            self._flat[_flat(path)].append(path)
            self._bare[_flat(unwrapped(path))].append(path)

    def __contains__(self, path: Path) -> bool:
        return tuple(map(typed_key, path)) in self._exact

    def find(self, path: Path, *, bare: bool) -> Path:
        """The given path that is written like this one, or is without wrappers (``bare``); else this one.

        Raises:
            StateMismatch: there are several.
        """
        if path in self:
            return path
        found = self._flat.get(_flat(path)) or (self._bare.get(_flat(unwrapped(path))) if bare else None) or [path]
        if len(found) > 1:
            several = " and ".join(map(format_path, found[:3]))
            raise StateMismatch(f"{format_path(path)} of the version may be {several} in the given state; rename it")
        return found[0]


def _new_names(nodes: Sequence[VersionNode], rename: Rename, place: StateNode | None) -> list[Path]:
    steps = compile_rename(rename)
    bare = unwrapped in steps
    given = None if place is None else _GivenNames(at.path for at in place.walk() if not at.children)
    found = []
    for node in nodes:
        path = _applied(steps, node.leaf)
        if given is not None:
            as_saved = _applied([step for step in steps if step is not unwrapped], node.leaf)
            path = as_saved if bare and as_saved in given else given.find(path, bare=bare)
        found.append(path)
    return found


def _applied(steps: Sequence[Callable[[Path], Path]], leaf: Leaf) -> Path:
    path = leaf.path
    for step in steps:
        path = step(path)
        if not isinstance(path, tuple) or len(path) > MAX_PATH_DEPTH:
            raise TypeError(f"rename of {leaf.name} returned {path!r:.80}, no tuple of keys")
    try:
        encode_path(path)
    except CaptureError as error:
        raise TypeError(f"rename of {leaf.name}: {error}") from error
    return path


def rename_leaves(
    root: VersionNode, leaves: Sequence[Leaf], rename: Rename, place: StateNode | None = None
) -> tuple[VersionNode, list[Leaf]]:
    """The tree of a version with other names, and its leaves with other paths, each under the same index.

    Containers come about by what is in them: one of which some leaf keeps its name is what it was; a new one is like
    that from which its items come. The leaves of containers keep their paths in the list.

    Args:
        place: the given state, whose names are looked up; None if there is none.

    Raises:
        StateMismatch: two leaves would have one name, or one would lie in the other. All are listed.
        TypeError, ValueError: as `compile_rename`, and where a function returns what is no path.
    """
    nodes = [node for node in root.walk() if not node.children]
    paths = _new_names(nodes, rename, place)
    tree = _NewTree(root, nodes, paths)
    renamed = list(leaves)
    for node, path in zip(nodes, paths, strict=True):
        renamed[node.index] = node.leaf._replace(path=path)
    return tree.build(), renamed


class _NewTree:
    """Builds the tree of renamed leaves.

    Args:
        root: the tree as saved.
        nodes: its leaves, and containers without items.
        paths: the new path of each.
    """

    def __init__(self, root: VersionNode, nodes: Sequence[VersionNode], paths: Sequence[Path]) -> None:
        self._nodes, self._paths = nodes, paths
        self._saved = {tuple(map(typed_key, node.leaf.path)): node for node in root.walk() if node.children}
        self._made: dict[tuple[Any, ...], tuple[VersionNode, VersionNode | None]] = {}
        self._kept = {
            tuple(map(typed_key, path[:depth]))
            for node, path in zip(nodes, paths, strict=True)
            for depth in range(_common(node.leaf.path, path))
        }
        self._moved: dict[int, list[tuple[str, str]]] = defaultdict(list)  # by id of a container: old and new keys
        self._twice: list[str] = []

    def build(self) -> VersionNode:
        for node, path in zip(self._nodes, self._paths, strict=True):
            self._add(node, path)
        if self._twice:
            more = [f"  and {len(self._twice) - _LISTED} more"] if len(self._twice) > _LISTED else []
            lines = [f"  {line}" for line in self._twice[:_LISTED]] + more
            raise StateMismatch("after `rename` several leaves of the version have one name:\n" + "\n".join(lines))
        for node, old in self._made.values():
            node.become(node.leaf._replace(spec=self._spec(node, old)))
        if () not in self._made:  # the state is a single leaf
            return VersionNode(self._nodes[0].index, self._nodes[0].leaf._replace(path=()))
        return self._made[()][0]

    def _add(self, node: VersionNode, path: Path) -> None:
        name = node.leaf.name
        if not path:
            if len(self._nodes) > 1:
                self._twice.append(f"{name}: has no name left")
            return
        parent = self._container(path, len(path) - 1, node)
        mark = typed_key(path[-1])
        key = tuple(map(typed_key, path))
        if parent is None or mark in parent.children or key in self._made:
            twin = next((n for n, p in zip(self._nodes, self._paths, strict=True) if n is not node and p == path), None)
            what = f"{twin.leaf.name} too" if twin is not None else "and another leaf lies above or below that name"
            self._twice.append(f"{name}: becomes {format_path(path)}, {what}")
            return
        parent.children[mark] = VersionNode(node.index, node.leaf._replace(path=path))
        if node.leaf.path and isinstance(node.leaf.path[-1], str) and isinstance(path[-1], str):
            self._moved[id(parent)].append((node.leaf.path[-1], path[-1]))

    def _container(self, path: Path, depth: int, node: VersionNode) -> VersionNode | None:
        """The container of this many keys of a path; None where a leaf is in its place."""
        key = tuple(map(typed_key, path[:depth]))
        if key in self._made:
            return self._made[key][0]
        old = self._origin(key, node.leaf.path[: len(node.leaf.path) - (len(path) - depth)])
        spec = old.leaf.spec if old is not None else Spec("dict")
        found = VersionNode(old.index if old is not None else -1, Leaf(path[:depth], spec))
        if depth:
            above = self._container(path, depth - 1, node)
            if above is None or typed_key(path[depth - 1]) in above.children:
                return None
            above.children[typed_key(path[depth - 1])] = found
        self._made[key] = found, old
        return found

    def _origin(self, key: tuple[Any, ...], aligned: Path) -> VersionNode | None:
        """The saved container that a container of this path is like."""
        if key in self._kept or not key:
            return self._saved.get(key)
        return self._saved.get(tuple(map(typed_key, aligned))) if aligned else None

    def _spec(self, node: VersionNode, old: VersionNode | None) -> Spec:
        """What a container is, now that its items are known."""
        spec = node.leaf.spec
        if METADATA in spec.attrs and (moved := self._moved.get(id(node))):
            spec = replace(spec, attrs={**spec.attrs, METADATA: _moved_metadata(spec.attrs[METADATA], moved)})
        if spec.kind in ("list", "tuple", "namedtuple") or FORM in spec.attrs:
            order = _item_order(spec, old)
            if order is None or node.children.keys() != set(order):
                return Spec("dict")
            node.children = {mark: node.children[mark] for mark in order}
        return spec


def _common(one: Path, other: Path) -> int:
    """How many leading keys two paths have in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if typed_key(a) != typed_key(b)), min(len(one), len(other)))


def _item_order(spec: Spec, old: VersionNode | None) -> list[Any] | None:
    """The keys that a container of this kind must have, in order; None if it would be another."""
    count = len(old.children) if old is not None else 0
    if old is not None and (FORM in spec.attrs or spec.kind == "namedtuple"):
        return list(old.children)
    return [typed_key(at) for at in range(count)] if count else None


def _moved_metadata(told: Any, moved: Sequence[tuple[str, str]]) -> Any:
    """The metadata of a module's state dict under the new prefixes of its keys.

    Args:
        told: by prefix, as saved; not checked yet.
        moved: old and new keys of the state dict.
    """
    if not isinstance(told, dict):
        return told
    to: dict[str, str] = {}
    for old, new in moved:
        a, b = old.split("."), new.split(".")
        while a and b and a[-1] == b[-1]:
            del a[-1], b[-1]
            to.setdefault(".".join(a), ".".join(b))
    found: dict[str, Any] = {}
    for prefix in sorted(told, key=len, reverse=True):  # of a wrapper and what it wraps the inner one
        head = prefix
        while head and head not in to:
            head = head.rpartition(".")[0]
        found.setdefault((to.get(head, "") + prefix[len(head) :]).removeprefix("."), told[prefix])
    return found
