"""The provider of torch tensors of any dtype, stride and device.

Bytes are read and written in place. Copies to and from devices are ordered with the caller's work as `devices` says.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch

from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, Chunk, DeviceChunk, Event, spans
from tierstate.manifest.errors import CaptureError, FormatError, StateMismatch
from tierstate.manifest.format.leaf import STRIDES, Spec
from tierstate.providers.base import Provider

from .devices import CPU, caller_waits_for_uploads, copies_beside, refusal, upload, uploads_wait_for_caller
from .dtypes import QUANTIZED_DTYPES, torch_dtype, torch_name
from .host_memory import HostAllocator
from .strided import INT_DTYPES, Strided, copy_box, row_major_strides, storage_elements

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Tensor types that have one storage and no further state."""


MAX_TENSOR_BYTES = 1 << 56


MAX_TENSOR_DIMS = 64


_GATHERING = threading.Lock()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the local tensor of a DTensor: the one whose memory this rank has."""
    if type(tensor) in PLAIN_TENSORS:
        return tensor
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    return local  # type: ignore[no-any-return]


def is_meta(value: Any) -> bool:
    """Whether a value is a plain tensor that has a shape and a dtype, and no memory (device ``meta``)."""
    return type(value) in PLAIN_TENSORS and bool(value.is_meta)


class TensorProvider(Provider):
    """A strided tensor, streamed out of and into its own memory.

    The bytes are the elements in row-major order, with a lazy conjugate or negative applied. A capture from CUDA runs
    on the current stream.

    Raises:
        CaptureError: a sparse, nested, quantized or meta tensor, one whose memory was freed, one of a device that is
            not supported (see `devices`), or a tensor subclass that is not part of torch.
    """

    kind: ClassVar[str] = "tensor"

    def __init__(self, value: torch.Tensor) -> None:
        reason = _refusal(value)
        if reason:
            raise CaptureError(reason)
        self._value = value
        self._strided = Strided(value)
        self._saved: Spec | None = None  # set if the value was created for a restore
        self._gathered: Buffer | None = None
        self._uploaded = False

    @cached_property
    def spec(self) -> Spec:
        if self._saved is not None:
            return self._saved
        spec, strides = tensor_spec(self._value, tuple(self._value.shape), self.kind), strides_to_save(self._value)
        return spec if strides is None else replace(spec, attrs={**spec.attrs, STRIDES: strides})

    @property
    def value(self) -> torch.Tensor:
        """The tensor itself."""
        return self._value

    @property
    def storage_address(self) -> int:
        """Where the tensor's storage begins: tensors of different ones share no memory."""
        return self._strided.storage_address

    def mismatch(self, spec: Spec) -> str:
        value = self._value
        # Without this tensor's own spec, which takes longer to make than all the rest of a comparison.
        plain = type(self) is TensorProvider and self._saved is None and spec.kind == TensorProvider.kind
        alike = plain and spec.shape == value.shape and spec.dtype == torch_name(value.dtype)
        return "" if alike else super().mismatch(spec)

    @cached_property
    def alias(self) -> Hashable:
        """Equal for tensors that are the same view of the same memory; None for one without elements."""
        value = self._value
        if value.numel() == 0:
            return None
        strides = tuple(s if n > 1 else 0 for s, n in zip(value.stride(), value.shape, strict=True))
        lazy = (value.is_conj(), value.is_neg())
        return (self.kind, value.device, value.data_ptr(), value.dtype, tuple(value.shape), strides, lazy)

    def chunks(self, size: int) -> Iterator[Chunk]:
        data = self.on_device()
        if data is not None and 0 < self._strided.nbytes <= size:
            return iter((DeviceChunk.of(0, data, partial(self._fill, 0)),))
        return self._cut(data, size)

    def _cut(self, data: Buffer | None, size: int) -> Iterator[Chunk]:
        for start, nbytes in spans(self._strided.nbytes, size):
            fill = partial(self._fill, start)
            yield (
                Chunk(start, nbytes, fill)
                if data is None
                else DeviceChunk.of(start, data[start : start + nbytes], fill)
            )

    def _fill(self, start: int, out: Buffer) -> Event | None:
        self._strided.read(start, out)
        device = self._strided.device
        if not copies_beside(device):
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def memory(self) -> Buffer | None:
        strided = self._strided
        return strided.bytes() if strided.dense and strided.on_host else None

    def on_device(self) -> Buffer | None:
        """The tensor's own memory, if that is contiguous memory of a device whose copies are queued on streams."""
        strided = self._strided
        return strided.bytes() if strided.dense and copies_beside(strided.device) else None

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None, blocks: HostAllocator | None = None) -> Self:
        """A provider that creates a tensor from a saved spec; on the host from ``blocks``, if given."""
        provider = cls(allocate(spec, device or CPU, blocks))
        provider._saved = spec
        uploads_wait_for_caller(provider._strided.device)
        return provider

    def receiver(self, spec: Spec) -> Provider:
        if not self._strided.on_host:
            uploads_wait_for_caller(self._strided.device)
        return self

    def load(self, start: int, data: Buffer) -> Event | None:
        strided = self._strided
        if strided.direct and copies_beside(strided.device) and data.device in (CPU, strided.device):
            self._uploaded = True
            return upload(strided.device, partial(strided.write, start, data))
        if strided.direct:
            strided.write(start, data)
            if data.is_cuda:  # the caller may reuse its buffer as soon as this returns
                torch.cuda.current_stream(data.device).synchronize()
            return None
        self._gather()[start : start + data.numel()].copy_(data)
        return None

    def scatter(self, at: Box, data: Buffer, part: Box) -> Event | None:
        strided, origin = self._strided, self.box.offset
        at, part = at.relative_to(origin), part.relative_to(origin)
        if strided.direct and copies_beside(strided.device) and data.device in (CPU, strided.device):
            self._uploaded = True
            return upload(strided.device, partial(strided.write_box, at, data, part))
        if strided.direct:
            strided.write_box(at, data, part)
        else:
            gathered = strided.as_elements(self._gather())
            copy_box(gathered, at, data.cpu().clone().view(gathered.dtype), part)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
        return None

    def _gather(self) -> Buffer:
        """A buffer that collects all bytes, where they cannot be written in place (`Strided.direct` is False)."""
        with _GATHERING:
            if self._gathered is None:
                self._gathered = torch.empty(self._strided.nbytes, dtype=torch.uint8, device=CPU)
            return self._gathered

    def done(self) -> torch.Tensor:
        if not self._strided.on_host and (self._uploaded or not copies_beside(self._strided.device)):
            caller_waits_for_uploads(self._strided.device)
        gathered, self._gathered = self._gathered, None
        if gathered is not None and not self._strided.write_all(gathered):
            raise StateMismatch(
                f"elements of the given tensor share memory (strides {self._value.stride()}), "
                "but are not equal in the version; give a tensor with memory for each element, as after .clone()"
            )
        if self._saved is not None:
            return with_autograd_flags(self._value, self._saved.attrs)
        if not self._value.is_inference():  # so that autograd notices a restore between forward and backward
            torch.autograd.graph.increment_version(self._value)
        return self._value


