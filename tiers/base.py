"""The storage backend interface: `Tier`, its writers, and the properties that a tier reports (`Traits`).

A tier keeps immutable objects of bytes under keys. What the bytes mean is known only to the code that uses the tier.
Five methods (``put``, ``read``, ``list``, ``size``, ``delete``) and ``traits`` make a backend. Each of them promises:

* **whole or absent**: no reader sees an object before its writer closed without error; an aborted or killed writer
  leaves nothing visible.
* **create-only**: ``put`` or ``writer`` on an existing key raises `AlreadyExists` and changes nothing, also when two
  processes race.
* **exact**: a read fills every byte of every range or raises; never short, never stale.
* **durable**: if ``traits.persistent``, what ``close()`` or ``put()`` returned for survives the death of the host.
* **leases**: the caller does not change a buffer that it gave to ``append(buffer, release)`` until the tier has called
  ``release``: once, on success and on failure. A memory tier may keep it for as long as the object lives.
* **honest errors**: `TierFull`, `NotFound`, `AccessDenied`, `TierUnavailable` and `Damaged` are never raised for one
  another.

`tierstate.tiers.testing.TierContract` is this list as a test suite. `AtomicWriter` is the base class of our own
writers: it never publishes part of an object.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import Damaged, NotFound, Oversized, TierError
from tierstate.tiers.connections.secret import JobSecret

Release = Callable[[], None]

AnyTier = TypeVar("AnyTier", bound="Tier")


DEFAULT_PART_SIZE = 16 << 20
"""Bytes per request of a tier that has no preference."""


MAX_KEY = 512


RACE_SECONDS = 3.0
"""Seconds for which an object that several processes may create at once may still be replaced by another one of them,
in a tier that does not create exclusively: from the moment at which one looks whether the name is free until its own
object is there."""


_KEY = re.compile(r"[A-Za-z0-9_\-=+@,][A-Za-z0-9._\-=+@,]*(/[A-Za-z0-9_\-=+@,][A-Za-z0-9._\-=+@,]*)*")


class KeepingArena(Protocol):
    """The part of `Arena` that is used by a tier that keeps buffers."""

    slab_size: int
    """Bytes of one slab: keeping any part of it keeps all of it in memory."""

    def keep(self, buffer: Buffer) -> int:
        """Take the slab that holds ``buffer`` out of the in-flight budget, until its last lease is released.

        Returns:
            Bytes that this keeps in addition; 0 if the slab is kept already or is not of this arena.
        """
        ...


class IoAlignment(NamedTuple):
    """What direct I/O requires of a transfer: its alignment.

    Attributes:
        offset: offsets in the object must be multiples of this many bytes.
        memory: addresses of buffers must be multiples of this many bytes.
    """

    offset: int = 1
    memory: int = 1


class Range(NamedTuple):
    """A byte range of an object to read: ``len(out)`` bytes from ``offset``, written into ``out``."""

    offset: int
    out: Buffer


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a tier, so that code that uses one need not know its class.

    Attributes:
        persistent: what it keeps survives the death of the host.
        shared: which ranks see the same objects.
        failure_domain: tiers of the same domain are lost together.
        alignment: offsets and lengths that are multiples of this many bytes are moved without an extra copy.
        memory_alignment: the same for the addresses of buffers, as far as it is known yet.
        part_size: preferred bytes per request.
        parallelism: preferred number of requests in flight.
        capacity: bytes it may keep; None if only the medium limits it.
        bandwidth: expected bytes per second; None if not known.
        scarce: there is little room. No object is kept only for a cascade to slower tiers, and objects of different
            saves share no data, so that deleting an object always frees its room.
        conditional_create: whether create-only also holds between racing processes: True and False were probed,
            None is not known yet.
        io: the I/O path of long objects, such as io_uring; known after the first transfer, empty without a choice.
        notes: messages for users about what was found when the tier was opened.
    """

    persistent: bool
    shared: Literal["process", "host", "site"]
    failure_domain: str
    alignment: int = 1
    memory_alignment: int = 1
    part_size: int = DEFAULT_PART_SIZE
    parallelism: int = 4
    capacity: int | None = None
    bandwidth: float | None = None
    scarce: bool = False
    conditional_create: bool | None = True
    io: str = ""
    notes: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where a tier's objects lie, to find two tiers in one place.

    Attributes:
        paths: the place as lists of names, each from the outside in, as in ``(file, device, ckpt, a)``. One place may
            have several. Two tiers lie in one place, or one within the other, if a path of one begins with a path of
            the other.
        state: changes if something else may lie there than before, such as another directory; empty if not known.
        mount: the mount point of the file system; empty where the tier is in none.
    """

    paths: tuple[tuple[str, ...], ...]
    state: str = ""
    mount: str = ""

    def overlaps(self, other: Place) -> bool:
        """Whether the two are one place, or one lies within the other."""
        pairs = ((a, b) for a in self.paths for b in other.paths)
        return any(a[: len(b)] == b[: len(a)] for a, b in pairs)


class ObjectWriter(ABC):
    """One object being written. Leaving the ``with`` block closes it, or aborts it on an exception."""

    @abstractmethod
    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        """Add the bytes of a host buffer. ``release`` is called once, when the buffer is no longer needed.

        A tier that keeps buffers for as long as the object exists takes an ``arena`` and calls ``arena.keep``, so that
        they no longer count against the arena's in-flight budget.
        """

    @abstractmethod
    def close(self) -> None:
        """Make the object visible, and durable on a persistent tier. On an error nothing is visible.

        Raises:
            AlreadyExists: the key was taken meanwhile.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard the object. Safe to call at any time; does nothing the second time or after ``close``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class RankGroup(Protocol):
    """The part of the job's team of ranks that a tier uses."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def hosts(self) -> Sequence[int]:
        """The number of each rank's host."""

    @property
    def secret(self) -> JobSecret:
        """The secret of the job, from which the keys of connections between its processes are derived."""

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        """Whether this rank is the lowest of those that see the same objects as it does."""

    def gather(self, topic: str, data: bytes) -> Sequence[bytes]:
        """All-gather: one rank's bytes for each rank, in their order. Waits for every rank.

        Raises:
            RankFailed: a rank is dead or timed out.
        """


