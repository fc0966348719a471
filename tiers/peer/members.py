"""Membership of peer memory: the hosts that keep objects for each other, the files that store them, and partners.

The partners of a host keep the copies of the objects that it writes. They are a pure function of the failure domains.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

from tierstate.manifest.errors import FormatError
from tierstate.tiers.connections.channel import place_name
from tierstate.tiers.connections.secret import KEY, JobSecret, read_private

CARD, GROUP, SECRET = "card", "group", "secret"
"""Files in the folder of a host's memory: this host as a `Member`, written by its keeper; the `Membership`; and the
secret of the job that uses it now, which is derived from the job's own."""


MAX_MEMBERS = 1 << 14
"""Members of a group, at most."""


MAX_BYTES = 16 << 20
"""Bytes of an encoded member or membership, at most."""


_ID = re.compile(r"[0-9a-f]{32}")


_TEXT = re.compile(r"[\x20-\x7e\xa0-\uffff]{1,255}")


@dataclass(frozen=True)
class Member:
    """One host's memory, and the address of its keeper.

    Attributes:
        id: random, 32 hexadecimal digits, drawn when the memory was created.
        address, port: where the keeper listens.
        domain: failure domain; empty if no other host is lost together with this one.
    """

    id: str
    address: str
    port: int
    domain: str = ""

    def __post_init__(self) -> None:
        good = (
            isinstance(self.id, str)
            and _ID.fullmatch(self.id)
            and type(self.port) is int
            and 0 < self.port < 1 << 16
            and all(isinstance(text, str) and _TEXT.fullmatch(text) for text in (self.address, self.domain or "-"))
        )
        if not good:
            raise FormatError("a member of peer memory that is none: its id, address, port or domain is wrong")

    @property
    def fails_with(self) -> str:
        """Its failure domain; its own id if it has none with other hosts."""
        return self.domain or self.id

    @property
    def place(self) -> str:
        """Address and port, for messages."""
        return place_name((self.address, self.port))

    @property
    def service(self) -> str:
        """What its keeper is named in handshakes, so that a connection to it is refused by every other keeper."""
        return f"peer/{self.id}"


@dataclass(frozen=True)
class Membership:
    """The members that one host knows, and the number of the agreement by which it knows them.

    The ranks of a job agree on the members when they open the tier (`agree_on_members`). Each agreement has a higher
    number. First every host writes the new membership to its file, then every host confirms it, and objects are written
    only after that. So a host whose ``written`` is lower than another's ``confirmed`` was away when objects may have
    changed: what it keeps may be out of date.

    Attributes:
        written: number of the last agreement that this host has written to its file; 0 for none.
        confirmed: number of the last agreement that all hosts had written.
        thin: a host has left since the oldest objects were written, so some may have fewer copies than they should.
        members: in the order of the hosts' numbers.
    """

    written: int = 0
    confirmed: int = 0
    thin: bool = False
    members: tuple[Member, ...] = ()


def encode_membership(value: Member | Membership) -> bytes:
    """A member or a membership as JSON."""
    return json.dumps(asdict(value)).encode()


def decode_member(data: bytes) -> Member:
    """A member from JSON.

    Raises:
        FormatError: the bytes are not a member.
    """
    return _member(_mapping(data))


def decode_membership(data: bytes) -> Membership:
    """A membership from JSON.

    Raises:
        FormatError: the bytes are not a membership.
    """
    return _group(_mapping(data))


def _group(found: dict[str, Any]) -> Membership:
    members = found.get("members")
    written, confirmed = found.get("written"), found.get("confirmed")
    if (
        not isinstance(members, list)
        or len(members) > MAX_MEMBERS
        or not _is_number(written)
        or not _is_number(confirmed)
    ):
        raise FormatError("the members of peer memory cannot be read: not what this program writes")
    return Membership(written, confirmed, bool(found.get("thin")), tuple(_member(m) for m in members))


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _member(found: Any) -> Member:
    known = {f.name for f in fields(Member)}
    if not isinstance(found, dict) or not known <= found.keys():
        raise FormatError("a member of peer memory that is none: something is missing")
    return Member(**{name: found[name] for name in known})


