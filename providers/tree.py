"""A whole state as leaves: its structure kept, its shared memory saved once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstate.manifest.chunk import Chunk
from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.manifest.leaf import Leaf, Spec

from .base import Provider
from .placing import Frame
from .registry import REGISTRY, Registry
from .shards import frame_of, over
from .survey import Leave, Place, Survey, never
from .tensors import TensorProvider
from .ties import Ties, find_ties
from .values import ValueProvider


@dataclass(frozen=True, slots=True)
class Node:
    """A leaf and what streams its bytes: None for containers and tied leaves, which have none."""

    leaf: Leaf
    provider: Provider | None


class Tree:
    """A state as leaves, each container before what it holds, in the state's own order.

    Args:
        leaves: the leaves.
        providers: what streams the bytes of each; None where there are none.

    Attributes:
        values: where the tree is like one before, each tensor that lies where it lay then, of a shard the local one;
            None for other leaves.
        fresh: indices of leaves whose spec or memory is another than in the tree before.
        token: the same object for trees that are alike.
    """

    def __init__(self, leaves: tuple[Leaf, ...], providers: Sequence[Provider | None]) -> None:
        self.leaves, self._providers = leaves, list(providers)
        self.values: list[Any] = []
        self.fresh: Sequence[int] = ()
        self.token = object()
        self._frames: dict[int, Frame] = {}  # of shards of which only the local tensor is known

    def provider(self, leaf: int) -> Provider | None:
        """What streams a leaf's bytes; None if it has none."""
        found = self._providers[leaf]
        value = self.values[leaf] if self.values else None
        if found is None and value is not None and self.leaves[leaf].spec.has_bytes:
            frame = self._frames.get(leaf)
            found = TensorProvider(value) if frame is None else over(frame, value, self.leaves[leaf].spec)
            self._providers[leaf] = found
        return found

    def hold(self, leaf: int) -> None:
        """Hold on to a leaf's memory: a tensor may be given another one before its chunks are asked for."""
        if self.values and self.values[leaf] is not None:
            self.values[leaf] = self.values[leaf].detach()

    def chunks(self, leaf: int, size: int, part: int = 0) -> Iterator[Chunk]:
        """The bytes of one part of a leaf, as its provider gives them, which is made no sooner than the first is asked
        for.
        """
        provider = self.provider(leaf)
        if provider is not None:
            yield from provider.parts[part].chunks(size)

    def again(self, values: list[Any], fresh: Mapping[int, Provider]) -> Tree:
        """A tree that is like this one, but for some leaves.

        Args:
            values: tensors that lie where they lay.
            fresh: providers of other leaves that have changed.
        """
        providers, changed = self._providers.copy(), {}
        for i, provider in fresh.items():
            providers[i], spec = provider, provider.spec
            # Attributes that are equal to Python need not be the same: 0.0 and -0.0, 1 and True.
            if spec != self.leaves[i].spec or spec.attrs or self.leaves[i].spec.attrs:
                changed[i] = Leaf(self.leaves[i].path, spec)
        leaves = self.leaves
        if changed:
            leaves = tuple(changed.get(i, leaf) for i, leaf in enumerate(self.leaves))
        tree = Tree(leaves, providers)
        tree.values, tree.fresh, tree.token, tree._frames = values, tuple(fresh), self.token, self._frames
        return tree

    def without_memory(self) -> Tree:
        """The tree with nothing that refers to the state's memory: all but plain values."""
        tree = Tree(self.leaves, [p if type(p) is ValueProvider else None for p in self._providers])
        tree.token = self.token
        found = {i: frame for i, p in enumerate(self._providers) if (frame := frame_of(p)) is not None}
        tree._frames = self._frames | found
        return tree

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every leaf with its provider."""
        return tuple(Node(leaf, self.provider(i)) for i, leaf in enumerate(self.leaves))


def flatten(state: Any, *, registry: Registry = REGISTRY, allow_pickle: Leave = never, rank: int = 0) -> Tree:
    """A state as leaves.

    Dicts and OrderedDicts are always walked; lists and tuples where anything in them is not plain, otherwise they are
    one value. What has ``state_dict`` and ``load_state_dict``, and random generators, count through their state.
    Tensors that share memory are saved once. The tree refers to the state: its bytes are copied by the chunks' fills.

    Args:
        allow_pickle: whether the value at a path, if it has no provider, may be pickled.
        rank: under which number this process's own values are saved, as those of `PerRank`.

    Raises:
        CaptureError: something cannot be saved; the message names its path, type and remedy.
    """
    root = Survey(registry, allow_pickle, rank=rank).take(state)
    return plant(root, ties_of(root))


def ties_of(root: Place) -> Ties:
    """What shares memory in a state."""
    return find_ties([(place.path, place.provider) for place in root.walk() if place.provider is not None])


def plant(root: Place, ties: Ties) -> Tree:
    """The tree of a state that was walked."""
    nodes = list(_nodes(root, ties))
    return Tree(tuple(leaf for leaf, _ in nodes), [provider for _, provider in nodes])


def _nodes(root: Place, ties: Ties) -> Iterator[tuple[Leaf, Provider | None]]:
    index = 0
    for place in root.walk():
        if place.provider is None:
            yield Leaf(place.path, Spec(place.kind, attrs=place.attrs)), None
            continue
        if index in ties.specs:
            yield Leaf(place.path, ties.specs[index]), None
        else:
            yield Leaf(place.path, spec_of(place, place.provider)), place.provider
        if index in ties.storages:
            path, provider = ties.storages[index]
            yield Leaf(path, provider.spec), provider
        index += 1


def spec_of(place: Place, provider: Provider) -> Spec:
    """A leaf's spec.

    Raises:
        CaptureError: the provider has none; the message names the path.
    """
    try:
        return provider.spec
    except TierstateError as error:
        raise CaptureError(f"{place.name}: {error}") from error
    except Exception as error:
        raise CaptureError(f"{place.name}: {type(provider).__qualname__}.spec failed: {error!r}") from error
