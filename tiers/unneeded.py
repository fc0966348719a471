"""Unneeded: which of the packs that a saver let go of it may delete at once; the others are left to a sweep."""

from __future__ import annotations

from collections.abc import Collection

from tierstate.manifest.leases import FORK, Leases

from .base import Tier
from .index import Summaries
from .packs import is_mend


class Unneeded:
    """Tells which packs of a run in a tier nobody needs any more.

    Args:
        summaries: of the run.
    """

    def __init__(self, tier: Tier, run: str, summaries: Summaries) -> None:
        self._tier, self._run, self._summaries = tier, run, summaries
        self._own = f"packs/{run}/"
        self._forks: dict[str, Summaries] = {}

    def among(self, packs: Collection[str]) -> list[str] | None:
        """Those that no record names, by whatever generation, and none of a fork; None where nobody can tell for now.

        Raises:
            TierError: the tier could not be asked.
        """
        named = self._summaries.named()
        if named is None:
            return None
        # Leases last: whoever took one earlier, on a record that is not there any more, is seen here.
        held = Leases(self._tier, self._run).look(self._tier.age)
        if held.odd or not all(
            lease.kind == FORK or lease.is_of(named.commits.get(lease.seq, ())) for lease in held.live
        ):
            return None
        used = set(named.packs)
        for run in sorted({lease.by for lease in held.live if lease.kind == FORK}):
            theirs = self._named_by(run)
            if not theirs:
                return None  # it is being forked just now, or a prune is going to take its pin away
            used |= theirs
        # A fork's record names packs of the run that it came from: those are for that run to judge.
        return [k for k in sorted(packs) if k not in used and k.startswith(self._own) and not is_mend(k)]

    def _named_by(self, run: str) -> set[str]:
        """This run's packs that the records of another name."""
        named = self._forks.setdefault(run, Summaries(self._tier, run)).named()
        return set() if named is None else {key for key in named.packs if key.startswith(self._own)}
