"""The hosts that keep objects for each other: who they are, and what of that each remembers in its own memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from tierstate.manifest.errors import FormatError

CARD, GROUP = "card", "group"
"""Files of a host's memory: its own member, as its keeper has written it; and the members that it knows of."""

MAX_MEMBERS = 1 << 14
MAX_BYTES = 16 << 20
_ID = re.compile(r"[0-9a-f]{32}")
_TOKEN = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"[\x20-\x7e\xa0-\uffff]{1,255}")


@dataclass(frozen=True)
class Member:
    """One host's memory, and where its keeper is to be asked.

    Attributes:
        id: drawn at random when the memory was made.
        address, port: where the keeper listens.
        token: the keeper's secret, in hexadecimal; no repr and no message has it.
        domain: what is lost together with this host; its own id where nothing is.
    """

    id: str
    address: str
    port: int
    token: str = field(repr=False)
    domain: str = ""

    def __post_init__(self) -> None:
        good = (
            isinstance(self.id, str)
            and _ID.fullmatch(self.id)
            and isinstance(self.token, str)
            and _TOKEN.fullmatch(self.token)
            and type(self.port) is int
            and 0 < self.port < 1 << 16
            and all(isinstance(text, str) and _TEXT.fullmatch(text) for text in (self.address, self.domain or "-"))
        )
        if not good:
            raise FormatError("a member of peer memory that is none: its id, token, address, port or domain is wrong")

    @property
    def fails_with(self) -> str:
        """Its failure domain."""
        return self.domain or self.id

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Group:
    """The members that one host knows of, and how often they have met.

    A host writes what it has learned before any host confirms it, and nobody writes objects before it is confirmed
    everywhere. So a host whose ``written`` is below another's ``confirmed`` was away when something may have changed,
    and what it keeps may be of a past that the others have left behind.

    Attributes:
        written, confirmed: number of the last meeting whose members are these, and of the last that all had written.
        thin: a host has left since the oldest objects were written, so some may have fewer copies than they should.
        members: in the order of the hosts' numbers.
    """

    written: int = 0
    confirmed: int = 0
    thin: bool = False
    members: tuple[Member, ...] = ()


def encode(value: Member | Group) -> bytes:
    """As JSON."""
    return json.dumps(asdict(value)).encode()


def decode_member(data: bytes) -> Member:
    """A member.

    Raises:
        FormatError: it is none.
    """
    return _member(_mapping(data))


def decode_group(data: bytes) -> Group:
    """A group.

    Raises:
        FormatError: it is none.
    """
    return _group(_mapping(data))


def _group(found: dict[str, Any]) -> Group:
    members = found.get("members")
    written, confirmed = found.get("written"), found.get("confirmed")
    if (
        not isinstance(members, list)
        or len(members) > MAX_MEMBERS
        or not _is_number(written)
        or not _is_number(confirmed)
    ):
        raise FormatError("the members of peer memory cannot be read: not what this program writes")
    return Group(written, confirmed, bool(found.get("thin")), tuple(_member(m) for m in members))


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


def read_card(root: Path) -> Member | None:
    """The member that a host's memory is; None where no keeper has ever had it.

    Raises:
        FormatError: the file is damaged.
    """
    data = _read(root / CARD)
    return None if data is None else decode_member(data)


def read_group(root: Path) -> Group:
    """The members that a host knows of.

    Raises:
        FormatError: the file is damaged.
    """
    data = _read(root / GROUP)
    return Group() if data is None else decode_group(data)


def remember(root: Path, name: str, value: Member | Group) -> None:
    """Write one of the two files, whole or not at all."""
    temporary = root / f".{name}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(encode(value))
    os.replace(temporary, root / name)


def _read(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Introduction:
    """What the leader of a host says to the others: its member, and the group that it remembers; or why it has none."""

    member: Member | None = None
    group: Group = Group()
    trouble: str = ""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Introduction:
        """The other way.

        Raises:
            FormatError: it is none.
        """
        found = _mapping(data)
        member, group = found.get("member"), found.get("group")
        if not isinstance(group, dict):
            raise FormatError("a host has introduced itself to its peers by something else than this program does")
        return Introduction(None if member is None else _member(member), _group(group), str(found.get("trouble", "")))


def agreed(said: Sequence[Introduction]) -> Group:
    """The group that hosts become who meet; the same on all of them.

    Args:
        said: by every host, in the order of their numbers.
    """
    members = tuple(one.member for one in said if one.member is not None)
    there = {member.id for member in members}
    confirmed = max(one.group.confirmed for one in said)
    thin = any(
        one.group.thin or any(member.id not in there for member in one.group.members) or is_stale(one, confirmed)
        for one in said
        if one.group.written
    )
    return Group(max(one.group.written for one in said) + 1, confirmed, thin, members)


def is_stale(one: Introduction, confirmed: int) -> bool:
    """Whether a host was away when the others went on, so that what it keeps may be out of date."""
    return 0 < one.group.written < confirmed
