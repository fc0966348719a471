"""Restore: find the wanted version, and read it from the tiers that have it into the target's tensors.

Damaged versions are skipped if the caller allows it. Stored shards are resharded to the boxes that the target wants.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch

from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.store.catalog import (
    LOOK_FURTHER,
    RunCatalog,
    SeqVersions,
    VersionCopies,
    VersionMoved,
    lease_for_reading,
    read_sources,
)
from tierstate.manifest.arguments import as_step, as_text, check_callable, check_flags, short_repr
from tierstate.manifest.arrays import Array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import (
    Damaged,
    FormatError,
    NewestUnreadable,
    NotFound,
    OutOfMemory,
    StateMismatch,
    TierstateError,
    Unauthentic,
    Unreadable,
    untrusted,
)
from tierstate.manifest.format.globs import check_globs
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.leaf_path import Path
from tierstate.manifest.format.record import Summary
from tierstate.manifest.format.version import Version, copy_stages
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.manifest.reshard.coverage import check_covered
from tierstate.manifest.reshard.overlap import WantedBox, find_overlaps
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.tensors.devices import absence, refusal
from tierstate.providers.tree.rename import Rename
from tierstate.providers.tree.target import Target
from tierstate.providers.tree.unflatten import NEW, plan_restore
from tierstate.providers.values.values import ValueProvider
from tierstate.tiers.memory.arena import Arena

from .fetch import Fetch, RepairWriter
from .scatter import Destination, ScatterTargets
from .uploads import restore_from_memory

READ_WORKERS = max(4, min(16, os.cpu_count() or 1))
"""Number of reads at once, each with a slab whose pages must be faulted in first. Four keep a disk busy, and more the
bus to a GPU: a reader also copies, verifies, and waits until its slab has crossed the bus."""


log = logging.getLogger("tierstate")


T = TypeVar("T")


OnDamage = Literal["raise", "older"]


STEPS_NAMED = 8
"""How many steps of versions that are there an error names, where there is none of the wanted step."""


PASSED_OVER = (Damaged, FormatError, OutOfMemory)
"""Errors of a version with which ``on_damage="older"`` goes on to the next one: it is not what was saved, or cannot be.
A version that is sound, and that the caller's state does not match (`StateMismatch`) or that needs a permission
(`Unsafe`), is told instead: an older one would be taken silently in its place."""


MAX_RESTARTS = 5
"""How often a restore starts again because another process dropped or moved the version while it was read."""


class RestorePlan(NamedTuple):
    """Where each chunk of a version goes.

    Attributes:
        ahead: the chunks that are read before anything of the given state is overwritten.
        wanted: those that are read after that.
    """

    ahead: ScatterTargets
    wanted: ScatterTargets

    @property
    def rows(self) -> Array:
        """All chunks that are read, rising."""
        return np.union1d(self.ahead.rows, self.wanted.rows)


def plan_scatter(version: Version, target: Target) -> RestorePlan:
    """Decide where each chunk of a version goes. Writes to no memory.

    Raises:
        StateMismatch: a provider's box is not within the shape of the saved leaf.
        FormatError: the shards do not cover the wanted boxes, or a leaf that is always whole was saved in shards.
    """
    with untrusted(name_version(version), named=False):
        plan = RestorePlan(
            _scatter(version, target.ahead, untouched=True),
            _scatter(version, target.wanted.items(), untouched=target.is_new),
        )
        for targets in plan:
            check_scatter(version, targets)
    return plan


def _scatter(version: Version, providers: Iterable[tuple[int, Provider]], *, untouched: bool) -> ScatterTargets:
    to = [place for i, provider in providers for place in _places(version.leaves[i], i, provider)]
    return ScatterTargets(version, to, untouched=untouched, what=name_version(version))


def content_of(version: Version) -> Callable[[int], Hashable]:
    """For `plan_restore`: a leaf's boxes and digests, equal for leaves with equal bytes that were cut alike."""

    def content(leaf: int) -> Hashable:
        rows, shards = np.flatnonzero(version.chunk_leaf == leaf), np.flatnonzero(version.shard_leaf == leaf)
        boxes = tuple(version.boxes[int(shard)] for shard in shards)
        return boxes, version.chunk_nbytes[rows].tobytes(), version.digests[rows].tobytes()

    return content


