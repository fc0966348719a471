"""Thresholds scaled down, so that states of a few kilobytes cross them, and counts of how often they were crossed.

Large data takes other code paths than small data: direct I/O, reads straight into tensors, several packs. The
states of a test are small and would never take them. Each call of such a path is counted, so that a test
can fail when its states stop to take it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpointer_worlds import has_uring

from tierstate.engine.capture import capture, snapshot
from tierstate.engine.codecs import adaptive, codecs
from tierstate.engine.maintain import prune
from tierstate.engine.packs import formats, hdf5, pack, slab_layout
from tierstate.engine.publish import encode, leaf_files
from tierstate.engine.restore import fetch, read_plan, scatter
from tierstate.engine.store import catalog, index
from tierstate.manifest import digest
from tierstate.tiers.memory import memcpy
from tierstate.tiers.object import filesystem
from tierstate.tiers.posix import direct, io_engine
from tierstate.tiers.posix import direct as direct_module
from tierstate.tiers.posix.files import open_file
from tierstate.tiers.wrappers import deadline, measure, retry

LOADED = (hdf5, formats)
"""Modules that the library loads late: they are to get the scaled constants, and to lose them again."""

SCALES: list[tuple[Any, str, int]] = [
    (slab_layout, "BIG", 4096),
    (pack, "MAX_PACK", 16 << 10),
    (leaf_files, "MAX_FILE", 8 << 10),
    (leaf_files, "MAX_LEAVES", 3),
    (direct, "DIRECT_MIN", 4096),
    (direct_module, "BOUNCE_SIZE", 4096),
    (direct_module, "PREALLOCATE", 8 << 10),
    (io_engine, "MAX_TRANSFER", 4096),
    (fetch, "IN_PLACE_FROM", 1024),
    (fetch, "REQUEST", 4096),
    (memcpy, "SHORT_COPY", 1024),
    (read_plan, "GAP", 512),
    (capture, "WORTH_A_THREAD", 2048),
    (digest, "SAMPLE_BYTES", 64),
    (codecs, "SAMPLE", 1024),
    (encode, "LEAST", 1024),
    (encode, "SAMPLE", 1024),
    (adaptive, "WORTH_ENCODING", 1024),
    (filesystem, "READ_PART", 4096),
    (retry, "COMPARE_PIECE", 1024),
    (deadline, "PAGED_MIN", 4096),
    (catalog, "LEASE_FROM", 4096),
    (measure, "TRUSTED_AFTER", 4096),
    (measure, "TIMED_CLOSE_MIN", 4096),
    (index, "MIN_UNINDEXED", 4),
    (index, "COMMITS_BETWEEN_CHECKS", 2),
    (index, "READ_WITHOUT_INDEX", 1),
]
"""Where a constant is defined, its name, and what it is to be. Whole pages stay what they are: the kernel asks for
them."""

WIN = 1024

DIRECT = {
    "a long range was read past the page cache",
    "the end of a long range was read by way of a block",
    "a transfer took several calls",
    "memory was written from where it lies",
    "short pieces were gathered",
    "blocks were reserved again",
    "threads moved bytes",
}
URING = {"io_uring moved bytes"}
ORDINARY = {
    "chunks were read in place",
    "there were several requests for what is read in place of one object",
    "a chunk that was read in place was damaged",
    "a run was longer than a slab",
    "long memory was copied beside other threads",
    "a save had several packs",
    "a state was copied by several threads",
    "unchanged chunks were not copied",
    "a chunk changed where its sample did not",
    "leaves were divided over several files",
    "a file's leaves stayed in an older one",
    "chunks were captured within a device",
    "a codec was tried",
    "an object was read in parts",
    "a restore held its version",
    "an index was written",
    "a pack was emptied",
}

MOSTLY = {
    "a long range was read past the page cache",
    "memory was written from where it lies",
    "short pieces were gathered",
    "chunks were read in place",
    "a save had several packs",
    "a state was copied by several threads",
    "unchanged chunks were not copied",
    "a restore held its version",
}
"""What each history with a disk that takes bytes raw crosses."""

RANKS = {
    "chunks were read in place",
    "a save had several packs",
    "unchanged chunks were not copied",
    "boxes were cut out of a chunk",
}
"""What each history of ranks crosses that restores columns as rows."""


def expected(folder: Path) -> set[str]:
    """What can be crossed here, with tiers of all kinds in this folder."""
    path = folder / "probe"
    path.touch()
    file = open_file(path)
    try:
        direct_io = direct_module.supports_direct_io(file.descriptor)
    finally:
        file.close()
        path.unlink()
    if not direct_io:
        return ORDINARY
    return ORDINARY | DIRECT | (URING if has_uring() else set())


class Crossings:
    """Scales the thresholds down for the length of a test, and counts what crosses them.

    Attributes:
        counts: how often each thing of `DIRECT`, `URING` and `ORDINARY` happened so far.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self._patch = patch
        for where, name, value in SCALES:
            self._scale(where, name, value)
        patch.setattr(prune, "repack", partial(prune.repack, win=WIN))
        patch.setattr(capture, "usable_cores", lambda: 3)
        self._count_io()
        self._count_reads()
        self._count_saves()
        self._count_rest()

    def _scale(self, where: Any, name: str, value: int) -> None:
        """In the module that defines it, and in all that have taken it from there."""
        constant = getattr(where, name)
        for module in [m for n, m in sys.modules.items() if n.startswith("tierstate.")]:
            if vars(module).get(name) is constant:
                self._patch.setattr(module, name, value)

    def _after(self, owner: Any, name: str, told: Callable[..., str | None]) -> None:
        """Count what ``told`` says of a call that returned: it is given the result, then the arguments."""
        call = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if what := told(result, *args, **kwargs):
                self.counts[what] += 1
            return result

        self._patch.setattr(owner, name, staticmethod(counting) if _is_static(owner, name) else counting)

    def _count_io(self) -> None:
        self._after(direct, "_read_blocks", lambda *_: "a long range was read past the page cache")
        self._after(direct, "_read_tail", lambda *_: "the end of a long range was read by way of a block")
        self._after(
            io_engine.Transfer,
            "advance",
            lambda _error, transfer, result: "a transfer took several calls" if result > 0 and transfer.left else None,
        )
        self._after(direct_module.AppendStream, "_send_whole", lambda *_: "memory was written from where it lies")
        self._after(
            direct_module.AppendStream,
            "_send",
            lambda _sent, _self, _buffer, _release, nbytes=None: nbytes and "short pieces were gathered",
        )
        self._after(
            direct_module, "preallocate", lambda _done, _file, offset, _n: offset and "blocks were reserved again"
        )
        self._after(io_engine.ThreadEngine, "_submit", lambda *_: "threads moved bytes")
        self._after(io_engine.UringEngine, "_submit", lambda *_: "io_uring moved bytes")
        self._after(
            filesystem, "_split", lambda _parts, wanted: wanted.out.numel() > 4096 and "an object was read in parts"
        )

    def _count_reads(self) -> None:
        several = "there were several requests for what is read in place of one object"
        self._after(fetch.Fetch, "_destinations", lambda *_: "chunks were read in place")
        self._after(read_plan, "_in_place", lambda reads, *_: several if _repeats(reads) else None)
        self._after(
            fetch.Fetch,
            "_verified",
            lambda raw, _self, run, _spot, stored, _failure: (
                "a chunk that was read in place was damaged" if run.reads.in_place and raw is not stored else None
            ),
        )
        self._after(
            fetch.Fetch,
            "_room",
            lambda _room, made, nbytes: nbytes > made.slab_size and "a run was longer than a slab",
        )
        self._after(
            scatter,
            "memcpy",
            lambda _none, _to, _from, nbytes: nbytes >= 1024 and "long memory was copied beside other threads",
        )

    def _count_saves(self) -> None:
        self._after(pack.PackWriter, "close", lambda sizes, *_: len(sizes) > 1 and "a save had several packs")
        self._after(
            capture.Capture, "_workers", lambda count, _self: count > 1 and "a state was copied by several threads"
        )
        unchanged = capture.Capture._unchanged

        def counting(made: capture.Capture, slabful: slab_layout.SlabPlan) -> Any:
            kept = unchanged(made, slabful)
            self.counts["unchanged chunks were not copied"] += int(kept.any())
            rows, stood = made._rows(slabful), made._stood
            looked = np.flatnonzero(stood.likely[rows] & (slabful.nbytes >= slab_layout.BIG) & ~kept)
            for i in looked.tolist():
                at, nbytes = int(made._plan.address[slabful.source[i]] + slabful.start[i]), int(slabful.nbytes[i])
                same = digest.sample_hash(capture._memory_at(at, nbytes)) == int(stood.samples[rows[i]])
                self.counts["a chunk changed where its sample did not"] += same
            return kept

        self._patch.setattr(capture.Capture, "_unchanged", counting)
        cut = leaf_files.LeafFiles._cut

        def cutting(made: leaf_files.LeafFiles, leaves: Any) -> Any:
            found = list(cut(made, leaves))
            self.counts["leaves were divided over several files"] += len(found) > 1
            return iter(found)

        self._patch.setattr(leaf_files.LeafFiles, "_cut", cutting)
        self._after(
            leaf_files.LeafFiles,
            "_add",
            lambda _unit, _self, _leaves, *, frozen: frozen and "a file's leaves stayed in an older one",
        )
        self._after(snapshot.Snapshot, "place", lambda *_: "chunks were captured within a device")
        self._after(adaptive._Trial, "sample", lambda *_: "a codec was tried")

    def _count_rest(self) -> None:
        self._after(scatter.Scatter, "_boxes", lambda *_: "boxes were cut out of a chunk")
        self._after(catalog, "_hold", lambda *_: "a restore held its version")
        self._after(index.Summaries, "write", lambda *_: "an index was written")
        self._after(prune, "repack", lambda done, *_, **__: done.packs and "a pack was emptied")


def _is_static(owner: Any, name: str) -> bool:
    return isinstance(vars(owner).get(name), staticmethod)


def _repeats(reads: read_plan.ReadPlan) -> bool:
    """Whether two requests are for the same object."""
    objects = [reads.order(run)[0] for run in range(len(reads))]
    return len(set(objects)) < len(objects)
