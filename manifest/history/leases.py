"""Leases and pins: they protect versions that a process reads, or that a fork needs, from garbage collection.

::

    leases/<run>/<seq>-read-<unique>        a process reads the version; JSON with the process and the record's id
    leases/<run>/<seq>-repack-<unique>      a process writes a new record of it
    leases/<run>/<seq>-fork-<new run>@<unique>   a pin: records of another run name packs that this version needs
    leases/<run>/000000000000-<kind>-<unique>    a process repairs the run (`WHOLE_RUN`): no pack of it is deleted

A process that takes a lease checks afterwards that the version still exists. A process that drops a version checks the
leases before, and again before it deletes packs. So at least one of the two processes always sees the other.

A lease expires after a day by the tier's own clock, or when its process is known to have ended. A pin stays until it is
deleted. Every fork has its own pin, so that deleting an old pin never deletes a new one.

`this_process` and `is_dead` identify processes across restarts, containers and reused process numbers. The keys of
leases are made and parsed here only.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from tierstate.manifest.chunk import as_buffer, view
from tierstate.manifest.errors import AlreadyExists, FormatError, NotFound

from .log import KeyValueStore, check_run

_PROC = "/proc"


LEASE_SECONDS = 24 * 3600.0
"""Seconds after which a lease expires, even if its process is alive."""


READ, REPACK, FORK = "read", "repack", "fork"


WHOLE_RUN = 0
"""The number of no version: a lease on it says that somebody repairs the run, and keeps all packs."""


_DOING = {REPACK: "repacked", FORK: "forked", "doctor": "repaired", "rebuild": "repaired"}
"""What is done to a version, by the kind of its lease, for messages."""

_PIN = re.compile(r"leases/([^/]+)/[0-9]+-fork-([^/@]+)(?:@[^/]*)?")


MAX_LEASE_BYTES = 4096


_NAME = re.compile(r"([0-9]{12})-([a-z]{1,20})-([A-Za-z0-9][A-Za-z0-9._\-]{0,99})(?:@([0-9a-f]{1,32}))?")


Age = Callable[[str], float | None]
"""Key of an object -> seconds since it was created; None if this is not known."""


def this_process() -> dict[str, Any]:
    """JSON fields that identify this process uniquely, also after a later process got the same process id."""
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pids": _numbering(),
        "pid": os.getpid(),
        "start": _start(os.getpid()),
        "time": time.time(),
    }


def is_dead(holder: Mapping[str, Any]) -> bool:
    """Whether a process is known to have ended. Only processes of this boot of this host, in this process id namespace,
    can be checked; False for all others.
    """
    pid, boot, numbering = holder.get("pid"), _boot(), _numbering()
    if not (boot and numbering) or (holder.get("boot"), holder.get("pids")) != (boot, numbering):
        return False
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # the process of another user
    start = _start(pid)
    return start is not None and start != holder.get("start")


@cache
def _boot() -> str:
    """The id of the current boot of this host; empty if the kernel gives none."""
    return _line(f"{_PROC}/sys/kernel/random/boot_id")


def _numbering() -> str:
    """The process id namespace: containers on one host may have different ones."""
    with suppress(OSError):
        return os.readlink(f"{_PROC}/self/ns/pid")
    return ""


def _start(pid: int) -> str | None:
    """When a process started, in clock ticks since the boot; empty if it has ended; None if it cannot be read."""
    # The name of the program, in brackets, comes before it and may contain any character.
    fields = _line(f"{_PROC}/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20 or not re.fullmatch(r"[0-9]+", fields[19]):
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _line(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
    return ""


class VersionLease(NamedTuple):
    """A lease or a pin that is valid.

    Attributes:
        kind: ``read``, ``repack``, ``fork``, or a kind of a later program.
        by: the holder, for messages: a run, or a process.
        record: commit id of the record that is read; empty for any record of the version, None if it is not known.
    """

    key: str
    seq: int
    kind: str
    by: str
    record: str | None = ""

    @property
    def reason(self) -> str:
        """Why the version is kept, for messages."""
        return f"{_DOING.get(self.kind, self.kind)} by {self.by}"

    def is_of(self, commits: Collection[str]) -> bool:
        """Whether it protects one of these records: a reader's lease protects only the record that it names.

        Args:
            commits: commit ids of the version's records.
        """
        return self.record in commits if self.kind == READ or self.record is None else bool(commits)


class LeaseListing(NamedTuple):
    """The leases of a run.

    Attributes:
        live: the valid leases and pins.
        gone: keys of expired leases, which can be deleted.
        odd: keys that this program cannot parse.
    """

    live: tuple[VersionLease, ...]
    gone: tuple[str, ...]
    odd: tuple[str, ...]


class Leases:
    """The leases of one run in one tier."""

    def __init__(self, tier: KeyValueStore, run: str) -> None:
        self.tier, self.run = tier, check_run(run)
        self._prefix = f"leases/{run}/"

    def take(self, seq: int, why: str = READ, record: str = "") -> str:
        """Take a lease on a version. Check afterwards that the version still exists.

        Args:
            record: commit id of the record that will be read.

        Returns:
            The lease's key.

        Raises:
            TierError: the lease could not be written.
        """
        key = f"{self._prefix}{seq:012d}-{why}-{uuid.uuid4().hex}"
        self.tier.put(key, as_buffer(json.dumps({**this_process(), "record": record}).encode()))
        return key

    def release(self, key: str) -> None:
        """Delete a lease."""
        self.tier.delete(key)

    def live(self, age: Age) -> dict[int, str]:
        """Protected versions (by sequence number), and why. A key that cannot be parsed protects the version whose
        number it begins with.
        """
        held = self.look(age)
        odd = {
            int(m[0]): f"held by {key}" for key in held.odd if (m := re.match("[0-9]{12}", key[len(self._prefix) :]))
        }
        return odd | {lease.seq: lease.reason for lease in held.live}

    def look(self, age: Age) -> LeaseListing:
        """All leases and pins.

        Raises:
            TierError: the tier could not be read.
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
        return LeaseListing(tuple(live), tuple(gone), tuple(odd))

    def _lease(self, key: str, seq: int, kind: str, by: str, age: Age) -> VersionLease | None:
        if kind == FORK:
            return VersionLease(key, seq, kind, by)
        holder = self._holder(key)
        if holder is not None and is_dead(holder):
            return None
        old = age(key)
        if old is not None and old > LEASE_SECONDS:
            return None
        if holder is None:
            return VersionLease(key, seq, kind, "nobody knows whom", None)
        record = holder.get("record", "")
        who = f"{str(holder.get('host'))[:80]}:{str(holder.get('pid'))[:20]}"
        return VersionLease(key, seq, kind, who, record if isinstance(record, str) else None)

    def _holder(self, key: str) -> dict[str, Any] | None:
        """The process that a lease names; None if the lease cannot be parsed."""
        try:
            found = json.loads(bytes(view(self.tier.get_within(key, MAX_LEASE_BYTES, "a lease"))))
        except (ValueError, RecursionError, FormatError):
            return None
        return found if isinstance(found, dict) else None


def pinned_runs(tier: KeyValueStore) -> dict[str, set[str]]:
    """For each fork with pins in a tier the runs whose versions it pins, from the keys alone.

    Raises:
        TierError: the tier could not be listed.
    """
    found: dict[str, set[str]] = {}
    for key in tier.list("leases/"):
        if match := _PIN.fullmatch(key):
            found.setdefault(match[2], set()).add(match[1])
    return found


def pin_version(tier: KeyValueStore, run: str, seq: int, by: str) -> str:
    """Pin a version for a fork that uses its packs. Check afterwards that the version still exists.

    Returns:
        The pin's key. It is deleted by the process that created it, or by a garbage collection that finds it old and
        not needed.

    Raises:
        TierError: the pin could not be written.
    """
    key = f"leases/{check_run(run)}/{seq:012d}-{FORK}-{check_run(by)}@{uuid.uuid4().hex}"
    with suppress(AlreadyExists):  # the key is unique: an earlier try succeeded and its answer was lost
        tier.put(key, as_buffer(json.dumps({**this_process(), "run": by}).encode()))
    return key
