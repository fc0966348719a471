"""The contract of a tier.

A tier keeps immutable objects of bytes under keys. It knows nothing of chunks, leaves or steps. Five methods and
``traits`` make a backend; every one of them promises:

* **whole or absent**: no reader sees an object before its writer closed without error; an aborted or killed writer
  leaves nothing visible.
* **create-only**: ``put`` or ``writer`` on an existing key raises `AlreadyExists` and changes nothing, also when two
  processes race.
* **exact**: a read fills every byte of every range or raises; never short, never stale.
* **durable**: if ``traits.persistent``, what ``close()`` or ``put()`` returned for survives the death of the host.
* **leases**: a buffer given to ``append(buffer, release)`` is untouched by the caller until the tier has called
  ``release``: once, on success and on failure. A memory tier may keep it for as long as the object lives.
* **honest errors**: `TierFull`, `NotFound`, `AccessDenied`, `TierUnavailable`, `Damaged` are different things.

`tierstate.tiers.testing.TierContract` is this list as a test suite.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

from tierstate.manifest.chunk import Buffer, empty_buffer

Release = Callable[[], None]

PART = 16 << 20
"""Bytes per request, where a tier has no liking of its own."""

MAX_KEY = 512
_KEY = re.compile(r"[A-Za-z0-9_\-=+@,][A-Za-z0-9._\-=+@,]*(/[A-Za-z0-9_\-=+@,][A-Za-z0-9._\-=+@,]*)*")


class Range(NamedTuple):
    """A wanted run of an object: ``len(out)`` bytes from ``offset``, to be written into ``out``."""

    offset: int
    out: Buffer


@dataclass(frozen=True, slots=True)
class Traits:
    """What a tier is, so that the engine need not know its class.

    Attributes:
        persistent: what it keeps survives the death of the host.
        shared: which ranks see the same objects.
        failure_domain: tiers of the same domain are lost together.
        alignment: offsets and lengths that are multiples of this many bytes are moved without an extra copy.
        memory_alignment: and so are buffers whose address is a multiple of this many bytes; as far as is known yet.
        part_size: bytes per request that the tier likes best.
        parallelism: requests in flight that the tier likes best.
        capacity: bytes it may keep; None where only the medium decides.
        bandwidth: bytes per second to expect; None where unknown.
        scarce: room is scarce: no version is kept there for slower tiers to be filled from, and versions share nothing,
            so that each one that is dropped makes room.
        conditional_create: whether create-only also holds between racing processes: True and False were probed,
            None is not known yet.
        io: how long objects are moved, as found out at the first transfer; empty where there is no choice.
        notes: what was found when the tier was opened, for people.
    """

    persistent: bool
    shared: Literal["process", "host", "site"]
    failure_domain: str
    alignment: int = 1
    memory_alignment: int = 1
    part_size: int = PART
    parallelism: int = 4
    capacity: int | None = None
    bandwidth: float | None = None
    scarce: bool = False
    conditional_create: bool | None = True
    io: str = ""
    notes: tuple[str, ...] = ()


class ObjectWriter(ABC):
    """One object being written. Leaving the ``with`` block closes it, or aborts it on an exception."""

    @abstractmethod
    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        """Add the bytes of a host buffer. ``release`` is called once, when the buffer is no longer needed.

        A tier that keeps buffers for as long as the object lives takes an ``arena`` and tells it (``arena.keep``), so
        that they leave the budget of what is in flight.
        """

    @abstractmethod
    def close(self) -> None:
        """Make the object visible, and durable on a persistent tier. On an error nothing is visible.

        Raises:
            AlreadyExists: the key was taken meanwhile.
        """

    @abstractmethod
    def abort(self) -> None:
        """Forget the object. Safe to call at any time, also twice and after ``close``, where it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Meeting(Protocol):
    """What a tier is told of the ranks of its job: `tierstate.tiers.team.Team` is one."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def hosts(self) -> Sequence[int]:
        """The number of each rank's host."""

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        """Whether this rank is the lowest of those that see the same objects as it does."""

    def gather(self, topic: str, data: bytes) -> Sequence[bytes]:
        """What each rank has to say about a topic; returns when all have said it.

        Raises:
            RankFailed: one is dead, or late.
        """


class Tier(ABC):
    """A place that keeps immutable objects of bytes under keys. See the module for the contract.

    The constructor's keyword-only parameters, with their annotations, are the tier's keys in a policy. A parameter
    named ``arena`` is not: the engine hands its arena to a tier that asks for it.
    """

    persistent: ClassVar[bool] = True
    """Whether tiers of this class survive the host: what a policy knows before it opens one. `traits` has the truth."""

    name: str = ""
    """The tier's name in the policy; set by the engine, used in messages."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What this tier is."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Create an object from one host buffer, which the caller keeps.

        Raises:
            AlreadyExists, TierFull, AccessDenied, TierUnavailable
            ValueError: the key is not a key (see `check_key`).
        """

    @abstractmethod
    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Fill every range. Ranges may come in any order and may overlap in the object.

        Raises:
            NotFound: there is no such object.
            Damaged: a range starts before the object, or ends behind its end.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterator[str]:
        """Keys of all objects whose key starts with ``prefix`` (``""``: all), in order of their code points."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Length of an object in bytes.

        Raises:
            NotFound: there is no such object.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object. A key that does not exist is no error: deleting is safe to do again."""

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        """Create an object piece by piece. The default gathers the pieces in memory and calls `put`.

        Args:
            size_hint: the object's likely length in bytes, for preallocation; it may be wrong.

        Raises:
            AlreadyExists: the key is taken. A tier may find that out only at ``close``.
        """
        from .writing import Gather  # which builds on this room

        return Gather(self, check_key(key))

    def get(self, key: str) -> Buffer:
        """A whole object in a fresh host buffer."""
        out = empty_buffer(self.size(key))
        self.read(key, [Range(0, out)])
        return out

    def discard(self, keys: Iterable[str]) -> None:
        """Remove many objects, as `delete` does, in any order. After an error some of them may be there still."""
        for key in keys:
            self.delete(key)

    def age(self, key: str) -> float | None:
        """Seconds since an object was created, by the clock of whatever keeps it; None where nobody can tell.

        What is not named by any record is removed once it is old enough, so an age must never be too high; hosts'
        clocks differ, so it is not told by ours.

        Raises:
            NotFound: there is no such object.
        """
        return None

    def firm(self, key: str) -> bool:
        """Whether an object that is there would outlive all that one written now does: later versions share no other.

        True, unless a tier knows better.
        """
        return True

    def room(self) -> int | None:
        """Bytes that may still be put there, as far as can be told without much work; None where nobody knows."""
        return None

    def meet(self, team: Meeting) -> None:  # noqa: B027 - most tiers are the same, whoever uses them
        """Be told of the ranks of the job. Every rank calls it after opening, before anything else is asked."""

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing
        """Let go of files, connections and memory. The tier is not used afterwards."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def check_key(key: str) -> str:
    """The key itself, if it is one: names of letters, digits and ``._-=+@,`` joined by ``/``, none starting with a dot.

    Raises:
        ValueError: anything else, so that no key can lead out of its tier.
    """
    if not is_key(key):
        raise ValueError(
            f"{key[:80]!r} is not a key; a key is names of letters, digits and ._-=+@, joined by '/', "
            f"none starting with a dot, at most {MAX_KEY} characters"
        )
    return key


def is_key(text: str) -> bool:
    """Whether `check_key` would let it pass."""
    return len(text) <= MAX_KEY and _KEY.fullmatch(text) is not None