class StorageProvider(TensorProvider):
    """The raw bytes that several overlapping tensors are views of: a leaf of kind ``storage``."""

    kind: ClassVar[str] = "storage"


def tensor_spec(value: torch.Tensor, shape: tuple[int, ...], kind: str = TensorProvider.kind) -> Spec:
    """The spec of a tensor with this shape: the global shape, if the tensor is a shard."""
    attrs = {}
    if value.requires_grad:
        attrs["requires_grad"] = True
    if isinstance(value, torch.nn.Parameter):
        attrs["parameter"] = True
    return Spec(kind, torch_name(value.dtype), value.dtype.itemsize, shape, attrs)


def strides_to_save(value: torch.Tensor) -> list[int] | None:
    """The strides that a restored tensor shall have, in elements; None for those of row-major order.

    They are the tensor's own (channels_last, transposed, expanded), as ``torch.save`` keeps them. A tensor that leaves
    gaps in its memory gets none again: its dimensions stay in the same order, as after ``clone()``.
    """
    shape, strides = tuple(value.shape), value.stride()
    if value.is_contiguous() and 1 not in shape and 0 not in shape:
        return None  # the usual case; a dimension of length 1 may have any stride
    check_shape(shape, value.dtype.itemsize)  # one of another tensor is within the bounds: it has memory
    if storage_elements(shape, strides) > math.prod(shape):
        gaps = torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta")
        strides = torch.empty_like(gaps, memory_format=torch.preserve_format).stride()
    usual = strides == row_major_strides(shape) or max(strides) > MAX_TENSOR_BYTES
    return None if usual else list(strides)


def allocate(spec: Spec, device: torch.device, blocks: HostAllocator | None = None) -> torch.Tensor:
    """An uninitialised tensor of a spec that may be untrusted, with its strides.

    Args:
        blocks: the allocator for host memory; None for torch's own.

    Raises:
        FormatError: the spec does not describe a tensor.
        MemoryError: the allocator has not enough memory.
    """
    dtype, shape = check_tensor(spec), spec.shape
    unit = INT_DTYPES.get(dtype.itemsize, dtype)
    strides = spec.attrs.get(STRIDES, row_major_strides(shape))
    count = storage_elements(shape, strides)
    # Through integers: torch warns about making a complex32 tensor, and knows no empty() of some rare dtypes.
    if blocks is not None and device.type == "cpu":
        flat = blocks.take(count * dtype.itemsize).view(unit)
    else:
        flat = torch.empty(count, dtype=unit, device=device)
    return flat.as_strided(shape, strides).view(dtype).detach()


