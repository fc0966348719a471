"""Between the user's words and the engine's: plans, retention, checks of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Path, matches_any
from tierstate.manifest.retention import Keep
from tierstate.providers.base import Provider
from tierstate.providers.tree import Tree
from tierstate.tiers.devices import fences
from tierstate.tiers.placement import may_pickle
from tierstate.tiers.plan import Plan, Source
from tierstate.tiers.policy import Policy, TierPolicy


def allowed_pickles(policy: Policy, globs: Sequence[str]) -> Callable[[Path], bool]:
    """Where pickles are allowed: by the policy's rules, or by globs."""
    by_rule = may_pickle(policy)
    return lambda path: by_rule(path) or matches_any(globs, path)


def retention(tier: TierPolicy) -> Keep:
    """A tier's retention as the manifest decides it."""
    return Keep(tier.keep.last, tier.keep.every, tier.keep.all)


def plan(tree: Tree, guarded: Callable[[Provider], bool]) -> Plan:
    """What the flow is to capture of a flattened state, and which of it may be captured after save has returned."""
    sources = [
        Source(i, p.box, node.leaf.spec.nbytes, p.chunks, guarded(p), p.memory())
        for i, node in enumerate(tree.nodes)
        if (p := node.provider) is not None
    ]
    return Plan.of(tree.leaves, sources, fences())


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
