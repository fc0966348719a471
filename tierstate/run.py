"""A run: its versions over all tiers of a policy, to be listed, looked at, compared, named, forked and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tierstate.manifest.diff import LeafDiff
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.tags import Tag
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog, Entry
from tierstate.tiers.findings import Depth, Report
from tierstate.tiers.policy import Policy
from tierstate.tiers.rebuilding import Rebuilding, rebuild
from tierstate.tiers.shelf import Shelf

from .collecting import uncollected
from .comparing import compare
from .finding import Wanted, find
from .forking import fork
from .info import VersionInfo
from .inspecting import inspect
from .listing import listed
from .locating import Located, locate
from .progress import Progress, nobody
from .pruning import PruneReport, Pruning, Saving
from .tagging import Tagged, Tags

if TYPE_CHECKING:
    from .copying import Copied


class Run:
    """What can be done with the versions that a run has.

    Where several ranks save together, none of this waits for the others: any rank may call any of it. Each looks at the
    tiers that it sees itself, so that on a tier of one host or process it finds the chunks of that one only. What
    changes something that all see (a name, a fork, a copy, a rebuilt record) is for one rank to call; where a host has
    tiers of its own, for one rank of each host, one after the other.

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

    def located(
        self, *, step: int | None = None, version: str | None = None, only: Sequence[str] | None = None
    ) -> list[Located]:
        """The leaves of a version, or those that match a glob, and what each tier has of them; from records alone.

        Raises:
            NotFound: there is no such version.
            StateMismatch: nothing matches.
        """
        return locate(self._find(step, version), only)

    def diff(
        self,
        old: int,
        new: int,
        *,
        values: bool = False,
        only: Sequence[str] | None = None,
        progress: Progress = nobody,
    ) -> list[LeafDiff]:
        """What changed from one step to another, leaf by leaf: by digests alone, or with ``values`` also by how much.

        See `comparing.compare`.
        """
        one, other = (self._find(step) for step in (old, new))
        return compare(one, other, self._arena, values=values, only=only, progress=progress)

    def verify(
        self,
        *,
        deep: bool = False,
        data: bool = False,
        sample: float = 0.0,
        seed: int | None = None,
        mend: bool = False,
        progress: Progress = nobody,
    ) -> Report:
        """Whether the tiers have what they claim to have: records, and packs by presence and length.

        See `inspecting.inspect`.
        """
        how = Depth.of(deep=deep, data=data, sample=sample, seed=seed, mend=mend)
        return inspect(self._catalog(), self._arena, how, progress)

    def copy(
        self,
        *,
        step: int | None = None,
        version: str | None = None,
        to: str | None = None,
        into: Policy | str | os.PathLike[str] | None = None,
        run: str | None = None,
        progress: Progress = nobody,
    ) -> Copied:
        """Copy a version to another tier, or into the tiers of another policy. See `copying.copy`."""
        from .copying import copy  # which makes Checkpointers, and so knows this room

        return copy(self, step=step, version=version, to=to, into=into, into_run=run, progress=progress)

    def rebuild(self, tier: str, *, partial: bool = False, dry_run: bool = False) -> Rebuilding:
        """Make the records of a tier again that are lost, from its packs. See `rebuilding.rebuild`."""
        self._check_open()
        return rebuild(self._shelves, tier, self.policy, partial=partial, dry_run=dry_run)

    def tag(self, name: str, step: int | None = None, *, version: str | None = None) -> VersionInfo:
        """Give a version a name, by default the newest; a version that had it loses it.

        Tiers that do not answer are told by a warning, and learn it the next time that a tag is given.

        Raises:
            ValueError: the name is not one of up to 64 letters, digits, ``.``, ``_`` and ``-``.
            NotFound: there is no such version, or it was dropped meanwhile.
            TierError: no tier took the tag.
        """
        entry = self._find(step, version)
        self._tags.give_to(name, entry)
        found = VersionInfo.of(entry)
        return replace(found, tags=self._tags.by_version().get((found.seq, found.id), ()))

    def untag(self, name: str) -> None:
        """Take a name back from whichever version has it.

        Raises:
            NotFound: none has it.
            TierError: no tier took it.
        """
        self._check_open()
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
            NotFound: there is no such version, or `keep` has dropped leaves of it that no tier which lasts has.
            TierError: no tier that lasts has it, or none took it, or a tier cannot be asked for the new run.
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
        what is theirs. Of ranks that save together any or all may call this: each prunes what no lower one sees.

        Args:
            dry_run: only look; the report says what would be done.
            grace: seconds for which a pack stays that no version names, a day by default: longer than any save takes.
                0 is right only while no other process saves, forks or prunes this run.
            progress: told what is being done now.
        """
        self._check_open()
        return Pruning(
            self.policy,
            self._shelves,
            self._saving(),
            grace,
            dry_run=dry_run,
            progress=progress,
        ).run()

    def _saving(self) -> Saving | None:
        """What this process has under way."""
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise TierstateError("this Checkpointer is closed; make a new one")

    def _catalog(self) -> Catalog:
        self._check_open()
        return Catalog(self._shelves)
