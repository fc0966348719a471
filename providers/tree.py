"""A whole state as leaves: its structure kept, its shared memory saved once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tierstate.manifest.errors import CaptureError, TierstateError
from tierstate.manifest.leaf import Leaf, Spec

from .base import Provider
from .registry import REGISTRY, Registry
from .survey import Leave, Place, Survey, never
from .ties import Ties, find_ties


@dataclass(frozen=True, slots=True)
class Node:
    """A leaf and what streams its bytes: None for containers and tied leaves, which have none."""

    leaf: Leaf
    provider: Provider | None


@dataclass(frozen=True, slots=True)
class Tree:
    """A state as leaves, each container before what it holds, in the state's own order."""

    nodes: tuple[Node, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves without their providers."""
        return tuple(node.leaf for node in self.nodes)


def flatten(state: Any, *, registry: Registry = REGISTRY, allow_pickle: Leave = never) -> Tree:
    """A state as leaves.

    Dicts and OrderedDicts are always walked; lists and tuples where anything in them is not plain, otherwise they are
    one value. What has ``state_dict`` and ``load_state_dict``, and random generators, count through their state.
    Tensors that share memory are saved once. The tree refers to the state: its bytes are copied by the chunks' fills.

    Args:
        allow_pickle: whether the value at a path, if it has no provider, may be pickled.

    Raises:
        CaptureError: something cannot be saved; the message names its path, type and remedy.
    """
    root = Survey(registry, allow_pickle).take(state)
    leaves = [(place.path, place.provider) for place in root.walk() if place.provider is not None]
    ties = find_ties(leaves)
    return Tree(tuple(_nodes(root, ties)))


def _nodes(root: Place, ties: Ties) -> Iterator[Node]:
    index = 0
    for place in root.walk():
        if place.provider is None:
            yield Node(Leaf(place.path, Spec(place.kind, attrs=place.attrs)), None)
            continue
        if index in ties.specs:
            yield Node(Leaf(place.path, ties.specs[index]), None)
        else:
            yield Node(Leaf(place.path, _spec(place, place.provider)), place.provider)
        if index in ties.storages:
            path, provider = ties.storages[index]
            yield Node(Leaf(path, provider.spec), provider)
        index += 1


def _spec(place: Place, provider: Provider) -> Spec:
    try:
        return provider.spec
    except TierstateError as error:
        raise CaptureError(f"{place.name}: {error}") from error
    except Exception as error:
        raise CaptureError(f"{place.name}: {type(provider).__qualname__}.spec failed: {error!r}") from error
