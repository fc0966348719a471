"""Leases: versions that somebody reads, or that another run was forked from, so that nobody drops them meanwhile.

::

    leases/<run>/<seq>-read-<unique>        a process reads the version; JSON says which process, and which record
    leases/<run>/<seq>-repack-<unique>      a process writes a new record of it
    leases/<run>/<seq>-fork-<new run>@<unique>   a pin: records of another run name packs that this version needs

Whoever takes a lease looks afterwards whether the version is still there. Whoever drops a version looks for leases
first, and again before its packs are deleted. So one of the two always sees the other.

A lease is gone when it is older than a day by the tier's own clock, or when its process is known to have ended. A pin
stays until it is taken away. Every fork has its own, so that whoever takes away one that was left by another, long ago,
does not take this one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

from .chunk import as_buffer, view
from .errors import AlreadyExists, NotFound
from .holder import is_dead, this_process
from .log import Objects, check_run

LEASE = 24 * 3600.0
"""Seconds after which a lease is gone, whatever its process does."""

READ, REPACK, FORK = "read", "repack", "fork"
MAX_LEASE = 4096
_NAME = re.compile(r"([0-9]{12})-([a-z]{1,20})-([A-Za-z0-9][A-Za-z0-9._\-]{0,99})(?:@([0-9a-f]{1,32}))?")

Age = Callable[[str], float | None]
"""Seconds since an object was created; None where nobody can tell."""


class Lease(NamedTuple):
    """A lease or a pin that stands.

    Attributes:
        kind: ``read``, ``repack``, ``fork``, or what a later program calls it.
        by: who holds it, for people: a run, or a process.
        record: commit id of the record that is read; empty where it may be any, None where nobody can tell.
    """

    key: str
    seq: int
    kind: str
    by: str
    record: str | None = ""

    @property
    def reason(self) -> str:
        """Why the version stays."""
        return f"forked by {self.by}" if self.kind == FORK else f"{self.kind} by {self.by}"

    def is_of(self, commits: Collection[str]) -> bool:
        """Whether it is of a version that has a record, and a reader's of that very record.

        Args:
            commits: commit ids of the version's records.
        """
        return self.record in commits if self.kind == READ or self.record is None else bool(commits)


class Held(NamedTuple):
    """What a look at the leases of a run found.

    Attributes:
        live: those that stand.
        gone: keys of those that do not, and can be deleted.
        odd: keys that are not understood.
    """

    live: tuple[Lease, ...]
    gone: tuple[str, ...]
    odd: tuple[str, ...]


class Leases:
    """The leases of one run in one tier."""

    def __init__(self, tier: Objects, run: str) -> None:
        self.tier, self.run = tier, check_run(run)
        self._prefix = f"leases/{run}/"

    def take(self, seq: int, why: str = READ, record: str = "") -> str:
        """Hold a version. Look afterwards whether it is still there.

        Args:
            record: commit id of the record that will be relied upon.

        Returns:
            The lease's key.

        Raises:
            TierError: the tier does not take it.
        """
        key = f"{self._prefix}{seq:012d}-{why}-{uuid.uuid4().hex}"
        self.tier.put(key, as_buffer(json.dumps({**this_process(), "record": record}).encode()))
        return key

    def release(self, key: str) -> None:
        """Let go of a version."""
        self.tier.delete(key)

    def live(self, age: Age) -> dict[int, str]:
        """Versions that are held or pinned, and why; a key that is not understood holds the version it begins with."""
        held = self.look(age)
        odd = {
            int(m[0]): f"held by {key}" for key in held.odd if (m := re.match("[0-9]{12}", key[len(self._prefix) :]))
        }
        return odd | {lease.seq: lease.reason for lease in held.live}

    def look(self, age: Age) -> Held:
        """All leases and pins.

        Raises:
            TierError: the tier could not be asked.
        """
        live, gone, odd = [], [], []
        for key in self.tier.list(self._prefix):
            name = _NAME.fullmatch(key.removeprefix(self._prefix))
            if name is None:
                odd.append(key)
                continue
            try:
                lease = self._lease(key, int(name[1]), name[2], name[3], age)
            except NotFound:
                continue  # released meanwhile
            if lease is None:
                gone.append(key)
            else:
                live.append(lease)
        return Held(tuple(live), tuple(gone), tuple(odd))

    def _lease(self, key: str, seq: int, kind: str, by: str, age: Age) -> Lease | None:
        if kind == FORK:
            return Lease(key, seq, kind, by)
        holder = self._holder(key)
        if holder is not None and is_dead(holder):
            return None
        old = age(key)
        if old is not None and old > LEASE:
            return None
        if holder is None:
            return Lease(key, seq, kind, "nobody knows whom", None)
        record = holder.get("record", "")
        who = f"{str(holder.get('host'))[:80]}:{str(holder.get('pid'))[:20]}"
        return Lease(key, seq, kind, who, record if isinstance(record, str) else None)

    def _holder(self, key: str) -> dict[str, Any] | None:
        """What a lease says of its process; None where that cannot be understood."""
        size = self.tier.size(key)
        if not 0 < size <= MAX_LEASE:
            return None
        try:
            found = json.loads(bytes(view(self.tier.get(key))))
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def pin(tier: Objects, run: str, seq: int, by: str) -> str:
    """Hold a version for as long as another run relies on its packs. Look afterwards whether it is still there.

    Returns:
        The pin's key. Only who has put it deletes it, or who finds it old and needed by nobody.

    Raises:
        TierError: the tier does not take it.
    """
    key = f"leases/{check_run(run)}/{seq:012d}-{FORK}-{check_run(by)}@{uuid.uuid4().hex}"
    with suppress(AlreadyExists):  # nobody else has this key: a first try's answer was lost
        tier.put(key, as_buffer(json.dumps({**this_process(), "run": by}).encode()))
    return key