class Tier(ABC):
    """A place that keeps immutable objects of bytes under keys. See the module for the contract.

    The constructor's keyword-only parameters, with their annotations, are the tier's keys in a policy. A parameter
    named ``arena`` is not: `open_tier` passes the arena to a tier that has one.
    """

    persistent: ClassVar[bool] = True
    """Whether tiers of this class survive the host, as known before one is opened. `traits` has the final word."""

    @classmethod
    def persists(cls, options: Mapping[str, Any]) -> bool:
        """Whether a tier with these options, as in a policy, survives the host; as known before it is opened."""
        return cls.persistent

    name: str = ""
    """The tier's name in the policy; set by `open_tier`, used in messages."""

    inner: Tier | None = None
    """The tier that this one is a wrapper around; None for a tier that keeps the bytes itself."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The properties of this tier."""

    @property
    def trouble(self) -> str:
        """What hangs, and since when: then other calls fail at once, and the tier is asked again at intervals. Empty
        while it is in use, and for tiers that cannot tell."""
        return ""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Create an object from one host buffer, which the tier does not use after the call.

        Raises:
            AlreadyExists: the key is taken; nothing was changed.
            TierFull, AccessDenied, TierUnavailable: it could not be written; nothing of it is visible.
            ValueError: the key is not valid (see `check_key`).
        """

    @abstractmethod
    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Fill every range. Ranges may come in any order and may overlap in the object.

        Raises:
            NotFound: there is no such object.
            Damaged: a range is not within the object.
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
        """Create an object piece by piece. The default collects the pieces in memory and calls `put`.

        Args:
            size_hint: the object's likely length in bytes, for preallocation; it may be wrong.

        Raises:
            AlreadyExists: the key is taken. A tier may find that out only at ``close``.
        """

        return BufferingWriter(self, check_key(key))

    def get(self, key: str) -> Buffer:
        """Read a whole object into a new host buffer."""
        return read_range(self, key, 0, self.size(key))

    def get_within(self, key: str, most: int, what: str) -> Buffer:
        """As `get`, for an object that may be anybody's: a longer one than any program writes is not read.

        Args:
            most: bytes that it may have.
            what: it should be, as in ``a record``.

        Raises:
            NotFound: there is no such object.
            Oversized: it is longer.
        """
        if (size := self.size(key)) > most:
            raise Oversized(f"{self.name}: {key}: {size} bytes are too many for {what}")
        return read_range(self, key, 0, size)

    def discard(self, keys: Iterable[str]) -> None:
        """Remove many objects, as `delete` does, in any order. After an error some of them may still exist."""
        for key in keys:
            self.delete(key)

    def age(self, key: str) -> float | None:
        """Seconds since an object was created, by the clock of the storage; None where that is not known.

        Garbage collection deletes objects that nothing refers to once they are old enough, so an age must never be too
        high. It does not use this host's clock, since the clocks of hosts differ.

        Raises:
            NotFound: there is no such object.
        """
        return None

    def firm(self, key: str) -> bool:
        """Whether an object is as safe as one that is written now; only then do later saves reuse its data.

        True by default.
        """
        return True

    def room(self) -> int | None:
        """Free bytes, if cheap to find out; None if not known."""
        return None

    def place(self) -> Place | None:
        """Where the objects lie; None, the default, if that is not known. Reads no object.

        Raises:
            TierError: it could not be looked at.
        """
        return None

    def meet(self, team: RankGroup) -> None:  # noqa: B027 - most tiers are the same, whoever uses them
        """Tell the tier the ranks of the job. Every rank calls it after opening the tier, before any other call."""

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing
        """Release files, connections and memory. The tier is not used afterwards."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def read_range(tier: Tier, key: str, offset: int, nbytes: int) -> Buffer:
    """Read a part of an object into a new host buffer. Raises: as `Tier.read`."""
    out = empty_buffer(nbytes)
    tier.read(key, [Range(offset, out)])
    return out


