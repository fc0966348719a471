"""Recorded tiers: a record of everything that changes them, and every state in which a crash can leave them.

A test runs a piece of work on tiers of a `Recording`, then opens what each possible crash leaves, and checks that the
work's promises still hold. No process is killed, so all crash points can be tried.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import ClassVar, Literal, NamedTuple

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AlreadyExists, NotFound
from tierstate.tiers.base import Range, Tier, Traits, check_key, check_ranges

Objects = Mapping[str, bytes]
"""The objects of a tier: bytes by key."""


MOST_AT_ONCE = 10
"""Most operations in progress at one moment of which every subset is tried; more would make thousands of subsets."""


@dataclass(frozen=True, eq=False)
class Operation:
    """A change of a tier. A writer makes its change only when it is closed.

    Attributes:
        tier: the tier's name.
        kind: whether an object is created or deleted.
        data: the bytes of an object that is created.
    """

    tier: str
    kind: Literal["create", "delete"]
    key: str
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.tier}:{self.key}"


class RecordedEvent(NamedTuple):
    """One event of a recording.

    Attributes:
        what: an operation begins, has taken effect and is about to return, or has failed; or something was announced.
        subject: the operation, or what was announced.
    """

    what: Literal["begin", "end", "fail", "told"]
    subject: Hashable


@dataclass(frozen=True)
class Crash:
    """The state in which a crash leaves the tiers.

    Attributes:
        at: how many events there were before the crash.
        took_effect: the operations in progress that had taken effect; the others in progress had not.
        told: what had been announced before, by `Recording.tell`.
        objects: the objects of each tier.
    """

    at: int
    took_effect: tuple[Operation, ...]
    told: tuple[Hashable, ...]
    objects: Mapping[str, Objects] = field(repr=False)

    def recording(self) -> Recording:
        """The tiers as a restart finds them: a new recording, which may crash again."""
        return Recording(self.objects)


class Recording:
    """Tiers in memory that record every change of them, by any thread, in one order.

    After a crash a persistent tier has everything for which `put` or `close` had returned. Of the operations that were
    in progress, each may have taken effect as a whole, or not at all. `crashes` gives every such state::

        recording = Recording()
        tier = recording.tier("disk")
        ...  # use it; call recording.tell("saved 3") as soon as a caller may rely on that
        for crash in recording.crashes():
            found = crash.recording().tier("disk")
            ...  # is everything in crash.told still true?

    Args:
        objects: the objects of each tier at the beginning.
        linger: seconds that each operation takes, so that operations of several threads overlap.
    """

    def __init__(self, objects: Mapping[str, Objects] | None = None, *, linger: float = 0.0) -> None:
        self.begun_with: dict[str, dict[str, bytes]] = {name: dict(found) for name, found in (objects or {}).items()}
        self.linger = linger
        self.events: list[RecordedEvent] = []
        self._tiers: dict[str, Recorded] = {}
        self._lock = threading.Lock()

    def tier(self, name: str) -> Recorded:
        """The tier of that name; created at the first call."""
        with self._lock:
            if name not in self._tiers:
                self._tiers[name] = Recorded(self, name, dict(self.begun_with.setdefault(name, {})))
            return self._tiers[name]

    def tell(self, what: Hashable) -> None:
        """Announce something on which callers rely from now on, such as that a save is durable."""
        self._add(RecordedEvent("told", what))

    def _add(self, event: RecordedEvent) -> None:
        with self._lock:
            self.events.append(event)

    def do(self, operation: Operation, objects: dict[str, bytes]) -> bool:
        """Apply an operation to a tier's objects, which only this method changes; returns whether it succeeded."""
        self._add(RecordedEvent("begin", operation))
        if self.linger:
            time.sleep(self.linger)
        with self._lock:
            done = _apply(operation, objects)
            self.events.append(RecordedEvent("end" if done else "fail", operation))
        return done

    def under_way(self, at: int) -> tuple[Operation, ...]:
        """Operations in progress just before an event, in their order: each may have taken effect, or not."""
        found: dict[Operation, None] = {}
        for what, subject in self.events[:at]:
            if isinstance(subject, Operation):
                found.pop(subject, None)
                if what == "begin":
                    found[subject] = None
        return tuple(found)

    def crash(self, at: int, took_effect: Collection[Operation] = ()) -> Crash:
        """The state that a crash just before an event leaves.

        Args:
            at: number of the event, from 0; the number of all events for a crash at the end.
            took_effect: which operations of `under_way` had taken effect, in their order; a create of an object that
                exists by then has none.
        """
        objects = {name: dict(found) for name, found in self.begun_with.items()}
        for what, subject in self.events[:at]:
            if what == "end" and isinstance(subject, Operation):
                _apply(subject, objects[subject.tier])
        chosen = [operation for operation in self.under_way(at) if operation in took_effect]
        effects = tuple(operation for operation in chosen if _apply(operation, objects[operation.tier]))
        told = tuple(event.subject for event in self.events[:at] if event.what == "told")
        return Crash(at, effects, told, objects)

    def crashes(self) -> Iterator[Crash]:
        """Every state that a crash can leave, each once, and the latest announcements at which it can occur.

        Raises:
            ValueError: more than `MOST_AT_ONCE` operations were in progress at once; use `crash` to try some subsets.
        """
        last: dict[Hashable, Crash] = {}
        for at in self._moments():
            for effects in _subsets(self.under_way(at)):
                crash = self.crash(at, effects)
                last[_fingerprint(crash)] = crash
        return iter(last.values())

    def _moments(self) -> list[int]:
        """The moments to try. Just before "begin" is left out: the moment after it can leave all the same states."""
        return [at for at in range(len(self.events) + 1) if at == len(self.events) or self.events[at].what != "begin"]


