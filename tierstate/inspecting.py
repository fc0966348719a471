"""Inspecting: a verification, and where it is to be deep, every leaf opened by its provider."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import Damaged, FormatError
from tierstate.manifest.leaf import Spec
from tierstate.manifest.version import Version
from tierstate.providers.base import Provider
from tierstate.providers.registry import REGISTRY
from tierstate.providers.retie import read_ties
from tierstate.providers.structure import grow
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog, Entry
from tierstate.tiers.fetch import Fetch
from tierstate.tiers.findings import Depth, Problem, Report
from tierstate.tiers.landing import Destination, Landing
from tierstate.tiers.verify import Verifier

from .filling import WORKERS, check_landing
from .progress import Progress

BATCH = 64 << 20
"""Bytes of leaves that are opened together, or one leaf where that is more; nothing of them is kept."""


def inspect(catalog: Catalog, arena: Arena, how: Depth, progress: Progress) -> Report:
    """Verify every version of a run in every tier.

    Args:
        how: how deep to look. Deep also means that containers are put together, and every leaf is read into a fresh
            value by its provider; pickles are not opened.
        progress: called with the raw bytes read since the last call.
    """
    verifier = Verifier(catalog, arena, how, workers=WORKERS, progress=progress)
    return verifier.run(_Opening(arena, verifier.report, progress) if how.deep else lambda _entry: None)


class _Opening:
    """Opens the leaves of versions; those that were opened for another version are not opened again."""

    def __init__(self, arena: Arena, report: Report, progress: Progress) -> None:
        self._arena, self._report, self._progress = arena, report, progress
        self._opened: set[bytes] = set()

    def __call__(self, entry: Entry) -> None:
        version = entry.version
        try:
            _, index = grow(version.leaves)
            read_ties(version.leaves, index)
        except FormatError as error:
            self._tell(entry, -1, error)
            return
        for batch in _batches(version, list(self._unopened(version))):
            self._open(entry, batch)

    def _unopened(self, version: Version) -> Iterator[int]:
        """Leaves to open, by index."""
        digests = version.digests.tobytes()
        first, end = (np.searchsorted(version.chunk_leaf, np.arange(len(version.leaves)), s) for s in ("left", "right"))
        shards = np.searchsorted(version.shard_leaf, np.arange(len(version.leaves) + 1)).tolist()
        for i, leaf in enumerate(version.leaves):
            if not leaf.spec.has_bytes:
                continue
            boxes = [version.boxes[s] for s in range(shards[i], shards[i + 1])]
            name = checksum(_described(leaf.spec, boxes) + digests[16 * int(first[i]) : 16 * int(end[i])])
            if name not in self._opened:
                self._opened.add(name)
                yield i

    def _open(self, entry: Entry, leaves: Sequence[int]) -> None:
        version = entry.version
        failed: dict[int, Exception] = {}
        providers = {i: p for i in leaves if (p := self._fresh(entry, i)) is not None}
        landing = self._land(version, providers, failed)
        torn: set[int] = set()  # of which the verification tells itself
        self._load(entry, landing, failed, torn)
        for i in providers.keys() - failed.keys() - torn:
            try:
                providers[i].done()
            except Exception as error:
                failed[i] = error
        for i in sorted(failed):
            self._tell(entry, i, failed[i])

    @staticmethod
    def _land(version: Version, providers: Mapping[int, Provider], failed: dict[int, Exception]) -> Landing:
        """Where the bytes go of those leaves whose shards are whole leaves together; the others have ``failed``."""
        to = {i: Destination(i, Box.whole(version.leaves[i].spec.shape), p) for i, p in providers.items()}
        landing = Landing(version, list(to.values()))
        try:
            check_landing(version, landing)
            return landing
        except FormatError:
            for i, one in to.items():
                try:
                    check_landing(version, Landing(version, [one]))
                except FormatError as error:
                    failed[i] = error
        return Landing(version, [one for i, one in to.items() if i not in failed])

    def _load(self, entry: Entry, landing: Landing, failed: dict[int, Exception], torn: set[int]) -> None:
        """Give the providers their bytes; what they say against it. Leaves with a lost chunk are ``torn``."""
        version = entry.version

        def load(row: int, raw: Buffer, _slab: object) -> None:
            try:
                event = landing.give(row, raw)
                if event is not None:
                    event.synchronize()
            except Exception as error:
                failed[int(version.chunk_leaf[row])] = error
            self._progress(raw.numel())

        def lose(row: int, _error: Damaged) -> None:
            torn.add(int(version.chunk_leaf[row]))

        fetch = Fetch(version, entry.holdings, self._arena, workers=WORKERS, lost=lose)
        fetch.run(landing.rows.tolist(), load)

    def _fresh(self, entry: Entry, index: int) -> Provider | None:
        """A provider for a new value; None where there is none, or it may not be opened."""
        spec = entry.version.leaves[index].spec
        try:
            found = REGISTRY.by_kind(spec.kind)
            if not found.unsafe:
                return found.fresh(spec)
        except Exception as error:
            self._tell(entry, index, error)
            return None
        self._report.unopened += 1
        return None

    def _tell(self, entry: Entry, index: int, error: Exception) -> None:
        head = entry.version.head
        name = entry.version.leaves[index].name if index >= 0 else ""
        what = str(error) if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
        self._report.problems.append(Problem("", head.seq, head.step, name, what))


def _described(spec: Spec, boxes: Sequence[Box]) -> bytes:
    return json.dumps([spec.kind, spec.dtype, spec.shape, spec.attrs, boxes], sort_keys=True, default=str).encode()


def _batches(version: Version, leaves: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    held = 0
    for i in leaves:
        nbytes = version.leaves[i].spec.nbytes
        if batch and held + nbytes > BATCH:
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += nbytes
    if batch:
        yield batch
