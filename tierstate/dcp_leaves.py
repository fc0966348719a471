"""A rank's items of a DCP plan as leaves and shards: DCP's keys as paths, its pickles as plain values."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tierstate.manifest.box import Box
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Leaf, Path, Spec, encode_path, format_path
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.registry import REGISTRY
from tierstate.providers.survey import Survey
from tierstate.providers.tensors import TensorProvider
from tierstate.tiers.devices import fences
from tierstate.tiers.plan import HOST, Plan, Source

from .dcp_lists import is_listed

Allowed = Callable[[Path], bool]


class Piece(NamedTuple):
    """A leaf of which this rank has something, or a container that holds one.

    Attributes:
        leaf: with its global shape.
        box: the part that this rank has.
        provider: what streams its bytes; None for a container.
    """

    leaf: Leaf
    box: Box
    provider: Provider | None = None


def plan_of(plan: SavePlan, planner: SavePlanner, allowed: Allowed) -> tuple[Plan, dict[Path, Any]]:
    """What a rank is to capture, and the plain values in lists that the coordinator writes.

    Args:
        plan: the rank's final plan.
        planner: gives the data.
        allowed: where objects that are no plain values may be pickled.

    Raises:
        CaptureError: something cannot be saved; the message names its key, type and remedy.
    """
    listed: dict[Path, Any] = {}
    index: dict[str, int] = {}
    leaves: list[Leaf] = []
    sources: list[Source] = []
    devices: set[int] = set()
    for leaf, box, provider in _pieces(plan, planner, allowed, listed):
        at = index.setdefault(encode_path(leaf.path), len(leaves))
        if at == len(leaves):
            leaves.append(leaf)
        elif leaves[at].spec != leaf.spec:
            raise CaptureError(f"{leaf.name} is there as {leaves[at].spec} and as {leaf.spec}")
        if provider is not None:
            sources.append(_source(at, leaf, box, provider, devices))
    sources.sort(key=lambda source: (source.leaf, source.box))
    return Plan.of(leaves, sources, fences(devices)), listed


def paths_of(planner_data: Any, keys: Iterator[str] | list[str]) -> list[Path]:
    """The path of each key, as the planner's mapping has it; a key that is not in it is a path of its own."""
    known: Mapping[str, Any] = planner_data if isinstance(planner_data, Mapping) else {}
    return [tuple(known.get(key, (key,))) for key in keys]


def _pieces(plan: SavePlan, planner: SavePlanner, allowed: Allowed, listed: dict[Path, Any]) -> Iterator[Piece]:
    paths = paths_of(plan.planner_data, [item.index.fqn for item in plan.items])
    opened: set[Path] = set()
    survey = Survey(REGISTRY, allowed)
    yield _container((), "dict")
    for item, path in zip(plan.items, paths, strict=True):
        value = _value_of(item, planner, path) if item.type == WriteItemType.BYTE_IO else None
        if item.type == WriteItemType.BYTE_IO and is_listed(path, value):
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


def _container(path: Path, kind: str) -> Piece:
    return Piece(Leaf(path, Spec(kind)), Box((), ()))


def _tensor(item: WriteItem, planner: SavePlanner, path: Path) -> Piece:
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
    return Piece(Leaf(path, Spec(spec.kind, spec.dtype, spec.itemsize, tuple(told.size))), box, provider)


def _value_of(item: WriteItem, planner: SavePlanner, path: Path) -> Any:
    """The object that DCP would pickle."""
    if isinstance(planner, DefaultSavePlanner):
        cls = type(planner)
        if (cls.resolve_data, cls.transform_object) == (
            DefaultSavePlanner.resolve_data,
            DefaultSavePlanner.transform_object,
        ):
            return planner.lookup_object(item.index)  # as pickling and unpickling it would give it
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise CaptureError(f"{format_path(path)}: the planner gave a {type(data).__qualname__} where bytes are right")
    data.seek(0)
    # Made a moment ago, by this process, of its own object: nobody else's code can be in it.
    return torch.load(data, weights_only=False)


def _values(survey: Survey, value: Any, path: Path) -> Iterator[Piece]:
    for place in survey.take(value, path).walk():
        if place.provider is None:
            yield Piece(Leaf(place.path, Spec(place.kind, attrs=place.attrs)), Box((), ()))
        else:
            spec = place.provider.spec
            yield Piece(Leaf(place.path, spec), Box.whole(spec.shape), place.provider)


def _source(index: int, leaf: Leaf, box: Box, provider: Provider, devices: set[int]) -> Source:
    nbytes, device = box.volume * leaf.spec.itemsize, HOST
    if isinstance(provider, TensorProvider) and provider.value.is_cuda:
        device = provider.value.device.index
        devices.add(device)
    return Source(index, box, nbytes, provider.chunks, False, memory_of(provider, nbytes), device)
