"""DTensors: the boxes that a rank holds of a tensor on any mesh. Imported once a DTensor is met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierstate.manifest.errors import CaptureError

from .base import Provider
from .placing import Cut, Frame, frame, from_the_right, local_shape
from .shards import local_of, over
from .tensors import tensor_spec


def provider_of(value: DTensor) -> Provider:
    """The provider of a DTensor.

    Raises:
        CaptureError: it is not all there yet, or its local tensor is not what its placements say.
    """
    local, shape = local_of(value), tuple(value.shape)
    return over(_frame(value, local), local, tensor_spec(value, shape), holder=value, near=_near)


def _near(value: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    # What is in the spec, and not the spec: that can be given other placements.
    spec = value._spec
    return (
        value._local_tensor,
        value,
        (spec.mesh, spec.placements, spec.tensor_meta, getattr(spec, "shard_order", None)),
    )


def _frame(value: DTensor, local: torch.Tensor) -> Frame:
    """What the local tensor is of the global one; nothing on a rank that is not in the mesh."""
    shape, coordinate = tuple(value.shape), value.device_mesh.get_coordinate()
    cuts = tuple(_cuts(value, (0,) * len(value.placements) if coordinate is None else tuple(coordinate)))
    if coordinate is None:
        return Frame(shape, ())
    for meaning in (cuts, from_the_right(cuts)):
        if 0 in shape or local_shape(shape, meaning) == tuple(local.shape):
            return frame(shape, meaning)
    raise CaptureError(
        f"the local tensor has shape {tuple(local.shape)}, but {value.placements} of {shape} on a mesh of shape "
        f"{tuple(value.device_mesh.shape)} is {local_shape(shape, cuts)} on this rank; "
        "say where it lies by ts.Shard(tensor.to_local(), offset, global_shape)"
    )


def _cuts(value: DTensor, coordinate: tuple[int, ...]) -> Iterator[Cut]:
    mesh, placements = value.device_mesh, value.placements
    for at in _order(value):
        placement = placements[at]
        if placement.is_partial():
            raise CaptureError(
                f"a DTensor with {placement} placements is a sum (or the like) that is still to be made over its "
                "ranks; save it after tensor.redistribute(placements=[Replicate()]) or tensor.full_tensor()"
            )
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            split = int(getattr(placement, "split_factor", 1))
            yield Cut(dim % max(value.ndim, 1), mesh.size(at), coordinate[at], split)


def _order(value: DTensor) -> list[int]:
    """The mesh's dimensions in the order in which they cut: from left to right, where nothing else is said."""
    said = getattr(value._spec, "shard_order", None)
    order = [at for entry in said or () for at in entry.mesh_dims]
    return order + [at for at in range(len(value.placements)) if at not in order]


PROVIDERS = {DTensor: provider_of}
"""Providers by the type of a value."""
