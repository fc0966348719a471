"""The output about what runs now: the status of a run, agents, peers; as tables or as JSON."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstate.manifest.errors import TierUnavailable
from tierstate.manifest.printable import escape_controls, escape_lines
from tierstate.tiers.peer.members import Member
from tierstate.tiers.units import rough_size

from .lines import as_json_text, plural, print_fields, print_json, printable, say, table, when
from .table import shortened, table_lines


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """One peer tier, and for each host the status that its memory server answers, or the error."""

    name: str
    notes: tuple[str, ...]
    members: Sequence[tuple[Member, dict[str, Any] | TierUnavailable]]


def show_peers(tiers: Sequence[PeerStatus], as_json: bool) -> None:
    """The hosts of each peer tier."""
    if as_json:
        print_json([{"tier": t.name, "notes": t.notes, "hosts": [_peer_as_json(*m) for m in t.members]} for t in tiers])
        return
    for tier in tiers:
        say(f"{tier.name}: {'; '.join(tier.notes)}")
        if tier.members:
            table(["host", "domain", ">objects", ">used", ">capacity", "keeper"], [_peer_row(*m) for m in tier.members])


def _peer_as_json(member: Member, said: dict[str, Any] | TierUnavailable) -> dict[str, Any]:
    found = {"address": member.address, "port": member.port, "domain": member.domain, "id": member.id}
    return found | (said if isinstance(said, dict) else {"error": str(said)})


def _peer_row(member: Member, said: dict[str, Any] | TierUnavailable) -> tuple[object, ...]:
    if not isinstance(said, dict):
        return member.place, member.domain, "", "", "", f"does not answer: {said}"
    capacity = "-" if said["capacity"] is None else rough_size(said["capacity"])
    return member.place, member.domain, said["objects"], rough_size(said["used"]), capacity, f"runs, pid {said['pid']}"


_STATUS = ["tier", ">newest step", "saved", ">behind", ">versions", ">owed", ">unreadable", ">speed"]


@dataclasses.dataclass(frozen=True)
class TierStatus:
    """How a run stands in one tier.

    Attributes:
        step, saved: of its newest version; None if it has none.
        behind, behind_seconds: steps and seconds from there to the newest version of all tiers.
        versions: that it has.
        missing: versions that are due there and not there yet.
        unreadable: records that cannot be read.
        speed: bytes per second of the newest write that is logged; None if none is.
        trouble: that it hangs, or why its last save failed; empty if all is well.
    """

    tier: str
    versions: int
    step: int | None
    saved: float | None
    behind: int | None
    behind_seconds: float | None
    missing: int
    unreadable: int
    speed: float | None
    trouble: str


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        under_way: what agents of this host still have to publish of it.
    """

    run: str
    tiers: Sequence[TierStatus]
    under_way: Sequence[str]


def show_status(found: RunStatus, as_json: bool) -> None:
    """How a run stands in each tier."""
    if as_json:
        print_fields(found)
        return
    table(_STATUS, [_status_row(tier) for tier in found.tiers])
    for line in _remarks(found):
        say(line)


def status_lines(found: RunStatus, width: int) -> list[str]:
    """The same as lines for a terminal of this width."""
    rows = printable([_status_row(tier) for tier in found.tiers])
    return [*table_lines(_STATUS, rows, width), *(escape_controls(line) for line in _remarks(found))]


def show_again_and_again(run: str, look: Callable[[], RunStatus | str], seconds: float, as_json: bool) -> None:
    """Show what a look has found, or why it has failed, every so many seconds: on a terminal in place. Never ends."""
    if as_json or not sys.stdout.isatty():
        while True:
            _show_once(look(), as_json)
            time.sleep(seconds)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            found, head = look(), f"run {run}, {when(time.time())}, again every {seconds:g} s; Ctrl-C ends"
            lines = escape_lines(found).split("\n") if isinstance(found, str) else status_lines(found, console.width)
            live.update(Text("\n".join([shortened(escape_controls(head), console.width), *lines])), refresh=True)
            time.sleep(seconds)


def _show_once(found: RunStatus | str, as_json: bool) -> None:
    told = {"error": found} if isinstance(found, str) else dataclasses.asdict(found)
    if as_json:
        print(as_json_text({"time": time.time(), **told}), flush=True)
        return
    say(when(time.time()))
    if isinstance(found, str):
        print(escape_lines(found), flush=True)
    else:
        show_status(found, as_json)
    sys.stdout.flush()


def _remarks(found: RunStatus) -> list[str]:
    troubles = [f"{tier.tier}: {tier.trouble}" for tier in found.tiers if tier.trouble]
    return troubles + [f"an agent has under way: {text}" for text in found.under_way]


def _rough_age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _ago(seconds: float) -> str:
    return f"{_rough_age(seconds)} ago" if seconds > -1 else f"{_rough_age(-seconds)} ahead of this clock"


def _status_row(tier: TierStatus) -> tuple[object, ...]:
    saved = "" if tier.saved is None else f"{when(tier.saved)}, {_ago(time.time() - tier.saved)}"
    behind = "–" if tier.behind is None else f"{plural(tier.behind, 'step')}, {_rough_age(tier.behind_seconds or 0.0)}"
    step, speed = "–" if tier.step is None else tier.step, "" if tier.speed is None else f"{rough_size(tier.speed)}/s"
    return tier.tier, step, saved, behind, tier.versions, tier.missing, tier.unreadable, speed


def show_agents(agents: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """The agents of this user on this host, with their trainers."""
    if as_json:
        print_json(list(agents))
        return
    for one in agents:
        if "error" in one:
            say(f"{one['socket']}: {one['error']}")
            continue
        memory = f"{rough_size(one['memory'])} of {rough_size(one['capacity'])} in memory"
        say(f"process {one['pid']} (tierstate {one['version']}), tiers {', '.join(one['tiers'])}: {memory}")
        if rows := [_trainer_row(session) for session in one["sessions"]]:
            table(["run", ">trainer", "", ">slabs", "under way"], rows)
        for peer in one["peer"]:
            say(f"peer memory {peer['path']}: {rough_size(peer['used'])}, {peer['connections']} connections")
    if not agents:
        say("no agent runs on this host")


def _trainer_row(session: Mapping[str, Any]) -> tuple[object, ...]:
    under_way = "; ".join(session["under_way"]) or "nothing"
    return session["run"], session["pid"], session["trainer"], rough_size(session["held"]), under_way
