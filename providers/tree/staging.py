"""Values of a given state whose memory overlaps: loaded into buffers, compared where they overlap, and then copied.

Tensors that share a storage are compared with the ties of the version before anything is read (`Comparison`). Other
values may share memory without a tie: shards, since they may be cut otherwise, NumPy arrays, tensors over the memory of
an array, and expanded tensors with themselves. They can be restored if they have equal bytes where they overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.format.leaf import Leaf
from tierstate.providers.base import Provider
from tierstate.providers.sharded.shards import ShardProvider, ShardsProvider, local_boxes_of, shard_provider
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tensors.extents import Extent, overlapping_runs, sharing_groups
from tierstate.providers.tensors.strided import Strided
from tierstate.providers.tensors.tensors import TensorProvider, allocate, tensor_spec

from .ties import copy_value


class OverlapStaging:
    """The values that overlap, and the buffers that their bytes are loaded into.

    Args:
        wanted: index of a leaf -> the provider that would receive its bytes; those that overlap are removed.

    Attributes:
        providers: index of a leaf that was removed -> the provider of its buffer.
    """

    def __init__(self, wanted: dict[int, Provider]) -> None:
        self._groups = list(_overlapping_values(wanted))
        self._real = {at.item: wanted.pop(at.item) for group in self._groups for at in group}
        self.providers = {leaf: _buffer_for(provider) for leaf, provider in self._real.items()}

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Compare the loaded bytes where values overlap. Changes no value.

        Raises:
            StateMismatch: values that share memory here are not equal there in the version.
        """
        for group in self._groups:
            start, stop = min(at.lo for at in group), max(at.hi for at in group)
            memory = np.zeros(stop - start, np.uint8)
            loaded = [_as_stored(self._real[at.item], self.providers[at.item]) for at in group]
            for at, data in zip(group, loaded, strict=True):
                at.elements(memory, start)[...] = data.reshape(*at.shape, at.itemsize)
            for at, data in zip(group, loaded, strict=True):
                if not np.array_equal(at.elements(memory, start), data.reshape(*at.shape, at.itemsize)):
                    raise StateMismatch(
                        f"{leaves[at.item].name}: shares memory with {_others(group, at, leaves)} here, and they are "
                        "not equal there in the version; give each memory of its own, as after .clone()"
                    )

    def write(self) -> None:
        """Copy the loaded bytes into the values."""
        for leaf, real in self._real.items():
            buffer: Any = self.providers[leaf]
            if isinstance(real, ShardsProvider):
                assert real.value is not None
                real.value.detach().copy_(buffer.value)
            else:
                copy_value(buffer, real)

    def done(self, leaf: int) -> Any:
        """The filled value of a leaf."""
        return self._real[leaf].done()


def _others(group: Sequence[Extent], at: Extent, leaves: Sequence[Leaf]) -> str:
    names = [leaves[other.item].name for other in group if other.item != at.item]
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else "itself"


def _buffer_for(provider: Any) -> Provider:
    """A provider of a new value like this provider's, with the same boxes."""
    if isinstance(provider, ArrayProvider):
        return ArrayProvider(np.empty(provider.spec.shape, provider.value.dtype))
    spec = tensor_spec(provider.value, tuple(provider.value.shape))
    buffer = allocate(replace(spec, attrs={}), provider.value.device)
    frame = local_boxes_of(provider)
    return TensorProvider(buffer) if frame is None else shard_provider(frame, buffer, provider.spec)


def _as_stored(real: Any, buffer: Any) -> np.ndarray[Any, Any]:
    """The loaded bytes as they will be in memory, ``(bytes,)``."""
    if isinstance(buffer, ArrayProvider):
        found: np.ndarray[Any, Any] = buffer.value.reshape(-1).view(np.uint8)
        return found
    return Strided(real.value).as_stored(Strided(buffer.value).bytes()).cpu().numpy()


def _overlapping_values(wanted: Mapping[int, Provider]) -> Iterator[list[Extent]]:
    """Groups of values of which one may be changed by loading another one, or that overlap with themselves."""
    for found in _values_by_device(wanted):
        if _lie_apart([value for _, value in found]):
            continue
        for run in overlapping_runs([_extent(index, value) for index, value in found]):
            groups = [[at] for at in run] if _are_compared(run, wanted) else sharing_groups(run)
            yield from (group for group in groups if len(group) > 1 or group[0].overlaps_itself)


def _values_by_device(wanted: Mapping[int, Provider]) -> Collection[list[tuple[int, Any]]]:
    """The arrays and tensors that have memory, of each device, with the indices of their leaves."""
    values: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for index, provider in wanted.items():
        if isinstance(provider, ArrayProvider):
            if provider.value.nbytes:
                values["cpu"].append((index, provider.value))
        elif type(provider) in (TensorProvider, ShardProvider, ShardsProvider):
            value: Any = provider.value  # type: ignore[attr-defined]
            if value is not None and value.numel():
                values["cpu" if value.is_cpu else str(value.device)].append((index, value))
    return values.values()


def _extent(index: int, value: Any) -> Extent:
    return Extent.of_tensor(value, index) if isinstance(value, torch.Tensor) else Extent.of_array(value, index)


def _lie_apart(values: Sequence[Any]) -> bool:
    """Whether all are contiguous tensors of memory of their own, as those of nearly every state are: told in a tenth of
    the time that a look at each extent takes."""
    if not all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in values):
        return False
    start = np.array([value.data_ptr() for value in values], "u8")
    order = np.argsort(start)
    stop = start + np.array([value.nbytes for value in values], "u8")
    return bool((start[order[1:]] >= stop[order[:-1]]).all())


def _are_compared(run: Sequence[Extent], wanted: Mapping[int, Provider]) -> bool:
    """Whether these are plain tensors of one storage: `Comparison` has compared them with the version's ties."""
    providers = [wanted[at.item] for at in run]
    storages = {p.value.untyped_storage().data_ptr() for p in providers if type(p) is TensorProvider}
    return len(storages) == 1 and all(type(p) is TensorProvider for p in providers)
