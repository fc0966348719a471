"""ShardedTensors, as FSDP1 gives them under SHARDED_STATE_DICT. Imported once one is met."""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tierstate.manifest.box import Box
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Spec

from .base import Provider
from .dtypes import torch_name
from .placing import Frame, Piece
from .shards import ShardProvider, ShardsProvider
from .tensors import TensorProvider


def provider_of(value: ShardedTensor) -> Provider:
    """The provider of a ShardedTensor.

    Raises:
        CaptureError: it is a flat parameter of FSDP1, or a shard that cannot be saved.
    """
    metadata = value.metadata()
    dtype, shape = metadata.tensor_properties.dtype, tuple(metadata.size)
    attrs = {"requires_grad": True} if metadata.tensor_properties.requires_grad else {}
    spec = Spec(TensorProvider.kind, torch_name(dtype), dtype.itemsize, shape, attrs)
    parts, pieces = [], []
    for shard in value.local_shards():
        if _is_flat(shard.tensor):
            raise CaptureError(
                "a flat parameter of FSDP1, as LOCAL_STATE_DICT gives it, fits no other number of ranks; save under "
                "FSDP.set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT)"
            )
        box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        if box.volume:
            parts.append(ShardProvider(shard.tensor, spec, box))
            pieces.append(Piece(box, (0,) * len(shape)))
    frame = Frame(shape, tuple(pieces))
    if len(parts) == 1:
        return ShardProvider(parts[0].value, spec, parts[0].box, holder=value)
    return ShardsProvider(spec, parts, frame=frame, holder=value)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether a shard is a flat parameter, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return bool(getattr(base, "_is_flat_param", False))


PROVIDERS = {ShardedTensor: provider_of}
"""Providers by the type of a value."""