def check_scatter(version: Version, targets: ScatterTargets) -> None:
    """Check that the shards cover all destinations, and that each receiver can take them; raises FormatError if not.

    Needed because a record may be damaged or forged.
    """
    met, to = targets.overlaps, targets.destinations
    for want in np.unique(met.want[~met.same]).tolist():
        if isinstance(to[want].taker, Provider) and type(to[want].taker).scatter is Provider.scatter:
            raise _cut(version, to[want].leaf)
    check_covered(version, [WantedBox(place.leaf, place.box) for place in to], met)


def check_leaves_whole(version: Version, leaves: Sequence[int]) -> None:
    """Raise FormatError unless shards have each element of these leaves once, and plain values in one piece."""
    unbroken = copy_stages(version)
    for leaf in leaves:
        if version.leaves[leaf].spec.kind == ValueProvider.kind and unbroken[leaf] < 0:
            raise _cut(version, leaf)
    wants = [WantedBox(leaf, Box.whole(version.leaves[leaf].spec.shape)) for leaf in leaves]
    check_covered(version, wants, find_overlaps(version, wants))


def _cut(version: Version, leaf: int) -> FormatError:
    """The error for a leaf of a kind that is always whole, but was saved in shards."""
    found = version.leaves[leaf]
    return FormatError(f"{name_version(version)} holds {found.name} in shards; a {found.spec.kind} lies in one piece")


def fill_target(
    entry: VersionCopies,
    target: Target,
    plan: RestorePlan,
    arena: Arena,
    progress: Progress = no_progress,
) -> Any:
    """Read and verify what the target wants, and return the finished state. Repairs damaged chunks on the way.

    If this fails, `Target.changed` says whether a given state may have been changed.
    """
    try:
        with _reading(entry, plan.rows, arena, progress) as read:
            read(plan.ahead)
            target.settle()
            target.changed = not target.is_new
            read(plan.wanted)
        return target.finish()
    except BaseException:
        target.undo()
        raise


def read_into(entry: VersionCopies, targets: ScatterTargets, arena: Arena) -> None:
    """Read and verify the wanted chunks, and copy them to their destinations. Repairs damaged chunks on the way."""
    with _reading(entry, targets.rows, arena) as read:
        read(targets)


@contextmanager
def _reading(
    entry: VersionCopies, rows: Array, arena: Arena, progress: Progress = no_progress
) -> Iterator[Callable[[ScatterTargets], None]]:
    """Holds a lease on these chunks. Gives a function that reads those of some targets."""
    version = entry.version
    repair = RepairWriter(version, entry.holdings)

    def read(targets: ScatterTargets) -> None:
        if len(targets.rows):
            fetch = Fetch(version, entry.holdings, arena, workers=READ_WORKERS, mended=repair, progress=progress)
            fetch.fill(restore_from_memory(entry, targets.rows, targets), targets)

    try:
        with lease_for_reading(read_sources(entry, rows), int(version.chunk_nbytes[rows].sum(dtype="i8"))):
            yield read
    finally:
        repair.close()


def _places(leaf: Leaf, index: int, provider: Provider) -> Iterator[Destination]:
    """The destinations of a leaf: one for each box that its provider holds."""
    whole = leaf.spec.shape
    for part in provider.parts:
        # A provider without boxes takes the whole saved leaf, even if its own value has another length.
        says = type(part).box is not Provider.box
        box = part.box if says else Box((0,) * len(whole), whole)
        if says and not box.within(whole):
            raise StateMismatch(f"{leaf.name}: {type(part).__qualname__} holds {box}, which is no part of {whole}")
        nbytes = box.volume * leaf.spec.itemsize if says else leaf.spec.nbytes
        yield Destination(index, box, part, _memory(leaf, nbytes, part))


def _memory(leaf: Leaf, nbytes: int, provider: Provider) -> Buffer | None:
    try:
        return memory_of(provider, nbytes)
    except Exception as error:
        raise StateMismatch(f"{leaf.name}: {error}") from error


