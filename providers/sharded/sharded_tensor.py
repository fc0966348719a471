"""ShardedTensors, as FSDP1 returns them with SHARDED_STATE_DICT. Imported when the first one is seen."""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import Provider
from tierstate.providers.tensors.dtypes import torch_name
from tierstate.providers.tensors.tensors import TensorProvider

from .mesh import LocalBox, LocalBoxes
from .shards import ShardProvider, ShardsProvider


def sharded_tensor_provider(value: ShardedTensor) -> Provider:
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
            pieces.append(LocalBox(box, (0,) * len(shape)))
    frame = LocalBoxes(shape, tuple(pieces))
    if len(parts) == 1:
        return ShardProvider(parts[0].value, spec, parts[0].box, holder=value)
    return ShardsProvider(spec, parts, frame=frame, holder=value)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether a shard is a flat parameter, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return bool(getattr(base, "_is_flat_param", False))


PROVIDERS = {ShardedTensor: sharded_tensor_provider}
"""Providers by the type of a value."""