def check_tensor(spec: Spec) -> torch.dtype:
    """Check the spec of a tensor, which may be untrusted; returns its dtype.

    Raises:
        FormatError: the dtype is unknown, itemsize or attributes do not fit the dtype, or shape or strides are not
            valid.
    """
    dtype = torch_dtype(spec.dtype)
    if spec.itemsize != dtype.itemsize:
        raise FormatError(f"a tensor of {spec.dtype} has {dtype.itemsize} bytes per element, not {spec.itemsize!r:.20}")
    check_shape(spec.shape, dtype.itemsize)
    _check_strides(spec)
    if spec.kind == StorageProvider.kind and (dtype != torch.uint8 or len(spec.shape) != 1):
        raise FormatError(f"a storage is a run of uint8, not {spec.dtype} of shape {spec.shape}")
    if spec.attrs.get("requires_grad") is True and not (dtype.is_floating_point or dtype.is_complex):
        raise FormatError(f"a tensor of {spec.dtype} cannot require a gradient")
    return dtype


def _check_strides(spec: Spec) -> None:
    """Raises FormatError unless the strides of a spec, if it has any, take no more memory than its elements."""
    if STRIDES not in spec.attrs:
        return
    strides = spec.attrs[STRIDES]
    numbers = isinstance(strides, list) and all(type(n) is int and 0 <= n <= MAX_TENSOR_BYTES for n in strides)
    if spec.kind != TensorProvider.kind or not numbers or len(strides) != len(spec.shape):
        raise FormatError(f"{strides!r:.80} are no strides of a {spec.kind} of shape {spec.shape}")
    if storage_elements(spec.shape, strides) > math.prod(spec.shape):
        raise FormatError(f"strides {strides!r:.80} reach beyond the elements of shape {spec.shape}")


def check_shape(shape: tuple[int, ...], itemsize: int) -> None:
    """Raises FormatError if a shape is not valid, or too large for any memory."""
    sane = len(shape) <= MAX_TENSOR_DIMS and all(type(n) is int and n >= 0 for n in shape)
    if not sane or math.prod(max(n, 1) for n in shape) * max(itemsize, 1) > MAX_TENSOR_BYTES:
        raise FormatError(
            f"{shape!r:.80} is not a shape of at most {MAX_TENSOR_DIMS} dimensions and {MAX_TENSOR_BYTES} bytes"
        )


def with_autograd_flags(tensor: torch.Tensor, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The tensor as a Parameter, or requiring a gradient, where the attributes say so."""
    grad = attrs.get("requires_grad") is True
    if attrs.get("parameter") is True:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_() if grad else tensor


FLAT_PARAMETER = (
    "a flat parameter of FSDP1 is one rank's piece of many parameters; save the wrapped module itself, under "
    "FSDP.set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT)"
)
"""Why such a parameter cannot be saved."""


def is_flat_parameter(value: torch.Tensor) -> bool:
    """Whether this is a flat parameter of FSDP1 itself; a detached one has lost the mark."""
    return getattr(value, "_is_flat_param", False) is True


def _refusal(value: torch.Tensor) -> str:
    """Why a tensor cannot be saved; empty where it can."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        if torch.nn.parameter.is_lazy(value):
            return "a parameter of a lazy module has no shape yet; run the module once before it is saved"
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return f"a tensor subclass {kind} is not known; register a provider for it, or save a plain tensor"
    if is_flat_parameter(value):
        return FLAT_PARAMETER
    if value.is_nested:
        return "a nested tensor has no strides; save its parts, as from unbind()"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout} has no strides; save its parts, as indices() and values(), or dense"
    if torch_name(value.dtype) in QUANTIZED_DTYPES:
        return "a quantized tensor also has scales; save int_repr() with its scales and zero points"
    if value.is_meta:
        return "a meta tensor has no bytes; give it memory first, as with to_empty(device=...)"
    return (value.numel() > 0 and _lacks_memory(value)) or ("" if value.is_cpu else refusal(value.device))


def _lacks_memory(value: torch.Tensor) -> str:
    """Why a tensor's elements are not all in memory; empty where they are.

    torch does not check it: a copy reads or writes what lies behind the storage, and a view makes the storage longer.
    """
    try:
        address = value.data_ptr()
    except RuntimeError:
        return (
            "a tensor inside a transform of torch.func, as vmap or grad, has no memory of its own; save outside of it"
        )
    # Without an address there is no memory, whatever the storage says: of zeros of autograd, for one.
    held = value.untyped_storage().nbytes() if address else 0
    span = value.numel() if value.is_contiguous() else storage_elements(value.shape, value.stride())
    needed = (value.storage_offset() + span) * value.itemsize
    if needed <= held:
        return ""
    return (
        f"a tensor that needs {needed} bytes of its storage, which has {held}, as after untyped_storage().resize_(0); "
        "give it its memory back first"
    )


def empty_like_dtensor(tensor: torch.Tensor, spec: Spec) -> torch.Tensor | None:
    """A new, uninitialised DTensor of a saved spec with the mesh and placements of this DTensor; None if the saved
    tensor has another shape.
    """
    fits = spec.kind == TensorProvider.kind and spec.shape == tuple(tensor.shape) and local_of(tensor) is not tensor
    return torch.empty_like(tensor, dtype=check_tensor(spec), requires_grad=False) if fits else None
