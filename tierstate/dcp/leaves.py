"""Maps a DCP save plan to leaves and shards: keys become paths, objects that DCP would pickle become plain values.

DCP splits lists, such as an optimizer's groups, into items; `plan_lists` joins them again. `in_state_order` sorts the
leaves of the merged version into the order of the state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tierstate.engine.save.plan import HOST, CapturePlan, CaptureSource
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf, Path, Spec, encode_path, format_path
from tierstate.manifest.format.version import Shards, Version
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.tree.walk import StateWalk
from tierstate.providers.values.encoding import encode_value
from tierstate.tiers.memory.cuda import stream_fences

ListValues = Mapping[Path, Any]
"""*List values*: plain values at paths through a list, by path."""


_GAP = -1
"""Index of a leaf that was added to fill a list."""


_PARTS = {"dict", "odict", "list", "tensor"}
"""DCP splits a list into items if it has an item of one of these kinds."""


PickleAllowed = Callable[[Path], bool]
"""Whether the value of a path may be pickled, or loaded from a pickle."""


def is_list_value(path: Path, value: Any) -> bool:
    """Whether a value is plain and its path leads through a list.

    The coordinator writes such values, since only it has all items of a list.
    """
    if not any(type(key) is int for key in path):
        return False
    try:
        encode_value(value)
    except CaptureError:
        return False
    return True


def plan_lists(listed: ListValues, others: Iterable[Path]) -> CapturePlan:
    """Plan the list values that the coordinator writes.

    A list of only plain values is one value, as a `Checkpointer` saves it. Plain values of other lists are leaves of
    their own.

    Args:
        listed: the list values of all ranks.
        others: paths of all other leaves with bytes.
    """
    parted = {root for path in others if (root := _root(path)) is not None}
    values: dict[Path, Any] = {}
    for path, value in listed.items():
        root = _root(path)
        if root is None or root in parted:
            values[path] = value
        else:
            _put(values.setdefault(root, []), path[len(root) :], value)
    leaves: dict[Path, Leaf] = {}
    sources: list[CaptureSource] = []
    for path, value in values.items():
        for depth in range(len(path)):
            kind = "list" if type(path[depth]) is int else "dict"
            leaves.setdefault(path[:depth], Leaf(path[:depth], Spec(kind)))
        place = StateWalk(REGISTRY).take(_with_end(value) if path not in listed else value, path)
        assert place.provider is not None  # everything in it is plain
        spec = place.provider.spec
        leaves[path] = Leaf(path, spec)
        at, chunks, memory = len(leaves) - 1, place.provider.chunks, place.provider.memory()
        sources.append(CaptureSource(at, Box.whole(spec.shape), spec.nbytes, chunks, False, memory))
    return CapturePlan.of(tuple(leaves.values()), sources)


def _root(path: Path) -> Path | None:
    """The path of the outermost list that a path leads through; None if there is none."""
    return next((path[:depth] for depth, key in enumerate(path) if type(key) is int), None)


def _put(at: Any, path: Path, value: Any) -> None:
    """Set a value in nested lists and dicts. A list item for which DCP has no key was an empty dict."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(at, list):
            at += [{} for _ in range(key + 1 - len(at))]
        if following is None:
            at[key] = value
            return
        missing = key not in at if isinstance(at, dict) else at[key] == {} and type(following) is int
        if missing:
            at[key] = [] if type(following) is int else {}
        at = at[key]


def _with_end(items: list[Any]) -> list[Any]:
    """The list, with an empty dict at its end if there is no other reason why DCP has split it."""
    explained = any(isinstance(item, dict) or _is_parted(item) for item in items)
    return items if explained else [*items, {}]


def _is_parted(item: Any) -> bool:
    return isinstance(item, list) and any(isinstance(one, dict) or _is_parted(one) for one in item)


