"""Tensors that share memory: found, so that their bytes are saved once and tied again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tierstate.manifest.chunk import CHUNK_GRAIN
from tierstate.manifest.leaf import STORAGE, TIED, Path, Spec, encode_path

from .base import Provider
from .tensors import StorageProvider, TensorProvider

_MAX_EXACT = 256
_MAX_WORK = 10_000
"""Effort after which two views that may overlap are taken to: tying what need not be is never wrong, only larger."""

Item = tuple[Path, Provider]


class _View(NamedTuple):
    """A tensor's place in memory: addresses in bytes, and the items that are this very view."""

    tensor: torch.Tensor
    lo: int
    hi: int
    items: list[int]


@dataclass(slots=True)
class Ties:
    """What shares memory.

    Attributes:
        specs: index of an item -> the spec of kind ``tied`` that it is saved under.
        storages: index of an item -> the leaf of kind ``storage`` to be saved right after it.
    """

    specs: dict[int, Spec] = field(default_factory=dict)
    storages: dict[int, Item] = field(default_factory=dict)


def find_ties(items: Sequence[Item]) -> Ties:
    """Which of these leaves share memory, and how they are to be saved.

    A provider takes part by having ``alias``: a hashable that is equal for leaves that are the same value in the same
    memory, or None. Tensors are also tied where they merely overlap within one storage: to a contiguous one that
    contains all others, if there is one, otherwise to a leaf for the raw bytes.
    """
    ties = Ties()
    same: dict[Hashable, list[int]] = defaultdict(list)
    for index, (_, provider) in enumerate(items):
        alias = getattr(provider, "alias", None)
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


def _groups(items: Sequence[Item], same: Iterable[list[int]]) -> Iterator[list[_View]]:
    """Views of one storage that overlap, directly or through others."""
    storages: dict[Hashable, list[_View]] = defaultdict(list)
    for indices in same:
        provider = items[indices[0]][1]
        if type(provider) is TensorProvider:
            tensor = provider.value
            storages[tensor.device, tensor.untyped_storage().data_ptr()].append(_view(tensor, indices))
    for views in storages.values():
        for run in _touching(sorted(views, key=lambda view: view.lo)):
            yield from _overlapping(run)


def _view(tensor: torch.Tensor, items: list[int]) -> _View:
    lo = tensor.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return _View(tensor, lo, lo + (reach + 1) * tensor.element_size(), items)


def _touching(views: list[_View]) -> Iterator[list[_View]]:
    """Runs of views whose extents overlap, from views in order of their first byte."""
    run, end = views[:1], views[0].hi
    for view in views[1:]:
        if view.lo >= end:
            yield run
            run = []
        run.append(view)
        end = max(end, view.hi)
    yield run


def _overlapping(run: list[_View]) -> Iterator[list[_View]]:
    """The parts of a run that really share bytes: columns of a matrix do not, though their extents overlap."""
    if len(run) > _MAX_EXACT:
        yield run
        return
    groups: list[list[_View]] = []
    for view in run:
        apart, merged = [], [view]
        for group in groups:
            if any(_share(view, other) for other in group):
                merged += group
            else:
                apart.append(group)
        groups = [*apart, merged]
    yield from groups


class _Address:
    """Memory as NumPy's overlap solver wants to see it; it is never read, so a device's address will do."""

    def __init__(self, view: _View) -> None:
        size = view.tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (view.lo, False),
            "typestr": f"|V{size}",
            "shape": tuple(view.tensor.shape),
            "strides": tuple(s * size for s in view.tensor.stride()),
        }


def _share(one: _View, other: _View) -> bool:
    if one.lo >= other.hi or other.lo >= one.hi:
        return False
    try:
        memories = np.asarray(_Address(one)), np.asarray(_Address(other))
        return np.shares_memory(*memories, max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _tie_views(ties: Ties, items: Sequence[Item], views: list[_View]) -> None:
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
    """Whether a view's bytes are its memory, and all others lie in it where their dtypes can be viewed."""
    lazy = root.tensor.is_conj() or root.tensor.is_neg()
    return (
        root.tensor.is_contiguous()
        and not lazy
        and all(
            root.lo <= view.lo and view.hi <= root.hi and (view.lo - root.lo) % view.tensor.element_size() == 0
            for view in views
        )
    )


def _add_storage(ties: Ties, items: Sequence[Item], views: list[_View]) -> tuple[int, Path]:
    """Add a leaf for the bytes that the views span; its first address and its path."""
    storage = views[0].tensor.untyped_storage()
    base = storage.data_ptr()
    first = min(view.lo for view in views) - base
    first -= first % CHUNK_GRAIN  # so that every dtype can be viewed in it
    nbytes = max(view.hi for view in views) - base - first
    raw = torch.empty(0, dtype=torch.uint8, device=views[0].tensor.device).set_(storage, first, (nbytes,), (1,))
    index = views[0].items[0]
    path = (*items[index][0], STORAGE)
    ties.storages[index] = (path, StorageProvider(raw))
    return base + first, path


def _position(view: _View, origin: int) -> dict[str, Any]:
    """Where a view lies in its root: bytes from the first one, strides in elements, signs that are still to be set."""
    tensor = view.tensor
    attrs: dict[str, Any] = {"offset": view.lo - origin, "strides": list(tensor.stride())}
    if tensor.is_conj():
        attrs["conj"] = True
    if tensor.is_neg():
        attrs["neg"] = True
    return attrs


def _tied(spec: Spec, root: Path, attrs: Mapping[str, Any] = {}) -> Spec:
    return Spec(TIED, spec.dtype, spec.itemsize, spec.shape, {**spec.attrs, "to": encode_path(root), **attrs})
