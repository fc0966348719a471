"""Finding the version to restore, and restoring it from whatever tiers have it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tierstate.manifest.columns import Array
from tierstate.manifest.errors import Damaged, NotFound, TierstateError
from tierstate.manifest.leaf import Path
from tierstate.providers.target import NEW, Target, plan_restore
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog, Entry, Place
from tierstate.tiers.leasing import Moved

from .filling import WORKERS, fill, land
from .tagging import Tagged

log = logging.getLogger("tierstate")

OnDamage = Literal["raise", "older"]


class Wanted(NamedTuple):
    """Which version, and which part of it, goes where.

    Attributes:
        step, version: a step, or the beginning of an id; neither: the newest whole version.
        into: the state to restore in place, or NEW for a fresh one.
        only: globs of leaf paths; None: everything.
        device: where fresh tensors go.
        on_damage: ``raise``, or ``older`` to go back to the newest version that is whole.
        allow_pickle: leaves whose pickles may be loaded.
        allow_lossy: whether leaves may be restored that were saved with fewer bits.
        tag: the version that has this name, instead of a step or an id.
    """

    step: int | None = None
    version: str | None = None
    into: Any = NEW
    only: Sequence[str] | None = None
    device: torch.device | None = None
    on_damage: OnDamage = "raise"
    allow_pickle: Callable[[Path], bool] = lambda _path: False
    allow_lossy: bool = False
    tag: Tagged | None = None

    @property
    def newest(self) -> bool:
        """Whether no version is named."""
        return self.step is None and self.version is None and self.tag is None


class Restored(NamedTuple):
    """A state, and the version it came from."""

    state: Any
    entry: Entry


RUNS_AFTER = 5
"""How often the newest version is looked for again, because a saver dropped it while it was read."""


class Dropped(NotFound):
    """A version was dropped while it was read."""


def restore(catalog: Catalog, arena: Arena, run: str, wanted: Wanted) -> Restored:
    """Restore the newest version that fits and is whole; the newest again, if it is dropped while it is read.

    Raises: as `_restore`.
    """
    for _ in range(RUNS_AFTER):
        try:
            return _restore(catalog, arena, run, wanted)
        except Moved as error:
            log.info("%s", error)
        except Dropped as error:
            if not wanted.newest:
                raise
            log.info("%s", error)
    return _restore(catalog, arena, run, wanted)


def _restore(catalog: Catalog, arena: Arena, run: str, wanted: Wanted) -> Restored:
    """Restore the newest version that fits and is whole.

    Raises:
        NotFound: there is no such version.
        StateMismatch: its leaves do not fit the given state.
        FormatError: its shards are not whole leaves together.
        Damaged: a part of it is whole in no tier.

    If the given state was touched before an error came, a note on the error says so.
    """
    passed: list[str] = []
    touched = False
    # Beside the reading of records and the comparison: the first touch of memory costs more than what is done with it.
    arena.prepare(WORKERS * arena.slab_size)
    try:
        for entry in _candidates(catalog, wanted, passed):
            target = _plan(entry, wanted)
            landing = land(entry.version, target)
            try:
                if not _is_whole(entry, landing.rows, wanted, passed):
                    continue
                touched = wanted.into is not NEW
                return Restored(fill(entry, target, landing, arena), entry)
            except Damaged as error:
                if wanted.on_damage == "raise":
                    check_still_there(entry, error)
                    raise
                _pass_over(passed, name_of(entry), error)
        raise no_version(run, wanted, catalog, passed)
    except BaseException as error:
        if touched:
            error.add_note("the given state may be overwritten in part: do not train on from it")
        raise


def _plan(entry: Entry, wanted: Wanted) -> Target:
    return plan_restore(
        entry.version.leaves,
        into=wanted.into,
        only=wanted.only,
        device=wanted.device,
        allow_pickle=wanted.allow_pickle,
        allow_lossy=wanted.allow_lossy,
    )


def find(catalog: Catalog, run: str, wanted: Wanted) -> Entry:
    """The entry that a restore would try first.

    Raises:
        NotFound: there is no such version.
    """
    passed: list[str] = []
    for entry in _candidates(catalog, wanted, passed):
        return entry
    raise no_version(run, wanted, catalog, passed)


def _candidates(catalog: Catalog, wanted: Wanted, passed: list[str]) -> Iterator[Entry]:
    """Versions to try, newest first; once the wanted one is found, older ones only where damage leads back to them."""
    reached = wanted.newest
    for place in catalog.newest_first(wanted.tag.seq if wanted.tag else None):
        if not place.entries:
            _unreadable(place, wanted, reached, passed)
        for entry in place.entries:
            if reached or _fits(entry, wanted):
                yield entry
                reached = reached or wanted.on_damage == "older"
        if wanted.tag and not reached:
            return  # its number is known, so that none of the older ones need be read


def _fits(entry: Entry, wanted: Wanted) -> bool:
    if wanted.tag is not None:
        return entry.version.id == wanted.tag.id and entry.version.head.seq == wanted.tag.seq
    if wanted.version is not None:
        if not wanted.version:
            raise ValueError("version='' names none; give the beginning of an id")
        return entry.version.id.startswith(wanted.version)
    return entry.version.head.step == wanted.step


def _unreadable(place: Place, wanted: Wanted, reached: bool, passed: list[str]) -> None:
    """What cannot be read might be the version that is wanted: not to be passed over in silence."""
    if not place.problems:
        if reached:
            raise Dropped(
                f"version {place.seq} was dropped, as `keep` says, before it was read; ask for the newest one"
            )
        return
    told = "; ".join(f"{name}: {error}" for name, error in place.problems) or "dropped while it was looked for"
    if reached and wanted.on_damage == "raise" and not all(e.transient for _, e in place.problems):
        raise Damaged(
            f"version {place.seq} is the newest, and its record cannot be read ({told}); "
            "name a step, or say on_damage='older' to go back to the newest version that is whole"
        )
    _pass_over(passed, f"version {place.seq}", told)


def _is_whole(entry: Entry, rows: Array, wanted: Wanted, passed: list[str]) -> bool:
    """Whether the tiers that can be reached have, together, all that is wanted of a version."""
    absent = entry.absent(rows)
    if not len(absent):
        return True
    version = entry.version
    leaves = np.unique(version.chunk_leaf[absent])
    first = version.leaves[int(leaves[0])].name
    error = Damaged(
        f"{name_of(entry)} is not whole in {', '.join(entry.tiers)}: "
        f"{len(leaves)} leaves are in none of them, {first} the first{_dropped(entry)}"
    )
    if not wanted.newest:
        raise error
    _pass_over(passed, name_of(entry), error)
    return False


def _dropped(entry: Entry) -> str:
    """What retention has dropped of a version, where it has."""
    gone = entry.thinned
    return f"; {gone}: ask for others by `only`, or for another version" if gone else ""


def check_still_there(entry: Entry, error: Damaged) -> None:
    """Raises Dropped or Moved where a damage is no wonder, as records by which a version was read are gone."""
    seq = entry.version.head.seq
    try:
        dropped = all(seq not in holding.shelf.log.seqs() for holding in entry.holdings)
        moved = not all(h.shelf.log.holds(r) for h, r in zip(entry.holdings, entry.records, strict=True))
    except TierstateError:
        return
    if dropped:
        text = f"{name_of(entry)} was dropped, as `keep` says, while it was read; ask for the newest one"
        raise Dropped(text) from error
    if moved:
        raise Moved(f"{name_of(entry)} was moved while it was read") from error


def _pass_over(passed: list[str], name: str, error: object) -> None:
    passed.append(f"{name}: {error}")
    log.warning("%s is passed over: %s", name, error)


def name_of(entry: Entry) -> str:
    return f"version {entry.version.head.seq} (step {entry.version.head.step}) of run {entry.version.head.run!r}"


def no_version(run: str, wanted: Wanted, catalog: Catalog, passed: list[str]) -> TierstateError:
    what = f"step {wanted.step}" if wanted.step is not None else f"id {wanted.version}" if wanted.version else ""
    what = f"tag {wanted.tag.name}" if wanted.tag else what
    if passed:
        return Damaged(f"run {run!r} has no whole version{' of ' + what if what else ''}: " + "; ".join(passed))
    where = ", ".join(s.name for s in catalog.shelves)
    if tag := wanted.tag:
        what = f"tag {tag.name!r}: it names version {tag.seq} ({tag.id[:12]}), which is not there any more,"
    lost = "".join(f"; {name} cannot be asked: {error}" for name, error in catalog.unreachable.items())
    return NotFound(f"run {run!r} has no version{' with ' + what if what else ''} in {where}{lost}")
