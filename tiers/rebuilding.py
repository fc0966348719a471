"""Rebuilding: records of a tier that are lost, made again of what its packs and the other tiers' records say."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tierstate.manifest.chunk import to_bytes
from tierstate.manifest.columns import Array
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, NotFound, TierstateError
from tierstate.manifest.layout import Draft, Layout
from tierstate.manifest.leases import Leases
from tierstate.manifest.log import commit_id
from tierstate.manifest.record import Record
from tierstate.manifest.retention import Mark
from tierstate.manifest.version import Version

from .contents import Contents
from .leasing import let_go
from .policy import Policy
from .routes import Routes
from .shelf import Shelf


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One version whose record a tier has lost.

    Attributes:
        seq, step, id: which; step and id are None and empty where no record or pack says what it was.
        chunks: how many of its chunks the tier is to have.
        found: how many of those lie in its packs.
        rebuilt: whether it has a record again, or would have if this were no dry run.
        why: why it has none.
    """

    seq: int
    step: int | None
    id: str
    chunks: int = 0
    found: int = 0
    rebuilt: bool = False
    why: str = ""


@dataclass
class Rebuilding:
    """What was rebuilt in a tier, and what was not.

    Attributes:
        tier: which.
        versions: those whose record it has lost, newest first.
        packs: how many packs were looked into.
        unread: packs that say nothing of what they hold, and why.
        unreachable: tiers that could not be asked for their records.
        unknown: numbers of versions that packs were written for and that nothing says more of: they were dropped, or
            all records of them are lost.
    """

    tier: str
    versions: list[Rebuilt] = field(default_factory=list)
    packs: int = 0
    unread: dict[str, str] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no record is lost any more."""
        return all(version.rebuilt for version in self.versions)


class _Lost(NamedTuple):
    """Records of one number that cannot be read: their generations, and why; none where the number is not there."""

    generations: Sequence[int]
    why: str = ""
    foreign: bool = False


def rebuild(
    shelves: Sequence[Shelf], name: str, policy: Policy, *, partial: bool = False, dry_run: bool = False
) -> Rebuilding:
    """Make the records of a tier again that are lost or damaged, as far as its packs have the chunks.

    What a version consists of is taken from the record that another tier has of it, or from the copy that a save puts
    into its last pack; where its chunks lie in this tier, from the footers of this tier's packs. What `keep` would
    drop at once is passed over.

    Args:
        shelves: the run in each tier.
        name: the tier whose records are made.
        policy: its rules say which leaves the tier is to have.
        partial: also versions of which the packs have only some of those leaves' chunks.
        dry_run: only say what would be done.

    Raises:
        NotFound: there is no such tier.
        TierError: the tier could not be read or written to.
    """
    shelf = next((s for s in shelves if s.name == name), None)
    if shelf is None:
        raise NotFound(f"the policy has no tier {name!r}; it has {', '.join(s.name for s in shelves)}", tier=name)
    others = [s for s in shelves if s is not shelf]
    rebuilder = _Rebuilder(shelf, others, policy, partial=partial, dry_run=dry_run)
    if dry_run:
        return rebuilder.run()
    # A lease on a version that is not there: whoever deletes packs waits until it is known what they are of.
    leases = Leases(shelf.tier, shelf.run)
    key = leases.take(0, "rebuild")
    try:
        return rebuilder.run()
    finally:
        let_go(leases, key)
        shelf.look_again()


class _Rebuilder:
    def __init__(self, shelf: Shelf, others: Sequence[Shelf], policy: Policy, *, partial: bool, dry_run: bool) -> None:
        self._shelf, self._others, self._partial, self._dry_run = shelf, others, partial, dry_run
        self._routes = Routes(policy)
        self._report = Rebuilding(shelf.name)

    def run(self) -> Rebuilding:
        """Look for what is lost, and make what can be made."""
        readable, damaged = self._own()
        contents = Contents(self._shelf.tier, self._shelf.run)
        self._report.packs, self._report.unread = contents.packs, contents.unread
        versions = self._versions(contents, readable)
        heads = [these[0].head for these in versions.values()]
        kept = self._shelf.worth_bringing([Mark(head.seq, head.step, head.time, head.metadata) for head in heads])
        for seq in sorted(kept | damaged.keys(), reverse=True):
            # Of others nothing says that they ever were in this tier: it may only have chunks that are the same.
            was_here = seq in damaged or seq in contents.seqs
            told = self._one(seq, damaged.get(seq, _Lost(())), versions.get(seq, []), contents, was_here)
            if told.rebuilt or was_here:
                self._report.versions.append(told)
        self._report.unknown = sorted(contents.seqs - readable - versions.keys() - damaged.keys())
        return self._report

    def _own(self) -> tuple[set[int], dict[int, _Lost]]:
        """Numbers whose record can be read, and those where there is one that cannot."""
        readable: set[int] = set()
        damaged: dict[int, _Lost] = {}
        for seq, generations in self._shelf.log.generations().items():
            try:
                self._shelf.log.read(seq)
                readable.add(seq)
            except FormatError as error:
                foreign = any(_is_whole(self._shelf, seq, generation) for generation in generations)
                damaged[seq] = _Lost(generations, str(error), foreign)
            except NotFound:
                continue  # dropped meanwhile
        return readable, damaged

    def _versions(self, contents: Contents, readable: set[int]) -> dict[int, list[Version]]:
        """What the numbers without a readable record may have been: by the other tiers, then by the packs."""
        found: dict[int, dict[str, Version]] = {}
        for shelf in self._others:
            try:
                for seq in shelf.log.seqs():
                    if seq not in readable and (record := shelf.log.look(seq).record) is not None:
                        found.setdefault(seq, {}).setdefault(record.version.id, record.version)
            except TierstateError as error:
                self._report.unreachable[shelf.name] = str(error)
        for version in contents.versions(self._shelf.run):
            if version.head.seq not in readable:
                found.setdefault(version.head.seq, {}).setdefault(version.id, version)
        return {seq: sorted(these.values(), key=lambda v: v.head.time, reverse=True) for seq, these in found.items()}

    def _one(self, seq: int, lost: _Lost, versions: Sequence[Version], contents: Contents, was_here: bool) -> Rebuilt:
        """Make one record, of the version of that number of which most is there."""
        if lost.foreign:
            return Rebuilt(seq, None, "", why=f"its record is whole, but not for this program: {lost.why}")
        if not versions:
            return Rebuilt(seq, None, "", why="no other tier has a record of it, and no pack says what it consists of")
        drawn = [(self._draw(version, contents), version) for version in versions]
        (draft, chunks, found), version = max(drawn, key=lambda each: each[0][2])
        told = Rebuilt(seq, version.head.step, version.id, chunks, found)
        if found < chunks and not (self._partial and was_here and found):
            return _because(told, f"the packs have {found} of {chunks} chunks")
        if not self._dry_run:
            self._commit(version, draft.build(contents.sizes), lost)
        return Rebuilt(seq, version.head.step, version.id, chunks, found, True)

    def _draw(self, version: Version, contents: Contents) -> tuple[Draft, int, int]:
        """Where a version's chunks lie; how many are to lie here, and how many of those do."""
        routed: Array = self._routes.of(version.leaves)[self._shelf.name].leaves[version.chunk_leaf]
        draft, placed = Draft(len(version.digests)), np.zeros(len(version.digests), bool)
        digests, nbytes = version.digests.tobytes(), version.chunk_nbytes.tolist()
        for row in range(len(version.digests)):
            place = contents.place(digests[16 * row : 16 * row + 16], nbytes[row])
            if place is not None:
                draft.put(row, place)
                placed[row] = True
        return draft, int(routed.sum()), int((routed & placed).sum())

    def _commit(self, version: Version, layout: Layout, lost: _Lost) -> None:
        """Keys are create-only: what is damaged gets another generation, and goes when that is there."""
        commit = {"id": commit_id(), "tier": self._shelf.name, "host": socket.gethostname(), "pid": os.getpid()}
        seq = version.head.seq
        generation = max(lost.generations, default=-1) + 1
        self._shelf.summaries.renew(seq)
        self._shelf.log.commit(Record(version, layout, {**commit, "rebuilt": True}), generation)
        self._shelf.log.forget(seq, lost.generations)


def _because(told: Rebuilt, why: str) -> Rebuilt:
    return Rebuilt(told.seq, told.step, told.id, told.chunks, told.found, why=why)


def _is_whole(shelf: Shelf, seq: int, generation: int) -> bool:
    """Whether a record that cannot be read is as it was written: then it is a newer program's, and not lost."""
    try:
        data = to_bytes(shelf.tier.get(shelf.log.key(seq, generation)))
    except NotFound:
        return False
    return len(data) > 16 and checksum(data[:-16]) == data[-16:]
