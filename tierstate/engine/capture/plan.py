"""The capture plan: which bytes of a state a save copies, and from where, as NumPy columns.

The `Planner` makes it from the state that the user gives to `save`. As long as a state keeps its structure, the plan is
the last one with a few values changed, so that thousands of leaves cost no Python work per leaf. `LastCapture` has the
digests of the last save: with them an unchanged chunk is found before it is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress, count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tierstate.engine.packs.slab_layout import capture_order
from tierstate.manifest.arguments import as_step
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, Chunk, StreamEvent
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.statistics import ChunkStatistics
from tierstate.manifest.format.version import Head, ShardRow
from tierstate.manifest.sharded.ownership import ONE_OWNER
from tierstate.manifest.sharded.state_order import StateOrder
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.sharded.shards import ShardsProvider
from tierstate.providers.tensors.devices import CPU, copies_beside, wait_for
from tierstate.providers.tensors.lossy import LossyProvider
from tierstate.providers.tensors.tensors import TensorProvider, local_of
from tierstate.providers.tree.flatten import FlatState
from tierstate.providers.tree.flatten_cache import FlattenCache
from tierstate.providers.values.metadata import json_metadata
from tierstate.tiers.memory.cuda import stream_fences
from tierstate.tiers.policy.policy import Policy

from .guard import Guard
from .read_set import ReadSet

HOST = -1
"""The device number that means host memory."""


Chunks = Callable[[int], Iterator[Chunk]]
"""Takes a chunk length in bytes and returns the chunks of a source."""


class Fence(Protocol):
    """A point on a device's stream, recorded when `save` was called: work queued before it is part of the state."""

    def synchronize(self) -> None:
        """Wait on the host until the device has passed the point."""

    def follow(self) -> None:
        """Make this thread's later work on the device wait for the point."""

    def copied(self) -> StreamEvent:
        """An event that happens when the work is done that was queued so far after `follow`."""


