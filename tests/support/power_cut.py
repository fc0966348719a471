"""A power cut: what a folder may hold after one, by the calls that were made, of which what was not synced may be lost.

The model is the weakest that POSIX allows, as ALICE (Pillai et al., OSDI'14) has it: bytes last once an fsync or
fdatasync of their file has returned, names once an fsync of their folder has; nothing else lasts, nothing is in order,
and of a write that was not synced any part may be there, or bytes that nobody wrote.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


def rooms_with(name: str, what: object) -> list[ModuleType]:
    """The rooms of tiers that know something under a name."""
    rooms = [module for path, module in sys.modules.items() if path.startswith("tierstate.tiers.")]
    return [room for room in rooms if vars(room).get(name) is what]


JUNK = 0xA5
DATA = ("lost", "all", "torn", "junk")
"""What may have become of bytes that were written and not synced."""


@dataclass
class Change:
    """A call that changes a file or a folder, and when it began and had returned; or a sync of one."""

    begun: int
    over: int | None = None


@dataclass
class Entry(Change):
    """A name in a folder leads to a node from now on, or to nothing."""

    name: str = ""
    node: Node | None = None


@dataclass
class Bytes(Change):
    """Bytes are written at an offset; or, without any, the file is cut to that length."""

    offset: int = 0
    data: bytes | None = None


@dataclass(eq=False)
class Node:
    """A file or a folder: what was done to it, and when it was synced."""

    folder: bool
    changes: list[Any] = field(default_factory=list)
    syncs: list[Change] = field(default_factory=list)

    def before(self, at: int) -> list[Any]:
        """Changes that had begun by a moment."""
        return [change for change in self.changes if change.begun < at]

    def lasting(self, change: Change, at: int) -> bool:
        """Whether a change had been synced by a moment."""
        return change.over is not None and any(
            change.over <= sync.begun and sync.over is not None and sync.over <= at for sync in self.syncs
        )

    def names(self, at: int) -> dict[str, list[Node | None]]:
        """What each name may lead to: last of all what it does if nothing is lost."""
        found: dict[str, list[Node | None]] = {}
        for change in self.before(at):
            if self.lasting(change, at):
                found[change.name] = [change.node]
            else:
                found.setdefault(change.name, [None]).append(change.node)
        return {name: list(dict.fromkeys(nodes)) for name, nodes in found.items()}

    def contents(self, at: int) -> list[bytes]:
        """What the file may hold."""
        done = self.before(at)
        lasting = [change for change in done if self.lasting(change, at)]
        kinds = DATA if len(lasting) < len(done) else DATA[1:2]
        return list(dict.fromkeys(_content(done, lasting, kind) for kind in kinds))


def _content(done: Sequence[Bytes], lasting: Sequence[Bytes], kind: str) -> bytes:
    content = bytearray()
    for change in done:
        data, kept = change.data, any(change is other for other in lasting)
        if not kept and (kind == "lost" or (data is None and kind == "torn")):
            continue
        if data is None:
            content = (content + bytes(change.offset))[: change.offset]
            continue
        if not kept and kind != "all":
            data = data[: len(data) // 2] if kind == "torn" else bytes([JUNK]) * len(data)
        content += bytes(max(0, change.offset + len(data) - len(content)))
        content[change.offset : change.offset + len(data)] = data
    return bytes(content)


@dataclass(frozen=True)
class Cut:
    """What is found after a power cut: files and folders by path, and what had been told before."""

    told: tuple[Hashable, ...]
    found: dict[str, bytes | None]

    def build(self, place: Path) -> None:
        """Make it all in a folder that is empty."""
        for name, content in self.found.items():
            if content is None:
                (place / name).mkdir()
            else:
                (place / name).write_bytes(content)


class Disk:
    """Records what is done below a folder that is there, and empty, from the beginning on.

    Args:
        place: the folder.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.root = place, Node(folder=True)
        self.told: list[tuple[int, Hashable]] = []
        self.now = 0
        self._lock = threading.RLock()
        self._live: dict[str, Node] = {str(place): self.root}
        self._open: dict[int, Node] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block the tiers' calls are recorded."""
        with ExitStack() as stack:
            for room in rooms_with("os", os):
                stack.enter_context(mock.patch.object(room, "os", _Calls(self)))
            yield

    def tell(self, what: Hashable) -> None:
        """Somebody relies on something from now on."""
        with self._lock:
            self.told.append((self.tick(), what))

    def tick(self) -> int:
        """A moment of its own."""
        with self._lock:
            self.now += 1
            return self.now - 1

    def change(self, node: Node | None, change: Any, call: Callable[[], Any]) -> Any:
        """Make a call that changes a node; what failed has changed nothing."""
        if node is None:
            return call()
        changes = node.syncs if type(change) is Change else node.changes
        with self._lock:
            change.begun = self.tick()
            changes.append(change)
        try:
            result = call()
        except BaseException:
            with self._lock:
                changes[:] = [other for other in changes if other is not change]
            raise
        with self._lock:
            change.over = self.tick()
        return result

    def entry(self, path: Any, node: Node | None, call: Callable[[], Any]) -> Any:
        """Make a call that changes what a path leads to.

        One at a time: who sees the name, and syncs its folder, must not seem to have done so before the call was over.
        """
        parent, name = os.path.split(os.fspath(path))
        with self._lock:
            result = self.change(self._live.get(parent), Entry(0, name=name, node=node), call)
            if node is None:
                self._live.pop(os.fspath(path), None)
            elif parent in self._live:
                self._live[os.fspath(path)] = node
        return result

    def node(self, path: Any) -> Node | None:
        """The node that a path leads to now."""
        return self._live.get(os.fspath(path))

    def opened(self, descriptor: int, node: Node | None) -> int:
        """Take note of what a descriptor leads to."""
        self._open.pop(descriptor, None)
        if node is not None:
            self._open[descriptor] = node
        return descriptor

    def behind(self, descriptor: int) -> Node | None:
        """The node that a descriptor leads to."""
        return self._open.get(descriptor)

    def cut(self, at: int, choose: Callable[[Sequence[Any]], Any]) -> Cut:
        """What a power cut at a moment may leave.

        Args:
            choose: takes one of several outcomes; called for each name and each content that is not certain.
        """
        found: dict[str, bytes | None] = {}
        held: dict[Node, bytes] = {}  # a file of two names has one content

        def one_of(options: Sequence[Any]) -> Any:
            return choose(options) if len(options) > 1 else options[0]

        def visit(node: Node, path: str) -> None:
            for name, nodes in sorted(node.names(at).items()):
                child = one_of(nodes)
                if child is not None and child.folder:
                    found[f"{path}{name}"] = None
                    visit(child, f"{path}{name}/")
                elif child is not None:
                    if child not in held:
                        held[child] = one_of(child.contents(at))
                    found[f"{path}{name}"] = held[child]

        visit(self.root, "")
        return Cut(tuple(what for when, what in self.told if when < at), found)

    def cuts(self, at: int) -> Iterator[Cut]:
        """Every outcome of a power cut at a moment."""
        prefix: list[int] | None = []
        while prefix is not None:
            taken: list[tuple[int, int]] = []

            def choose(options: Sequence[Any], taken: list[tuple[int, int]] = taken, known: Any = prefix) -> Any:
                which = known[len(taken)] if len(taken) < len(known) else 0
                taken.append((which, len(options)))
                return options[which]

            yield self.cut(at, choose)
            prefix = _next(taken)


