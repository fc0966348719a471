"""Between the user's words and the engine's: plans, retention, checks of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tierstate.manifest.chunk import Chunk
from tierstate.manifest.errors import CaptureError
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
from tierstate.tiers.plan import HOST, Plan, Source
from tierstate.tiers.policy import Policy, TierPolicy

from .guard import Guard


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
    """

    def __init__(self, recall: Recall, guard: Guard) -> None:
        self._recall, self._guard = recall, guard
        self._token: object = None
        self._signature: list[int] = []
        self._plan: Plan | None = None
        self._numbers: dict[int, int] = {}
        self._devices: set[int] = set()
        self._covers: Callable[[Provider], bool] = lambda _provider: False

    def plan(self, state: Any) -> Plan:
        """The plan of a save.

        Raises:
            CaptureError: something cannot be saved; the message names its path, type and remedy.
        """
        # Forgotten until all is done: what fails halfway must not leave a plan that is no longer true.
        last, self._plan = self._plan, None
        tree, signature = self._recall.flatten(state), self._guard.signature()
        if last is not None and tree.token is self._token and signature == self._signature:
            plan = self._again(last, tree)
        else:
            self._signature, self._covers = signature, self._guard.covers()
            plan = self._anew(tree)
        # What is remembered holds on to nothing of the state's memory.
        chunks = dict.fromkeys(plan.chunks, _gone)
        self._token, self._plan = tree.token, replace(plan, keep=None, chunks=chunks, fences=())
        return plan

    def _anew(self, tree: Tree) -> Plan:
        sources: list[Source] = []
        self._numbers.clear()
        self._devices.clear()
        for i, node in enumerate(tree.nodes):
            if node.provider is not None:
                self._numbers[i] = len(sources)
                sources.append(self._source(i, node.leaf, node.provider))
        return Plan.of(tree.leaves, sources, fences(self._devices))

    def _source(self, index: int, leaf: Leaf, provider: Provider) -> Source:
        try:
            box, memory = provider.box, memory_of(provider, leaf.spec.nbytes)
        except Exception as error:
            raise CaptureError(f"leaf {leaf.name}: {error}") from error
        device = HOST
        if isinstance(provider, (TensorProvider, LossyProvider)) and provider.value.is_cuda:
            self._devices.add(provider.value.device.index)
            if type(provider).chunks is TensorProvider.chunks:  # another's fill was promised host memory
                device = provider.value.device.index
        return Source(index, box, leaf.spec.nbytes, provider.chunks, self._covers(provider), memory, device)

    def _again(self, last: Plan, tree: Tree) -> Plan:
        # Storages, and not tensors, which may be given other memory while this one is still being read.
        keep = [tree, [value.untyped_storage() for value in tree.values if value is not None]]
        plan = replace(last, leaves=tree.leaves, keep=keep, fences=fences(self._devices))
        fresh = {i: self._source(i, tree.leaves[i], p) for i in tree.fresh if (p := tree.provider(i)) is not None}
        if fresh:
            plan = plan.changed({self._numbers[i]: source for i, source in fresh.items()})
        if plan.chunks:
            leaves = {i: int(plan.leaf[i]) for i in plan.chunks}
            for leaf in leaves.values():
                tree.hold(leaf)
            plan = replace(plan, chunks={i: partial(tree.chunks, leaf) for i, leaf in leaves.items()})
        return plan


def _gone(size: int) -> Iterator[Chunk]:
    raise RuntimeError("a plan is captured once")


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
