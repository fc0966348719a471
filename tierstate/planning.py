"""Between the user's words and the engine's: plans, retention, checks of arguments."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, count
from typing import Any

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Chunk
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.head import Head
from tierstate.manifest.leaf import Leaf, Path, matches_any
from tierstate.manifest.retention import Best, Keep
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.lossy import LossyProvider
from tierstate.providers.recall import Recall
from tierstate.providers.tensors import TensorProvider
from tierstate.providers.tree import Tree
from tierstate.tiers.devices import fences
from tierstate.tiers.keep_keys import Keep as KeepKeys
from tierstate.tiers.placement import may_pickle
from tierstate.tiers.plan import HOST, Chunks, Plan, Source
from tierstate.tiers.policy import Policy, TierPolicy

from .guard import Guard
from .sharing_out import ONE_OWNER, SharingOut


def allowed_pickles(policy: Policy, globs: Sequence[str]) -> Callable[[Path], bool]:
    """Where pickles are allowed: by the policy's rules, or by globs."""
    by_rule = may_pickle(policy)
    return lambda path: by_rule(path) or matches_any(globs, path)


def retention(tier: TierPolicy) -> Keep:
    """A tier's retention as the manifest decides it."""
    return _keep(tier.keep, tier)


def rule_retention(policy: Policy, tier: TierPolicy) -> dict[str, Keep]:
    """That of the leaves for which rules say it, by their globs in the order in which they are tried."""
    found: dict[str, Keep] = {}
    for rule in policy.rules:
        if rule.keep is not None:
            found.setdefault(rule.match, _keep(rule.keep, tier))
    return found


def _keep(said: KeepKeys, tier: TierPolicy) -> Keep:
    tags = tier.persistent if said.tags is None else said.tags
    best = Best(said.best.metric, said.best.mode, said.best.count) if said.best else None
    return Keep(said.last, said.every, said.within, best, tags, said.all)


