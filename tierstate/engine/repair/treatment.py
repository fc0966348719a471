"""What `doctor --apply` does: the repairs of a diagnosis, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.progress import Progress
from tierstate.engine.store.catalog import RunCatalog
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.copy import copy_version
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.errors import AlreadyExists, NotFound, TierstateError
from tierstate.manifest.format.layout import RAW, LayoutBuilder
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .chunk_search import ChunkId, ChunkSearch, chunk_ids
from .health import DoctorReport, Kind, RepairStep
from .rebuild import rebuilt_commit


class Treatment:
    """Carries out repairs."""

    def __init__(
        self, tier_runs: Sequence[TierRun], policy: Policy, arena: Arena, search: ChunkSearch, progress: Progress
    ) -> None:
        self._tier_runs = {tier_run.name: tier_run for tier_run in tier_runs}
        self._policy, self._arena, self._search, self._progress = policy, arena, search, progress

    def run(self, steps: Sequence[RepairStep], report: DoctorReport) -> None:
        """Carry out each step; one that fails does not stop the others."""
        tasks: dict[Kind, Callable[[RepairStep], None]] = {
            "rebuild": self._write, "mend": self._write, "clean": self._clean, "copy": self._copy, "tag": self._tag,
        }  # fmt: skip
        for step in steps:
            try:
                tasks[step.repair.kind](step)
                report.repairs.append(dataclasses.replace(step.repair, done=True))
            except TierstateError as error:
                report.repairs.append(dataclasses.replace(step.repair, error=str(error)))
            if step.repair.tier:
                self._tier_runs[step.repair.tier].look_again()

    def _write(self, step: RepairStep) -> None:
        """Write the chunks that the tier lacks, then the record."""
        version, tier_run = step.version, self._tier_runs[step.repair.tier]
        assert version is not None
        ids, draft = chunk_ids(version), LayoutBuilder(len(version.digests))
        sizes = dict(self._search.sizes(tier_run.name))
        if step.base is not None:
            layout = step.base.layout
            rows = np.flatnonzero(layout.present)
            draft.put_like(rows, layout, rows)
            sizes |= layout.pack_sizes
        new = self._fill(tier_run, version, [ids[row] for row in step.rows])
        for row in step.rows:
            place = self._search.place(tier_run.name, ids[row])
            if place is None:
                raise NotFound(f"{tier_run.name}: a chunk of version {version.head.seq} has gone meanwhile")
            draft.put(row, place)
        about = rebuilt_commit(tier_run) if step.base is None else step.base.commit
        tier_run.replace(Record(version, draft.build({**sizes, **new}), about), step.replaced)

    def _fill(self, tier_run: TierRun, version: Version, wanted: Sequence[ChunkId]) -> Mapping[str, int]:
        """Write those of the chunks that have no place in the tier into new packs; lengths of these by key."""
        lacking = [one for one in dict.fromkeys(wanted) if self._search.place(tier_run.name, one) is None]
        if not lacking:
            return {}
        writer = PackWriter(tier_run.tier, tier_run.run, version.head.seq)
        try:
            places = {}
            for one in lacking:
                raw = self._search.read(one)
                places[one] = writer.add(raw, one.digest, one.nbytes, RAW)
                self._progress(one.nbytes)
            sizes = writer.close(version.data)
        except BaseException:
            writer.abort()
            raise
        for one, place in places.items():
            self._search.add_good(tier_run.name, one, place, sizes[place.object])
        return sizes

    def _clean(self, step: RepairStep) -> None:
        """Delete records that a sound one replaces, once that was read again."""
        tier_run, seq = self._tier_runs[step.repair.tier], step.repair.seq
        left = [g for g in tier_run.log.generations().get(seq, []) if g not in step.replaced]
        if not left:
            raise NotFound(f"{tier_run.name}: version {seq} has no other record any more")
        tier_run.log.read_generation(seq, left[-1])
        tier_run.summaries.renew(seq)
        tier_run.log.forget(seq, step.replaced)

    def _copy(self, step: RepairStep) -> None:
        assert step.version is not None
        tier_run, seq = self._tier_runs[step.repair.tier], step.repair.seq
        found = RunCatalog.look(seq, [t for t in self._tier_runs.values() if t is not tier_run])
        entry = next((e for e in found.entries if e.version.id == step.version.id), None)
        if entry is None:
            raise NotFound(f"version {seq} is in no other tier any more")
        try:
            copy_version(entry, tier_run.apart(), self._policy, self._arena, self._progress)
        except AlreadyExists:
            if tier_run.log.read(seq).version.id != step.version.id:
                raise

    def _tag(self, _step: RepairStep) -> None:
        Tags([tier_run for tier_run in self._tier_runs.values() if tier_run.tier.traits.persistent]).level()
