"""Maps a DCP save plan to leaves and shards: keys become paths, objects that DCP would pickle become plain values.

DCP splits lists, such as an optimizer's groups, into items; `list_leaves` joins them again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tierstate.engine.capture.plan import HOST, CapturePlan, CaptureSource
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.leaf_path import Path, encode_path, format_path
from tierstate.manifest.sharded.state_order import StateOrder, new_numbers, ordered_leaves
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.registry import REGISTRY
from tierstate.providers.tensors.devices import copies_beside, wait_for
from tierstate.providers.tensors.tensors import FLAT_PARAMETER, TensorProvider, is_flat_parameter
from tierstate.providers.tree.walk import StateWalk
from tierstate.providers.values.encoding import encode_value
from tierstate.tiers.memory.cuda import stream_fences

from .staging import StagingFailed

ListValues = Mapping[Path, Any]
"""*List values*: plain values at paths through a list, by path."""


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


class RankValues(NamedTuple):
    """What one rank saves.

    Attributes:
        leaves: its leaves.
        listed: its list values, which the coordinator saves for all ranks.
        whole: the containers that DCP takes for one value each. It does not look into tuples, for example, nor into
            lists of arrays.
    """

    leaves: list[RankLeaf]
    listed: ListValues
    whole: list[Path]

    @property
    def split(self) -> set[Path]:
        """The outermost lists that have leaves in them which are no list values: such lists are not one value."""
        paths = (leaf.path for leaf, _, provider in self.leaves if provider is not None)
        return {root for path in paths if (root := _root(path)) is not None}


def list_leaves(listed: ListValues, split: Collection[Path]) -> Iterator[RankLeaf]:
    """The leaves of the list values of all ranks.

    A list of only plain values is one value, as a `Checkpointer` saves it. Plain values of other lists are leaves of
    their own.

    Args:
        listed: the list values of all ranks.
        split: the lists of all ranks that have other leaves in them; see `RankValues.split`.
    """
    values: dict[Path, Any] = {}
    for path, value in listed.items():
        root = _root(path)
        if root is None or root in split:
            values[path] = value
        else:
            _put(values.setdefault(root, []), path[len(root) :], value)
    for path, value in values.items():
        for depth in range(len(path)):
            yield _container(path[:depth], "list" if type(path[depth]) is int else "dict")
        place = StateWalk(REGISTRY).take(_with_end(value) if path not in listed else value, path)
        assert place.provider is not None  # everything in it is plain
        spec = place.provider.spec
        yield RankLeaf(Leaf(path, spec), Box.whole(spec.shape), place.provider)


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


class LeafTables:
    """Makes the capture plans of a run. Leaves that are as in the plan before are the same objects, so that a version
    with the same leaves is described without encoding them again."""

    def __init__(self) -> None:
        self._last: dict[str, Leaf] = {}

    def plan(self, found: Iterable[RankLeaf], order: StateOrder | None = None) -> CapturePlan:
        """The plan that captures these leaves.

        Args:
            found: the leaves; containers may come more than once, and a leaf with several shards once for each.
            order: of the leaves of the state; None: leaves stay in the given order.

        Raises:
            CaptureError: the same path is given as different leaves.
        """
        index: dict[str, int] = {}
        leaves: list[Leaf] = []
        parts: list[tuple[int, RankLeaf]] = []
        for one in found:
            at = index.setdefault(encode_path(one.leaf.path), len(leaves))
            if at == len(leaves):
                leaves.append(one.leaf)
            elif leaves[at].spec != one.leaf.spec:
                raise CaptureError(f"{one.leaf.name} is there as {leaves[at].spec} and as {one.leaf.spec}")
            parts.append((at, one))
        if order is not None:
            leaves, old = ordered_leaves(leaves, index, order)
            moved = new_numbers(old, len(index)).tolist()
            parts = [(moved[at], one) for at, one in parts]
        devices: set[int] = set()
        sources = [_source(at, one, devices) for at, one in parts if one.provider is not None]
        sources.sort(key=lambda source: (source.leaf, source.box))
        return CapturePlan.of(self._known(leaves), sources, stream_fences(devices))

    def _known(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        last, now = self._last, dict[str, Leaf]()
        for leaf in leaves:
            path = encode_path(leaf.path)
            before = last.get(path)
            # Attributes may be equal and not the same: 1 and True.
            same = before is not None and before.spec == leaf.spec and not leaf.spec.attrs
            now[path] = before if same and before is not None else leaf
        self._last = now
        return list(now.values())


def values_of(plan: SavePlan, planner: SavePlanner, allowed: PickleAllowed) -> RankValues:
    """What a rank saves.

    Args:
        plan: the rank's final DCP save plan.
        planner: DCP's planner, which resolves the data.
        allowed: whether an object that is not a plain value may be pickled, by path.

    Raises:
        CaptureError: a value cannot be saved; the message names its key, type and a remedy.
    """
    listed, whole = dict[Path, Any](), list[Path]()
    return RankValues(list(_rank_leaves(plan, planner, allowed, listed, whole)), listed, whole)


def paths_of(planner_data: Any, keys: Iterator[str] | list[str]) -> list[Path]:
    """The path of each DCP key, from the planner's mapping; a key that is not in it becomes a path of one part."""
    known: Mapping[str, Any] = planner_data if isinstance(planner_data, Mapping) else {}
    return [tuple(known.get(key, (key,))) for key in keys]


def _rank_leaves(
    plan: SavePlan, planner: SavePlanner, allowed: PickleAllowed, listed: dict[Path, Any], whole: list[Path]
) -> Iterator[RankLeaf]:
    paths = paths_of(plan.planner_data, [item.index.fqn for item in plan.items])
    opened: set[Path] = set()
    survey = StateWalk(REGISTRY, allowed)
    yield _container((), "dict")
    for item, path in zip(plan.items, paths, strict=True):
        value = _value_of(item, planner, path) if item.type == WriteItemType.BYTE_IO else None
        if isinstance(value, StagingFailed):
            raise value.error
        if item.type == WriteItemType.BYTE_IO and is_list_value(path, value):
            listed[path] = value
            continue
        for depth in range(1, len(path)):
            if path[:depth] not in opened:
                opened.add(path[:depth])
                yield _container(path[:depth], "list" if type(path[depth]) is int else "dict")
        if item.type == WriteItemType.BYTE_IO:
            values = list(_values(survey, value, path))
            if values[0].provider is None:
                whole.append(path)
            yield from values
        else:
            yield _tensor(item, planner, path)


def _container(path: Path, kind: str) -> RankLeaf:
    return RankLeaf(Leaf(path, Spec(kind)), Box((), ()))


def _tensor(item: WriteItem, planner: SavePlanner, path: Path) -> RankLeaf:
    data, told = planner.resolve_data(item), item.tensor_data
    if not isinstance(data, torch.Tensor) or told is None:
        raise CaptureError(f"{format_path(path)}: the planner gave a {type(data).__qualname__} where a tensor is right")
    if is_flat_parameter(data):
        raise CaptureError(f"{format_path(path)}: {FLAT_PARAMETER}")
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


def _source(index: int, one: RankLeaf, devices: set[int]) -> CaptureSource:
    (leaf, box, provider), device = one, HOST
    assert provider is not None
    nbytes = box.volume * leaf.spec.itemsize
    if isinstance(provider, TensorProvider) and copies_beside(provider.value.device):
        device = provider.value.device.index
        devices.add(device)
    elif isinstance(provider, TensorProvider):
        wait_for(provider.value.device)
    return CaptureSource(index, box, nbytes, provider.chunks, False, memory_of(provider, nbytes), device)
