"""Copies: a version of a run in another tier of its policy, or in the tiers of another policy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tierstate.manifest.chunk import Buffer, Chunk, spans
from tierstate.manifest.columns import Array
from tierstate.manifest.errors import AlreadyExists, NotFound, StateMismatch, TierFull
from tierstate.manifest.head import Head
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Entry
from tierstate.tiers.copying import copy_version
from tierstate.tiers.fetch import Fetch
from tierstate.tiers.plan import Plan, Source
from tierstate.tiers.policy import Policy
from tierstate.tiers.shelf import Shelf

from .checkpointer import Checkpointer
from .filling import WORKERS
from .finding import Wanted, find
from .info import VersionInfo
from .progress import Progress, nobody
from .run import Run

AHEAD = 64 << 20
"""Bytes that are read together, and held until the save has taken them; or one chunk where that is more."""


@dataclass(frozen=True)
class Copied:
    """What a copy came to.

    Attributes:
        version: the version as it is now, where it was copied to.
        tiers: where it was copied to; none where it was there already.
    """

    version: VersionInfo
    tiers: tuple[str, ...]


def copy(
    run: Run,
    *,
    step: int | None = None,
    version: str | None = None,
    to: str | None = None,
    into: Policy | str | os.PathLike[str] | None = None,
    into_run: str | None = None,
    progress: Progress = nobody,
) -> Copied:
    """Copy a version, every chunk verified.

    Args:
        step, version: which; by default the newest.
        to: a tier of the run's own policy. The version is the same there, and the rules say which of its leaves go;
            `keep` of that tier counts for it from the next save on.
        into: another policy. There it becomes a new version of a run, in every tier to which its rules send a leaf,
            whatever `every` says: with the same leaves, step and metadata, and, where chunks are as long and the digest
            is the same, with the same digests.
        into_run: the name of the run there; by default the same.
        progress: called with the raw bytes read since the last call.

    Raises:
        NotFound: there is no such version or tier, or no rule sends a leaf there.
        AlreadyExists: ``to`` has another version of that number.
        Damaged: a chunk is whole in no tier.
    """
    if (to is None) == (into is None):
        raise ValueError("a copy goes either to a tier (to=) or into another policy (into=); name one of them")
    if into_run is not None and into is None:
        raise ValueError("a run's name (into_run=) goes with into=; a copy to a tier stays in its run")
    entry = find(run._catalog(), run.run, Wanted(step, version))
    if into is not None:
        return _copy_into(entry, run._arena, into, into_run or run.run, progress)
    return _copy_to(run, entry, str(to), progress)


def _copy_to(run: Run, entry: Entry, name: str, progress: Progress) -> Copied:
    shelf = next((s for s in run._shelves if s.name == name), None)
    if shelf is None:
        names = ", ".join(s.name for s in run._shelves)
        raise NotFound(f"the policy has no tier {name!r}; it has {names}", tier=name)
    head = entry.version.head
    done: tuple[str, ...] = ()
    if name not in entry.tiers:
        if head.seq in shelf.log.seqs():
            raise AlreadyExists(
                f"{name} has a record of number {head.seq} that is another version, or damaged", tier=name
            )
        copy_version(entry, Shelf(shelf.tier, run.run), run.policy, run._arena, progress)
        shelf.look_again()
        done = (name,)
    return Copied(VersionInfo.of(find(run._catalog(), run.run, Wanted(None, entry.version.id))), done)


def _copy_into(entry: Entry, arena: Arena, into: Any, name: str, progress: Progress) -> Copied:
    policy = into if isinstance(into, Policy) else Policy.load(into)
    # It is to be there as a whole, whether that tier would have been due for a save of this step or not.
    tiers = tuple(tier.model_copy(update={"every": None}) for tier in policy.tiers)
    with Checkpointer(policy.model_copy(update={"tiers": tiers}), name) as there:
        known = _known(there, entry)
        if known is not None:
            return Copied(VersionInfo.of(known), ())
        head = entry.version.head
        save = there._submit(_plan(entry, arena, progress), head.step, head.metadata)
        save.wait_captured()
        if save.skipped:
            raise TierFull("nothing was copied: the arena was full, and the policy says on_full: skip")
        if not save.tiers:
            raise NotFound(f"no rule of that policy sends a leaf of step {head.step} to any of its tiers")
        for tier in save.tiers:
            save.wait(tier)
        places = there._catalog().newest_first()
        made = next(e for place in places if place.seq == save.seq for e in place.entries)
        return Copied(VersionInfo.of(made), save.tiers)


def _known(there: Run, entry: Entry) -> Entry | None:
    """A version that is the same but for its place in the run, if its digests can tell."""
    version = entry.version
    for place in there._catalog().newest_first():
        for found in place.entries:
            other = found.version
            same_cut = _cut(other.head) == _cut(version.head) and other.boxes == version.boxes
            if same_cut and other.leaves == version.leaves and np.array_equal(other.digests, version.digests):
                return found
    return None


def _cut(head: Head) -> tuple[int, int, str]:
    return head.step, head.chunk, head.digest


def _plan(entry: Entry, arena: Arena, progress: Progress) -> Plan:
    """The version as what a save captures."""
    version = entry.version
    absent = entry.absent(np.arange(len(version.digests)))
    if len(absent):
        name = version.leaves[int(version.chunk_leaf[absent[0]])].name
        why = f"; {entry.thinned}" if entry.thinned else ""
        raise StateMismatch(
            f"leaf {name} of step {version.head.step} is in none of the tiers{why}: copy another version"
        )
    ahead = _Ahead(entry, arena, progress)
    ends = version.chunk_end.tolist()
    shards = zip(version.shard_leaf.tolist(), version.boxes, version.shard_nbytes.tolist(), [0, *ends], strict=False)
    sources = [Source(leaf, box, n, partial(ahead.chunks, first, n)) for leaf, box, n, first in shards]
    plan = Plan.of(version.leaves, sources)
    ahead.order(plan, [0, *ends])
    return plan


class _Ahead:
    """Reads a version's chunks, several at once, ahead of a save that takes one after the other.

    Args:
        entry: the version.
        arena: where its bytes pass through; not the save's own.
    """

    def __init__(self, entry: Entry, arena: Arena, progress: Progress) -> None:
        self._version, self._progress = entry.version, progress
        self._fetch = Fetch(entry.version, entry.holdings, arena, workers=WORKERS)
        self._rows: Array = np.zeros(0, "i8")
        self._place: Array = np.zeros(0, "i8")
        self._held: dict[int, Buffer] = {}

    def order(self, plan: Plan, ends: Sequence[int]) -> None:
        """Say in which order the save will ask."""
        sources = plan.in_order(np.arange(len(plan.leaf))).tolist()
        runs = [np.arange(ends[s], ends[s + 1]) for s in sources]
        self._rows = np.concatenate([*runs, np.zeros(0, "i8")]).astype("i8")
        self._place = np.argsort(self._rows)

    def chunks(self, first: int, nbytes: int, size: int) -> Iterator[Chunk]:
        """The chunks of a shard whose first row is that, as long as the save wants them."""
        for start, length in spans(nbytes, size):
            yield Chunk(start, length, partial(self._fill, first, start))

    def _fill(self, first: int, start: int, out: Buffer) -> None:
        chunk, at = self._version.head.chunk, 0
        while at < out.numel():
            row, offset = divmod(start + at, chunk)
            piece = self._chunk(first + row)[offset : offset + out.numel() - at]
            out[at : at + piece.numel()].copy_(piece)
            at += piece.numel()

    def _chunk(self, row: int) -> Buffer:
        if row not in self._held:
            place = int(self._place[row])
            nbytes = np.cumsum(self._version.chunk_nbytes[self._rows[place : place + 4096]])
            count = max(1, int(np.searchsorted(nbytes, AHEAD, "right")))
            self._held = {}
            self._fetch.run(self._rows[place : place + count].tolist(), self._hold)
        return self._held[row]

    def _hold(self, row: int, raw: Buffer, _slab: object) -> None:
        self._held[row] = raw.clone()
        self._progress(raw.numel())