class RestoreSpec(NamedTuple):
    """Which version to restore, which leaves of it, and into what.

    Attributes:
        step, version: a step, or the beginning of an id; neither: the newest undamaged version.
        into: the state to restore in place, or NEW for a new one.
        only: globs of leaf paths; None: everything.
        device: the device of new tensors.
        on_damage: ``raise``, or ``older`` to fall back to the newest undamaged version.
        allow_pickle: whether the pickle at a path may be loaded.
        allow_lossy: whether leaves may be restored that were saved with fewer bits.
        tag: the version that a tag names, instead of a step or an id.
        optional: the result is None, and not NotFound, if the run has no version at all.
        rename: how the version's leaves are renamed first.
        progress: called with the raw bytes read since the last call, from several threads.
    """

    step: int | None = None
    version: str | None = None
    into: Any = NEW
    only: Sequence[str] | None = None
    device: torch.device | str | None = None
    on_damage: OnDamage = "raise"
    allow_pickle: Callable[[Path], bool] = lambda _path: False
    allow_lossy: bool = False
    tag: TaggedVersion | None = None
    optional: bool = False
    rename: Rename | None = None
    progress: Progress = no_progress

    @property
    def newest(self) -> bool:
        """Whether no version is named."""
        return self.step is None and self.version is None and self.tag is None

    @property
    def place(self) -> torch.device | None:
        """The device as torch has it."""
        return None if self.device is None else torch.device(self.device)


def check_wanted(wanted: RestoreSpec) -> RestoreSpec:
    """Check what a caller asks for, before anything is looked up; returns it.

    Raises:
        ValueError: a step and an id are given together, the step is no int, ``on_damage`` is not known, a glob is not
            valid, or tensors cannot be loaded to the device, or this process has no such one.
        TypeError: the id is no text, or ``only`` is no list of texts.
        StateMismatch: a mode of torch makes tensors that nothing can be read into.
    """
    step, version = wanted.step, wanted.version
    if step is not None and version is not None:
        raise ValueError(f"step {step!r} and version {version!r:.40} are two ways to name a version; give one of them")
    if version is not None:
        version = as_text(version, "version", "an id is text, or the beginning of it; name a step as the step")
    if wanted.on_damage not in get_args(OnDamage):
        raise ValueError(f"what to do about damage is 'raise' or 'older', not {wanted.on_damage!r:.40}")
    _check_device(wanted)
    if type(torch.empty(0, device="cpu")) is not torch.Tensor:  # which a mode of torch has replaced
        raise StateMismatch(
            "tensors that are made here are no plain ones, as in the block of a FakeTensorMode, and have no memory to "
            "read into; ask for the version outside of that block"
        )
    check_flags(allow_lossy=wanted.allow_lossy)
    check_callable(wanted.progress, "progress", "give a function of the bytes read since its last call")
    return wanted._replace(
        step=None if step is None else as_step(step),
        version=version,
        only=None if wanted.only is None else check_globs(wanted.only),
    )


def _check_device(wanted: RestoreSpec) -> None:
    """Check that this process can load tensors to the device; later it would look as if the version were damaged."""
    try:
        place = wanted.place
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"load(device={short_repr(wanted.device)}): {why}; write as in 'cpu' or 'cuda:0'") from None
    if place is not None and (refused := refusal(place) or absence(place)):
        raise ValueError(f"load(device={str(place)!r}): {refused}")


class Restored(NamedTuple):
    """The restored state and its version."""

    state: Any
    entry: VersionCopies


class VersionDropped(NotFound):
    """A version was dropped while it was read."""


def restore(catalog: RunCatalog, arena: Arena, run: str, wanted: RestoreSpec) -> Restored | None:
    """Restore the newest undamaged version that matches. Starts again if it is dropped or moved while it is read.

    Raises: as `_restore`.
    """
    return restarting(lambda: _restore(catalog, arena, run, wanted), newest=wanted.newest)


def restarting(read: Callable[[], T], *, newest: bool = False) -> T:
    """What ``read`` returns, which finds versions and reads them (`reading`). It is called again if one was moved
    meanwhile.

    Args:
        newest: no version is named, so that another one is read if the newest was dropped meanwhile.
    """
    for _ in range(MAX_RESTARTS):
        try:
            return read()
        except VersionMoved as error:
            log.info("%s", error)
        except VersionDropped as error:
            if not newest:
                raise
            log.info("%s", error)
    return read()


