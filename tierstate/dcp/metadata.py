"""Makes DCP's metadata from a version: keys, shapes and chunks of its tensors, and the other values by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import LOSSY, Leaf
from tierstate.manifest.format.version import Version
from tierstate.providers.tensors.dtypes import torch_dtype
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.rename import Rename, rename_leaves
from tierstate.providers.tree.structure import VersionNode, build_container, version_tree
from tierstate.providers.tree.ties import TiedLeaf, read_ties
from tierstate.providers.values.classes import FORM

VALUE = "value"
"""The kind of leaves that hold plain values."""


class UnreadLeaf(NamedTuple):
    """A placeholder for a leaf whose value is read later, when the load needs it.

    Attributes:
        leaf: its index.
    """

    leaf: int


@dataclass(frozen=True)
class UnreadContainer:
    """A placeholder for a container that DCP does not look into, and that is built when its leaves are read.

    Attributes:
        node: what it is.
        items: its items by key, with an `UnreadLeaf` or an `UnreadContainer` in place of each that is read later.
    """

    node: VersionNode
    items: dict[Any, Any]


@dataclass
class DcpView:
    """A version, indexed by DCP's keys (fully qualified names).

    Attributes:
        version: the version.
        metadata: the metadata from which DCP plans a load.
        tensors: by key of a tensor, the index of its leaf.
        values: by other key, its value, with an `UnreadLeaf` or `UnreadContainer` in place of what is read later.
        ties: by index of a tied leaf, where it is in the bytes of another leaf.
    """

    version: Version
    metadata: Metadata
    tensors: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    ties: Mapping[int, TiedLeaf] = field(default_factory=dict)


def value_leaves(version: Version) -> list[int]:
    """The leaves with plain values, whose values DCP's keys depend on: some may be lists or dicts."""
    return [i for i, leaf in enumerate(version.leaves) if leaf.spec.kind == VALUE]


def dcp_view(version: Version, values: Mapping[int, Any], rename: Rename | None = None) -> DcpView:
    """A version with the keys that DCP would have given it.

    Args:
        version: the version.
        values: by index, the values of the leaves in `value_leaves`.
        rename: how its leaves are renamed first, as in `Checkpointer.load`.

    Raises:
        StateMismatch: it has no DCP keys: the state is not a dict, or two paths have the same key.
        TypeError, ValueError: as `compile_rename`, and where a function returns what is no path.
        FormatError: its leaves do not form a tree, or its tied tensors are not valid.
    """
    root, ties = version_tree(version.leaves), read_ties(version.leaves)
    if rename is not None:
        root, _ = rename_leaves(root, version.leaves, rename)
    state, marks = _outline(root, values, ties)
    if not isinstance(state, dict):
        raise StateMismatch(f"the version is a {type(state).__qualname__}, and DCP knows states that are dicts")
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        raise StateMismatch(f"the version has paths that are one key to DCP: {error}") from error
    view = DcpView(version, Metadata({}, planner_data=paths), ties=ties)
    for key, value in flat.items():
        leaf = marks.of(value)
        if leaf is None:
            view.metadata.state_dict_metadata[key] = BytesStorageMetadata()
            view.values[key] = value
        else:
            view.metadata.state_dict_metadata[key] = _described(version.leaves[leaf])
            view.tensors[key] = leaf
    return view


class _Marks:
    """Placeholder tensors without memory ("meta" tensors), one per leaf."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, int]] = {}

    def make(self, index: int, leaf: Leaf) -> torch.Tensor:
        """Make a placeholder for a leaf."""
        made = torch.empty(leaf.spec.shape, dtype=torch_dtype(leaf.spec.dtype), device="meta")
        self._made[id(made)] = made, index
        return made

    def of(self, value: Any) -> int | None:
        """The index of the leaf whose placeholder ``value`` is; None if it is none."""
        found = self._made.get(id(value))
        return None if found is None else found[1]


def _outline(root: VersionNode, values: Mapping[int, Any], ties: Mapping[int, TiedLeaf]) -> tuple[Any, _Marks]:
    """The state with its known values, and placeholders for all leaves that are not read yet."""
    marks = _Marks()

    def made(stem: VersionNode) -> Any:
        if stem.kind and _is_split(stem):
            return build_container(stem, {child.key: made(child) for child in stem.children.values()})
        if not stem.kind and stem.index not in values and _is_tensor(stem.leaf, ties.get(stem.index)):
            return marks.make(stem.index, stem.leaf)
        return unread(stem)

    def unread(stem: VersionNode) -> Any:
        if stem.kind:
            return UnreadContainer(stem, {child.key: unread(child) for child in stem.children.values()})
        return values[stem.index] if stem.index in values else UnreadLeaf(stem.index)

    return made(root), marks


def _is_tensor(leaf: Leaf, tie: TiedLeaf | None) -> bool:
    spec = leaf.spec if tie is None else tie.spec
    if LOSSY in leaf.spec.attrs:
        return False
    return spec.kind == TensorProvider.kind


def _is_split(stem: VersionNode) -> bool:
    """Whether DCP looks for tensors in a container: in mappings and lists, and in nothing else."""
    kinds, forms = ("dict", "odict", "list"), (None, "defaultdict", "subclass")
    return stem.kind in kinds and stem.leaf.spec.attrs.get(FORM) in forms


def unread_leaves(value: Any) -> Iterator[int]:
    """The leaves of a value of a `DcpView` that are still to be read."""
    if type(value) is UnreadLeaf:
        yield value.leaf
    elif type(value) is UnreadContainer or type(value) is list:
        for item in value.items.values() if isinstance(value, UnreadContainer) else value:
            yield from unread_leaves(item)


def resolve(value: Any, read: Callable[[int], Any]) -> Any:
    """A value of a `DcpView` with its unread leaves read.

    Args:
        value: the value.
        read: gives the value of a leaf by its index.
    """
    if type(value) is UnreadLeaf:
        return read(value.leaf)
    if type(value) is UnreadContainer:
        return build_container(value.node, {key: resolve(item, read) for key, item in value.items.items()})
    return [resolve(item, read) for item in value] if type(value) is list else value


def _described(leaf: Leaf) -> TensorStorageMetadata:
    """DCP's description of a tensor, as one chunk however it is sharded.

    With a chunk per shard, DCP would compare every wanted part with every shard.
    """
    shape = torch.Size(leaf.spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(leaf.spec.dtype)), shape, [chunk])
