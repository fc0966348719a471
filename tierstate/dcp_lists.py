"""Plain values in lists: DCP parts such lists, as of an optimizer's groups, item by item; here they are whole again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tierstate.manifest.box import Box
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.leaf import Leaf, Path, Spec
from tierstate.providers.encoding import encode
from tierstate.providers.registry import REGISTRY
from tierstate.providers.survey import Survey
from tierstate.tiers.plan import Plan, Source

Listed = Mapping[Path, Any]
"""Plain values that lie in lists, by their paths."""


def is_listed(path: Path, value: Any) -> bool:
    """Whether a value is plain and lies in a list: the coordinator writes it, who alone has all items."""
    if not any(type(key) is int for key in path):
        return False
    try:
        encode(value)
    except CaptureError:
        return False
    return True


def whole_lists(listed: Listed, others: Iterable[Path]) -> Plan:
    """What the coordinator is to write: lists of which everything is plain as one value, as a `Checkpointer` has them;
    else each value by itself.

    Args:
        listed: of all ranks.
        others: paths of all other leaves with bytes.
    """
    parted = {root for path in others if (root := _root(path)) is not None}
    values: dict[Path, Any] = {}
    for path, value in listed.items():
        root = _root(path)
        if root is None or root in parted:
            values[path] = value
        else:
            _put(values.setdefault(root, []), path[len(root) :], value)
    leaves: dict[Path, Leaf] = {}
    sources: list[Source] = []
    for path, value in values.items():
        for depth in range(len(path)):
            kind = "list" if type(path[depth]) is int else "dict"
            leaves.setdefault(path[:depth], Leaf(path[:depth], Spec(kind)))
        place = Survey(REGISTRY).take(_with_end(value) if path not in listed else value, path)
        assert place.provider is not None  # everything in it is plain
        spec = place.provider.spec
        leaves[path] = Leaf(path, spec)
        at, chunks, memory = len(leaves) - 1, place.provider.chunks, place.provider.memory()
        sources.append(Source(at, Box.whole(spec.shape), spec.nbytes, chunks, False, memory))
    return Plan.of(tuple(leaves.values()), sources)


def _root(path: Path) -> Path | None:
    """The outermost list that a path leads through."""
    return next((path[:depth] for depth, key in enumerate(path) if type(key) is int), None)


def _put(at: Any, path: Path, value: Any) -> None:
    """Set a value in lists and dicts; where DCP tells nothing of an item of a list, it was an empty dict."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(at, list):
            at += [{} for _ in range(key + 1 - len(at))]
        if following is None:
            at[key] = value
            return
        missing = key not in at if isinstance(at, dict) else at[key] == {} and type(following) is int
        if missing:
            at[key] = [] if type(following) is int else {}
        at = at[key]


def _with_end(items: list[Any]) -> list[Any]:
    """The list; with an empty dict at its end, where nothing else explains why DCP parted it."""
    explained = any(isinstance(item, dict) or _is_parted(item) for item in items)
    return items if explained else [*items, {}]


def _is_parted(item: Any) -> bool:
    return isinstance(item, list) and any(isinstance(one, dict) or _is_parted(one) for one in item)
