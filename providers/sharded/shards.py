"""Providers of sharded tensors: local tensors that are one or more boxes of a global tensor.

The spec is the global tensor's, the bytes are the local tensor's; a restore may use other boxes (reshard). With `Shard`
a user declares which box of a global tensor a plain tensor is. `TiedShards` loads tied leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Self

import torch

from tierstate.manifest.arguments import short_repr
from tierstate.manifest.boxes import Box, Shape
from tierstate.manifest.chunk import Buffer, Chunk
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Spec
from tierstate.providers.base import Provider
from tierstate.providers.tensors.tensors import TensorProvider, tensor_spec

from .mesh import LocalBox, LocalBoxes

FindLocal = Callable[[Any], tuple[torch.Tensor, torch.Tensor, Any]]
"""A sharded value -> its local tensor, the tensor whose ``requires_grad`` counts, and whatever else its boxes depend on
(compared by equality)."""


class ShardProvider(TensorProvider):
    """A local tensor that is one box of a global one.

    Its bytes and its memory are the local tensor's, its spec the global one's.

    Args:
        value: the local tensor.
        spec: the spec of the global tensor; None if the local tensor is the whole.
        box: the box of the local tensor.
        holder: the sharded value in the state (a DTensor, say), which a restore returns.
        near: returns the local tensor of such a holder.
    """

    def __init__(
        self,
        value: torch.Tensor,
        spec: Spec | None = None,
        box: Box | None = None,
        *,
        holder: Any = None,
        near: FindLocal | None = None,
    ) -> None:
        super().__init__(value)
        self._global = tensor_spec(value, tuple(value.shape)) if spec is None else spec
        self._box = Box.whole(tuple(value.shape)) if box is None else box
        self._holder, self.near = holder, near

    @cached_property
    def spec(self) -> Spec:
        return self._global

    @property
    def box(self) -> Box:
        return self._box

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return self._strided.nbytes

    @property
    def frame(self) -> LocalBoxes:
        """The boxes of the local tensor in the global one."""
        return LocalBoxes.of_box(self.spec.shape, self._box)

    @cached_property
    def alias(self) -> Hashable:
        if self._holder is not None and self.near is None:
            return None if 0 in self._global.shape else ("holder", id(self._holder))
        return shard_alias(self.value, self.frame)

    def done(self) -> Any:
        value = super().done()
        return value if self._holder is None else mark_modified(self._holder)


class ShardsProvider(Provider):
    """A value of which this rank holds several boxes, or none. Each box has its own provider in ``parts``.

    Args:
        spec: the global tensor's.
        parts: one provider for each box.
        value: the local tensor of which all parts are views, if there is one.
        frame: the boxes of the local tensor.
        holder, near: as for `ShardProvider`.
    """

    kind: ClassVar[str] = TensorProvider.kind

    def __init__(
        self,
        spec: Spec,
        parts: Sequence[Provider],
        *,
        value: torch.Tensor | None = None,
        frame: LocalBoxes | None = None,
        holder: Any = None,
        near: FindLocal | None = None,
    ) -> None:
        self._spec, self._parts, self.value, self.frame = spec, tuple(parts), value, frame
        self._holder, self.near = holder, near

    @property
    def spec(self) -> Spec:
        return self._spec

    @property
    def parts(self) -> Sequence[Provider]:
        return self._parts

    @cached_property
    def alias(self) -> Hashable:
        """Equal for values that are the same boxes in the same memory. A value without one local tensor is equal only
        to the same object; so the ties are also the same on a rank that holds nothing of it.
        """
        if self._holder is not None and self.near is None:
            return None if 0 in self._spec.shape else ("holder", id(self._holder))
        return None if self.value is None or self.frame is None else shard_alias(self.value, self.frame)

    @property
    def box(self) -> NoReturn:
        raise self._refusal()

    def chunks(self, size: int) -> Iterator[Chunk]:
        raise self._refusal()

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Self:
        return cls(spec, (TensorProvider.fresh(spec, device),))

    def receiver(self, spec: Spec) -> Provider:
        for part in self._parts:
            part.receiver(spec)
        return self

    def load(self, start: int, data: Buffer) -> None:
        raise self._refusal()

    def done(self) -> Any:
        found = [part.done() for part in self._parts]
        if self._holder is not None:
            return mark_modified(self._holder)
        return found[0] if found else None

    def _refusal(self) -> TypeError:
        return TypeError(f"this rank holds {len(self._parts)} boxes of the value; ask each of its parts")


class TiedShards(ShardsProvider):
    """A value whose saved bytes are also loaded into other values: leaves tied to it in the version, not in this state.

    The boxes of its parts may overlap.
    """

    def __init__(self, first: Provider, others: Sequence[Provider]) -> None:
        parts = [part for provider in (first, *others) for part in provider.parts]
        super().__init__(first.spec, parts)
        self._first = first
        self.frame = local_boxes_of(first)

    @cached_property
    def alias(self) -> Hashable:
        found: Hashable = getattr(self._first, "alias", None)
        return found

    def done(self) -> Any:
        return self._first.done()


def local_boxes_of(provider: Provider | None) -> LocalBoxes | None:
    """The boxes of a shard's provider in the global tensor; None for any other provider."""
    return provider.frame if isinstance(provider, (ShardProvider, ShardsProvider)) else None


