"""A run: its versions over all tiers of a policy, to be listed, looked at, compared and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierstate.manifest.diff import LeafDiff, diff
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.leaf import Leaf
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog
from tierstate.tiers.policy import Policy
from tierstate.tiers.shelf import Shelf
from tierstate.tiers.verify import Report, Verifier

from .finding import Wanted, find
from .info import VersionInfo
from .listing import listed


class Run:
    """What can be done with the versions that a run has.

    Args:
        policy: which tiers there are.
        run: its name.
        shelves: the run in each tier, in the policy's order.
        arena: the memory that bytes pass through.
    """

    def __init__(self, policy: Policy, run: str, shelves: Sequence[Shelf], arena: Arena) -> None:
        self.policy, self.run = policy, run
        self._shelves, self._arena = list(shelves), arena
        self._closed = False

    def versions(self) -> list[VersionInfo]:
        """All versions of the run over all tiers, oldest first."""
        return listed(self._catalog(), self.policy)

    def info(self, *, step: int | None = None, version: str | None = None) -> VersionInfo:
        """One version, by default the newest.

        Raises:
            NotFound: there is no such version.
        """
        return VersionInfo.of(find(self._catalog(), self.run, Wanted(step, version)))

    def leaves(self, *, step: int | None = None, version: str | None = None) -> list[Leaf]:
        """The leaves of a version, in the state's order: path, kind, dtype, shape.

        Raises:
            NotFound: there is no such version.
        """
        return list(find(self._catalog(), self.run, Wanted(step, version)).version.leaves)

    def diff(self, old: int, new: int) -> list[LeafDiff]:
        """What changed from one step to another, leaf by leaf, by digests alone."""
        entries = [find(self._catalog(), self.run, Wanted(step)) for step in (old, new)]
        return diff(entries[0].version, entries[1].version)

    def verify(self, *, deep: bool = False, progress: Callable[[int], None] = lambda _nbytes: None) -> Report:
        """Whether the tiers have what they claim to have.

        Args:
            deep: read and digest every chunk; otherwise records, and packs by presence and length.
            progress: called with the raw bytes read since the last call.
        """
        return Verifier(self._catalog(), self._arena, data=deep, progress=progress).run()

    def _check_open(self) -> None:
        if self._closed:
            raise TierstateError("this Checkpointer is closed; make a new one")

    def _catalog(self) -> Catalog:
        return Catalog(self._shelves)
