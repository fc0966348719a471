"""The marker of a tier: the object ``tier.json``, by which a tier that was used before is told from an empty place.

It gives the tier an id. Records name the ids of the tiers of their policy (`TierName`), so that a tier that is missing,
because its file system is not mounted, or that is another one than before is noticed. It is no part of any version.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from tierstate.manifest.digest import json_checksum, json_with_checksum
from tierstate.manifest.errors import FormatError, WrongTier, untrusted

MARKER_KEY = "tier.json"
"""The marker's key in its tier."""


MARKER_FORMAT = 1


MAX_MARKER_BYTES = 1 << 20
"""Largest size of a marker, in bytes."""


_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class TierMarker:
    """The marker of one tier.

    Attributes:
        id: the tier's id, 32 hexadecimal digits; unique.
        tier: the tier's name in the policy by which it was first used.
        time: when that was, in seconds since 1970.
        replaces: ids of tiers that this one is used in place of (`tierstate adopt`).
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tier: str = ""
    time: float = field(default_factory=time.time)
    replaces: tuple[str, ...] = ()

    def stands_for(self, id: str) -> bool:
        """Whether this tier is the one with that id, or is used in its place."""
        return id == self.id or id in self.replaces

    def encode(self) -> bytes:
        """The marker's bytes: JSON."""
        fields = {"format": MARKER_FORMAT, **asdict(self), "replaces": list(self.replaces)}
        return json_with_checksum(fields)

    @classmethod
    def decode(cls, data: bytes, what: str) -> TierMarker:
        """A marker from its bytes; fields of later programs are ignored.

        Args:
            what: the object, for messages.

        Raises:
            FormatError: it is damaged, or no marker, or of an unknown format number.
        """
        with untrusted(what, named=False):
            return cls._decode(data, what)

    @classmethod
    def _decode(cls, data: bytes, what: str) -> TierMarker:
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{what}: is not JSON") from error
        if not isinstance(fields, dict) or fields.pop("sum", None) != json_checksum(fields):
            raise FormatError(f"{what}: is not what was written: its checksum differs")
        if fields.get("format") != MARKER_FORMAT:
            raise FormatError(f"{what}: has the format number {fields.get('format')!r:.20}; {MARKER_FORMAT} is known")
        id, tier, made, replaces = (fields.get(name) for name in ("id", "tier", "time", "replaces"))
        if not (_is_id(id) and isinstance(tier, str) and isinstance(made, (int, float)) and isinstance(replaces, list)):
            raise FormatError(f"{what}: lacks a field of a marker")
        return cls(str(id), tier, float(made), tuple(one for one in replaces if _is_id(one)))


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


class TierName(NamedTuple):
    """How a record names a tier.

    Attributes:
        id: its id.
        mount: the mount point of the file system that it was in; empty where it is in none, or that is not known.
    """

    id: str
    mount: str


def names_tiers(tiers: Mapping[str, TierName]) -> dict[str, Any]:
    """The fields of a record's commit data that name the tiers of its policy, by their names there."""
    return {"tiers": {name: one._asdict() for name, one in tiers.items()}} if tiers else {}


def named_tiers(commit: Mapping[str, Any]) -> dict[str, TierName]:
    """The tiers that the commit data of a record name, by their names; those of earlier programs name none."""
    found = commit.get("tiers")
    named = found.items() if isinstance(found, dict) else ()
    return {
        name: TierName(one["id"], str(one.get("mount", "")))
        for name, one in named
        if isinstance(one, dict) and _is_id(one.get("id"))
    }


def check_same_tier(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> None:
    """Check that two ranks have written to the same tier of this name, by the commit data of their parts.

    Raises:
        WrongTier: they have not: the file system is not mounted for one of them, or another one is.
    """
    own, its = named_tiers(mine).get(name), named_tiers(theirs).get(name)
    if own is not None and its is not None and own.id != its.id:
        raise WrongTier(
            f"{name}: rank {rank} has written to tier {its.id[:12]}, and rank 0 to tier {own.id[:12]}: all ranks must "
            "see the same place; is its file system not mounted on a host?",
            tier=name,
        )
