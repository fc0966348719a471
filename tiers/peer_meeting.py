"""The meeting of a job's hosts: who keeps objects for whom from now on, agreed by all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from tierstate.manifest.errors import TierstateError, TierUnavailable

from .base import Meeting
from .peer_home import Home
from .peer_members import Group, Introduction, Member, agreed, is_stale

log = logging.getLogger("tierstate")


def meet(team: Meeting, topic: str, home: Home, keeper: Callable[[], Member]) -> Group:
    """Meet the other hosts; the same group on every rank.

    A host that was away while the others met and went on may keep what they have deleted or saved anew since, under the
    same names. Its memory is emptied, which is told by a warning; all of that lay with others too.

    Args:
        team: the ranks.
        topic: names what is gathered here.
        home: this host's memory.
        keeper: gives this host's member, once its keeper runs; called by one rank per host.

    Raises:
        TierUnavailable: on every rank alike, if one host has no keeper or cannot remember.
        RankFailed: a rank is dead or late.
    """
    leader = team.leads("host")
    mine = _introduce(home, keeper) if leader else None
    heard = team.gather(f"{topic} hosts", mine.encode() if mine else b"")
    by_host = sorted((team.hosts[rank], rank) for rank, data in enumerate(heard) if data)
    said = [Introduction.decode(heard[rank]) for _, rank in by_host]
    _check([one.trouble for one in said])
    group = agreed(said)
    trouble = _write(home, mine, group) if mine else ""
    _check([data.decode(errors="replace") for data in team.gather(f"{topic} written", trouble.encode())])
    group = replace(group, confirmed=group.written)
    if leader:
        home.remember(group)
    return group


def _introduce(home: Home, keeper: Callable[[], Member]) -> Introduction:
    try:
        member = keeper()
        return Introduction(member, home.group())
    except (TierstateError, OSError) as error:
        return Introduction(trouble=str(error))


def _write(home: Home, mine: Introduction, group: Group) -> str:
    """Remember the group, on one host; what went wrong."""
    try:
        if is_stale(mine, group.confirmed):
            log.warning(
                "%s: this host was away when the others last met, so what its memory kept may be out of date: emptied",
                home.name,
            )
            home.kept.clear()
        home.remember(group)
    except (TierstateError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _check(troubles: list[str]) -> None:
    if found := [trouble for trouble in troubles if trouble]:
        raise TierUnavailable(f"peer memory: {len(found)} hosts cannot take part: {found[0]}")