@contextmanager
def reading(entry: VersionCopies) -> Iterator[None]:
    """Hold leases on a version while the block reads it, perhaps all of it, for another use than a restore.

    Raises:
        VersionMoved, VersionDropped: what looked like damage is that another process moved or dropped the version.
    """
    rows = np.arange(len(entry.version.digests))
    try:
        with lease_for_reading(read_sources(entry, rows), entry.version.nbytes):
            yield
    except (Damaged, Unreadable) as error:
        raise_if_dropped(entry, error)
        raise


def _restore(catalog: RunCatalog, arena: Arena, run: str, wanted: RestoreSpec) -> Restored | None:
    """Restore the newest undamaged version that matches.

    Raises:
        NotFound: there is no such version.
        WrongTier: a tier is not the one that is expected: the newest version, or the wanted one, may be there.
        StateMismatch: its leaves do not match the given state.
        FormatError: its shards do not cover their leaves, or its leaves are not what any value can be.
        OutOfMemory: what it says that it holds has no room in memory.
        Damaged: a chunk is missing or damaged in every tier.
        Unreadable: the version is stored, and a tier that has a part of it cannot be asked now.

    If the given state may have been changed before an error, a note on the error says so.
    """
    passed: list[str] = []
    target: Target | None = None
    changed = False
    try:
        for entry in _candidates(catalog, wanted, passed):
            target = None  # the one before is done with, and its memory
            try:
                target = _plan(catalog, entry, wanted)
                plan = plan_scatter(entry.version, target)
                if not _is_whole(entry, plan.rows, wanted, passed):
                    continue
                return Restored(fill_target(entry, target, plan, arena, wanted.progress), entry)
            except PASSED_OVER as error:
                changed = changed or (target is not None and target.changed)
                _raise_unless_older(entry, wanted, error)
                _pass_over(passed, name_version(entry.version), error)
        check_missing(catalog, wanted, passed)
        none_found(run, wanted, catalog, passed)
        return None
    except BaseException as error:
        if changed or (target is not None and target.changed):
            error.add_note("the given state may be overwritten in part: do not train on from it")
        raise


def _raise_unless_older(entry: VersionCopies, wanted: RestoreSpec, error: Damaged | FormatError | OutOfMemory) -> None:
    """Raise the error of a version, unless an older one is to be taken in its place."""
    if isinstance(error, Damaged):
        if entry.away:
            raise_if_dropped(entry, error)
            raise may_be_whole(entry, error) from error
        if wanted.on_damage == "raise":
            raise_if_dropped(entry, error)
    if wanted.on_damage == "raise":
        raise error


def check_missing(catalog: RunCatalog, wanted: RestoreSpec, passed: Sequence[str]) -> None:
    """Check, where the wanted version was not found, that no tier is missing in which it may be.

    Raises:
        WrongTier: a tier is not the one that is expected.
        Unreadable: there is no version at all, and a persistent tier cannot be asked now.
    """
    if wanted.newest and not passed:
        catalog.check_empty()
        catalog.check_not_turned_back()
    else:
        catalog.check_tiers()


def _check_newest(catalog: RunCatalog, wanted: RestoreSpec) -> None:
    """Check, before anything is touched, that no tier is missing or turned back, which may have a newer version."""
    if wanted.newest:
        catalog.check_tiers()
        catalog.check_not_turned_back()


def _plan(catalog: RunCatalog, entry: VersionCopies, wanted: RestoreSpec) -> Target:
    _check_newest(catalog, wanted)
    return plan_restore(
        entry.version.leaves,
        into=wanted.into,
        only=wanted.only,
        device=wanted.place,
        allow_pickle=wanted.allow_pickle,
        allow_lossy=wanted.allow_lossy,
        content=content_of(entry.version),
        rename=wanted.rename,
    )


def find_version(catalog: RunCatalog, run: str, wanted: RestoreSpec) -> VersionCopies:
    """The catalog entry that a restore would try first.

    Raises:
        NotFound: there is no such version.
        WrongTier, Unreadable: as `check_missing`.
        ValueError, TypeError: as `check_wanted`.
    """
    wanted = check_wanted(wanted)
    passed: list[str] = []
    for entry in _candidates(catalog, wanted, passed, goes_back=False):
        return entry
    check_missing(catalog, wanted, passed)
    raise no_such_version(run, wanted, catalog, passed)


