"""Leaf files: whatever order chunks come in, the file has them in its own, and no slab is held for longer."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.packs.formats import FileLayout
from tierstate.engine.packs.slab_layout import BIG
from tierstate.engine.publish.leaf_files import ChunkRun, LeafFile
from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.errors import TierFull
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.memory.pages import PAGE
from tierstate.tiers.testing import Fault, Faulty

HEAD = b"head" * 4
SIZES = st.lists(st.sampled_from([1, 16, 100, 5000, BIG, BIG + 16]), min_size=1, max_size=8)


class Case:
    """A file of one chunk per leaf, with gaps, and the slabs in which its chunks come."""

    def __init__(self, sizes: list[int], gaps: list[int], again: set[int], tier: Memory | Faulty) -> None:
        self.data = [random.Random(i).randbytes(n) for i, n in enumerate(sizes)]
        self.nbytes, self.again = np.array(sizes), again
        ends = np.cumsum(self.nbytes + np.array(gaps)) + len(HEAD)
        self.offsets = ends - self.nbytes
        self.size = int(ends[-1]) + 16 * len(sizes) + 5
        blueprint = FileLayout(self.size, tuple(self.offsets.tolist()), HEAD, int(ends[-1]) + 3)
        self.arena, self.tier = Arena(32 * 2 * BIG, 2 * BIG), tier
        which, zeros = np.arange(len(sizes)), np.zeros(len(sizes), "i8")
        self.file = LeafFile(
            tier, "packs/run/x", which + 7, zeros, self.nbytes, which, lambda: blueprint, self._passed_already
        )

    def _passed_already(self, row: int) -> Buffer | None:
        return as_buffer(self.data[row - 7]) if row - 7 in self.again else None

    def give(self, first: int, count: int, grain: int) -> None:
        """Chunks as they come in a slab."""
        slab = self.arena.acquire()
        taken = -(-self.nbytes[first : first + count] // grain) * grain
        at = np.cumsum(taken) - taken
        for i, place in enumerate(at.tolist()):
            data = as_buffer(self.data[first + i])
            slab.buffer[place : place + len(data)] = data
        try:
            self.file.take(first, ChunkRun(slab.buffer, at, slab))
        finally:
            slab.release()

    def expected(self, digests: np.ndarray) -> bytes:
        whole = bytearray(self.size)
        whole[: len(HEAD)] = HEAD
        for offset, data in zip(self.offsets.tolist(), self.data, strict=True):
            whole[offset : offset + len(data)] = data
        end = int(self.offsets[-1] + self.nbytes[-1]) + 3
        whole[end : end + digests.nbytes] = digests.tobytes()
        return bytes(whole)


@given(sizes=SIZES, seed=st.integers(0, 99), dense=st.booleans(), grain=st.sampled_from([16, PAGE]))
def test_chunks_in_any_order_are_the_file(sizes: list[int], seed: int, dense: bool, grain: int) -> None:
    rng = random.Random(seed)
    gaps = [0 if dense else rng.choice([0, 3, 5000]) for _ in sizes]
    again = {i for i in range(len(sizes)) if rng.random() < 0.2}
    case = Case(sizes, gaps, again, Memory())
    rest = [i for i in range(len(sizes)) if i not in again]
    rng.shuffle(rest)
    for i in rest:
        case.give(i, 1, grain)
    case.file.advance()
    assert case.file.complete
    digests = np.arange(2 * len(sizes), dtype="<u8").reshape(-1, 2)
    assert case.file.close(digests) == case.size
    assert to_bytes(case.tier.get("packs/run/x")) == case.expected(digests)
    assert case.file.offset.tolist() == case.offsets.tolist()
    assert case.arena.in_flight == 0
    assert np.concatenate(list(case.file.windows(BIG))).tolist() == case.file.rows.tolist()


def test_a_run_goes_out_in_one_piece_and_short_ones_are_gathered() -> None:
    tier = Faulty(Memory())
    case = Case([16] * 500 + [BIG, BIG, 100, 100, 7], [0] * 505, set(), tier)
    case.give(0, 500, 16)
    case.give(500, 2, PAGE)
    case.give(502, 3, 16)
    assert case.file.complete
    assert tier.calls["append"] <= 5, "head, short ones, one long run, short ones"
    case.file.abort()
    assert list(tier.list("")) == []


def test_an_unfinished_file_is_never_closed_and_an_abort_lets_go() -> None:
    case = Case([100, BIG, 100], [0, 0, 0], set(), Memory())
    case.give(2, 1, 16)
    case.give(0, 1, 16)
    assert case.arena.in_flight == 1
    with pytest.raises(RuntimeError, match="chunk 1 of 3 did not come"):
        case.file.close(np.zeros((3, 2)))
    case.file.abort()
    assert case.arena.in_flight == 0
    assert list(case.tier.list("")) == []


def test_a_failure_lets_go_of_every_slab() -> None:
    tier = Faulty(Memory(), Fault("append", 1, TierFull("full")))
    case = Case([BIG, BIG, BIG], [0, 0, 0], set(), tier)
    case.give(1, 1, 16)
    case.give(2, 1, 16)
    with pytest.raises(TierFull):
        case.give(0, 1, 16)
    case.file.let_go()
    assert case.arena.in_flight == 0
    case.file.abort()
    assert list(tier.list("")) == []
