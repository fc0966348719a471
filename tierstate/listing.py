"""The listing: all versions of a run, which tiers have each, and which are yet to get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierstate.tiers.catalog import Catalog, Entry
from tierstate.tiers.owing import Due, missed
from tierstate.tiers.policy import Policy, TierPolicy
from tierstate.tiers.routes import Routes

from .info import VersionInfo


def listed(catalog: Catalog, policy: Policy) -> list[VersionInfo]:
    """All versions over all tiers, oldest first. Of a tier that cannot be asked nobody knows what it lacks."""
    entries = [entry for place in catalog.newest_first() for entry in place.entries][::-1]
    late: dict[int, list[str]] = {}
    for tier in policy.tiers:
        if tier.persistent and tier.name not in catalog.unreachable:
            for seq in _lacking(tier, entries, policy):
                late.setdefault(seq, []).append(tier.name)
    return [replace(VersionInfo.of(e), late=tuple(late.get(e.version.head.seq, ()))) for e in entries]


def _lacking(tier: TierPolicy, entries: Sequence[Entry], policy: Policy) -> list[int]:
    """Numbers of the versions that a tier of this cadence is to get, newer than all that it has."""
    heads = [entry.version.head for entry in entries if tier.name in entry.tiers]
    newest = max(heads, key=lambda head: head.seq, default=None)
    routes = Routes(policy)
    newer = [
        Due.of(entry.version.head, entry.version.nbytes)
        for entry in entries
        if (newest is None or entry.version.head.seq > newest.seq)
        and routes.of(entry.version.leaves)[tier.name].leaves.any()
    ]
    return [due.seq for due in missed(tier.every, (newest.step, newest.time) if newest else None, newer)]