def _next(taken: Sequence[tuple[int, int]]) -> list[int] | None:
    """The choices after these, in the order of counting; None after the last."""
    rest = list(itertools.dropwhile(lambda choice: choice[0] + 1 == choice[1], reversed(taken)))[::-1]
    return [*(which for which, _ in rest[:-1]), rest[-1][0] + 1] if rest else None


class _Calls:
    """The module ``os`` with calls that are recorded."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *mode: int) -> int:
        disk = self._disk
        if not flags & os.O_CREAT:
            return disk.opened(os.open(path, flags, *mode), disk.node(path))
        assert flags & os.O_EXCL, "a file that is there is never written again"
        node = Node(folder=False)
        return disk.opened(disk.entry(path, node, lambda: os.open(path, flags, *mode)), node)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return self._write(descriptor, bytes(data), offset, lambda: os.pwrite(descriptor, data, offset))

    def pwritev(self, descriptor: int, buffers: Any, offset: int) -> int:
        data = b"".join(map(bytes, buffers))
        return self._write(descriptor, data, offset, lambda: os.pwritev(descriptor, buffers, offset))

    def _write(self, descriptor: int, data: bytes, offset: int, call: Callable[[], int]) -> int:
        change = Bytes(0, offset=offset, data=data)
        written: int = self._disk.change(self._disk.behind(descriptor), change, call)
        change.data = data[:written]
        return written

    def ftruncate(self, descriptor: int, length: int) -> None:
        change = Bytes(0, offset=length)
        self._disk.change(self._disk.behind(descriptor), change, lambda: os.ftruncate(descriptor, length))

    def fsync(self, descriptor: int) -> None:
        self._disk.change(self._disk.behind(descriptor), Change(0), lambda: os.fsync(descriptor))

    def fdatasync(self, descriptor: int) -> None:
        self._disk.change(self._disk.behind(descriptor), Change(0), lambda: os.fdatasync(descriptor))

    def link(self, old: Any, new: Any, **keys: Any) -> None:
        self._disk.entry(new, self._disk.node(old), lambda: os.link(old, new, **keys))

    def unlink(self, path: Any) -> None:
        self._disk.entry(path, None, lambda: os.unlink(path))

    def mkdir(self, path: Any, *mode: int) -> None:
        self._disk.entry(path, Node(folder=True), lambda: os.mkdir(path, *mode))

    def rmdir(self, path: Any) -> None:
        self._disk.entry(path, None, lambda: os.rmdir(path))
