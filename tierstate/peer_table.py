"""What the command line prints of peer memory: for people, and JSON for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tierstate.manifest.errors import TierUnavailable
from tierstate.tiers.peer_members import Member
from tierstate.tiers.units import rough_size

from .tables import print_json, table


class Told(NamedTuple):
    """One tier, and what each host's keeper says, or why it says nothing."""

    name: str
    notes: tuple[str, ...]
    members: Sequence[tuple[Member, dict[str, Any] | TierUnavailable]]


def show(tiers: Sequence[Told], as_json: bool) -> None:
    """The hosts of each tier."""
    if as_json:
        print_json([{"tier": t.name, "notes": t.notes, "hosts": [_told(*m) for m in t.members]} for t in tiers])
        return
    for told in tiers:
        print(f"{told.name}: {'; '.join(told.notes)}")
        if told.members:
            table(["host", "domain", ">objects", ">used", ">capacity", "keeper"], [_row(*m) for m in told.members])


def _told(member: Member, said: dict[str, Any] | TierUnavailable) -> dict[str, Any]:
    found = {"address": member.address, "port": member.port, "domain": member.domain, "id": member.id}
    return found | (said if isinstance(said, dict) else {"error": str(said)})


def _row(member: Member, said: dict[str, Any] | TierUnavailable) -> tuple[object, ...]:
    if not isinstance(said, dict):
        return member.place, member.domain, "", "", "", f"does not answer: {said}"
    capacity = "-" if said["capacity"] is None else rough_size(said["capacity"])
    return member.place, member.domain, said["objects"], rough_size(said["used"]), capacity, f"runs, pid {said['pid']}"