def in_state_order(version: Version, reference: Sequence[Path]) -> tuple[Version, Array]:
    """The version with its leaves in the order of the state: a container before its contents, list items by index.

    Args:
        version: merged from the parts of the ranks, each with some of the leaves.
        reference: paths in the state's order; leaves of other paths come last.

    Returns:
        The version, and ``(chunks,)``: for each old row of a chunk its new row.
    """
    leaves, old = _leaves(version, reference)
    number = np.full(len(version.leaves), -1)
    there = old != _GAP
    number[old[there]] = np.flatnonzero(there)
    leaf = number[version.shard_leaf.astype("i8")]
    order = np.argsort(leaf, kind="stable")
    ends = version.chunk_end.astype("i8")
    counts = np.diff(ends, prepend=0)
    # The first row of each shard's chunks in the new order; `ends - counts` is that in the old order.
    starts = np.zeros(len(order), "i8")
    starts[order] = np.cumsum(counts[order]) - counts[order]
    rows = np.arange(len(version.digests)) + np.repeat(starts - (ends - counts), counts)
    digests = np.empty_like(version.digests)
    digests[rows] = version.digests
    shards = Shards(leaf[order].astype("<u4"), version.shard_rank[order], version.boxes[order])
    return Version.build(version.head, leaves, shards, digests), rows


def _leaves(version: Version, reference: Sequence[Path]) -> tuple[list[Leaf], Array]:
    """The leaves in the new order, and the old index of each; `_GAP` for leaves that were added to fill a list."""
    children = _children(version, _places(reference))
    found: list[tuple[Leaf, int]] = []
    root = version.leaf_index[encode_path(())]
    stack = [(version.leaves[root], root)]
    while stack:
        leaf, at = stack.pop()
        found.append((leaf, at))
        if at != _GAP:
            stack += reversed(list(_filled(version, leaf, children.get(at, []))))
    return [leaf for leaf, _ in found], np.array([at for _, at in found], "i8")


def _places(reference: Sequence[Path]) -> dict[str, int]:
    """The position of each path, and of each container of one, in the order in which they first appear."""
    place: dict[str, int] = {}
    for path in reference:
        for depth in range(1, len(path) + 1):
            place.setdefault(encode_path(path[:depth]), len(place))
    return place


def _children(version: Version, place: Mapping[str, int]) -> dict[int, list[int]]:
    """By index of a container, the indexes of its children, in order."""
    children: dict[int, list[int]] = {}
    for i, leaf in enumerate(version.leaves):
        if leaf.path:
            children.setdefault(version.leaf_index[encode_path(leaf.path[:-1])], []).append(i)
    texts = list(version.leaf_index)
    for parent, found in children.items():
        if version.leaves[parent].spec.kind in ("list", "tuple"):
            found.sort(key=lambda i: version.leaves[i].path[-1])
        else:
            found.sort(key=lambda i: (place.get(texts[i], len(place)), i))
    return children


def _filled(version: Version, parent: Leaf, found: Sequence[int]) -> Iterator[tuple[Leaf, int]]:
    """A container's children, with an empty dict for each missing item of a list: DCP has no key for empty dicts."""
    at, cause = 0, parent.spec.kind != "list"
    for i in found:
        key: Any = version.leaves[i].path[-1]
        while parent.spec.kind == "list" and at < key:
            yield Leaf((*parent.path, at), Spec("dict")), _GAP
            at, cause = at + 1, True
        yield version.leaves[i], i
        at, cause = at + 1, cause or version.leaves[i].spec.kind in _PARTS
    if found and not cause:
        # DCP would not have split a list of plain values only: it must have had an empty dict at its end.
        yield Leaf((*parent.path, at), Spec("dict")), _GAP


class RankLeaf(NamedTuple):
    """A leaf of which this rank has a shard, or a container of such leaves.

    Attributes:
        leaf: the leaf, with its global shape.
        box: the shard that this rank has.
        provider: streams the shard's bytes; None for a container.
    """

    leaf: Leaf
    box: Box
    provider: Provider | None = None


def plan_of(plan: SavePlan, planner: SavePlanner, allowed: PickleAllowed) -> tuple[CapturePlan, dict[Path, Any]]:
    """The plan of what a rank captures, and its list values, which the coordinator writes.

    Args:
        plan: the rank's final DCP save plan.
        planner: DCP's planner, which resolves the data.
        allowed: whether an object that is not a plain value may be pickled, by path.

    Raises:
        CaptureError: a value cannot be saved; the message names its key, type and a remedy.
    """
    listed: dict[Path, Any] = {}
    index: dict[str, int] = {}
    leaves: list[Leaf] = []
    sources: list[CaptureSource] = []
    devices: set[int] = set()
    for leaf, box, provider in _rank_leaves(plan, planner, allowed, listed):
        at = index.setdefault(encode_path(leaf.path), len(leaves))
        if at == len(leaves):
            leaves.append(leaf)
        elif leaves[at].spec != leaf.spec:
            raise CaptureError(f"{leaf.name} is there as {leaves[at].spec} and as {leaf.spec}")
        if provider is not None:
            sources.append(_source(at, leaf, box, provider, devices))
    sources.sort(key=lambda source: (source.leaf, source.box))
    return CapturePlan.of(leaves, sources, stream_fences(devices)), listed


