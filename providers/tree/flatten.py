"""Flattens a state into a list of leaves with their providers; memory that leaves share (tied) is saved once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstate.manifest.chunk import Chunk
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY, Registry
from tierstate.providers.sharded.mesh import LocalBoxes
from tierstate.providers.sharded.shards import local_boxes_of, shard_provider
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.providers.values.values import ValueProvider

from .ties import Ties, find_ties
from .walk import PickleAllowed, StateNode, StateWalk, no_pickle


@dataclass(frozen=True, slots=True)
class FlatLeaf:
    """A leaf and the provider of its bytes: None for containers and tied leaves, which have no bytes."""

    leaf: Leaf
    provider: Provider | None


class FlatState:
    """A flattened state: its leaves in the state's own order, each container before its items.

    Args:
        leaves: the leaves.
        providers: the provider of each leaf; None where a leaf has no bytes.

    Attributes:
        values: per leaf, its tensor (the local one, if it is sharded) where `FlattenCache` found it in the same memory
            as in the last save; None for other leaves.
        fresh: indices of leaves whose spec or memory has changed since the last save.
        token: the same object for flattened states with the same structure.
    """

    def __init__(self, leaves: tuple[Leaf, ...], providers: Sequence[Provider | None]) -> None:
        self.leaves, self._providers = leaves, list(providers)
        self.values: list[Any] = []
        self.fresh: Sequence[int] = ()
        self.token = object()
        self._frames: dict[int, LocalBoxes] = {}  # of shards of which only the local tensor is known

    def provider(self, leaf: int) -> Provider | None:
        """The provider of a leaf, made on the first call; None if the leaf has no bytes."""
        found = self._providers[leaf]
        value = self.values[leaf] if self.values else None
        if found is None and value is not None and self.leaves[leaf].spec.has_bytes:
            frame = self._frames.get(leaf)
            found = TensorProvider(value) if frame is None else shard_provider(frame, value, self.leaves[leaf].spec)
            self._providers[leaf] = found
        return found

    def hold(self, leaf: int) -> None:
        """Keep a reference to a leaf's memory: code may give the tensor other memory before its chunks are read."""
        if self.values and self.values[leaf] is not None:
            self.values[leaf] = self.values[leaf].detach()

    def chunks(self, leaf: int, size: int, part: int = 0) -> Iterator[Chunk]:
        """The chunks of one part of a leaf, from its provider, which is made now."""
        provider = self.provider(leaf)
        return iter(()) if provider is None else provider.parts[part].chunks(size)

    def again(self, values: list[Any], fresh: Mapping[int, Provider]) -> FlatState:
        """The flattened state of the next save, which has the same structure.

        Args:
            values: per leaf, its tensor where its memory is the same as before, otherwise None.
            fresh: new providers of leaves that have changed.
        """
        providers, changed = self._providers.copy(), {}
        for i, provider in fresh.items():
            providers[i], spec = provider, provider.spec
            # Attributes that compare equal in Python may still differ: 0.0 and -0.0, 1 and True.
            if spec != self.leaves[i].spec or spec.attrs or self.leaves[i].spec.attrs:
                changed[i] = Leaf(self.leaves[i].path, spec)
        leaves = self.leaves
        if changed:
            leaves = tuple(changed.get(i, leaf) for i, leaf in enumerate(self.leaves))
        tree = FlatState(leaves, providers)
        tree.values, tree.fresh, tree.token, tree._frames = values, tuple(fresh), self.token, self._frames
        return tree

    def without_memory(self) -> FlatState:
        """A copy without references to the state's memory; only plain values are kept."""
        tree = FlatState(self.leaves, [p if type(p) is ValueProvider else None for p in self._providers])
        tree.token = self.token
        # Frames of leaves that are not fresh were found at the save before.
        new = self.fresh if self.values else range(len(self._providers))
        found = {i: frame for i in new if (frame := local_boxes_of(self._providers[i])) is not None}
        tree._frames = self._frames | found
        return tree

    @property
    def nodes(self) -> tuple[FlatLeaf, ...]:
        """Every leaf with its provider."""
        return tuple(FlatLeaf(leaf, self.provider(i)) for i, leaf in enumerate(self.leaves))


def flatten(
    state: Any, *, registry: Registry = REGISTRY, allow_pickle: PickleAllowed = no_pickle, rank: int = 0
) -> FlatState:
    """Flatten a state into leaves.

    Dicts and OrderedDicts always become containers. A list or tuple becomes a container only if an item is not a plain
    value; otherwise it is one value. Objects with ``state_dict`` and ``load_state_dict``, and random generators, are
    saved as their state. Tensors that share memory are saved once. The result refers to the state's memory: bytes are
    copied when a chunk's ``fill`` is called.

    Args:
        allow_pickle: whether the value at a path, if it has no provider, may be pickled.
        rank: this process's rank, under which its `PerRank` values are saved.

    Raises:
        CaptureError: something cannot be saved; the message names its path, type and remedy.
    """
    root = StateWalk(registry, allow_pickle, rank=rank).take(state)
    return flat_state(root, ties_of(root))


def ties_of(root: StateNode) -> Ties:
    """The ties between the leaves of a state that share memory."""
    return find_ties([(place.path, place.provider) for place in root.walk() if place.provider is not None])


def flat_state(root: StateNode, ties: Ties) -> FlatState:
    """The flattened form of a state that was walked."""
    nodes = list(_nodes(root, ties))
    return FlatState(tuple(leaf for leaf, _ in nodes), [provider for _, provider in nodes])


def _nodes(root: StateNode, ties: Ties) -> Iterator[tuple[Leaf, Provider | None]]:
    index = 0
    for place in root.walk():
        if place.provider is None:
            yield Leaf(place.path, Spec(place.kind, attrs=place.attrs)), None
            continue
        if index in ties.specs:
            yield Leaf(place.path, ties.specs[index]), None
        else:
            yield Leaf(place.path, _spec_of(place, place.provider)), place.provider
        if index in ties.storages:
            path, provider = ties.storages[index]
            yield Leaf(path, provider.spec), provider
        index += 1


def _spec_of(place: StateNode, provider: Provider) -> Spec:
    """A leaf's spec.

    Raises:
        CaptureError: the provider gives no spec; the message names the path.
    """
    try:
        return provider.spec
    except TierstateError as error:
        raise CaptureError(f"{place.name}: {error}") from error
    except Exception as error:
        raise CaptureError(f"{place.name}: {type(provider).__qualname__}.spec failed: {error!r}") from error