class Recorded(Tier):
    """One tier of a `Recording`. Closing it keeps its objects, as on a disk.

    Args:
        recording: records the operations.
        objects: the tier's objects; changed in place.
    """

    persistent: ClassVar[bool] = True

    def __init__(self, recording: Recording, name: str, objects: dict[str, bytes]) -> None:
        self._recording, self.name = recording, name
        self._objects = objects
        self._known_as = name  # in the recording; the policy may set `name`

    def again(self) -> Recorded:
        """Another handle on the same objects."""
        return Recorded(self._recording, self._known_as, self._objects)

    @property
    def traits(self) -> Traits:
        return Traits(persistent=True, shared="process", failure_domain=f"recorded:{self._known_as}")

    @property
    def objects(self) -> dict[str, bytes]:
        """A copy of the objects as they are now."""
        return dict(self._objects)

    def put(self, key: str, data: Buffer) -> None:
        operation = Operation(self._known_as, "create", check_key(key), bytes(view(data)))
        if not self._recording.do(operation, self._objects):
            raise AlreadyExists(f"{self.name}: {key}: exists already, nothing was changed", tier=self.name, key=key)

    def _find(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFound(f"{self.name}: {key}: there is no such object", tier=self.name, key=key) from None

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        data = self._find(key)
        check_ranges(f"{self.name}: {key}", len(data), ranges)
        for offset, out in ranges:
            view(out)[:] = data[offset : offset + out.numel()]

    def list(self, prefix: str) -> Iterator[str]:
        return iter(sorted(key for key in self.objects if key.startswith(prefix)))

    def size(self, key: str) -> int:
        return len(self._find(key))

    def delete(self, key: str) -> None:
        self._recording.do(Operation(self._known_as, "delete", check_key(key)), self._objects)


def _apply(operation: Operation, objects: dict[str, bytes]) -> bool:
    """Change a tier's objects; returns False, and changes nothing, if the object to be created exists."""
    if operation.kind == "delete":
        objects.pop(operation.key, None)
        return True
    if operation.key in objects:
        return False
    objects[operation.key] = operation.data
    return True


def _subsets(operations: Sequence[Operation]) -> Iterator[tuple[Operation, ...]]:
    if len(operations) > MOST_AT_ONCE:
        raise ValueError(f"{len(operations)} operations under way at once have 2**{len(operations)} outcomes")
    return chain.from_iterable(combinations(operations, n) for n in range(len(operations) + 1))


def _fingerprint(crash: Crash) -> Hashable:
    return frozenset((tier, key, data) for tier, objects in crash.objects.items() for key, data in objects.items())
