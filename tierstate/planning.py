"""Between the user's words and the engine's: plans, retention, checks of arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tierstate.manifest.chunk import Event
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Path, matches_any
from tierstate.manifest.retention import Keep
from tierstate.providers.base import Provider
from tierstate.providers.tree import Tree
from tierstate.tiers.capture import Plan, Source
from tierstate.tiers.placement import may_pickle
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
        Source(i, node.provider.box, node.leaf.spec.nbytes, node.provider.chunks, guarded(node.provider))
        for i, node in enumerate(tree.nodes)
        if node.provider is not None
    ]
    return Plan(tuple(node.leaf for node in tree.nodes), tuple(sources), fences())


def fences() -> tuple[Event, ...]:
    """An event per CUDA device in use, on the caller's stream: the capture runs in a thread that has another one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return ()
    made = []
    for device in range(torch.cuda.device_count()):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        made.append(event)
    return tuple(made)


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
