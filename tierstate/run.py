"""A run: its versions over all tiers of a policy, to be listed, looked at, compared, named, forked and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tierstate.manifest.diff import LeafDiff, diff
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.tags import Tag
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog, Entry
from tierstate.tiers.policy import Policy
from tierstate.tiers.shelf import Shelf
from tierstate.tiers.verify import Report, Verifier

from .collecting import uncollected
from .finding import Wanted, find
from .forking import fork
from .info import VersionInfo
from .listing import listed
from .pruning import PruneReport, Pruning, Saving
from .tagging import Tagged, Tags


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
        self._tags = Tags(self._shelves)
        self._closed = False
        for shelf in self._shelves:
            shelf.beside = self._shelves

    def versions(self) -> list[VersionInfo]:
        """All versions of the run over all tiers, oldest first."""
        with uncollected():  # many small objects at once, and none of them garbage
            return listed(self._shelves, self.policy, self._tags.by_version())

    def info(self, *, step: int | None = None, version: str | None = None, tag: str | None = None) -> VersionInfo:
        """One version, by default the newest.

        Raises:
            NotFound: there is no such version.
        """
        found = VersionInfo.of(self._find(step, version, tag))
        return replace(found, tags=self._tags.by_version().get((found.seq, found.id), ()))

    def leaves(self, *, step: int | None = None, version: str | None = None, tag: str | None = None) -> list[Leaf]:
        """The leaves of a version, in the state's order: path, kind, dtype, shape.

        Raises:
            NotFound: there is no such version.
        """
        return list(self._find(step, version, tag).version.leaves)

    def diff(self, old: int, new: int) -> list[LeafDiff]:
        """What changed from one step to another, leaf by leaf, by digests alone."""
        entries = [self._find(step) for step in (old, new)]
        return diff(entries[0].version, entries[1].version)

    def verify(self, *, deep: bool = False, progress: Callable[[int], None] = lambda _nbytes: None) -> Report:
        """Whether the tiers have what they claim to have.

        Args:
            deep: read and digest every chunk; otherwise records, and packs by presence and length.
            progress: called with the raw bytes read since the last call.
        """
        return Verifier(self._catalog(), self._arena, data=deep, progress=progress).run()

    def tag(self, name: str, step: int | None = None, *, version: str | None = None) -> VersionInfo:
        """Give a version a name, by default the newest; a version that had it loses it.

        Tiers that do not answer are told by a warning, and learn it the next time that a tag is given.

        Raises:
            ValueError: the name is not one of up to 64 letters, digits, ``.``, ``_`` and ``-``.
            NotFound: there is no such version.
            TierError: no tier took the tag.
        """
        found = VersionInfo.of(self._find(step, version))
        self._tags.give(name, Tag(found.seq, found.id))
        return replace(found, tags=self._tags.by_version().get((found.seq, found.id), ()))

    def untag(self, name: str) -> None:
        """Take a name back from whichever version has it.

        Raises:
            NotFound: none has it.
            TierError: no tier took it.
        """
        self._tags.resolve(name)
        self._tags.give(name, None)

    def tags(self) -> dict[str, VersionInfo | Tag]:
        """All names, and the version that has each; its number and id alone where no tier has it any more."""
        infos = {(v.seq, v.id): v for v in self.versions()}
        return {name: infos.get(tag, tag) for name, tag in self._tags.current().items()}

    def fork(
        self, new_run: str, step: int | None = None, *, version: str | None = None, tag: str | None = None
    ) -> VersionInfo:
        """Begin a new run with a version of this one, by default the newest, and without copying its data.

        Returns:
            The new run's first version; a Checkpointer of that run restores it and goes on from it.

        Raises:
            AlreadyExists: the new run has versions already.
            NotFound: there is no such version.
            TierError: no tier that lasts has it, or none took it.
        """
        return fork(self._find(step, version, tag), self._shelves, new_run)

    def _find(self, step: int | None = None, version: str | None = None, tag: str | None = None) -> Entry:
        return find(self._catalog(), self.run, Wanted(step, version, tag=self._tagged(tag, step, version)))

    def _tagged(self, tag: str | None, step: int | None, version: str | None) -> Tagged | None:
        """The version that a tag names, if one is given."""
        if tag is not None and not (step is None and version is None):
            raise ValueError(f"tag {tag!r} names a version; give no step and no id beside it")
        return None if tag is None else self._tags.resolve(tag)

    def prune(
        self,
        *,
        dry_run: bool = False,
        grace: float | None = None,
        progress: Callable[[str], object] = lambda _what: None,
    ) -> PruneReport:
        """Drop what the policy does not keep, delete packs that no version names, repack those that are mostly dead.

        Safe beside other processes that save, read or prune this run. Saves of this process that are under way keep
        what is theirs.

        Args:
            dry_run: only look; the report says what would be done.
            grace: seconds for which a pack stays that no version names, a day by default: longer than any save takes.
                0 is right only while no other process saves, forks or prunes this run.
            progress: told what is being done now.
        """
        self._check_open()
        return Pruning(self.policy, self._shelves, self._saving(), grace, dry_run=dry_run, progress=progress).run()

    def _saving(self) -> Saving | None:
        """What this process has under way."""
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise TierstateError("this Checkpointer is closed; make a new one")

    def _catalog(self) -> Catalog:
        return Catalog(self._shelves)