def find_whole_version(catalog: RunCatalog, run: str, wanted: RestoreSpec) -> VersionCopies:
    """As `find_version`, the first version that the reachable tiers have whole, with all its leaves.

    Raises:
        NotFound, WrongTier, ValueError, TypeError: as `find_version`.
        Damaged: chunks of the named version, or of every version, are in no tier.
        Unreadable: the version may be whole in a tier that cannot be asked now.
    """
    wanted = check_wanted(wanted)
    passed: list[str] = []
    for entry in _candidates(catalog, wanted, passed, goes_back=False):
        _check_newest(catalog, wanted)
        try:
            if _is_whole(entry, np.arange(len(entry.version.digests)), wanted, passed):
                return entry
        except Damaged as error:
            _raise_unless_older(entry, wanted, error)
            _pass_over(passed, name_version(entry.version), error)
    check_missing(catalog, wanted, passed)
    raise no_such_version(run, wanted, catalog, passed)


def _candidates(
    catalog: RunCatalog, wanted: RestoreSpec, passed: list[str], *, goes_back: bool = True
) -> Iterator[VersionCopies]:
    """Versions to try, newest first. After the wanted one, older ones only with ``on_damage="older"``.

    Args:
        goes_back: whether the caller can be told to go back to older ones, as an error then says.
    """
    reached = wanted.newest
    if wanted.version is not None:
        catalog.check_unique(wanted.version)

    def fits(found: Summary) -> bool:
        return reached or is_named(found.id, found.step, wanted)

    upto = wanted.tag.seq if wanted.tag else None
    for place in catalog.newest_first(upto, fits=None if wanted.newest else fits):
        if not place.entries:
            _unreadable(place, wanted, reached, passed, goes_back)
        for entry in place.entries:
            if reached or _fits(entry, wanted):
                yield entry
                reached = reached or wanted.on_damage == "older"
        if wanted.tag and not reached:
            return  # its number is known, so older versions need not be looked at


def _fits(entry: VersionCopies, wanted: RestoreSpec) -> bool:
    version = entry.version
    right = wanted.tag is None or version.head.seq == wanted.tag.seq
    return right and is_named(version.id, version.head.step, wanted)


def is_named(version: str, step: int, wanted: RestoreSpec) -> bool:
    """Whether the version with this id and step is the one that is asked for, by a tag, an id or a step."""
    if wanted.tag is not None:
        return version == wanted.tag.id
    if wanted.version is not None:
        return version.startswith(wanted.version)
    return step == wanted.step


def _unreadable(place: SeqVersions, wanted: RestoreSpec, reached: bool, passed: list[str], goes_back: bool) -> None:
    """Handle a version whose record cannot be read, and which may be the wanted one: raise, or note and skip it."""
    if not place.problems:
        if reached:
            raise VersionDropped(
                f"version {place.seq} was dropped, as `keep` says, before it was read; ask for the newest one"
            )
        return
    told = place.told
    if place.away and (reached or (wanted.tag is not None and wanted.tag.seq == place.seq)):
        raise unreadable_now(place.seq, told, newest=wanted.newest)
    if reached and wanted.on_damage == "raise":
        back = ", or say on_damage='older' to go back to the newest version that is whole" if goes_back else ""
        raise _as_refused(place.problems)(
            f"version {place.seq} is the newest, and its record cannot be read ({told}); name a step{back}; "
            f"{LOOK_FURTHER}"
        )
    _pass_over(passed, f"version {place.seq}", told)


def _as_refused(problems: Iterable[tuple[str, TierstateError]]) -> type[Damaged]:
    """The class of the error for records that cannot be read: `Unauthentic` if one of them is not authentic."""
    return Unauthentic if any(isinstance(error, Unauthentic) for _, error in problems) else Damaged


def unreadable_now(seq: int, told: str, *, newest: bool) -> Unreadable:
    """The error for a version whose record is listed, and cannot be read now from any tier."""
    if newest:
        return NewestUnreadable(
            f"version {seq} is the newest, and its record cannot be read now ({told}); "
            "try again, or name the step of an older version"
        )
    return Unreadable(f"the record of version {seq} cannot be read now ({told}); try again")


