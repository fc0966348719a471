"""A run and its versions over all tiers of a policy: list, inspect, diff, tag, fork, verify, rebuild and prune them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from tierstate.engine.events import Event, EventBus
from tierstate.engine.info import VersionInfo, list_versions
from tierstate.engine.maintain.prune import PendingSaves, PruneReport, PruneRun
from tierstate.engine.maintain.remove import RemoveReport, RunRemoval, remove_run, remove_version
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.repair.check_chunks import Depth, VerifyReport
from tierstate.engine.repair.doctor import doctor
from tierstate.engine.repair.health import DoctorReport
from tierstate.engine.repair.rebuild import RebuildReport, rebuild
from tierstate.engine.repair.verify import verify_run
from tierstate.engine.restore.restore import RestoreSpec, find_version, reading, restarting
from tierstate.engine.store.catalog import RunCatalog, VersionCopies
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.compare import compare
from tierstate.engine.versions.fork import fork
from tierstate.engine.versions.leaf_history import (
    LayerHistory,
    VersionHistory,
    layer_history,
    leaf_history,
    read_versions,
)
from tierstate.engine.versions.leaf_locations import LeafLocation, locate_leaves
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.arguments import as_int, as_number, as_step, check_callable, check_flags
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.globs import check_globs
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.history.diff import LeafDiff
from tierstate.manifest.history.leaf_statistics import LeafStatistics, leaf_statistics
from tierstate.manifest.history.log import list_runs
from tierstate.manifest.history.tags import TaggedVersion, TagTarget
from tierstate.telemetry.event_log import event_keys, read_events
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.places import check_places
from tierstate.tiers.policy.policy import Policy, open_policy_tier

from .not_reentrant import not_reentrant
from .pause_gc import gc_paused


def runs_of(policy: Policy, failed: Callable[[str, TierstateError], object]) -> dict[str, list[str]]:
    """The names of all runs, and the tiers that have each.

    Args:
        failed: called with the name of a tier that cannot be listed, and the error.

    Raises:
        TierstateError: a tier cannot be opened.
    """
    found: dict[str, list[str]] = {}
    for spec in policy.tiers:
        tier = open_policy_tier(spec)
        try:
            for run in list_runs(tier):
                found.setdefault(run, []).append(spec.name)
        except TierstateError as error:
            failed(spec.name, error)
        finally:
            tier.close()
    return found


class Run:
    """The versions of a run and the operations on them. The base class of `Checkpointer`.

    If several ranks save together, no method of this class waits for other ranks, so each rank may call any of them. A
    rank sees its own tiers only: on a tier of one host or process it finds the chunks of that host or process. A change
    that all ranks see (a tag, a fork, a copy, a rebuilt record) should be made by one rank; if each host has its own
    tiers, by one rank of each host, one after the other.

    Args:
        policy: the tiers and the rules.
        run: the name of the run.
        tier_runs: the run in each tier, in the policy's order.
        arena: the host memory for all reads and writes.
    """

    def __init__(self, policy: Policy, run: str, tier_runs: Sequence[TierRun], arena: Arena) -> None:
        self.policy, self.run, self._arena = policy, run, arena
        self._closed = False
        rank = next((tier_run.rank for tier_run in tier_runs if tier_run.together), None)
        self._events = EventBus(run, rank)
        self._use(tier_runs)
        _RUNS.add(self)

    def _use(self, tier_runs: Sequence[TierRun]) -> None:
        self._tier_runs = list(tier_runs)
        self._tags = Tags(self._tier_runs)
        identities = [tier_run.identity for tier_run in self._tier_runs]
        for tier_run in self._tier_runs:
            tier_run.beside, tier_run.identity.beside = self._tier_runs, identities
            tier_run.identity.required = self.policy.tier(tier_run.name).initialized
            tier_run.events = self._events

    def _begin_child(self) -> None:
        """In a forked child, which may read: forget what the parent knew of the tiers. A thread of the parent may have
        been about to change it, with locks that nobody releases here."""
        self._use([TierRun(one.tier, one.run, one.keep, one.rules) for one in self._tier_runs])

    def on(self, event: str | Iterable[str], call: Callable[[Event], object]) -> Callable[[], None]:
        """Have a function called whenever something happens to a save, a version or a tier.

        It is called in a thread of its own, one event after the other, and so delays no save. What it raises is logged.
        At `close` it is waited for, a few seconds at most.

        Args:
            event: the kind of event, such as ``"committed"``; several; or ``"*"`` for all (`ts.Event`).
            call: gets the `ts.Event`.

        Returns:
            A function that ends this.

        Raises:
            ValueError: there is no such kind of event.
            TypeError: ``call`` cannot be called, or no kind is given.
        """
        self._check_open()
        return self._events.subscribe(event, call)

    @not_reentrant
    def events(self, *, since: float = 0.0) -> list[Event]:
        """The events of the run that are logged in its persistent tiers (policy ``metrics: {events: true}``), by this
        and other processes, oldest first. What this process has not written yet is missing.

        Args:
            since: seconds since 1970; older events are left out.

        Raises:
            TierstateError: no tier can be read; one of several is passed over with a warning.
        """
        self._check_open()
        since = as_number(since, "since", "write seconds since 1970, as of time.time()")
        tiers = {s.name: s.tier for s in self._tier_runs if s.tier.traits.persistent}
        with gc_paused():  # it may make a hundred thousand small objects, and none of them is garbage
            return read_events(tiers, self.run, since)

    @not_reentrant
    def versions(self) -> list[VersionInfo]:
        """All versions of the run over all tiers, oldest first; also those whose records cannot be read, as such
        (`VersionInfo.unreadable`)."""
        self._check_open()
        with gc_paused():  # it makes many small objects, and none of them is garbage
            return list_versions(self._tier_runs, self.policy, self._tags.by_version())

    @not_reentrant
    def info(self, *, step: int | None = None, version: str | None = None, tag: str | None = None) -> VersionInfo:
        """One version, by default the newest.

        Raises:
            NotFound: there is no such version.
        """
        found = VersionInfo.of(self._find(step, version, tag))
        return replace(found, tags=self._tags.by_version().get((found.seq, found.id), ()))

    @not_reentrant
    def leaves(self, *, step: int | None = None, version: str | None = None, tag: str | None = None) -> list[Leaf]:
        """The leaves of a version, in the state's order: path, kind, dtype, shape.

        Raises:
            NotFound: there is no such version.
        """
        return list(self._find(step, version, tag).version.leaves)

    @not_reentrant
    def statistics(
        self,
        *,
        step: int | None = None,
        version: str | None = None,
        tag: str | None = None,
        only: Sequence[str] = (),
    ) -> Mapping[str, LeafStatistics]:
        """Count of NaN and infinities, range and norm of each leaf of a version by its path, by default of the newest.

        Empty if it was saved without ``statistics: true``. Reads a record, and no chunks.

        Args:
            only: globs of leaf paths; by default all leaves whose elements are numbers.

        Raises:
            NotFound: there is no such version.
        """
        return leaf_statistics(self._find(step, version, tag).version, _globs(only))

    @not_reentrant
    def history(self, only: Sequence[str] = (), *, last: int = 0) -> list[VersionHistory]:
        """The statistics of leaves over the versions of the run, oldest first, and which share of each has changed.

        Args:
            only: globs of leaf paths; by default all leaves.
            last: only so many of the newest versions; 0 for all.

        Raises:
            ValueError: ``last`` is negative.
        """
        last = _last(last)
        # One more, with which the first is compared.
        found = list(leaf_history(read_versions(self._catalog(), last=last and last + 1), _globs(only)))
        return found[-last:]

    @not_reentrant
    def layers(self, only: Sequence[str] = (), *, seqs: Collection[int] | None = None, last: int = 0) -> LayerHistory:
        """Norms, NaN and changes of layers over the versions of the run.

        Args:
            only: globs of leaf paths; by default all leaves.
            seqs: only versions of these numbers.
            last: only so many of the newest versions; 0 for all.

        Raises:
            ValueError: ``last`` is negative.
        """
        last = _last(last)
        numbers = None if seqs is None else {as_int(seq, "seqs", "write numbers of versions") for seq in seqs}
        found = layer_history(read_versions(self._catalog(), numbers, last and last + 1), _globs(only))
        return found.newest(last) if last else found

    @not_reentrant
    def located(self, *, version: str | None = None, only: Sequence[str] | None = None) -> list[LeafLocation]:
        """The leaves of a version, by default the newest, or those that match a glob, and where each tier has them.
        Reads records only.

        Raises:
            NotFound: there is no such version.
            StateMismatch: no leaf matches.
        """
        return locate_leaves(self._find(version=version), only)

    @not_reentrant
    def diff(
        self,
        old: int | str,
        new: int | str,
        *,
        values: bool = False,
        only: Sequence[str] | None = None,
        progress: Progress = no_progress,
    ) -> list[LeafDiff]:
        """What changed from one version to another, leaf by leaf. Compares digests; with ``values`` also reads the
        chunks and says by how much the values differ.

        Args:
            old, new: the steps, or beginnings of ids.
            values: also read the chunks whose digests differ, and compare them by element.
            only: globs of leaf paths.
            progress: called with the bytes read since the last call.

        Raises:
            NotFound: there is no such version.
            StateMismatch: no leaf of either matches ``only``.
            Damaged: with ``values``, a chunk is whole in no tier.
        """
        check_flags(values=values)
        if not values:
            return compare(self._named(old), self._named(new), self._arena, only=only)

        check_callable(progress, "progress", PROGRESS)

        def compared() -> list[LeafDiff]:
            one, other = self._named(old), self._named(new)
            with reading(one), reading(other):
                return compare(one, other, self._arena, values=True, only=only, progress=progress)

        return restarting(compared)

    @not_reentrant
    def verify(
        self,
        *,
        deep: bool = False,
        data: bool = False,
        sample: float = 0.0,
        seed: int | None = None,
        mend: bool = False,
        progress: Progress = no_progress,
    ) -> VerifyReport:
        """Check that the tiers have what their records name: packs by presence and length, or more with the options.

        Args:
            deep: as ``data``; also check pack footers and containers, and load each leaf with its provider, except
                pickles.
            data: read and decode every chunk and compare it with its digest.
            sample: read only this share of each tier's bytes instead, from 0 to 1, drawn at random.
            seed: random seed of the sample.
            mend: repair what is damaged in one tier and whole in another.
            progress: called with the bytes read since the last call.
        """
        check_flags(deep=deep, data=data, mend=mend)
        check_callable(progress, "progress", PROGRESS)
        how = Depth.of(deep=deep, data=data, sample=sample, seed=seed, mend=mend)
        return verify_run(self._catalog(), self._arena, how, progress)

    @not_reentrant
    def rebuild(self, tier: str, *, partial: bool = False, dry_run: bool = False) -> RebuildReport:
        """Rebuild lost records of a tier from its packs, with what the records of other tiers say of the versions.

        Args:
            tier: the tier whose records are rebuilt.
            partial: also versions of which the packs have only some chunks.
            dry_run: change nothing; the report says what would be done.

        Raises:
            NotFound: there is no such tier.
            TierError: the tier could not be read or written to.
        """
        self._check_open()
        check_flags(partial=partial, dry_run=dry_run)
        return rebuild(self._tier_runs, tier, self.policy, partial=partial, dry_run=dry_run)

    @not_reentrant
    def doctor(self, *, apply: bool = False, progress: Progress = no_progress) -> DoctorReport:
        """Find what is lost of this run over all tiers, and what can be repaired; with ``apply`` repair it.

        Every chunk in every tier is read. A repair is right only while no other process saves, prunes or repairs this
        run.

        Args:
            apply: carry out the repairs; otherwise nothing is changed.
            progress: called with the bytes read since the last call.
        """
        self._check_open()
        check_flags(apply=apply)
        check_callable(progress, "progress", PROGRESS)
        return doctor(self._tier_runs, self.policy, self._arena, apply=apply, progress=progress)

    @not_reentrant
    def tag(self, name: str, step: int | None = None, *, version: str | None = None) -> VersionInfo:
        """Give a version a tag, by default the newest; a version that had the tag loses it.

        A tier that does not answer causes a warning in the log; it gets the tag when the next tag is given.

        Raises:
            ValueError: the name is not one of up to 64 letters, digits, ``.``, ``_`` and ``-``.
            NotFound: there is no such version, or retention deleted it meanwhile.
            TierError: the tag could be written to no tier.
        """
        entry = self._find(step, version)
        self._tags.give_to(name, entry)
        found = VersionInfo.of(entry)
        return replace(found, tags=self._tags.by_version().get((found.seq, found.id), ()))

    @not_reentrant
    def untag(self, name: str) -> None:
        """Remove a tag from the version that has it.

        Raises:
            NotFound: no version has this tag.
            TierError: the change could be written to no tier.
        """
        self._check_open()
        self._tags.resolve(name)
        self._tags.give(name, None)

    @not_reentrant
    def tags(self) -> dict[str, VersionInfo | TagTarget]:
        """All tags with their versions. Of a version that no tier has any more: only its number and id."""
        infos = {(v.seq, v.id): v for v in self.versions()}
        return {name: infos.get(tag, tag) for name, tag in self._tags.current().items()}

    @not_reentrant
    def fork(
        self, new_run: str, step: int | None = None, *, version: str | None = None, tag: str | None = None
    ) -> VersionInfo:
        """Begin a new run with a version of this one, by default the newest, without copying its data.

        Returns:
            The new run's first version; a Checkpointer of that run restores it and continues from it.

        Raises:
            AlreadyExists: the new run has versions already.
            NotFound: there is no such version, or retention has dropped leaves of it that no persistent tier has.
            TierError: no persistent tier has the version or could be written to, or a tier cannot list the new run.
        """
        return fork(self._find(step, version, tag), self._tier_runs, new_run)

    def _find(self, step: int | None = None, version: str | None = None, tag: str | None = None) -> VersionCopies:
        wanted = RestoreSpec(step, version, tag=self._tagged(tag, step, version))
        return restarting(lambda: find_version(self._catalog(), self.run, wanted), newest=wanted.newest)

    def _named(self, which: int | str) -> VersionCopies:
        """The version of a step, or the one whose id begins so."""
        return self._find(version=which) if isinstance(which, str) else self._find(as_step(which))

    def _tagged(self, tag: str | None, step: int | None, version: str | None) -> TaggedVersion | None:
        """The version that a tag names, if one is given."""
        if tag is not None and not (step is None and version is None):
            raise ValueError(f"tag {tag!r} names a version; give no step and no id beside it")
        return None if tag is None else self._tags.resolve(tag)

    @not_reentrant
    def prune(
        self,
        *,
        dry_run: bool = False,
        grace: float | None = None,
        progress: Callable[[str], object] = no_progress,
    ) -> PruneReport:
        """Retention, then garbage collection: drop versions, delete unused packs, repack mostly unused ones.

        Safe while other processes save, read or prune this run; packs of this process's own saves in progress are
        kept. If several ranks save together, any or all may call this: each prunes the tiers that no lower rank sees.

        Args:
            dry_run: change nothing; the report says what would be done.
            grace: seconds for which an unreferenced pack is kept; by default a day, which is longer than any save
                takes. 0 is correct only while no other process saves, forks or prunes this run.
            progress: called with the name of each step.

        Raises:
            PolicyError: two tiers lie in one place; nothing was deleted.
        """
        self._check_open()
        check_flags(dry_run=dry_run)
        check_callable(progress, "progress", "give a function of a text")
        check_places([tier_run.tier for tier_run in self._tier_runs])
        return PruneRun(
            self.policy,
            self._tier_runs,
            self._saving(),
            grace,
            dry_run=dry_run,
            progress=progress,
        ).run()

    @not_reentrant
    def remove(
        self,
        *,
        step: int | None = None,
        version: str | None = None,
        seq: int | None = None,
        tier: str | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> RemoveReport:
        """Remove one version from one tier, or from all tiers; its chunks too, but for those that others need.

        A version that is tagged, forked or read now stays. Nothing brings a removed version back to a tier but `copy`.

        Args:
            step, version, seq: which version; one of them. The number also names one whose record cannot be read.
            tier: the only tier to remove it from.
            force: also the newest version, the only durable copy (where ``tier`` is given), one whose record cannot be
                read, and one that this process is still saving to a tier.
            dry_run: change nothing; the report says what would be done, and what stands in the way.

        Raises:
            NotFound: there is no such version or tier.
            TierstateError: it must stay; nothing was changed.
        """
        self._check_open()
        check_flags(force=force, dry_run=dry_run)
        if sum(one is not None for one in (step, version, seq)) != 1:
            raise ValueError("name the version to remove: by its step, or the beginning of its id, or its number")
        found: VersionCopies | int
        if seq is None:
            found = self._find(step, version)
        else:
            seq = as_int(seq, "seq", "write the number of a version")
            entries = RunCatalog.look(seq, self._tier_runs).entries
            # Two tiers that did not see each other may have two versions of that number.
            found = next((entry for entry in entries if tier in entry.tiers), entries[0] if entries else seq)
        tags: tuple[str, ...] = ()
        if not isinstance(found, int):
            tags = self._tags.by_version().get((found.version.head.seq, found.version.id), ())
        return remove_version(self._tier_runs, found, tags, self._saving(), tier=tier, force=force, dry_run=dry_run)

    @not_reentrant
    def remove_run(self, *, force: bool = False, dry_run: bool = False) -> RunRemoval:
        """Remove the whole run from all tiers: all versions, the oldest first, its log of events, and last its tags.

        Right only while nobody saves the run. It stays while a version of it is read or was forked. What an
        interruption leaves is a run without its oldest versions; to call it again goes on.

        Args:
            force: remove it; without, an error says what there is.
            dry_run: change nothing; the report says what would be done, and what stands in the way.

        Raises:
            NotFound: no tier has anything of it.
            TierstateError: it must stay, or ``force`` is not said; nothing was changed.
        """
        self._check_open()
        check_flags(force=force, dry_run=dry_run)
        logged = partial(event_keys, run=self.run)
        return remove_run(self._tier_runs, self._tags, logged, self._saving(), force=force, dry_run=dry_run)

    def _saving(self) -> PendingSaves | None:
        """The saves of this process that are in progress; a `Run` without saves has none."""
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise TierstateError("this Checkpointer is closed; make a new one")

    def _catalog(self) -> RunCatalog:
        self._check_open()
        return RunCatalog(self._tier_runs)


_RUNS: WeakSet[Run] = WeakSet()
"""All of this process."""


def _begin_children() -> None:
    for run in list(_RUNS):
        run._begin_child()


os.register_at_fork(after_in_child=_begin_children)


PROGRESS = "give a function of the bytes read since its last call"


def _last(last: int) -> int:
    return as_int(last, "last", "write how many of the newest versions, or 0 for all")


def _globs(only: Sequence[str] | None) -> tuple[str, ...]:
    return () if only is None else check_globs(only)
