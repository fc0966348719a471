"""Steps in CUDA graphs: a replay runs them without Python, so that the guard waits before the replay.

`CUDAGraph.replay` calls no hook of an optimizer, and moves no version counter of a tensor. While anything is guarded,
``torch.cuda.CUDAGraph`` has other methods: a capture notes whether a step came in it, or an operation that changes what
is guarded (these do move the version counters, once, when they are captured), and a replay waits first, unless its
graph is known to have neither. Graphs that were captured before are not known, so that they wait. The graphs of
``torch.compile`` (mode ``reduce-overhead``) and of ``make_graphed_callables`` are replayed by the same method.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tierstate.tiers.memory.cudart import is_capturing


class Steps(Protocol):
    """What waits before a step."""

    def before_step(self) -> None:
        """Wait until the state may change."""

    def versions(self) -> list[int]:
        """The version counters of the guarded tensors."""


_LOCK = threading.Lock()


_WATCHING: list[Steps] = []
"""The guards that have guarded optimizers."""


_CAPTURING: dict[int, list[list[int]] | None] = {}
"""Graphs that are being captured by now, by their id: the version counters at the beginning; None once a step came."""


_WITHOUT_STEP: weakref.WeakSet[Any] = weakref.WeakSet()


_UNDO: list[Callable[[], None]] = []


def in_step_of_graph() -> bool:
    """Whether this step is being captured into a CUDA graph; the graph is noted as one that steps."""
    if not is_capturing():
        return False
    with _LOCK:
        _CAPTURING.update(dict.fromkeys(_CAPTURING))
    return True


def watch_replays(guard: Steps) -> None:
    """Make replays of CUDA graphs wait as steps do."""
    with _LOCK:
        if guard not in _WATCHING:
            _WATCHING.append(guard)
        if not _UNDO:
            _patch("capture_begin", _begin)
            _patch("capture_end", _end)
            _patch("replay", _replay)


def watch_replays_no_more(guard: Steps) -> None:
    """Undo `watch_replays`."""
    with _LOCK:
        if guard in _WATCHING:
            _WATCHING.remove(guard)
        while _UNDO and not _WATCHING:
            _UNDO.pop()()


def _patch(name: str, around: Callable[..., Any]) -> None:
    kind: Any = torch.cuda.CUDAGraph
    own = getattr(kind, name)

    @functools.wraps(own)
    def patched(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return around(own, graph, *args, **kwargs)

    def undo() -> None:
        if getattr(kind, name) is patched:
            setattr(kind, name, own)

    setattr(kind, name, patched)
    _UNDO.append(undo)


def _begin(own: Callable[..., Any], graph: Any, *args: Any, **kwargs: Any) -> Any:
    _WITHOUT_STEP.discard(graph)
    found, versions = own(graph, *args, **kwargs), _versions()
    with _LOCK:
        _CAPTURING[id(graph)] = versions
    return found


def _end(own: Callable[..., Any], graph: Any) -> Any:
    with _LOCK:
        versions = _CAPTURING.pop(id(graph), None)
    found = own(graph)
    if versions is not None and versions == _versions():
        _WITHOUT_STEP.add(graph)
    return found


def _versions() -> list[list[int]]:
    return [guard.versions() for guard in tuple(_WATCHING)]


def _replay(own: Callable[..., Any], graph: Any) -> Any:
    if graph not in _WITHOUT_STEP:
        for guard in tuple(_WATCHING):
            guard.before_step()
    return own(graph)
