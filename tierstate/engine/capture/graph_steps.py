"""Steps in CUDA graphs: a replay runs them without Python, so that the guard waits before the replay.

`CUDAGraph.replay` calls no hook of an optimizer, and moves no version counter of a tensor. While anything is guarded,
``torch.cuda.CUDAGraph`` has other methods: a capture notes whether a step came in it, or an operation that changes what
is guarded (these do move the version counters, once, when they are captured), and a replay waits first, unless its
graph is known to have neither. What is known of a graph holds for the memory that was guarded when it was captured, and
until nothing is guarded any more: a capture is not noted then. Graphs that were captured before are not known, so that
they wait. The graphs of ``torch.compile`` (mode ``reduce-overhead``) and of ``make_graphed_callables`` are replayed by
the same method.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tierstate.tiers.memory.cudart import is_capturing

Memory = tuple[torch.device, int]
"""Device and address of a storage."""


class Steps(Protocol):
    """What waits before a step."""

    def before_step(self) -> None:
        """Wait until the state may change."""

    def wait(self) -> None:
        """Wait until it is captured."""

    def versions(self) -> list[int]:
        """The version counters of the guarded tensors."""

    def memory(self) -> set[Memory]:
        """The storages of the guarded tensors."""


_LOCK = threading.Lock()


_WATCHING: list[Steps] = []
"""The guards that have guarded optimizers."""


_CAPTURING: dict[int, list[list[int]] | None] = {}
"""Graphs that are being captured by now, by their id: the version counters at the beginning; None once a step came."""


_UNCHANGED: weakref.WeakKeyDictionary[Any, set[Memory]] = weakref.WeakKeyDictionary()
"""Graphs whose replays do not wait, and the memory that each is known to leave unchanged."""


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
        if not _WATCHING:
            _UNCHANGED.clear()  # a graph may be captured anew, with a step in it, before anything is guarded again
            _CAPTURING.clear()
            while _UNDO:
                _UNDO.pop()()


def wait_for_captures() -> None:
    """Wait until all that is guarded in this process is captured, by whichever Checkpointer: a restore may be about to
    fill it, and while it does that no version counter shows it."""
    for guard in tuple(_WATCHING):
        guard.wait()


def distrust_graphs(memory: set[Memory]) -> None:
    """Make replays wait of all graphs that are not known to leave this memory unchanged."""
    with _LOCK:
        for graph, unchanged in list(_UNCHANGED.items()):
            if not memory <= unchanged:
                del _UNCHANGED[graph]


def trusts_graphs() -> bool:
    """Whether there are graphs whose replays do not wait."""
    return bool(_UNCHANGED)


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
    with _LOCK:
        _UNCHANGED.pop(graph, None)
    found, versions = own(graph, *args, **kwargs), _versions()
    with _LOCK:
        _CAPTURING[id(graph)] = versions
    return found


def _end(own: Callable[..., Any], graph: Any) -> Any:
    with _LOCK:
        versions = _CAPTURING.pop(id(graph), None)
    found = own(graph)
    if versions is not None and versions == _versions():
        unchanged: set[Memory] = set().union(*(guard.memory() for guard in tuple(_WATCHING)))
        with _LOCK:
            _UNCHANGED[graph] = unchanged
    return found


def _versions() -> list[list[int]]:
    return [guard.versions() for guard in tuple(_WATCHING)]


def _replay(own: Callable[..., Any], graph: Any) -> Any:
    if graph not in _UNCHANGED:
        for guard in tuple(_WATCHING):
            guard.before_step()
    return own(graph)