def paths_of(planner_data: Any, keys: Iterator[str] | list[str]) -> list[Path]:
    """The path of each DCP key, from the planner's mapping; a key that is not in it becomes a path of one part."""
    known: Mapping[str, Any] = planner_data if isinstance(planner_data, Mapping) else {}
    return [tuple(known.get(key, (key,))) for key in keys]


def _rank_leaves(
    plan: SavePlan, planner: SavePlanner, allowed: PickleAllowed, listed: dict[Path, Any]
) -> Iterator[RankLeaf]:
    paths = paths_of(plan.planner_data, [item.index.fqn for item in plan.items])
    opened: set[Path] = set()
    survey = StateWalk(REGISTRY, allowed)
    yield _container((), "dict")
    for item, path in zip(plan.items, paths, strict=True):
        value = _value_of(item, planner, path) if item.type == WriteItemType.BYTE_IO else None
        if item.type == WriteItemType.BYTE_IO and is_list_value(path, value):
            listed[path] = value
            continue
        for depth in range(1, len(path)):
            if path[:depth] not in opened:
                opened.add(path[:depth])
                yield _container(path[:depth], "list" if type(path[depth]) is int else "dict")
        if item.type == WriteItemType.BYTE_IO:
            yield from _values(survey, value, path)
        else:
            yield _tensor(item, planner, path)


def _container(path: Path, kind: str) -> RankLeaf:
    return RankLeaf(Leaf(path, Spec(kind)), Box((), ()))


def _tensor(item: WriteItem, planner: SavePlanner, path: Path) -> RankLeaf:
    data, told = planner.resolve_data(item), item.tensor_data
    if not isinstance(data, torch.Tensor) or told is None:
        raise CaptureError(f"{format_path(path)}: the planner gave a {type(data).__qualname__} where a tensor is right")
    tensor, box = data.detach(), Box(tuple(told.chunk.offsets), tuple(told.chunk.sizes))
    if tuple(tensor.shape) != box.shape:
        raise CaptureError(f"{format_path(path)}: the planner gave {tuple(tensor.shape)} where {box.shape} is planned")
    try:
        provider = TensorProvider(tensor)
    except CaptureError as error:
        raise CaptureError(f"{format_path(path)}: {error}") from error
    spec = provider.spec
    return RankLeaf(Leaf(path, Spec(spec.kind, spec.dtype, spec.itemsize, tuple(told.size))), box, provider)


def _value_of(item: WriteItem, planner: SavePlanner, path: Path) -> Any:
    """The object that DCP would pickle."""
    if isinstance(planner, DefaultSavePlanner):
        cls = type(planner)
        if (cls.resolve_data, cls.transform_object) == (
            DefaultSavePlanner.resolve_data,
            DefaultSavePlanner.transform_object,
        ):
            return planner.lookup_object(item.index)  # the same as pickling and unpickling it, and faster
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise CaptureError(f"{format_path(path)}: the planner gave a {type(data).__qualname__} where bytes are right")
    data.seek(0)
    # This process has just made the pickle from its own object, so unpickling it runs no foreign code.
    return torch.load(data, weights_only=False)


def _values(survey: StateWalk, value: Any, path: Path) -> Iterator[RankLeaf]:
    for place in survey.take(value, path).walk():
        if place.provider is None:
            yield RankLeaf(Leaf(place.path, Spec(place.kind, attrs=place.attrs)), Box((), ()))
        else:
            spec = place.provider.spec
            yield RankLeaf(Leaf(place.path, spec), Box.whole(spec.shape), place.provider)


def _source(index: int, leaf: Leaf, box: Box, provider: Provider, devices: set[int]) -> CaptureSource:
    nbytes, device = box.volume * leaf.spec.itemsize, HOST
    if isinstance(provider, TensorProvider) and provider.value.is_cuda:
        device = provider.value.device.index
        devices.add(device)
    return CaptureSource(index, box, nbytes, provider.chunks, False, memory_of(provider, nbytes), device)