def _is_whole(entry: VersionCopies, rows: Array, wanted: RestoreSpec, passed: list[str]) -> bool:
    """Whether the reachable tiers together have all wanted chunks. Raises Damaged if not, if a version was named."""
    absent = entry.absent(rows)
    if not len(absent):
        return True
    version = entry.version
    leaves = np.unique(version.chunk_leaf[absent])
    first = version.leaves[int(leaves[0])].name
    error = Damaged(
        f"{name_version(entry.version)} is not whole in {', '.join(entry.tiers)}: "
        f"{len(leaves)} leaves are in none of them, {first} the first; {entry.remedy}"
    )
    if entry.away or not wanted.newest:
        raise error
    _pass_over(passed, name_version(entry.version), error)
    return False


def may_be_whole(entry: VersionCopies, why: object) -> Unreadable:
    """The error for a version that is not whole in the tiers that answer, while another one lists it."""
    away = "; ".join(entry.away)
    return Unreadable(f"{why}; it may be whole where its record cannot be read now ({away}); try again")


def raise_if_dropped(entry: VersionCopies, error: Damaged | Unreadable) -> None:
    """Raise VersionDropped or VersionMoved if the damage is explained by records that are gone meanwhile."""
    seq = entry.version.head.seq
    try:
        dropped = all(seq not in holding.tier_run.log.seqs() for holding in entry.holdings)
        moved = not all(h.tier_run.log.holds(r) for h, r in zip(entry.holdings, entry.records, strict=True))
    except TierstateError:
        return
    if dropped:
        text = f"{name_version(entry.version)} was dropped, as `keep` says, while it was read; ask for the newest one"
        raise VersionDropped(text) from error
    if moved:
        raise VersionMoved(f"{name_version(entry.version)} was moved while it was read") from error


def _pass_over(passed: list[str], name: str, error: object) -> None:
    passed.append(f"{name}: {error}")
    log.warning("%s is passed over: %s", name, error)


def name_version(version: Version) -> str:
    """Number, step and run of a version, for messages."""
    return f"version {version.head.seq} (step {version.head.step}) of run {version.head.run!r}"


def none_found(run: str, wanted: RestoreSpec, catalog: RunCatalog, passed: list[str]) -> None:
    """Return if the run may have no version, and it has none; else raise the error of `no_such_version`."""
    if passed or not wanted.optional:
        raise no_such_version(run, wanted, catalog, passed)


def no_such_version(run: str, wanted: RestoreSpec, catalog: RunCatalog, passed: list[str]) -> TierstateError:
    """The error if no version could be restored: Damaged if versions were skipped (``passed``), else NotFound; but
    Unreadable where a tier that cannot be asked now may have it."""
    what = f"step {wanted.step}" if wanted.step is not None else f"id {wanted.version}" if wanted.version else ""
    what = f"tag {wanted.tag.name}" if wanted.tag else what
    if passed and (catalog.unread or catalog.unlisted):
        told = "; ".join((*passed, *catalog.unlisted))
        return Unreadable(f"run {run!r} has no version{' with ' + what if what else ''} that can be read now: {told}")
    if passed:
        told = "; ".join(passed)
        more = "" if LOOK_FURTHER in told else f"; {LOOK_FURTHER}"
        error = Unauthentic if catalog.refused else Damaged
        return error(f"run {run!r} has no whole version{' of ' + what if what else ''}: {told}{more}")
    where = ", ".join(s.name for s in catalog.tier_runs)
    if tag := wanted.tag:
        what = f"tag {tag.name!r}: it names version {tag.seq} ({tag.id[:12]}), which is not there any more,"
    lost = "".join(f"; {name} cannot be asked: {error}" for name, error in catalog.unreachable.items())
    return (Unreadable if catalog.unlisted else NotFound)(
        f"run {run!r} has no version{' with ' + what if what else ''} in {where}{_there(wanted, catalog)}{lost}"
    )


def _there(wanted: RestoreSpec, catalog: RunCatalog) -> str:
    """Text for a message about a version that is not there: what is."""
    steps = catalog.steps()
    if not steps:
        return catalog.stray_packs()
    if wanted.step is None:
        return ""
    at = bisect.bisect(steps, wanted.step)
    near = steps[max(0, min(at - STEPS_NAMED // 2, len(steps) - STEPS_NAMED)) :][:STEPS_NAMED]
    word = "the nearest of its" if len(steps) > len(near) else "its"
    return f"; {word} steps: {', '.join(map(str, near))}"
