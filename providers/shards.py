"""Shards: local tensors that are boxes of a global one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Self

import torch

from tierstate.manifest.box import Box, Shape
from tierstate.manifest.chunk import Buffer, Chunk
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Spec

from .base import Provider
from .placing import Frame, Piece
from .tensors import TensorProvider, check_tensor, tensor_spec

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that lie in one memory and are nothing but that."""

Near = Callable[[Any], tuple[torch.Tensor, torch.Tensor, Any]]
"""Of a value that lies in shards: its local tensor, the tensor that says whether it needs a gradient, and what, beside
these, the boxes depend on."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank: that of a DTensor is its local tensor's."""
    if type(tensor) in PLAIN:
        return tensor
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    return local  # type: ignore[no-any-return]


class ShardProvider(TensorProvider):
    """A local tensor that is one box of a global one.

    Its bytes and its memory are the local tensor's, its spec the global one's.

    Args:
        value: the local tensor.
        spec: that of the global tensor; None where the local one is the whole.
        box: what the local tensor is of it.
        holder: what lies in the state: what a restore gives back.
        near: where the local tensor of such a holder is found again.
    """

    def __init__(
        self,
        value: torch.Tensor,
        spec: Spec | None = None,
        box: Box | None = None,
        *,
        holder: Any = None,
        near: Near | None = None,
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
    def frame(self) -> Frame:
        """What the local tensor is of the global one."""
        return Frame.of_box(self.spec.shape, self._box)

    @cached_property
    def alias(self) -> Hashable:
        if self._holder is not None and self.near is None:
            return None if 0 in self._global.shape else ("holder", id(self._holder))
        return shared_alias(self.value, self.frame)

    def done(self) -> Any:
        value = super().done()
        return value if self._holder is None else touched(self._holder)


class ShardsProvider(Provider):
    """A value of which this rank holds several boxes, or none: each of its ``parts`` gives and takes its own bytes.

    Args:
        spec: the global tensor's.
        parts: one provider for each box.
        value: the local tensor that all of them are views of, if there is one.
        frame: what it is of the global tensor.
        holder, near: as for `ShardProvider`.
    """

    kind: ClassVar[str] = TensorProvider.kind

    def __init__(
        self,
        spec: Spec,
        parts: Sequence[Provider],
        *,
        value: torch.Tensor | None = None,
        frame: Frame | None = None,
        holder: Any = None,
        near: Near | None = None,
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
        """As a tensor's: equal for values that are the same boxes in the same memory. Of what has no one local tensor:
        for the same object, so that it is alike on a rank that holds nothing of it.
        """
        if self._holder is not None and self.near is None:
            return None if 0 in self._spec.shape else ("holder", id(self._holder))
        return None if self.value is None or self.frame is None else shared_alias(self.value, self.frame)

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
            return touched(self._holder)
        return found[0] if found else None

    def _refusal(self) -> TypeError:
        return TypeError(f"this rank holds {len(self._parts)} boxes of the value; ask each of its parts")


class Joint(ShardsProvider):
    """A value whose saved bytes also go to others: the leaves that are tied to it in a version, but not here.

    The boxes of its parts may overlap.
    """

    def __init__(self, first: Provider, others: Sequence[Provider]) -> None:
        parts = [part for provider in (first, *others) for part in provider.parts]
        super().__init__(first.spec, parts)
        self._first = first
        self.frame = frame_of(first)

    @cached_property
    def alias(self) -> Hashable:
        found: Hashable = getattr(self._first, "alias", None)
        return found

    def done(self) -> Any:
        return self._first.done()


def frame_of(provider: Provider | None) -> Frame | None:
    """What a shard is of its global tensor; None for what is no shard."""
    return provider.frame if isinstance(provider, (ShardProvider, ShardsProvider)) else None


def over(frame: Frame, local: torch.Tensor, spec: Spec, *, holder: Any = None, near: Near | None = None) -> Provider:
    """The provider of a local tensor that is made of these boxes: views of it, where it is more than one.

    Raises:
        CaptureError: as `TensorProvider`.
    """
    pieces = frame.pieces
    if len(pieces) == 1:
        return ShardProvider(_view(local, frame, pieces[0]), spec, pieces[0].box, holder=holder, near=near)
    parts = [ShardProvider(_view(local, frame, piece), spec, piece.box) for piece in pieces]
    return ShardsProvider(spec, parts, value=local, frame=frame, holder=holder, near=near)


def _view(local: torch.Tensor, frame: Frame, piece: Piece) -> torch.Tensor:
    shape = piece.box.shape
    if tuple(local.shape) == shape:
        return local
    if 0 in frame.shape:  # there is nothing to be a view of
        return local.detach().new_empty(shape)
    return local.detach()[tuple(slice(a, a + n) for a, n in zip(piece.at, shape, strict=True))]


def like(tensor: torch.Tensor, spec: Spec) -> torch.Tensor | None:
    """A new tensor, of any content, of a saved spec, that lies on the mesh as this DTensor does; None where that cannot
    be, since what was saved is of another shape.
    """
    fits = spec.kind == TensorProvider.kind and spec.shape == tuple(tensor.shape) and local_of(tensor) is not tensor
    return torch.empty_like(tensor, dtype=check_tensor(spec), requires_grad=False) if fits else None


def shared_alias(local: torch.Tensor, frame: Frame) -> Hashable:
    """Equal for local tensors that are the same view of the same memory and the same boxes; None where the global
    tensor has no elements.

    All ranks must come to the same ties, also one that holds nothing: its tensors are told apart by their storages.
    """
    if 0 in frame.shape:
        return None
    lies: Hashable = TensorProvider(local).alias if local.numel() else storage_mark(local)
    return ("shard", lies, local.dtype, frame)


def storage_mark(local: torch.Tensor) -> Hashable:
    """What is equal for tensors of one storage, also where it is an empty one."""
    storage = local.untyped_storage()
    return (local.device, storage.data_ptr() if storage.nbytes() else ("empty", storage._cdata))


def touched(holder: Any) -> Any:
    """The holder, whose tensor was changed in its memory: autograd is to know of it where it knows the holder."""
    if hasattr(holder, "_local_tensor") and not holder.is_inference():
        torch.autograd.graph.increment_version(holder)
    return holder


class Shard:
    """A tensor that is a box of a global one: ``{"table": ts.Shard(rows, (rank * 1000, 0), (8000, 64))}``.

    All ranks name the same global shape under the same path; together they must hold all of it. What several ranks
    hold is saved once. A restore fills the tensor in place, from whatever boxes the version was saved in.

    Args:
        tensor: this rank's part: a plain tensor.
        offset: index of its first element in the global tensor.
        global_shape: the global tensor's shape.

    Raises:
        ValueError: the tensor, put there, is not inside the global shape.
        CaptureError: it is a tensor that has no bytes of its own to save, as a sparse one or a DTensor.
    """

    def __init__(self, tensor: torch.Tensor, offset: Sequence[int], global_shape: Sequence[int]) -> None:
        self.tensor = tensor
        self.offset, self.global_shape = _numbers("offset", offset), _numbers("global_shape", global_shape)
        box = Box(self.offset, tuple(tensor.shape))
        if not box.within(self.global_shape):
            raise ValueError(
                f"a tensor of shape {box.shape} at offset {self.offset} does not lie in {self.global_shape}; offset "
                "and global_shape have a number for each of its dimensions, and offset + shape is at most global_shape"
            )
        TensorProvider(tensor)  # which says what cannot be saved

    def __repr__(self) -> str:
        return f"Shard({tuple(self.tensor.shape)} at {self.offset} of {self.global_shape})"

    def __state_provider__(self) -> Provider:
        local, box = self.tensor, Box(self.offset, tuple(self.tensor.shape))
        if not box.within(self.global_shape):
            raise CaptureError(f"{self!r}: the tensor was given another shape, which does not lie there")
        spec, whole = tensor_spec(local, self.global_shape), 0 in self.global_shape
        if box.volume or whole:
            found = Frame.of_box(self.global_shape, Box.whole(self.global_shape) if whole else box)
        else:
            found = Frame(self.global_shape, ())
        return over(found, local, spec, holder=self, near=_near)


def _near(shard: Shard) -> tuple[torch.Tensor, torch.Tensor, tuple[Shape, Shape]]:
    return shard.tensor, shard.tensor, (shard.offset, shard.global_shape)


def _numbers(name: str, given: Sequence[int]) -> Shape:
    try:
        return tuple(n.__index__() for n in given)
    except (TypeError, AttributeError):
        raise ValueError(f"{name}={given!r:.80} is no sequence of ints") from None