class Planner:
    """Plans saves: what the flow is to capture of a state, and which of it may be captured after save has returned.

    While a state stays built as it is, a plan is the one before with a few numbers changed.

    Args:
        recall: flattens the states.
        guard: knows what holds still after save has returned.
        sharing: knows what of it this rank saves, where several save together.
    """

    def __init__(self, recall: Recall, guard: Guard, sharing: SharingOut | None = None) -> None:
        self._recall, self._guard, self._sharing = recall, guard, sharing
        self._token: object = None
        self._signature: list[int] = []
        self._plan: Plan | None = None
        self._numbers: dict[int, list[int | None]] = {}  # by leaf: of each box, the number of its source
        self._boxes: dict[int, list[Box]] = {}
        self._devices: set[int] = set()
        self._covers: Callable[[Provider], bool] = lambda _provider: False

    def plan(self, state: Any, seq: int = 0) -> Plan:
        """The plan of a save.

        Args:
            seq: the number of the version to be, by which ranks that save together speak of it.

        Raises:
            CaptureError: something cannot be saved; the message names its path, type and remedy.
        """
        # Forgotten until all is done: what fails halfway must not leave a plan that is no longer true.
        last, self._plan = self._plan, None
        tree, signature = self._recall.flatten(state), self._guard.signature()
        alike = last is not None and tree.token is self._token and signature == self._signature
        plan = self._again(last, tree, seq) if alike and last is not None else None
        if plan is None:
            self._signature, self._covers = signature, self._guard.covers()
            plan = self._anew(tree, seq)
        # What is remembered holds on to nothing of the state's memory.
        chunks = dict.fromkeys(plan.chunks, _gone)
        self._token, self._plan = tree.token, replace(plan, keep=None, chunks=chunks, fences=())
        return plan

    def _anew(self, tree: Tree, seq: int) -> Plan:
        self._devices.clear()
        nodes = enumerate(tree.nodes)
        sources = [s for i, node in nodes if node.provider for s in self._sources(i, node.leaf, node.provider)]
        mine: Sequence[bool] = [True] * len(sources)
        if self._sharing is not None:
            mine = self._sharing.ask(seq, tree.leaves, sources).tolist()
        self._numbers, self._boxes, taken = {}, {}, count()
        for source, is_mine in zip(sources, mine, strict=True):
            self._numbers.setdefault(source.leaf, []).append(next(taken) if is_mine else None)
            self._boxes.setdefault(source.leaf, []).append(source.box)
        return Plan.of(tree.leaves, [*compress(sources, mine)], fences(self._devices))

    def _sources(self, index: int, leaf: Leaf, provider: Provider) -> Iterator[Source]:
        """What this process holds of a leaf, box by box."""
        try:
            parts = provider.parts
        except Exception as error:
            raise CaptureError(f"leaf {leaf.name}: {error}") from error
        for part in parts:
            yield self._source(index, leaf, part)

    def _source(self, index: int, leaf: Leaf, provider: Provider) -> Source:
        try:
            box = provider.box
            nbytes = box.volume * leaf.spec.itemsize
            memory = memory_of(provider, nbytes)
        except Exception as error:
            raise CaptureError(f"leaf {leaf.name}: {error}") from error
        device = HOST
        if isinstance(provider, (TensorProvider, LossyProvider)) and provider.value.is_cuda:
            self._devices.add(provider.value.device.index)
            if type(provider).chunks is TensorProvider.chunks:  # another's fill was promised host memory
                device = provider.value.device.index
        return Source(index, box, nbytes, provider.chunks, self._covers(provider), memory, device)

    def _again(self, last: Plan, tree: Tree, seq: int) -> Plan | None:
        """The plan of a state that is built like the last one; None where it is to be planned anew all the same."""
        # Storages, and not tensors, which may be given other memory while this one is still being read.
        keep = [tree, [value.untyped_storage() for value in tree.values if value is not None]]
        plan = replace(last, leaves=tree.leaves, keep=keep, fences=fences(self._devices))
        fresh: dict[int, Source] = {}
        for i in tree.fresh:
            if (provider := tree.provider(i)) is not None:
                sources = list(self._sources(i, tree.leaves[i], provider))
                if not self._fit(i, tree.leaves[i], sources):
                    return None
                fresh |= {n: s for n, s in zip(self._numbers.get(i, ()), sources, strict=True) if n is not None}
        if self._sharing is not None:
            if self._sharing.called:
                return None
            self._sharing.steady(seq)
        if fresh:
            plan = plan.changed(fresh)
        if plan.chunks:
            plan = replace(plan, chunks=self._chunks(plan, tree))
        return plan

    def _fit(self, index: int, leaf: Leaf, sources: Sequence[Source]) -> bool:
        """Whether a leaf is cut as it was; one that every rank saves by itself may have another length."""
        boxes = self._boxes.get(index, [])
        return len(sources) == len(boxes) and (
            leaf.spec.kind not in ONE_OWNER or [source.box for source in sources] == boxes
        )

    def _chunks(self, plan: Plan, tree: Tree) -> dict[int, Chunks]:
        """The chunks of those sources that show no memory."""
        found: dict[int, Chunks] = {}
        for i in plan.chunks:
            leaf = int(plan.leaf[i])
            tree.hold(leaf)
            number = self._numbers[leaf].index(i)
            found[i] = partial(tree.chunks, leaf) if len(self._boxes[leaf]) == 1 else partial(_part, tree, leaf, number)
        return found


def _part(tree: Tree, leaf: int, number: int, size: int) -> Iterator[Chunk]:
    """The chunks of one of the boxes that are held of a leaf."""
    provider = tree.provider(leaf)
    if provider is not None:
        yield from provider.parts[number].chunks(size)


def _gone(size: int) -> Iterator[Chunk]:
    raise RuntimeError("a plan is captured once")


def new_head(policy: Policy, run: str, seq: int, step: int, metadata: Mapping[str, Any] | None) -> Head:
    """The head of a version that is about to be saved.

    Raises:
        ValueError: the step is none.
        CaptureError: the metadata are no JSON values.
    """
    said, now = checked_metadata(metadata), time.time()
    return Head(run, seq, checked_step(step), now, chunk=policy.chunk, digest=policy.digest, metadata=said)


def checked_step(step: int) -> int:
    """The step itself, if it is one; raises ValueError."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step={step!r}: a step is an int, 0 or more")
    return step


def checked_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The metadata as JSON gives it back; raises CaptureError."""
    try:
        return dict(json.loads(json.dumps(dict(metadata or {}))))
    except (TypeError, ValueError) as error:
        raise CaptureError(f"metadata must be JSON values: {error}; convert tensors by float(...)") from error