def outlast_race(tier: Tier, key: str) -> bool:
    """Wait until an object that several processes may create at once is one that stays.

    Where a tier does not create exclusively, all of them are told that they have created it, and the last one's bytes
    stay. So whoever goes on with such an object, as with a key or an id, must know that it is the last one.

    Args:
        tier: the tier. If it does not tell ages, the object counts as new.
        key: the key of an object that this process has created or found.

    Returns:
        Whether the caller must read the object (again): another one may be there.

    Raises:
        TierError: the tier could not be asked.
    """
    if tier.traits.conditional_create:
        return False
    try:
        age = tier.age(key)
    except NotFound:
        return True
    if (left := RACE_SECONDS - (age or 0.0)) <= 0:
        return False
    time.sleep(left)
    return True


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
    """Whether `check_key` accepts it."""
    return len(text) <= MAX_KEY and _KEY.fullmatch(text) is not None


def check_ranges(place: str, size: int, ranges: Sequence[Range]) -> None:
    """Check that every range lies within an object of ``size`` bytes.

    Raises:
        Damaged: one does not; the message names ``place`` (tier and key).
    """
    check_spans(place, size, ((offset, out.numel()) for offset, out in ranges))


def check_spans(place: str, size: int, spans: Iterable[tuple[int, int]]) -> None:
    """As `check_ranges`, for pairs of offset and length."""
    for offset, nbytes in spans:
        if offset < 0 or offset + nbytes > size:
            raise Damaged(f"{place}: bytes {offset} to {offset + nbytes} are wanted, the object has {size}")


class AtomicWriter(ObjectWriter):
    """A writer that is open, then closed or aborted, and never publishes a part of an object.

    Any failure aborts the object: a caller that ignores it gets the same failure at ``close``. A lock lets one call of
    a writer run at a time, so an abort from another thread waits for an append that is running.

    Args:
        place: tier and key, for messages.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._open = True
        self._failure: BaseException | None = None
        self._step = threading.RLock()

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        kept = False
        try:
            with self._step:
                if not self._open:
                    raise ValueError(f"{self._place}: nothing can be added: the writer is closed or was given up")
                with self._aborting_on_error():
                    kept = self._add(buffer, release)
        finally:
            # Outside the lock: the caller's `release` may take long, or wait for this writer.
            if release is not None and not kept:
                release()

    def close(self) -> None:
        with self._step:
            if isinstance(self._failure, Exception):
                raise self._failure
            if self._failure is not None:
                raise TierError(f"{self._place}: was given up when it was interrupted") from self._failure
            if self._open:
                with self._aborting_on_error():
                    self._publish()
                self._open = False

    def abort(self) -> None:
        with self._step:
            if self._open:
                self._open = False
                self._discard()

    @contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._open, self._failure = False, error
            self._discard()
            raise

    @abstractmethod
    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        """Add the bytes. Returns whether the lease is kept, to be released when the object is freed."""

    @abstractmethod
    def _publish(self) -> None:
        """Make the object visible, whole. On an error nothing is visible; `_discard` follows."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove all traces, and release the leases that were kept. Called once at most."""


class BufferingWriter(AtomicWriter):
    """The default writer of a tier: collects copies in memory, and calls `Tier.put` once, when it is closed."""

    def __init__(self, tier: Tier, key: str) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._tier, self._key = tier, key
        self._pieces: list[Buffer] = []

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        self._pieces.append(buffer.clone())
        return False

    def _publish(self) -> None:
        import torch  # here, so that a process without buffers does without it

        self._tier.put(self._key, torch.cat([empty_buffer(0), *self._pieces]))
        self._pieces = []

    def _discard(self) -> None:
        self._pieces = []


def layers(tier: Tier) -> Iterator[Tier]:
    """A tier, then the tier inside it, and so on to the one that keeps the bytes."""
    yield tier
    while tier.inner is not None:
        tier = tier.inner
        yield tier


def layer_of(tier: Tier, kind: type[AnyTier]) -> AnyTier | None:
    """The first of a tier's `layers` that is of a class; None if there is none."""
    return next((layer for layer in layers(tier) if isinstance(layer, kind)), None)