def _mapping(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FormatError("what should tell of the members of peer memory is no JSON object")
    return found


def read_member(root: Path) -> Member | None:
    """The member of this host, from its file; None if no keeper has ever run here.

    Raises:
        FormatError: the file is damaged.
    """
    data = _read(root / CARD)
    return None if data is None else decode_member(data)


def read_membership(root: Path) -> Membership:
    """The membership that this host knows, from its file; an empty one if there is no file.

    Raises:
        FormatError: the file is damaged.
    """
    data = _read(root / GROUP)
    return Membership() if data is None else decode_membership(data)


def write_membership(root: Path, name: str, value: Member | Membership) -> None:
    """Write the file ``name``, `CARD` or `GROUP`, atomically."""
    _write(root, name, encode_membership(value))


def write_secret(root: Path, secret: JobSecret) -> None:
    """Write the secret by which the keepers of a job know each other, atomically, for this user alone.

    It is derived from the job's secret, which nobody learns from it.
    """
    _write(root, SECRET, bytes([secret.authenticated]) + secret.reveal())


class SecretFile:
    """The secret in the folder of a host's memory; read again when the file has changed.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / SECRET
        self._seen: tuple[int, int] | None = None
        self._secret: JobSecret | None = None

    def read(self) -> JobSecret | None:
        """The secret; None if no job has brought any yet.

        Raises:
            SecretError: the file is not of this user alone, or no secret.
        """
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            self._seen = self._secret = None
            return None
        if (seen := (found.st_ino, found.st_mtime_ns)) != self._seen:
            data = read_private(self._path, 1 + KEY)
            self._secret, self._seen = JobSecret(data[1:], authenticated=data[:1] != b"\0"), seen
        return self._secret


def _write(root: Path, name: str, data: bytes) -> None:
    temporary = root / f".{name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, root / name)


def _read(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class HostReport:
    """What the leader of a host reports in an agreement on the members.

    Attributes:
        member: this host; None if it has no keeper.
        group: the membership in its file.
        trouble: why it has no keeper; empty if it has one.
    """

    member: Member | None = None
    group: Membership = Membership()
    trouble: str = ""

    def encode(self) -> bytes:
        """The report as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> HostReport:
        """The report that `encode` made.

        Raises:
            FormatError: the bytes are not a report.
        """
        found = _mapping(data)
        member, group = found.get("member"), found.get("group")
        if not isinstance(group, dict):
            raise FormatError("a host has introduced itself to its peers by something else than this program does")
        return HostReport(None if member is None else _member(member), _group(group), str(found.get("trouble", "")))


def merge_memberships(said: Sequence[HostReport]) -> Membership:
    """The membership that follows from the reports of all hosts; the same on all hosts.

    Args:
        said: the reports, in the order of the hosts' numbers.
    """
    members = tuple(one.member for one in said if one.member is not None)
    there = {member.id for member in members}
    confirmed = max(one.group.confirmed for one in said)
    thin = any(
        one.group.thin or any(member.id not in there for member in one.group.members) or is_stale(one, confirmed)
        for one in said
        if one.group.written
    )
    return Membership(max(one.group.written for one in said) + 1, confirmed, thin, members)


def is_stale(one: HostReport, confirmed: int) -> bool:
    """Whether a host missed a confirmed agreement, so that the objects it keeps may be out of date."""
    return 0 < one.group.written < confirmed


def partners(domains: Sequence[str], me: int, copies: int) -> tuple[int, ...]:
    """The hosts that keep the copies of one host's objects, in the order in which they are asked for them.

    * All differ from each other and from ``me``, so an object survives the loss of any ``copies`` hosts. There are
      fewer than ``copies`` partners only if there are not enough hosts.
    * Hosts of other failure domains come first. A host of the same domain is taken only if those are not enough.
    * If no domain has more than half of the hosts, and ``copies`` is small enough, every host keeps copies for exactly
      ``copies`` others. If one domain is larger, its hosts share the other hosts evenly.

    Args:
        domains: by host, its failure domain; hosts of equal domains are lost together.
        me: number of the host that writes.
        copies: number of partners that are wanted.
    """
    order = sorted(range(len(domains)), key=lambda host: (domains[host], host))
    here, size = order.index(me), len(order)
    widest = max(domains.count(domain) for domain in set(domains))
    if 0 < copies <= size - 2 * widest + 1:
        # The hosts are in a ring, sorted by domain. A partner is `turn` places further on. With a turn of at least the
        # size of the widest domain, and at most the number of all other hosts, no domain has partners in itself. Since
        # the turns are the same for every host, every host is a partner equally often.
        turns = [widest + n * (size - 2 * widest) // max(1, copies - 1) for n in range(copies)]
        return tuple(order[(here + turn) % size] for turn in turns)
    after = order[here + 1 :] + order[:here]
    others = [host for host in after if domains[host] != domains[me]]
    mates = [host for host in after if domains[host] == domains[me]]
    number = sum(1 for host in order[:here] if domains[host] == domains[me])
    far = _spread(others, copies, number)
    return far + _spread(mates, copies - len(far), 0)


def _spread(hosts: Sequence[int], wanted: int, turn: int) -> tuple[int, ...]:
    """``wanted`` of the hosts, or all if there are fewer, at even distances, starting at index ``turn``."""
    count = min(wanted, len(hosts))
    return tuple(hosts[(turn + n * len(hosts) // count) % len(hosts)] for n in range(count))
