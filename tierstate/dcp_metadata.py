"""A version as DCP sees it: keys, shapes and chunks of its tensors, and the other values by their keys."""

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
from tierstate.manifest.leaf import LOSSY, Leaf
from tierstate.manifest.version import Version
from tierstate.providers.dtypes import torch_dtype
from tierstate.providers.retie import Tie, read_ties
from tierstate.providers.structure import Stem, build, grow
from tierstate.providers.tensors import TensorProvider

VALUE = "value"


class Later(NamedTuple):
    """A value that is read when it is asked for.

    Attributes:
        leaf: its index.
    """

    leaf: int


@dataclass
class Sight:
    """A version by DCP's keys.

    Attributes:
        version: the version.
        metadata: what DCP plans a load by.
        tensors: leaf of each key that is a tensor.
        values: of the other keys; what is read later in them is a `Later`.
        ties: how tied leaves lie in others.
    """

    version: Version
    metadata: Metadata
    tensors: dict[str, int] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    ties: Mapping[int, Tie] = field(default_factory=dict)


def plain_values(version: Version) -> list[int]:
    """The leaves whose values must be known to see a version as DCP does: lists and dicts may be among them."""
    return [i for i, leaf in enumerate(version.leaves) if leaf.spec.kind == VALUE]


def see(version: Version, values: Mapping[int, Any]) -> Sight:
    """A version as DCP would have saved it.

    Args:
        values: of the leaves in `plain_values`.

    Raises:
        StateMismatch: it has no keys: the state is no dict, or two paths are one key to DCP.
        FormatError: its leaves are no tree, or no tensors.
    """
    root, index = grow(version.leaves)
    ties = read_ties(version.leaves, index)
    state, marks = _outline(root, values, ties)
    if not isinstance(state, dict):
        raise StateMismatch(f"the version is a {type(state).__qualname__}, and DCP knows states that are dicts")
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        raise StateMismatch(f"the version has paths that are one key to DCP: {error}") from error
    sight = Sight(version, Metadata({}, planner_data=paths), ties=ties)
    for key, value in flat.items():
        leaf = marks.of(value)
        if leaf is None:
            sight.metadata.state_dict_metadata[key] = BytesStorageMetadata()
            sight.values[key] = _later(value, marks)
        else:
            sight.metadata.state_dict_metadata[key] = _described(version.leaves[leaf])
            sight.tensors[key] = leaf
    return sight


class _Marks:
    """Tensors without memory that stand for leaves."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, int]] = {}

    def make(self, index: int, leaf: Leaf) -> torch.Tensor:
        """One for a leaf."""
        made = torch.empty(leaf.spec.shape, dtype=torch_dtype(leaf.spec.dtype), device="meta")
        self._made[id(made)] = made, index
        return made

    def of(self, value: Any) -> int | None:
        """The leaf that a value stands for; None where it is a value of its own."""
        found = self._made.get(id(value))
        return None if found is None else found[1]


def _outline(root: Stem, values: Mapping[int, Any], ties: Mapping[int, Tie]) -> tuple[Any, _Marks]:
    """The state with its values, and what stands for all that is not read yet."""
    marks = _Marks()

    def made(stem: Stem) -> Any:
        if stem.kind:
            return build(stem, {child.key: made(child) for child in stem.children.values()})
        if stem.index in values:
            return values[stem.index]
        tensor = _is_tensor(stem.leaf, ties.get(stem.index))
        return marks.make(stem.index, stem.leaf) if tensor else Later(stem.index)

    return made(root), marks


def _is_tensor(leaf: Leaf, tie: Tie | None) -> bool:
    spec = leaf.spec if tie is None else tie.spec
    if LOSSY in leaf.spec.attrs:
        return False
    return spec.kind == TensorProvider.kind


def _later(value: Any, marks: _Marks) -> Any:
    """A value with its tensors as what is read later; of the containers that DCP leaves whole."""
    leaf = marks.of(value)
    if leaf is not None:
        return Later(leaf)
    if type(value) is Later or not isinstance(value, (list, tuple)):
        return value
    items = [_later(item, marks) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _described(leaf: Leaf) -> TensorStorageMetadata:
    """A tensor in one piece, whatever shards it lies in: DCP would compare every part of it with every shard."""
    shape = torch.Size(leaf.spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(leaf.spec.dtype)), shape, [chunk])
