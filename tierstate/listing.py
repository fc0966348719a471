"""The listing: all versions of a run, which tiers have each, and which are yet to get it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tierstate.manifest.errors import TierstateError
from tierstate.manifest.summary import Summary
from tierstate.tiers.index import Seen
from tierstate.tiers.owing import Due, missed
from tierstate.tiers.policy import Policy, TierPolicy
from tierstate.tiers.routes import Routes
from tierstate.tiers.shelf import Shelf

from .info import VersionInfo

log = logging.getLogger("tierstate")

Copies = Mapping[str, Summary]
"""One version: by tier, nearest first, what its record there says."""


def listed(
    shelves: Sequence[Shelf], policy: Policy, tags: Mapping[tuple[int, str], tuple[str, ...]]
) -> list[VersionInfo]:
    """All versions over all tiers, oldest first. Of a tier that cannot be asked nobody knows what it lacks.

    Args:
        shelves: the run in each tier, nearest first.
        policy: which tier is to get which version.
        tags: by number and id of a version, the names given to it.
    """
    seen: dict[str, Mapping[int, Seen]] = {}
    for shelf in shelves:
        try:
            seen[shelf.name] = shelf.summaries.look()
        except TierstateError as error:
            log.warning("%s: its log cannot be listed: %s", shelf.name, error)
    versions = _versions(seen)
    late = _Late(shelves, policy, versions)
    found: dict[int, list[str]] = {}
    for tier in policy.tiers:
        if tier.persistent and tier.name in seen:
            for seq in late.of(tier):
                found.setdefault(seq, []).append(tier.name)
    run = shelves[0].run
    return [
        VersionInfo.summed(run, copies, tags.get((one.seq, one.id), ()), tuple(found.get(one.seq, ())))
        for copies in versions
        for one in [_any(copies)]
    ]


def _versions(seen: Mapping[str, Mapping[int, Seen]]) -> list[Copies]:
    """Every version, by rising number; where several writers used one number, the later one counts as the newer."""
    places: dict[int, dict[str, dict[str, Summary]]] = {}
    for name, numbers in seen.items():
        for seq, one in numbers.items():
            if (summary := one.current) is not None:
                places.setdefault(seq, {}).setdefault(summary.id, {})[name] = summary
    found: list[Copies] = []
    for _, versions in sorted(places.items(), reverse=True):
        found += sorted(versions.values(), key=lambda copies: _any(copies).time, reverse=True)
    return found[::-1]


def _any(copies: Copies) -> Summary:
    return next(iter(copies.values()))


class _Late:
    """Which versions tiers are yet to get."""

    def __init__(self, shelves: Sequence[Shelf], policy: Policy, versions: Sequence[Copies]) -> None:
        self._shelves = {shelf.name: shelf for shelf in shelves}
        self._versions, self._routes = versions, Routes(policy)
        self._parted = any(rule.tiers is not None for rule in policy.rules)
        self._going: dict[str, Mapping[str, bool]] = {}

    def of(self, tier: TierPolicy) -> list[int]:
        """Numbers of the versions that a tier of this cadence is to get, newer than all that it has."""
        last = next((copies[tier.name] for copies in reversed(self._versions) if tier.name in copies), None)
        newer = [copies for copies in self._versions if last is None or _any(copies).seq > last.seq]
        going = [_any(copies) for copies in newer if self._goes(copies, tier.name)]
        dues = [Due(one.seq, one.step, one.time, one.nbytes) for one in going]
        return [due.seq for due in missed(tier.every, (last.step, last.time) if last else None, dues)]

    def _goes(self, copies: Copies, name: str) -> bool:
        """Whether any leaf of a version is to go to a tier."""
        one = _any(copies)
        if not self._parted:
            return one.leaves > 0
        if one.paths not in self._going:
            self._going[one.paths] = self._look(copies)
        return self._going[one.paths].get(name, False)

    def _look(self, copies: Copies) -> Mapping[str, bool]:
        """Which tiers get something of versions with such paths, by the record of one of them."""
        for name, summary in copies.items():
            try:
                record = self._shelves[name].log.read_generation(summary.seq, summary.generation)
            except TierstateError as error:
                log.warning("%s: version %d cannot be read: %s", name, summary.seq, error)
                continue
            routes = self._routes.of(record.version.leaves)
            return {to: bool(route.leaves.any()) for to, route in routes.items()}
        return {}
