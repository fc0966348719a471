"""Outlines: the structure of an exported state, as JSON beside its tensors in a safetensors or HDF5 file.

An outline has containers, plain values and ties, so that an import creates the same state again. `Selection` chooses
the leaves of a version that are exported, as a complete tree.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import STORAGE, Leaf, Spec
from tierstate.manifest.format.leaf_path import decode_path, encode_path
from tierstate.providers.tree.compare import no_match_error
from tierstate.providers.tree.rename import Rename, rename_leaves
from tierstate.providers.tree.structure import VersionNode, build_container, select_leaves, version_tree
from tierstate.providers.tree.ties import read_ties
from tierstate.providers.values.classes import stand_in_classes
from tierstate.providers.values.encoding import decode_value, encode_value
from tierstate.providers.values.values import ValueProvider

from .stored import FileValue, read_value

NO_BYTES = -1


OUTLINE_FORMAT = 1


MAX_OUTLINE_LEAVES = 1 << 24


FindTensor = Callable[[Sequence[str], Spec], FileValue]
"""Name and spec of a tensor -> its lazy value in the file. Raises FormatError if the tensor does not have that spec."""


class SelectedLeaf(NamedTuple):
    """One leaf of a selection.

    Attributes:
        leaf: the leaf in the selection.
        source: index of the version's leaf with its bytes; `NO_BYTES` if it has none.
    """

    leaf: Leaf
    source: int


class Selection:
    """Some leaves of a version, with the containers that hold them.

    Args:
        leaves: the version's leaves; they may be untrusted.
        only: globs of leaf paths; None for all.
        rename: how the leaves are renamed first (see `rename_leaves`); ``only`` matches the new names.

    Raises:
        FormatError: the leaves do not form a tree.
        StateMismatch: no leaf matches, or two leaves have one name after renaming.
    """

    def __init__(self, leaves: Sequence[Leaf], only: Sequence[str] | None = None, rename: Rename | None = None) -> None:
        self._root, self._ties = version_tree(leaves), read_ties(leaves)
        if rename is not None:
            self._root, leaves = rename_leaves(self._root, leaves, rename)
        self._leaves = leaves
        self._chosen = select_leaves(self._root, only)
        if only is not None and not self._chosen:
            raise no_match_error(leaves, only)

    def values(self) -> Iterator[Leaf]:
        """The selected leaves without containers; tied leaves with the spec of their value."""
        for i in sorted(self._chosen):
            if i in self._ties:
                yield Leaf(self._leaves[i].path, self._ties[i].spec)
            elif self._leaves[i].spec.has_bytes:
                yield self._leaves[i]

    def drop(self, out: Callable[[Leaf], bool]) -> list[Leaf]:
        """Remove every leaf for which ``out`` is true; returns the removed leaves."""
        gone = [leaf for leaf in self.values() if out(leaf)]
        paths = {encode_path(leaf.path) for leaf in gone}
        self._chosen = {i for i in self._chosen if encode_path(self._leaves[i].path) not in paths}
        return gone

    def leaves(self) -> list[SelectedLeaf]:
        """The selected leaves as a complete tree, in the version's order.

        A list or tuple of which some items are missing becomes a dict from index to value, as in a partial load. If the
        root of tied leaves is not selected, the first tied leaf gets its bytes.
        """
        moved = self._moved_roots()
        found: list[SelectedLeaf] = []
        for stem in self._root.walk():
            leaf = stem.leaf
            if not self._wanted(stem):
                continue
            if stem.kind:
                whole = all(map(self._wanted, stem.children.values()))
                found.append(SelectedLeaf(leaf if whole or stem.kind == "odict" else _as_dict(leaf), NO_BYTES))
            elif stem.index in self._ties:
                found += self._tied(stem.index, moved)
            else:
                found.append(SelectedLeaf(leaf, stem.index))
        return found + self._storages(moved)

    def _wanted(self, stem: VersionNode) -> bool:
        return any(s.index in self._chosen for s in stem.walk())

    def _moved_roots(self) -> dict[int, tuple[int, Leaf]]:
        """Index of a root that is not selected -> the tied leaf that replaces it, or the leaf of raw bytes."""
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

    def _tied(self, index: int, moved: Mapping[int, tuple[int, Leaf]]) -> Iterator[SelectedLeaf]:
        leaf, tie = self._leaves[index], self._ties[index]
        at, root = moved.get(tie.root, (NO_BYTES, self._leaves[tie.root]))
        if at == index:
            yield SelectedLeaf(root, tie.root)
            return
        attrs = {**leaf.spec.attrs, "to": encode_path(root.path)}
        yield SelectedLeaf(leaf._replace(spec=replace(leaf.spec, attrs=attrs)), NO_BYTES)

    @staticmethod
    def _storages(moved: Mapping[int, tuple[int, Leaf]]) -> list[SelectedLeaf]:
        return [SelectedLeaf(leaf, root) for root, (at, leaf) in moved.items() if at == NO_BYTES]


def _as_dict(leaf: Leaf) -> Leaf:
    return Leaf(leaf.path, Spec("dict"))


class OutlineLeaf(NamedTuple):
    """One leaf of an outline.

    Attributes:
        leaf: the leaf.
        name: the name of the tensor with its bytes in the file, as parts that a format joins with dots or slashes; None
            if it has no tensor.
        value: the encoded value, if the leaf is a plain value.
    """

    leaf: Leaf
    name: Sequence[str] | None = None
    value: bytes | None = None


def encode_outline(parts: Sequence[OutlineLeaf], about: Mapping[str, Any]) -> dict[str, Any]:
    """An outline as JSON types.

    Args:
        about: further fields: run, step, and so on.
    """
    return {**about, "format": OUTLINE_FORMAT, "leaves": [_encode_part(part) for part in parts]}


def decode_outline(found: Any, what: str) -> list[OutlineLeaf]:
    """The leaves of an outline, which may be untrusted.

    Args:
        what: the file's name in messages.

    Raises:
        FormatError: it is not an outline.
    """
    if not isinstance(found, dict) or found.get("format") != OUTLINE_FORMAT:
        raise FormatError(
            f"{what}: its outline is of a format that this program does not know; right is {OUTLINE_FORMAT}"
        )
    listed = found.get("leaves")
    if not isinstance(listed, list) or len(listed) > MAX_OUTLINE_LEAVES:
        raise FormatError(f"{what}: its outline lists no leaves")
    try:
        return [_decode_part(item) for item in listed]
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise FormatError(f"{what}: its outline lists what is no leaf: {error!r}") from error


def state_of_outline(parts: Sequence[OutlineLeaf], find: FindTensor, what: str) -> Any:
    """The state of an outline; tensors are lazy values that stay in the file, unknown classes have stand-ins.

    Only tensors of which other tensors are views are read now, since the views need their memory.

    Raises:
        FormatError: the leaves do not form a tree, or a tensor is missing.
    """
    leaves = [part.leaf for part in parts]
    root = version_tree(leaves)
    ties = read_ties(leaves)
    viewed = {tie.root for tie in ties.values() if tie.offset is not None}
    values: dict[int, Any] = {}
    for i, part in enumerate(parts):
        if part.leaf.spec.kind == ValueProvider.kind:
            with stand_in_classes():
                values[i] = decode_value(_given(part.value, part.leaf, what))
        elif part.leaf.spec.has_bytes:
            held = find(_given(part.name, part.leaf, what), part.leaf.spec)
            values[i] = read_value(held) if i in viewed else held
    for i, tie in ties.items():
        held = values[tie.root]
        values[i] = held.like(tie.spec) if isinstance(held, FileValue) else tie.of(held, leaves[tie.root].spec)
    with stand_in_classes():
        return _put(root, values)


def _put(stem: VersionNode, values: Mapping[int, Any]) -> Any:
    if not stem.kind:
        return values[stem.index]
    return build_container(stem, {child.key: _put(child, values) for child in stem.children.values()})


def _given(found: Any, leaf: Leaf, what: str) -> Any:
    if found is None:
        raise FormatError(f"{what}: its outline does not say where leaf {leaf.name} is")
    return found


def _encode_part(part: OutlineLeaf) -> dict[str, Any]:
    spec = part.leaf.spec
    found: dict[str, Any] = {"path": encode_path(part.leaf.path), "kind": spec.kind}
    if spec.kind != ValueProvider.kind and (
        spec.has_bytes or spec.shape or spec.itemsize != 1 or spec.dtype != "uint8"
    ):
        found |= {"dtype": spec.dtype, "itemsize": spec.itemsize, "shape": list(spec.shape)}
    if spec.attrs:
        found["attrs"] = dict(spec.attrs)
    if part.name is not None:
        found["name"] = list(part.name)
    return found if part.value is None else found | encode_plain(part.value)


def encode_plain(value: bytes) -> dict[str, Any]:
    """A plain value as readable JSON, if JSON returns it exactly; otherwise as its encoded bytes."""
    with stand_in_classes():
        plain = decode_value(value)
    if type(plain) in (int, str, bool, type(None)) or (type(plain) is float and math.isfinite(plain)):
        # JSON would join two surrogates into one character, and has no int of more digits than Python writes.
        with suppress(ValueError):
            if json.loads(json.dumps(plain)) == plain:
                return {"json": plain}
    return {"value": base64.b64encode(value).decode("ascii")}


def _decode_value(item: Mapping[str, Any]) -> bytes | None:
    if "json" in item:
        return encode_value(item["json"])
    return base64.b64decode(item["value"], validate=True) if "value" in item else None


def _decode_part(item: Any) -> OutlineLeaf:
    path, kind, name = item["path"], item["kind"], item.get("name")
    dtype, itemsize, shape = item.get("dtype", "uint8"), item.get("itemsize", 1), item.get("shape", [])
    attrs = item.get("attrs", {})
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 56 for n in [itemsize, *shape])
    if not (isinstance(kind, str) and isinstance(dtype, str) and sizes and isinstance(attrs, dict) and itemsize):
        raise ValueError(f"{item!r:.80}")
    value = _decode_value(item)
    if kind == ValueProvider.kind:
        shape = [len(value or b"")]
    if name is not None and not (isinstance(name, list) and all(isinstance(n, str) for n in name)):
        raise TypeError(f"{name!r:.40} is no name")
    return OutlineLeaf(Leaf(decode_path(path), Spec(kind, dtype, itemsize, tuple(shape), attrs)), name, value)
