"""Recorded tiers: what was done to them can be cut off at any moment, and found again as after a crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import ClassVar, Literal, NamedTuple

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import AlreadyExists, NotFound

from .base import Range, Tier, Traits, check_key
from .ranges import check_ranges

Objects = Mapping[str, bytes]
"""What lies in a tier: bytes by key."""

MOST_AT_ONCE = 10
"""Operations under way at one moment of which every subset is tried; of more there would be thousands of subsets."""


@dataclass(frozen=True, eq=False)
class Operation:
    """What changes a tier; a writer does so only when it is closed.

    Attributes:
        tier: the tier's name.
        kind: whether the object comes or goes.
        data: the bytes of one that comes.
    """

    tier: str
    kind: Literal["create", "delete"]
    key: str
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.tier}:{self.key}"


class Event(NamedTuple):
    """Something that happened, in the order of the recording.

    Attributes:
        what: an operation begins, has taken effect and is about to return, or has failed; or something was told.
        subject: the operation, or what was told.
    """

    what: Literal["begin", "end", "fail", "told"]
    subject: Hashable


@dataclass(frozen=True)
class Crash:
    """What a crash leaves.

    Attributes:
        at: how many events there were before it.
        took_effect: which of the operations under way had taken effect; the others had not.
        told: what had been told by then.
        objects: what lies in each tier.
    """

    at: int
    took_effect: tuple[Operation, ...]
    told: tuple[Hashable, ...]
    objects: Mapping[str, Objects] = field(repr=False)

    def recording(self) -> Recording:
        """The tiers as they are found: a recording of its own, which may crash again."""
        return Recording(self.objects)


class Recording:
    """Tiers in memory of which everything that changes them is recorded, in one order, whatever thread it comes from.

    After a crash a persistent tier has what `put` or `close` had returned for; of what was under way any part may have
    taken effect, each operation as a whole. `crashes` gives every state that can be found so::

        recording = Recording()
        tier = recording.tier("disk")
        ...  # use it; recording.tell("saved 3") as soon as somebody may rely on that
        for crash in recording.crashes():
            found = crash.recording().tier("disk")
            ...  # is everything in crash.told still true?

    Args:
        objects: what lies in each tier to begin with.
        linger: seconds that each operation takes, so that those of several threads are under way together.
    """

    def __init__(self, objects: Mapping[str, Objects] | None = None, *, linger: float = 0.0) -> None:
        self.begun_with: dict[str, dict[str, bytes]] = {name: dict(found) for name, found in (objects or {}).items()}
        self.linger = linger
        self.events: list[Event] = []
        self._tiers: dict[str, Recorded] = {}
        self._lock = threading.Lock()

    def tier(self, name: str) -> Recorded:
        """The tier of that name; it is made when it is first asked for."""
        with self._lock:
            if name not in self._tiers:
                self._tiers[name] = Recorded(self, name, dict(self.begun_with.setdefault(name, {})))
            return self._tiers[name]

    def tell(self, what: Hashable) -> None:
        """Somebody relies on something from now on, such as on a save that is said to be durable."""
        self._add(Event("told", what))

    def _add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def do(self, operation: Operation, objects: dict[str, bytes]) -> bool:
        """Let an operation take effect on a tier's objects, which nobody else changes; whether it could."""
        self._add(Event("begin", operation))
        if self.linger:
            time.sleep(self.linger)
        with self._lock:
            done = _apply(operation, objects)
            self.events.append(Event("end" if done else "fail", operation))
        return done

    def under_way(self, at: int) -> tuple[Operation, ...]:
        """Operations that had begun before an event, and may have taken effect or not by then, in their order."""
        found: dict[Operation, None] = {}
        for what, subject in self.events[:at]:
            if isinstance(subject, Operation):
                found.pop(subject, None)
                if what == "begin":
                    found[subject] = None
        failed = {event.subject for event in self.events if event.what == "fail"}
        return tuple(operation for operation in found if operation not in failed)

    def crash(self, at: int, took_effect: Collection[Operation] = ()) -> Crash:
        """What a crash before an event leaves.

        Args:
            at: number of the event, from 0; as many as there are for the end.
            took_effect: which of `under_way` did.
        """
        objects = {name: dict(found) for name, found in self.begun_with.items()}
        for what, subject in self.events[:at]:
            if what == "end" and isinstance(subject, Operation):
                _apply(subject, objects[subject.tier])
        effects = tuple(operation for operation in self.under_way(at) if operation in took_effect)
        for operation in effects:
            _apply(operation, objects[operation.tier])
        told = tuple(event.subject for event in self.events[:at] if event.what == "told")
        return Crash(at, effects, told, objects)

    def crashes(self) -> Iterator[Crash]:
        """Every state that a crash can leave, each once: with the most that had been told by then.

        Raises:
            ValueError: more than `MOST_AT_ONCE` operations were under way at once; use `crash` to try some subsets.
        """
        last: dict[Hashable, Crash] = {}
        for at in self._moments():
            for effects in _subsets(self.under_way(at)):
                crash = self.crash(at, effects)
                last[_fingerprint(crash)] = crash
        return iter(last.values())

    def _moments(self) -> list[int]:
        """Those that matter: before an operation begins there is nothing that there is not right afterwards too."""
        return [at for at in range(len(self.events) + 1) if at == len(self.events) or self.events[at].what != "begin"]


class Recorded(Tier):
    """One tier of a `Recording`. It stays when it is closed, as a disk does.

    Args:
        recording: where what is done is written down.
        objects: what lies there; changed in place.
    """

    persistent: ClassVar[bool] = True

    def __init__(self, recording: Recording, name: str, objects: dict[str, bytes]) -> None:
        self._recording, self.name = recording, name
        self._objects = objects
        self._known_as = name  # `name` is what the policy calls it

    def again(self) -> Recorded:
        """Another handle on the same objects."""
        return Recorded(self._recording, self._known_as, self._objects)

    @property
    def traits(self) -> Traits:
        return Traits(persistent=True, shared="process", failure_domain=f"recorded:{self._known_as}")

    @property
    def objects(self) -> dict[str, bytes]:
        """What lies there now: a copy."""
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
    """Change a tier's objects; False, and nothing changed, where one that is to come is there."""
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
