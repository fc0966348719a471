"""All that one tier has of a run, as `doctor` sees it: records, what is legible of damaged ones, footers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tierstate.engine.packs.pack import PackScan
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import to_bytes
from tierstate.manifest.errors import FormatError, MediaError, NotFound, TierstateError, Unauthentic
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import Record, surviving_parts
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.removals import was_removed
from tierstate.tiers.concurrency import results_ahead

from .rebuild import LastingPacks, is_intact


class TierView:
    """All that one tier has of a run: records of every generation, what is legible of damaged ones, and footers."""

    def __init__(self, tier_run: TierRun, related: Sequence[str]) -> None:
        self.tier_run, self.name = tier_run, tier_run.name
        self.lasts = tier_run.tier.traits.persistent
        self.records: dict[int, dict[int, Record]] = {}
        self.damaged: dict[int, dict[int, str]] = {}
        self.away: dict[int, str] = {}
        self.foreign: dict[int, str] = {}
        self._sectors: set[tuple[int, int]] = set()
        self.legible: list[Version] = []
        self.layouts: list[tuple[Version, Layout]] = []
        self._removals = tier_run.removals()
        self._read((seq, g) for seq, generations in tier_run.log.generations().items() for g in generations)
        self.scan = PackScan(tier_run.tier, tier_run.run, related, go_on=True)
        for run in self.scan.runs[:-1]:
            found = (entry.record for entry in Log(tier_run.tier, run).newest_first())
            self.layouts += [(record.version, record.layout) for record in found if record is not None]
        self.copies = list(self.scan.versions(tier_run.run))
        self.lasting = LastingPacks(tier_run.tier, tier_run.run)

    def _read(self, keys: Iterable[tuple[int, int]]) -> None:
        for seq, generation, found in results_ahead(lambda key: (*key, self._outcome(*key)), keys):
            match found:
                case NotFound():
                    continue  # dropped or replaced meanwhile
                case MediaError():
                    self.damaged.setdefault(seq, {})[generation] = str(found)
                    self._sectors.add((seq, generation))
                case FormatError():
                    self._salvage(seq, generation, found)
                case TierstateError():
                    self.away[seq] = str(found)
                case _:
                    self.records.setdefault(seq, {})[generation] = found
                    self.layouts.append((found.version, found.layout))

    def _outcome(self, seq: int, generation: int) -> Record | TierstateError:
        try:
            return self.tier_run.log.read_generation(seq, generation)
        except TierstateError as error:
            return error

    def look_again(self, seqs: Collection[int]) -> bool:
        """Forget records that are gone, and read those that have come: beside a running job, what it has dropped or
        moved since is not damaged, and what it was just saving is not lost. Returns whether there were any.

        Args:
            seqs: numbers of the versions that are known; others, which were saved since, are not looked at.
        """
        try:
            listed = self.tier_run.log.generations()
            there = {(seq, generation) for seq, these in listed.items() for generation in these}
            known = {(seq, g) for found in (self.records, self.damaged) for seq, these in found.items() for g in these}
            gone = known - there
            new = [one for one in there - known if one[0] in seqs and not {one[0]} & {*self.away, *self.foreign}]
            if gone:
                self._removals = self.tier_run.removals()
        except TierstateError:
            return False  # what was read before is what is known
        for seq, generation in gone:
            for found in (self.records, self.damaged):
                found.get(seq, {}).pop(generation, None)
        self.records = {seq: these for seq, these in self.records.items() if these}
        self.damaged = {seq: these for seq, these in self.damaged.items() if these}
        self._read(sorted(new))
        return bool(gone or new)

    @property
    def removed(self) -> set[int]:
        """Numbers of versions that were removed by hand."""
        return {removal.entry.seq for removal in self._removals}

    def _salvage(self, seq: int, generation: int, error: FormatError) -> None:
        """Take what is legible of a damaged record, but leave the record of a newer program alone."""
        try:
            data = to_bytes(self.tier_run.tier.get(self.tier_run.log.key(seq, generation)))
        except TierstateError:
            data = b""
        # Sealed with a key that the policy does not have, it may be whole as well.
        if is_intact(data) or (isinstance(error, Unauthentic) and error.key_id):
            self.foreign[seq] = str(error)
            return
        self.damaged.setdefault(seq, {})[generation] = str(error)
        version, layout = surviving_parts(memoryview(data))
        if version is not None and (version.head.run, version.head.seq) == (self.tier_run.run, seq):
            self.legible.append(version)
            if layout is not None:
                self.layouts.append((version, layout))

    def current(self, seq: int) -> Record | None:
        """The record that a restore reads (`Log.read`): it passes over damaged ones, but not over bad sectors."""
        found = self.records.get(seq, {})
        for generation in sorted(self.generations(seq), key=lambda g: (g > 0, -g)):
            if generation in found:
                return found[generation]
            if (seq, generation) in self._sectors:
                return None
        return None

    @property
    def pack_runs(self) -> list[str]:
        """Runs in whose packs a restore looks for repaired copies (`TierRun.pack_runs`)."""
        found = (self.current(seq) for seq in sorted(self.records, reverse=True))
        return self.tier_run.pack_runs(next((record for record in found if record is not None), None))

    def has(self, version: Version) -> bool:
        """Whether a restore finds a record of this version."""
        record = self.current(version.head.seq)
        return record is not None and record.version.id == version.id

    def unread(self, seq: int) -> dict[str, str]:
        """The tier with the state of a record that a restore does not get; empty if there is none."""
        if seq in self.away or seq in self.foreign:
            return {self.name: "cannot be read"}
        return {self.name: "record damaged"} if seq in self.damaged else {}

    def generations(self, seq: int) -> tuple[int, ...]:
        """All generations of a number, legible or not."""
        return tuple(sorted({*self.records.get(seq, ()), *self.damaged.get(seq, ())}))

    def was_removed(self, version: Version) -> bool:
        """Whether somebody has removed this version by hand, and not an earlier one of its number."""
        head = version.head
        return was_removed(self._removals, head.seq, head.step, head.time)

    def taken(self, seq: int) -> bool:
        """Whether the number has any record, so that no other may be written beside it."""
        return seq in self.foreign or seq in self.away or bool(self.generations(seq))