class CaptureSource(NamedTuple):
    """One shard to capture.

    Attributes:
        leaf: index of its leaf.
        box: its box in the leaf.
        nbytes: its length in bytes.
        chunks: its chunks for a given chunk length.
        guarded: whether only the step of a guarded optimizer changes it, so that it can be captured later.
        memory: its bytes, if they are contiguous in host memory; else None.
        device: number of the CUDA device that has it and to whose memory its chunks can be copied; else HOST.
    """

    leaf: int
    box: Box
    nbytes: int
    chunks: Chunks
    guarded: bool = False
    memory: Buffer | None = None
    device: int = HOST


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """What to capture: leaves, and their shards (sources) by rising leaf, as columns.

    Attributes:
        leaves: the version's leaves.
        leaf, boxes, nbytes: for each source, as in `CaptureSource`.
        guarded: ``(sources,)`` of bool, as in `CaptureSource`.
        address: ``(sources,)`` of int64: address in host memory; 0 for sources that are read as chunks.
        chunks: the chunks of those, by the source's index.
        device: ``(sources,)`` of int64, as in `CaptureSource`.
        keep: references that keep the memory alive.
        fences: points on device streams to wait for before reading.
        read_set: proves that the guarded sources are captured as they were at the call; None if there are none.
        order: the order of all ranks' leaves in the state, where they have no common one and this rank knows it.
    """

    leaves: tuple[Leaf, ...]
    leaf: Array
    boxes: tuple[Box, ...]
    nbytes: Array
    guarded: Array
    address: Array
    chunks: Mapping[int, Chunks]
    device: Array
    keep: Any = None
    fences: tuple[Fence, ...] = ()
    read_set: ReadSet | None = None
    order: StateOrder | None = None

    @classmethod
    def of(cls, leaves: Sequence[Leaf], sources: Sequence[CaptureSource], fences: Sequence[Fence] = ()) -> CapturePlan:
        """The plan that captures these sources."""
        return cls(
            tuple(leaves),
            np.array([s.leaf for s in sources], "i8"),
            tuple(s.box for s in sources),
            np.array([s.nbytes for s in sources], "i8"),
            np.array([s.guarded for s in sources], bool),
            np.array([address_of(s.memory) for s in sources], "i8"),
            {i: s.chunks for i, s in enumerate(sources) if s.memory is None},
            np.array([s.device for s in sources], "i8"),
            [s.memory for s in sources],
            tuple(fences),
        )

    def changed(self, sources: Mapping[int, CaptureSource]) -> CapturePlan:
        """A copy of the plan in which these sources, by their index, replace the old ones."""
        boxes, chunks, keep = list(self.boxes), dict(self.chunks), [self.keep]
        nbytes, guarded, address = self.nbytes.copy(), self.guarded.copy(), self.address.copy()
        device = self.device.copy()
        for i, source in sources.items():
            boxes[i], nbytes[i], guarded[i], device[i] = source.box, source.nbytes, source.guarded, source.device
            address[i] = address_of(source.memory)
            keep.append(source.memory)
            chunks.pop(i, None)
            if source.memory is None:
                chunks[i] = source.chunks
        columns = replace(self, nbytes=nbytes, guarded=guarded, address=address, device=device)
        return replace(columns, boxes=tuple(boxes), chunks=chunks, keep=keep)

    @cached_property
    def total(self) -> int:
        """Bytes of all sources."""
        return int(self.nbytes.sum())

    def shards(self, rank: int = 0) -> list[ShardRow]:
        """The shards as a version's rows."""
        return [ShardRow(leaf, rank, box) for leaf, box in zip(self.leaf.tolist(), self.boxes, strict=True)]

    def counts(self, chunk: int) -> Array:
        """``(sources,)``: number of chunks of each source, for a chunk length in bytes."""
        found: Array = -(-self.nbytes // chunk)
        return found

    def row_leaves(self, chunk: int) -> Array:
        """``(chunks,)``: the leaf of each chunk."""
        return np.repeat(self.leaf, self.counts(chunk))

    def in_order(self, sources: Array) -> Array:
        """These sources (indices) in the order in which they are captured."""
        leaves, leaf = self.leaves, self.leaf[sources]
        order = capture_order(self.nbytes[sources], lambda i: leaves[int(leaf[i])].spec.itemsize)
        found: Array = sources[order]
        return found

    def without_memory(self) -> CapturePlan:
        """A copy of the plan without references to the state's memory, for use after the state is gone."""
        return replace(self, chunks={}, keep=None, fences=(), read_set=None)

    def stages(self) -> Array:
        """``(leaves,)``: in which stage of the capture a leaf is captured; -1 if it is not captured, or not whole.

        Chunks of one stage are captured in order, except that a few slabs may overtake each other.
        """
        found = np.full(len(self.leaves), -1)
        found[self.leaf] = 2 * self.guarded + (self.address == 0)
        shapes = (self.leaves[leaf].spec.shape for leaf in self.leaf.tolist())
        parts = (box.shape != shape for box, shape in zip(self.boxes, shapes, strict=True))
        found[self.leaf[np.fromiter(parts, bool, len(self.boxes))]] = -1
        found[np.bincount(self.leaf, minlength=len(found)) > 1] = -1
        return found

    def name(self, source: int) -> str:
        """The name of the source's leaf, for messages."""
        return f"leaf {self.leaves[int(self.leaf[source])].name}"


def address_of(memory: Buffer | None) -> int:
    """The address for `CapturePlan.address`: 0 for None, and not 0 for memory, even if it is empty."""
    return 0 if memory is None else memory.data_ptr() or 1


@dataclass(frozen=True, eq=False)
class LastCapture:
    """Digests of the last capture, to skip unchanged chunks in the next one.

    Attributes:
        nbytes: ``(sources,)``: lengths of the sources. While they are equal, a row is the same chunk.
        digests: ``(chunks, 2)`` of uint64.
        samples: ``(chunks,)`` of uint64: for big chunks the hash of a sample of the bytes; else 0.
        likely: ``(chunks,)`` of bool: which need not be copied if they have not changed.
        seen_again: whether so many chunks on devices were the same as before that it is worth to look for them first.
        statistics: what is known of the chunks' elements; None if that is not asked for.
    """

    nbytes: Array
    digests: Array
    samples: Array
    likely: Array
    seen_again: bool = False
    statistics: ChunkStatistics | None = None

    @classmethod
    def nothing(cls, nbytes: Array, chunks: int) -> LastCapture:
        """The value before a first save: everything is copied."""
        return cls(nbytes, np.zeros((chunks, 2), "<u8"), np.zeros(chunks, "<u8"), np.zeros(chunks, bool))

    def fits(self, nbytes: Array) -> bool:
        """Whether the sources have the same lengths, so that the same rows are the same chunks."""
        return np.array_equal(self.nbytes, nbytes)


class ShardOwners(Protocol):
    """Decides which of the shards that several ranks hold this rank saves (`tierstate.engine.ranks.save.ownership`)."""

    @property
    def called(self) -> bool:
        """Whether the ranks must agree on the owners at the next save, even if nothing changed here."""

    def ask(self, seq: int, leaves: Sequence[Leaf], sources: Sequence[CaptureSource]) -> Array:
        """``(sources,)`` of bool: which sources this rank saves. All ranks call it. Raises RankFailed."""

    def steady(self, seq: int) -> None:
        """Nothing changed: this rank saves the same shards as last time. Called instead of `ask`."""


class Planner:
    """Makes the capture plan of each save: the sources, and which of them may be captured after `save` has returned.

    As long as a state keeps its structure, the plan is the last one with a few values changed.

    Args:
        cache: flattens the states.
        guard: knows which tensors only a guarded optimizer changes.
        owners: decides which shards this rank saves, if several ranks save together.
    """

    def __init__(self, cache: FlattenCache, guard: Guard, owners: ShardOwners | None = None) -> None:
        self._cache, self._guard, self._owners = cache, guard, owners
        self._token: object = None
        self._signature: list[int] = []
        self._plan: CapturePlan | None = None
        self._numbers: dict[int, list[int | None]] = {}  # by leaf: of each box, the number of its source
        self._boxes: dict[int, list[Box]] = {}
        self._devices: set[int] = set()
        self._unstreamed: set[torch.device] = set()
        self._turn = 0
        self._covers: Callable[[Provider], bool] = lambda _provider: False

    def plan(self, state: Any, seq: int = 0) -> CapturePlan:
        """The capture plan of a state.

        Args:
            state: the state, as given to `save`.
            seq: the number of the new version; ranks that save together use it in their messages.

        Raises:
            CaptureError: a value cannot be saved; the message names its path and type, and says what to do.
        """
        # Forget the last plan until the new one is complete: a failure must not leave an outdated plan.
        last, self._plan = self._plan, None
        tree, tensors = self._cache.flatten(state), self._guard.tensors()
        local = [local_of(tensor) for tensor in tensors]
        signature = [tensor.data_ptr() for tensor in local]
        alike = last is not None and tree.token is self._token and signature == self._signature
        plan = self._again(last, tree, seq) if alike and last is not None else None
        if plan is None:
            self._signature, self._covers = signature, self._guard.covers()
            plan = self._anew(tree, seq)
        # The remembered plan has no references to the state's memory.
        chunks = dict.fromkeys(plan.chunks, _gone)
        for device in self._unstreamed:
            wait_for(device)
        self._token, self._plan = tree.token, replace(plan, keep=None, chunks=chunks, fences=())
        return self._with_read_set(plan, tree, tensors, local) if plan.guarded.any() else plan

    def _with_read_set(
        self, plan: CapturePlan, tree: FlatState, tensors: Sequence[torch.Tensor], local: Sequence[torch.Tensor]
    ) -> CapturePlan:
        """The plan with the read set of what is guarded. What cannot be proven unchanged later is not guarded.

        Args:
            tensors, local: the tensors of the guarded optimizers, and of DTensors among them the local ones.
        """
        guarded, unstable = plan.guarded & self._guard.lazy, self._guard.unstable
        if unstable:
            guarded &= ~np.array([leaf.path in unstable for leaf in plan.leaves], bool)[plan.leaf]
        some, read_set = np.zeros(len(plan.leaves), bool), None
        some[plan.leaf[guarded]] = True
        leaves = np.flatnonzero(some)
        if len(leaves):
            values = [_tensor(tree, leaf) for leaf in leaves.tolist()]
            host = guarded & (plan.address != 0) & (plan.nbytes > 0)
            columns = plan.leaf[host], plan.address[host], plan.nbytes[host]
            others = [*tensors, *(here for here, whole in zip(local, tensors, strict=True) if here is not whole)]
            addresses = [*self._signature, *(here.data_ptr() for here in others[len(tensors) :])]
            self._turn += 1
            read_set = ReadSet.of(leaves, values, others, addresses, columns, self._turn, unstable)
        return replace(plan, guarded=guarded & (read_set is not None), read_set=read_set)

    def _anew(self, tree: FlatState, seq: int) -> CapturePlan:
        self._devices.clear()
        self._unstreamed.clear()
        nodes = enumerate(tree.nodes)
        sources = [s for i, node in nodes if node.provider for s in self._sources(i, node.leaf, node.provider)]
        mine: Sequence[bool] = [True] * len(sources)
        if self._owners is not None:
            mine = self._owners.ask(seq, tree.leaves, sources).tolist()
        self._numbers, self._boxes, taken = {}, {}, count()
        for source, is_mine in zip(sources, mine, strict=True):
            self._numbers.setdefault(source.leaf, []).append(next(taken) if is_mine else None)
            self._boxes.setdefault(source.leaf, []).append(source.box)
        return CapturePlan.of(tree.leaves, [*compress(sources, mine)], stream_fences(self._devices))

    def _sources(self, index: int, leaf: Leaf, provider: Provider) -> Iterator[CaptureSource]:
        """The sources of a leaf: one for each box that this process holds."""
        try:
            parts = provider.parts
        except Exception as error:
            raise CaptureError(f"leaf {leaf.name}: {error}") from error
        for part in parts:
            yield self._source(index, leaf, part)

    def _source(self, index: int, leaf: Leaf, provider: Provider) -> CaptureSource:
        try:
            box = provider.box
            nbytes = box.volume * leaf.spec.itemsize
            memory = memory_of(provider, nbytes)
        except Exception as error:
            raise CaptureError(f"leaf {leaf.name}: {error}") from error
        device, guarded = HOST, self._covers(provider)
        if isinstance(provider, (TensorProvider, LossyProvider)) and memory is None:
            place = provider.value.device
            if not copies_beside(place):
                self._unstreamed.add(place)
                guarded &= place == CPU
            else:
                self._devices.add(place.index)
                if type(provider).chunks is TensorProvider.chunks:  # an overridden one may rely on host memory
                    device = place.index
        return CaptureSource(index, box, nbytes, provider.chunks, guarded, memory, device)

    def _again(self, last: CapturePlan, tree: FlatState, seq: int) -> CapturePlan | None:
        """The plan of a state with the same structure as the last one; None if it needs a new plan all the same."""
        # Keep storages, not tensors: a tensor may be given other memory while the old one is still being read.
        keep = [tree, [value.untyped_storage() for value in tree.values if value is not None]]
        plan = replace(last, leaves=tree.leaves, keep=keep, fences=stream_fences(self._devices))
        fresh: dict[int, CaptureSource] = {}
        for i in tree.fresh:
            if (provider := tree.provider(i)) is not None:
                sources = list(self._sources(i, tree.leaves[i], provider))
                if not self._fit(i, tree.leaves[i], sources):
                    return None
                fresh |= {n: s for n, s in zip(self._numbers.get(i, ()), sources, strict=True) if n is not None}
        if self._owners is not None:
            if self._owners.called:
                return None
            self._owners.steady(seq)
        if fresh:
            plan = plan.changed(fresh)
        if plan.chunks:
            plan = replace(plan, chunks=self._chunks(plan, tree))
        return plan

    def _fit(self, index: int, leaf: Leaf, sources: Sequence[CaptureSource]) -> bool:
        """Whether a leaf has the same boxes as before; a leaf that every rank saves itself may have other lengths."""
        boxes = self._boxes.get(index, [])
        return len(sources) == len(boxes) and (
            leaf.spec.kind not in ONE_OWNER or [source.box for source in sources] == boxes
        )

    def _chunks(self, plan: CapturePlan, tree: FlatState) -> dict[int, Chunks]:
        """The chunks of the sources that have no address."""
        found: dict[int, Chunks] = {}
        for i in plan.chunks:
            leaf = int(plan.leaf[i])
            tree.hold(leaf)
            number = self._numbers[leaf].index(i)
            found[i] = partial(tree.chunks, leaf) if len(self._boxes[leaf]) == 1 else partial(_part, tree, leaf, number)
        return found


def _part(tree: FlatState, leaf: int, number: int, size: int) -> Iterator[Chunk]:
    """The chunks of one of the boxes that this process holds of a leaf."""
    provider = tree.provider(leaf)
    if provider is not None:
        yield from provider.parts[number].chunks(size)


def _tensor(tree: FlatState, leaf: int) -> torch.Tensor:
    """The tensor of a guarded leaf; the local one, if it is sharded."""
    value = tree.values[leaf] if tree.values else None
    if value is None:
        provider = tree.provider(leaf)
        assert isinstance(provider, (TensorProvider, ShardsProvider))
        value = provider.value
    assert isinstance(value, torch.Tensor)
    return value


def _gone(size: int) -> Iterator[Chunk]:
    raise RuntimeError("a plan is captured once")


def new_head(policy: Policy, run: str, seq: int, step: int, metadata: Mapping[str, Any] | None) -> Head:
    """The head of a new version.

    Raises:
        ValueError: as `as_step`.
        CaptureError: the metadata have no form in JSON.
    """
    said, now = json_metadata(metadata), time.time()
    return Head(run, seq, as_step(step), now, chunk=policy.chunk, digest=policy.digest, metadata=said)
