"""Ties read back: leaves that are views of another leaf's memory, checked and made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import FormatError
from tierstate.manifest.leaf import STORAGE, TIED, Leaf, Spec

from .base import Provider
from .strided import WORDS, Strided
from .tensors import MAX_BYTES, TensorProvider, check_tensor, dress

_TIE_ATTRS = frozenset({"to", "offset", "strides", "conj", "neg"})
_COPY = 1 << 22


@dataclass(frozen=True, slots=True)
class Tie:
    """A tied leaf.

    Attributes:
        root: index of the leaf that has the bytes.
        spec: what the tied value is, as if it were saved by itself.
        offset: bytes from the root's first byte; None where the value is the root's.
        strides: elements of the value's own dtype, where there is an offset.
        conj, neg: whether the view is a lazy conjugate, a lazy negative.
    """

    root: int
    spec: Spec
    offset: int | None = None
    strides: tuple[int, ...] = ()
    conj: bool = False
    neg: bool = False

    def view(self, root: torch.Tensor) -> torch.Tensor:
        """The view of the loaded root, which is contiguous or is copied."""
        dtype, size = check_tensor(self.spec), self.spec.itemsize
        if not Strided(root).dense:
            root = _compact(root)
        first = root.storage_offset() * root.element_size() + (self.offset or 0)
        unit = WORDS.get(size, dtype)
        view = torch.empty(0, dtype=unit, device=root.device)
        view.set_(root.untyped_storage(), first // size, self.spec.shape, self.strides)
        view = view.view(dtype).detach()
        view = view.conj() if self.conj else view
        return torch._neg_view(view) if self.neg else view

    def of(self, root: Any, saved: Spec) -> Any:
        """The tied value for a fresh state: the root itself wherever it can be."""
        if self.offset is None and (not isinstance(root, torch.Tensor) or _flags(saved) == _flags(self.spec)):
            return root
        view = root.detach() if self.offset is None else self.view(root)
        return dress(view, self.spec.attrs)


def read_ties(leaves: Sequence[Leaf], index: Mapping[str, int]) -> dict[int, Tie]:
    """The tied leaves of a version that may come from anybody, by their index.

    Raises:
        FormatError: tied to nothing, to a tied leaf, to what has no bytes, or beyond the root's bytes.
    """
    ties = {}
    for i, leaf in enumerate(leaves):
        if leaf.spec.kind == TIED:
            try:
                ties[i] = _read(leaf.spec, leaves, index)
            except FormatError as error:
                raise FormatError(f"{leaf.name}: {error}") from error
    return ties


def _read(tied: Spec, leaves: Sequence[Leaf], index: Mapping[str, int]) -> Tie:
    to = tied.attrs.get("to")
    at = index.get(to) if isinstance(to, str) else None
    if at is None or not leaves[at].spec.has_bytes:
        raise FormatError(f"is tied to {to!r:.80}, which is no leaf with bytes")
    root = leaves[at].spec
    attrs = {key: value for key, value in tied.attrs.items() if key not in _TIE_ATTRS}
    if root.kind not in (TensorProvider.kind, STORAGE) or "offset" not in tied.attrs:
        if (tied.dtype, tied.itemsize, tied.shape) != (root.dtype, root.itemsize, root.shape) or root.kind == STORAGE:
            raise FormatError(f"is {tied.dtype} {tied.shape}, but tied to {leaves[at].name}, {root.dtype} {root.shape}")
        return Tie(at, Spec(root.kind, tied.dtype, tied.itemsize, tied.shape, attrs))
    spec = Spec(TensorProvider.kind, tied.dtype, tied.itemsize, tied.shape, attrs)
    conj, neg = tied.attrs.get("conj") is True, tied.attrs.get("neg") is True
    dtype = check_tensor(spec)
    if (conj and not dtype.is_complex) or (neg and not (dtype.is_complex or dtype.is_floating_point)):
        raise FormatError(f"a tensor of {tied.dtype} is no lazy conjugate or negative")
    offset, strides = tied.attrs["offset"], tied.attrs.get("strides")
    return Tie(at, spec, offset, _extent(spec, offset, strides, root.nbytes), conj, neg)


def _extent(spec: Spec, offset: Any, strides: Any, nbytes: int) -> tuple[int, ...]:
    """The strides, if they stay within the root's bytes."""
    numbers = [offset, *strides] if isinstance(strides, list) else []
    if len(numbers) != len(spec.shape) + 1 or not all(type(n) is int and 0 <= n <= MAX_BYTES for n in numbers):
        raise FormatError(f"offset {offset!r:.40} and strides {strides!r:.40} are no place in {nbytes} bytes")
    reach = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
    end = 0 if 0 in spec.shape else offset + (reach + 1) * spec.itemsize
    if offset % spec.itemsize or end > nbytes:
        raise FormatError(f"ends at byte {end} of {nbytes}, from {offset} on; that is outside, or not aligned")
    return tuple(strides)


class Placement(NamedTuple):
    """Where a leaf lies: two of the same root share memory as far as their offsets and strides, in bytes, say."""

    root: Any
    offset: int
    strides: tuple[int, ...]
    lazy: tuple[bool, bool]


def placement(root: Any, spec: Spec, attrs: Mapping[str, Any]) -> Placement:
    """Where a leaf of this spec lies by its tie's attributes; dense from the first byte, where they have no offset."""
    strides = attrs["strides"] if "offset" in attrs else _dense(spec.shape)
    in_bytes = tuple(s * spec.itemsize if n > 1 else 0 for s, n in zip(strides, spec.shape, strict=True))
    return Placement(root, attrs.get("offset", 0), in_bytes, (bool(attrs.get("conj")), bool(attrs.get("neg"))))


def pour(source: Provider, sink: Provider) -> None:
    """Copy one value's bytes into another of the same spec, piece by piece."""
    for start, nbytes, fill in source.chunks(_COPY):
        piece = empty_buffer(nbytes)
        event = fill(piece)
        if event is not None:
            event.synchronize()
        loaded = sink.load(start, piece)
        if loaded is not None:
            loaded.synchronize()


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _flags(spec: Spec) -> tuple[bool, bool]:
    return spec.attrs.get("parameter") is True, spec.attrs.get("requires_grad") is True


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, bit for bit."""
    spec = TensorProvider(tensor).spec
    copy = TensorProvider.fresh(Spec(spec.kind, spec.dtype, spec.itemsize, spec.shape), tensor.device)
    pour(TensorProvider(tensor), copy)
    return copy.value
