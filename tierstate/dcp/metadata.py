"""Makes DCP's metadata from a version: keys, shapes and chunks of its tensors, and the other values by their keys."""

from __future__ import annotations

from collections.abc import Mapping
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
from tierstate.providers.tree.structure import VersionNode, build_container, version_tree
from tierstate.providers.tree.ties import TiedLeaf, read_ties

VALUE = "value"
"""The kind of leaves that hold plain values."""


class UnreadLeaf(NamedTuple):
    """A placeholder for a leaf whose value is read later, when the load needs it.

    Attributes:
        leaf: its index.
    """

    leaf: int


@dataclass
class DcpView:
    """A version, indexed by DCP's keys (fully qualified names).

    Attributes:
        version: the version.
        metadata: the metadata from which DCP plans a load.
        tensors: by key of a tensor, the index of its leaf.
        values: by other key, its value, with an `UnreadLeaf` in place of each leaf that is read later.
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


def dcp_view(version: Version, values: Mapping[int, Any]) -> DcpView:
    """A version with the keys that DCP would have given it.

    Args:
        version: the version.
        values: by index, the values of the leaves in `value_leaves`.

    Raises:
        StateMismatch: it has no DCP keys: the state is not a dict, or two paths have the same key.
        FormatError: its leaves do not form a tree, or its tied tensors are not valid.
    """
    root, index = version_tree(version.leaves)
    ties = read_ties(version.leaves, index)
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
            view.values[key] = _later(value, marks)
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
        if stem.kind:
            return build_container(stem, {child.key: made(child) for child in stem.children.values()})
        if stem.index in values:
            return values[stem.index]
        tensor = _is_tensor(stem.leaf, ties.get(stem.index))
        return marks.make(stem.index, stem.leaf) if tensor else UnreadLeaf(stem.index)

    return made(root), marks


def _is_tensor(leaf: Leaf, tie: TiedLeaf | None) -> bool:
    spec = leaf.spec if tie is None else tie.spec
    if LOSSY in leaf.spec.attrs:
        return False
    return spec.kind == TensorProvider.kind


def _later(value: Any, marks: _Marks) -> Any:
    """A value with an `UnreadLeaf` for each placeholder, also within lists and tuples, which DCP may leave whole."""
    leaf = marks.of(value)
    if leaf is not None:
        return UnreadLeaf(leaf)
    if type(value) is UnreadLeaf or not isinstance(value, (list, tuple)):
        return value
    items = [_later(item, marks) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _described(leaf: Leaf) -> TensorStorageMetadata:
    """DCP's description of a tensor, as one chunk however it is sharded.

    With a chunk per shard, DCP would compare every wanted part with every shard.
    """
    shape = torch.Size(leaf.spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(leaf.spec.dtype)), shape, [chunk])