def shard_provider(
    frame: LocalBoxes, local: torch.Tensor, spec: Spec, *, holder: Any = None, near: FindLocal | None = None
) -> Provider:
    """The provider of a local tensor that consists of these boxes; for several boxes the parts are views of it.

    Raises:
        CaptureError: as `TensorProvider`.
    """
    pieces = frame.pieces
    if len(pieces) == 1:
        return ShardProvider(_view(local, frame, pieces[0]), spec, pieces[0].box, holder=holder, near=near)
    parts = [ShardProvider(_view(local, frame, piece), spec, piece.box) for piece in pieces]
    return ShardsProvider(spec, parts, value=local, frame=frame, holder=holder, near=near)


def _view(local: torch.Tensor, frame: LocalBoxes, piece: LocalBox) -> torch.Tensor:
    shape = piece.box.shape
    if tuple(local.shape) == shape:
        return local
    if 0 in frame.shape:  # an empty tensor has nothing to view
        return local.detach().new_empty(shape)
    return local.detach()[tuple(slice(a, a + n) for a, n in zip(piece.at, shape, strict=True))]


def shard_alias(local: torch.Tensor, frame: LocalBoxes) -> Hashable:
    """Equal for local tensors that are the same view of the same memory and the same boxes; None where the global
    tensor has no elements.

    All ranks must find the same ties, also a rank that holds nothing: its tensors are compared by their storages.
    """
    if 0 in frame.shape:
        return None
    lies: Hashable = TensorProvider(local).alias if local.numel() else storage_id(local)
    return ("shard", lies, local.dtype, frame)


def storage_id(local: torch.Tensor) -> Hashable:
    """A key that is equal for tensors of the same storage, also if it is empty."""
    storage = local.untyped_storage()
    return (local.device, storage.data_ptr() if storage.nbytes() else ("empty", storage._cdata))


def mark_modified(holder: Any) -> Any:
    """Tell autograd that the memory of the holder's tensor was changed; returns the holder."""
    if hasattr(holder, "_local_tensor") and not holder.is_inference():
        torch.autograd.graph.increment_version(holder)
    return holder


class Shard:
    """A tensor that is a box of a global one: ``{"table": ts.Shard(rows, (rank * 1000, 0), (8000, 64))}``.

    All ranks give the same global shape under the same path; together they must hold all of it. A box that several
    ranks hold is saved once. A restore fills the tensor in place, also from a version with other boxes.

    Args:
        tensor: this rank's part: a plain tensor.
        offset: index of its first element in the global tensor.
        global_shape: the global tensor's shape.

    Raises:
        TypeError: it is no tensor.
        ValueError: the tensor at this offset is not inside the global shape.
        CaptureError: the tensor is not a plain strided one: for example it is sparse, or a DTensor.
    """

    def __init__(self, tensor: torch.Tensor, offset: Sequence[int], global_shape: Sequence[int]) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor {short_repr(tensor)}: give the part of the global tensor that this rank has")
        self.tensor = tensor
        self.offset, self.global_shape = _numbers("offset", offset), _numbers("global_shape", global_shape)
        box = Box(self.offset, tuple(tensor.shape))
        if not box.within(self.global_shape):
            raise ValueError(
                f"a tensor of shape {box.shape} at offset {self.offset} does not lie in {self.global_shape}; offset "
                "and global_shape have a number for each of its dimensions, and offset + shape is at most global_shape"
            )
        TensorProvider(tensor)  # raises if the tensor cannot be saved

    def __repr__(self) -> str:
        return f"Shard({tuple(self.tensor.shape)} at {self.offset} of {self.global_shape})"

    def __state_provider__(self) -> Provider:
        local, box = self.tensor, Box(self.offset, tuple(self.tensor.shape))
        if not box.within(self.global_shape):
            raise CaptureError(f"{self!r}: the tensor was given another shape, which does not lie there")
        spec, whole = tensor_spec(local, self.global_shape), 0 in self.global_shape
        if box.volume or whole:
            found = LocalBoxes.of_box(self.global_shape, Box.whole(self.global_shape) if whole else box)
        else:
            found = LocalBoxes(self.global_shape, ())
        return shard_provider(found, local, spec, holder=self, near=_near)


def _near(shard: Shard) -> tuple[torch.Tensor, torch.Tensor, tuple[Shape, Shape]]:
    return shard.tensor, shard.tensor, (shard.offset, shard.global_shape)


def _numbers(name: str, given: Sequence[int]) -> Shape:
    try:
        return tuple(n.__index__() for n in given)
    except (TypeError, AttributeError):
        raise ValueError(f"{name}={given!r:.80} is no sequence of ints") from None
