"""DTensors: which boxes of the global tensor this rank holds, from its mesh and placements. Imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tierstate.manifest.errors import CaptureError
from tierstate.providers.base import Provider
from tierstate.providers.tensors.tensors import local_of, tensor_spec

from .mesh import Cut, LocalBoxes, local_boxes, local_shape, strided_last
from .shards import shard_provider


def dtensor_provider(value: DTensor) -> Provider:
    """The provider of a DTensor.

    Raises:
        CaptureError: it has partial placements, or its local tensor does not have the shape that its placements give.
    """
    local, shape = local_of(value), tuple(value.shape)
    return shard_provider(_frame(value, local), local, tensor_spec(value, shape), holder=value, near=_near)


def _near(value: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    # The fields of the spec, not the spec itself, since its placements can be changed.
    spec = value._spec
    return (
        value._local_tensor,
        value,
        (spec.mesh, spec.placements, spec.tensor_meta, getattr(spec, "shard_order", None)),
    )


def _frame(value: DTensor, local: torch.Tensor) -> LocalBoxes:
    """The boxes of the local tensor in the global one; none on a rank outside the mesh."""
    shape, coordinate = tuple(value.shape), value.device_mesh.get_coordinate()
    cuts = tuple(_cuts(value, (0,) * len(value.placements) if coordinate is None else tuple(coordinate)))
    if coordinate is None:
        return LocalBoxes(shape, ())
    for meaning in (cuts, strided_last(cuts)):
        if 0 in shape or local_shape(shape, meaning) == tuple(local.shape):
            return local_boxes(shape, meaning)
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
    """The mesh dimensions in the order in which they cut the tensor: by default from left to right."""
    said = getattr(value._spec, "shard_order", None)
    order = [at for entry in said or () for at in entry.mesh_dims]
    return order + [at for at in range(len(value.placements)) if at not in order]


PROVIDERS = {DTensor: dtensor_provider}
"""Providers by the type of a value."""
