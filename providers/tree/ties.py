"""Tied tensors (leaves that share memory: tied weights, views of one storage): saved once, tied again by a restore.

`find_ties` finds them in a state that is saved. `read_ties` reads and checks the tied leaves of a version.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tierstate.manifest.chunk import CHUNK_GRAIN, empty_buffer
from tierstate.manifest.errors import FormatError, untrusted
from tierstate.manifest.format.leaf import STORAGE, STRIDES, TIED, Leaf, Spec
from tierstate.manifest.format.leaf_path import Path, encode_path
from tierstate.providers.base import Provider
from tierstate.providers.tensors.extents import Extent, overlapping_runs, sharing_groups
from tierstate.providers.tensors.strided import INT_DTYPES, Strided, row_major_strides
from tierstate.providers.tensors.tensors import (
    MAX_TENSOR_BYTES,
    StorageProvider,
    TensorProvider,
    check_tensor,
    with_autograd_flags,
)

_TIE_ATTRS = frozenset({"to", "offset", "conj", "neg"})


_COPY = 1 << 22


PathProvider = tuple[Path, Provider]


@dataclass(frozen=True, slots=True)
class TiedLeaf:
    """A tied leaf.

    Attributes:
        root: index of the leaf that has the bytes.
        spec: the spec that the tied value would have if it were saved by itself.
        offset: bytes from the root's first byte; None where the value is the same as the root's.
        strides: in elements of the value's own dtype, if there is an offset.
        conj, neg: whether the view is a lazy conjugate, a lazy negative (torch's ``conj`` and ``neg`` bits).
    """

    root: int
    spec: Spec
    offset: int | None = None
    strides: tuple[int, ...] = ()
    conj: bool = False
    neg: bool = False

    def view(self, root: torch.Tensor) -> torch.Tensor:
        """This view of the loaded root. A root that is not contiguous is copied first."""
        dtype, size = check_tensor(self.spec), self.spec.itemsize
        if not Strided(root).dense:
            root = _compact(root)
        first = root.storage_offset() * root.element_size() + (self.offset or 0)
        unit = INT_DTYPES.get(size, dtype)
        view = torch.empty(0, dtype=unit, device=root.device)
        view.set_(root.untyped_storage(), first // size, self.spec.shape, self.strides)
        view = view.view(dtype).detach()
        view = view.conj() if self.conj else view
        return torch._neg_view(view) if self.neg else view

    def of(self, root: Any, saved: Spec) -> Any:
        """The tied value for a newly built state: the root itself where possible, otherwise a view of it."""
        if self.offset is None and (not isinstance(root, torch.Tensor) or _flags(saved) == _flags(self.spec)):
            return root
        view = root.detach() if self.offset is None else self.view(root)
        return with_autograd_flags(view, self.spec.attrs)


def read_ties(leaves: Sequence[Leaf]) -> dict[int, TiedLeaf]:
    """The tied leaves of a version, by index. The version may be untrusted; its paths differ.

    Raises:
        FormatError: the root does not exist, is tied itself or has no bytes, or the view reaches beyond its bytes.
    """
    tied = [i for i, leaf in enumerate(leaves) if leaf.spec.kind == TIED]
    index = {encode_path(leaf.path): i for i, leaf in enumerate(leaves)} if tied else {}
    ties = {}
    for i in tied:
        with untrusted(leaves[i]):
            ties[i] = _read(leaves[i].spec, leaves, index)
    return ties


def _read(tied: Spec, leaves: Sequence[Leaf], index: Mapping[str, int]) -> TiedLeaf:
    to = tied.attrs.get("to")
    at = index.get(to) if isinstance(to, str) else None
    if at is None or not leaves[at].spec.has_bytes:
        raise FormatError(f"is tied to {to!r:.80}, which is no leaf with bytes")
    root = leaves[at].spec
    attrs = {key: value for key, value in tied.attrs.items() if key not in _TIE_ATTRS}
    if root.kind not in (TensorProvider.kind, STORAGE) or "offset" not in tied.attrs:
        if (tied.dtype, tied.itemsize, tied.shape) != (root.dtype, root.itemsize, root.shape) or root.kind == STORAGE:
            raise FormatError(f"is {tied.dtype} {tied.shape}, but tied to {leaves[at].name}, {root.dtype} {root.shape}")
        return TiedLeaf(at, Spec(root.kind, tied.dtype, tied.itemsize, tied.shape, attrs))
    strides = attrs.pop(STRIDES, None)  # of the view
    spec = Spec(TensorProvider.kind, tied.dtype, tied.itemsize, tied.shape, attrs)
    conj, neg = tied.attrs.get("conj") is True, tied.attrs.get("neg") is True
    dtype = check_tensor(spec)
    if (conj and not dtype.is_complex) or (neg and not (dtype.is_complex or dtype.is_floating_point)):
        raise FormatError(f"a tensor of {tied.dtype} is no lazy conjugate or negative")
    offset = tied.attrs["offset"]
    return TiedLeaf(at, spec, offset, _extent(spec, offset, strides, root.nbytes), conj, neg)


def _extent(spec: Spec, offset: Any, strides: Any, nbytes: int) -> tuple[int, ...]:
    """The strides, after a check that the view stays within the root's bytes."""
    numbers = [offset, *strides] if isinstance(strides, list) else []
    if len(numbers) != len(spec.shape) + 1 or not all(type(n) is int and 0 <= n <= MAX_TENSOR_BYTES for n in numbers):
        raise FormatError(f"offset {offset!r:.40} and strides {strides!r:.40} are no place in {nbytes} bytes")
    reach = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
    end = 0 if 0 in spec.shape else offset + (reach + 1) * spec.itemsize
    if offset % spec.itemsize or end > nbytes:
        raise FormatError(f"ends at byte {end} of {nbytes}, from {offset} on; that is outside, or not aligned")
    return tuple(strides)


class ViewLayout(NamedTuple):
    """Where a leaf's elements are in its root: two leaves with the same root share the bytes that both address."""

    root: Any
    offset: int
    strides: tuple[int, ...]
    lazy: tuple[bool, bool]


def view_layout(root: Any, spec: Spec, attrs: Mapping[str, Any]) -> ViewLayout:
    """The layout of a leaf by the attributes of its tie; contiguous from the first byte, if they have no offset."""
    strides = attrs[STRIDES] if "offset" in attrs else row_major_strides(spec.shape)
    in_bytes = tuple(s * spec.itemsize if n > 1 else 0 for s, n in zip(strides, spec.shape, strict=True))
    return ViewLayout(root, attrs.get("offset", 0), in_bytes, (bool(attrs.get("conj")), bool(attrs.get("neg"))))


def copy_value(source: Provider, sink: Provider) -> None:
    """Copy one value's bytes into another value of the same spec, chunk by chunk."""
    for start, nbytes, fill in source.chunks(_COPY):
        piece = empty_buffer(nbytes)
        event = fill(piece)
        if event is not None:
            event.synchronize()
        loaded = sink.load(start, piece)
        if loaded is not None:
            loaded.synchronize()


def _flags(spec: Spec) -> tuple[bool, bool]:
    return spec.attrs.get("parameter") is True, spec.attrs.get("requires_grad") is True


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, bit for bit."""
    spec = TensorProvider(tensor).spec
    copy = TensorProvider.fresh(Spec(spec.kind, spec.dtype, spec.itemsize, spec.shape), tensor.device)
    copy_value(TensorProvider(tensor), copy)
    return copy.value


class _View(NamedTuple):
    """A view of memory: addresses in bytes, and the indices of the items that are exactly this view."""

    tensor: torch.Tensor
    lo: int
    hi: int
    items: list[int]


@dataclass(slots=True)
class Ties:
    """How the leaves that share memory are saved.

    Attributes:
        specs: index of an item -> its spec of kind ``tied``.
        storages: index of an item -> the leaf of kind ``storage`` that is saved right after it.
    """

    specs: dict[int, Spec] = field(default_factory=dict)
    storages: dict[int, PathProvider] = field(default_factory=dict)


def find_ties(items: Sequence[PathProvider]) -> Ties:
    """Find the leaves that share memory, and decide how they are saved.

    A provider takes part by its attribute ``alias``: a hashable that is equal for leaves that are the same value in
    the same memory, or None. Tensors that only overlap within one storage are tied too: to a contiguous tensor that
    contains all others, if there is one, otherwise to an additional leaf of kind ``storage`` for the raw bytes.
    """
    ties = Ties()
    same: dict[Hashable, list[int]] = defaultdict(list)
    for index in _may_be_tied(items):
        alias = getattr(items[index][1], "alias", None)
        if alias is not None:
            same[alias].append(index)
    for group in _groups(items, same.values()):
        if len(group) > 1:
            _tie_views(ties, items, sorted(group, key=lambda view: view.items[0]))
    for first, *others in same.values():
        for index in others:
            if first not in ties.specs and index not in ties.specs:
                ties.specs[index] = _tied(items[index][1].spec, items[first][0])
    return ties


def _may_be_tied(items: Sequence[PathProvider]) -> Iterator[int]:
    """The items without the plain tensors that have a storage of their own: nearly all tensors have one, and that is
    told in a tenth of the time that an alias takes."""
    storages = [provider.storage_address if type(provider) is TensorProvider else None for _, provider in items]
    users = Counter(storages)
    return (index for index, storage in enumerate(storages) if storage is None or users[storage] > 1)


def _groups(items: Sequence[PathProvider], same: Iterable[list[int]]) -> Iterator[list[_View]]:
    """Groups of views of one storage that overlap, directly or through others."""
    storages: dict[Hashable, list[list[int]]] = defaultdict(list)
    for indices in same:
        provider = items[indices[0]][1]
        if type(provider) is TensorProvider:
            tensor = provider.value
            storages[tensor.device, tensor.untyped_storage().data_ptr()].append(indices)
    for sharing in storages.values():
        if len(sharing) > 1:  # nearly all tensors have a storage of their own
            for run in overlapping_runs([_view_extent(items, indices) for indices in sharing]):
                for group in sharing_groups(run):
                    yield [extent.item for extent in group]


def _view_extent(items: Sequence[PathProvider], indices: list[int]) -> Extent:
    provider = items[indices[0]][1]
    assert isinstance(provider, TensorProvider)
    extent = Extent.of_tensor(provider.value, None)
    return extent._replace(item=_View(provider.value, extent.lo, extent.hi, indices))


def _tie_views(ties: Ties, items: Sequence[PathProvider], views: list[_View]) -> None:
    root = next((view for view in views if _holds_all(view, views)), None)
    if root is not None:
        index, origin, path = root.items[0], root.lo, items[root.items[0]][0]
    else:
        index, origin, path = -1, *_add_storage(ties, items, views)
    for view in views:
        for item in view.items:
            if item != index:
                attrs = {} if view is root else _position(view, origin)
                ties.specs[item] = _tied(items[item][1].spec, path, attrs)


def _holds_all(root: _View, views: list[_View]) -> bool:
    """Whether a view is contiguous, not lazy, and contains all others at offsets that suit their dtypes."""
    lazy = root.tensor.is_conj() or root.tensor.is_neg()
    return (
        root.tensor.is_contiguous()
        and not lazy
        and all(
            root.lo <= view.lo and view.hi <= root.hi and (view.lo - root.lo) % view.tensor.element_size() == 0
            for view in views
        )
    )


def _add_storage(ties: Ties, items: Sequence[PathProvider], views: list[_View]) -> tuple[int, Path]:
    """Add a leaf for the bytes that the views span. Returns its first address and its path."""
    storage = views[0].tensor.untyped_storage()
    base = storage.data_ptr()
    first = min(view.lo for view in views) - base
    first -= first % CHUNK_GRAIN  # aligned for views of every dtype
    nbytes = max(view.hi for view in views) - base - first
    raw = torch.empty(0, dtype=torch.uint8, device=views[0].tensor.device).set_(storage, first, (nbytes,), (1,))
    index = views[0].items[0]
    path = (*items[index][0], STORAGE)
    ties.storages[index] = (path, StorageProvider(raw))
    return base + first, path


def _position(view: _View, origin: int) -> dict[str, Any]:
    """The attributes of a tie: offset in bytes from the root's first byte, strides in elements, conj and neg bits."""
    tensor = view.tensor
    attrs: dict[str, Any] = {"offset": view.lo - origin, STRIDES: list(tensor.stride())}
    if tensor.is_conj():
        attrs["conj"] = True
    if tensor.is_neg():
        attrs["neg"] = True
    return attrs


def _tied(spec: Spec, root: Path, attrs: Mapping[str, Any] = {}) -> Spec:
    return Spec(TIED, spec.dtype, spec.itemsize, spec.shape, {**spec.attrs, "to": encode_path(root), **attrs})
