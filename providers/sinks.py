"""Sinks: what the bytes of a version are loaded into, where it is not simply the value of the same path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tierstate.manifest.errors import FormatError, StateMismatch
from tierstate.manifest.leaf import Leaf

from .base import Provider
from .blocks import Blocks
from .registry import Registry
from .retie import Tie
from .shards import Joint, frame_of
from .survey import Place
from .tensors import StorageProvider, TensorProvider


class Fresh:
    """Makes values for leaves that the given state has not.

    Args:
        registry: where providers are looked up.
        device: where tensors go (default: host).
        within: index of a leaf -> the thing whose state it becomes a part of.
    """

    def __init__(self, registry: Registry, device: torch.device | None, within: Mapping[int, Place]) -> None:
        self._registry, self._device, self._within = registry, device, within
        self._blocks = Blocks()
        self._makers: dict[int, Callable[..., Any]] = {}

    def provider(self, index: int, leaf: Leaf, cls: type[Provider]) -> Provider:
        """What takes a leaf's bytes.

        Raises:
            FormatError: the leaf's spec is none.
            MemoryError: there is no room for it.
        """
        try:
            own = self._own(index, leaf)
            if own is not None:
                return own.receiver(leaf.spec)
            if cls in (TensorProvider, StorageProvider):
                return cls.fresh(leaf.spec, self._device, self._blocks)
            return cls.fresh(leaf.spec, self._device)
        except (FormatError, MemoryError) as error:
            raise type(error)(f"{leaf.name}: {error}") from error

    def _own(self, index: int, leaf: Leaf) -> Provider | None:
        """Of a value as the thing makes it that it becomes a part of."""
        thing = self._within.get(index)
        if thing is None or thing.stateful is None or thing.stateful.anew is None:
            return None
        if id(thing) not in self._makers:
            self._makers[id(thing)] = thing.stateful.anew(thing.value)
        value = self._makers[id(thing)](leaf.path[len(thing.path) :], leaf.spec)
        return None if value is None else self._registry.exact(value)


def join(
    wanted: dict[int, Provider], leaves: Sequence[Leaf], ties: Mapping[int, Tie], matched: Mapping[int, Place]
) -> set[int]:
    """Have tied leaves loaded along with what they are tied to, where shards are among them: the boxes of one need not
    be those of the other, so that they cannot be copied from it.

    Args:
        wanted: what each leaf's bytes go into; changed.
        ties: those of the wanted leaves.
        matched: the places whose values take leaves.

    Returns:
        indices of the tied leaves that are so loaded.

    Raises:
        StateMismatch: a leaf is a part of another's memory, and one of them is a shard here.
    """
    others: dict[int, dict[int, Provider]] = defaultdict(dict)
    sharded: set[int] = set()
    for i, tie in ties.items():
        root, at = wanted[tie.root], matched.get(i)
        sink = at.provider.receiver(tie.spec) if at is not None and at.provider is not None else None
        shard = _in_boxes(root) or (sink is not None and _in_boxes(sink))
        if shard and tie.offset is not None:
            raise StateMismatch(
                f"{leaves[i].name}: shares memory with {leaves[tie.root].name} in the version, but is not all of it; "
                "such leaves are restored into plain tensors, not into shards"
            )
        if shard:
            sharded.add(tie.root)
        if sink is not None and at is not None and sink is at.provider and not _same(root, sink):
            others[tie.root][i] = sink
    for index in sharded & others.keys():
        whole = {i: sink for i, sink in others[index].items() if ties[i].offset is None}
        wanted[index] = Joint(wanted[index], list(whole.values()))
    return {i for index in sharded for i in others.get(index, {}) if ties[i].offset is None}


def _in_boxes(provider: Provider) -> bool:
    return frame_of(provider) is not None


def _same(one: Provider, other: Provider) -> bool:
    alias = getattr(one, "alias", None)
    return alias is not None and alias == getattr(other, "alias", None)
