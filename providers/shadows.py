"""Shadows: memory of their own for shards that share memory, so that none of them is overwritten unnoticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tierstate.manifest.errors import StateMismatch
from tierstate.manifest.leaf import Leaf

from .base import Provider
from .shards import ShardProvider, ShardsProvider, frame_of, over
from .tensors import TensorProvider


class _Place(NamedTuple):
    """Where a leaf's value lies: addresses in bytes."""

    lo: int
    hi: int
    leaf: int


class Shadows:
    """Has shards whose memory may overlap that of other leaves filled apart, and then brought to where they lie.

    Plain tensors that share memory are tied in the version, or do not fit it. Shards need not be: the boxes that they
    are of their leaves differ. So all is well if they are equal where they overlap, which nobody knows before they have
    come.

    Args:
        wanted: what each leaf's bytes go into; changed.
    """

    def __init__(self, wanted: dict[int, Provider]) -> None:
        self._real: dict[int, tuple[Any, torch.Tensor]] = {}
        for index in _doubtful(wanted) if any(frame_of(provider) for provider in wanted.values()) else ():
            provider: Any = wanted[index]
            shadow = torch.empty(provider.value.shape, dtype=provider.value.dtype, device=provider.value.device)
            frame = frame_of(provider)
            wanted[index] = TensorProvider(shadow) if frame is None else over(frame, shadow, provider.spec)
            self._real[index] = provider, shadow

    def settle(self, leaves: Sequence[Leaf]) -> dict[int, Any]:
        """The values, filled, of those that were filled apart.

        Raises:
            StateMismatch: some share memory here, and are not equal there in the version.
        """
        for provider, shadow in self._real.values():
            provider.value.detach().copy_(shadow)
        for index, (provider, shadow) in self._real.items():
            if not torch.equal(_bytes(provider.value), _bytes(shadow)):
                raise StateMismatch(
                    f"{leaves[index].name}: shares memory with another leaf here, and they are not equal there in the "
                    "version; give each a tensor of its own, as after .clone()"
                )
        return {index: provider.done() for index, (provider, _) in self._real.items()}


def _doubtful(wanted: Mapping[int, Provider]) -> Iterator[int]:
    """Leaves whose extents in memory overlap, where shards are among them."""
    lying: dict[torch.device, list[_Place]] = defaultdict(list)
    for index, provider in wanted.items():
        if type(provider) in (TensorProvider, ShardProvider, ShardsProvider):
            value: Any = provider.value  # type: ignore[attr-defined]
            # One that overlaps itself is filled apart by its provider already.
            if value is not None and value.numel() and 0 not in value.stride():
                lying[value.device].append(_place(value, index))
    for places in lying.values():
        yield from (at for run in _touching(sorted(places)) if any(frame_of(wanted[i]) for i in run) for at in run)


def _place(value: torch.Tensor, index: int) -> _Place:
    reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return _Place(value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size(), index)


def _touching(places: Sequence[_Place]) -> Iterator[list[int]]:
    """Leaves whose extents overlap, directly or through others; those that are alone are left out."""
    run: list[int] = []
    end = 0
    for lo, hi, index in places:
        if lo >= end:
            if len(run) > 1:
                yield run
            run = []
        run.append(index)
        end = max(end, hi)
    if len(run) > 1:
        yield run


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
