"""Publications: what a version is said to have in a tier is there, whatever became known of the tier meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.placement import Route
from tierstate.engine.publish.publish import DirectJob, UnchangedChunks
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_write import TierWrite, tier_write_of
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.catalog import Holding
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array, digest_array
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import Damaged, TierFull
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty

LEAVES = 4
ROWS = np.arange(LEAVES)
KINDS = [("native", 4096), ("safetensors", 4096), ("safetensors", 1 << 20)]
"""Formats, and bytes of a leaf: big ones stay in the file in which they lie, small ones do so all together or not."""


class World:
    """A run in a memory tier, whose versions are leaves of one chunk each.

    Attributes:
        now: what the leaves hold.
        truth: by version, what they held.
    """

    def __init__(self, kind: str, nbytes: int, tier: Tier | None = None) -> None:
        self.tier, self.kind, self.nbytes = tier or Memory(), kind, nbytes
        self.tier_run = TierRun(self.tier, "run")
        self.tier_run.recall()
        self.arena = Arena((LEAVES + 1) * LEAVES * nbytes, LEAVES * nbytes)
        self.leaves = [Leaf((f"leaf{i}",), Spec("tensor", "uint8", 1, (nbytes,))) for i in range(LEAVES)]
        self.now: list[bytes] = []
        self.change(0, set(range(LEAVES)))
        self.truth: dict[int, list[bytes]] = {}

    def change(self, seq: int, which: set[int]) -> None:
        self.now = [
            bytes([16 * seq + i]) * self.nbytes if i in which else was
            for i, was in enumerate(self.now or [b""] * LEAVES)
        ]

    @property
    def digests(self) -> Array:
        return digest_array([checksum(data) for data in self.now])

    def head(self, seq: int) -> Head:
        return Head("run", seq, seq, float(seq), chunk=self.nbytes)

    def version(self, seq: int) -> Version:
        shards = [ShardRow(i, 0, Box.whole((self.nbytes,))) for i in range(LEAVES)]
        return Version.build(self.head(seq), self.leaves, shards, self.digests)

    def begin(self, seq: int) -> TierWrite:
        route = Route(np.ones(LEAVES, bool), ["raw"] * LEAVES, self.kind)
        return tier_write_of(self.tier_run, self.head(seq), self.leaves, ROWS, route, lambda: ROWS * 0)

    def publish(self, seq: int, publication: TierWrite, kept: Array, slabs: Sequence[Array] | None = None) -> Record:
        """Take the same way as a save: what stood is not copied, and all else comes in these slabs, or in one."""
        head, nbytes = self.head(seq), self.nbytes
        intake = DirectJob(SaveState(head, LEAVES * nbytes, [self.tier.name], {}), publication)
        if kept.any():
            intake.feed(UnchangedChunks(ROWS[kept], self.digests[kept]))
        for rows in slabs or ([] if kept.all() else [ROWS[~kept]]):
            slab = self.arena.acquire()
            for i in rows.tolist():
                slab.buffer[i * nbytes : (i + 1) * nbytes] = as_buffer(self.now[i])
            intake.feed(SlabChunks(slab, rows, rows * nbytes, np.full(len(rows), nbytes), self.digests[rows]))
        intake.feed(self.version(seq))
        record = intake.run()
        self.truth[seq] = list(self.now)
        return record

    def save(self, seq: int) -> Record:
        publication = self.begin(seq)
        return self.publish(seq, publication, publication.needless(self.digests))

    def lose(self, key: str, how: str) -> None:
        """Damage a pack, which a reader meets then, if anything of the newest version lies there."""
        data = self.tier.get(key)
        self.tier.delete(key)
        if how == "damage":
            self.tier.put(key, data ^ 1)
        found = self.tier_run.newest()
        assert found is not None
        for row in ROWS.tolist():
            with suppress(Damaged):
                Fetch(found.version, [Holding(self.tier_run, found.layout)], self.arena).run([row], lambda *_: None)


def held(tier: Tier, record: Record) -> list[bytes]:
    """What a version's leaves hold, read from where its record says, all of them."""
    assert record.layout.present.all()
    places = [record.layout.place(row) for row in ROWS.tolist()]
    return [to_bytes(tier.get(p.object)[p.offset : p.offset + p.stored]) for p in places if p is not None]


SETS = st.sets(st.integers(0, LEAVES - 1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "nbytes"), KINDS)
@settings(max_examples=max(8, settings().max_examples // 2))
@given(second=SETS, third=SETS, lost=st.integers(0, 2), how=st.sampled_from(["damage", "delete"]))
@example(second={1}, third=set(), lost=0, how="damage")
@example(second={1}, third={1}, lost=0, how="delete")
@example(second={1}, third={0, 2, 3}, lost=0, how="damage")
def test_what_is_found_damaged_after_it_stood_is_not_in_the_next_version(
    kind: str, nbytes: int, second: set[int], third: set[int], lost: int, how: str
) -> None:
    """A save leaves chunks where they lie; while it runs, a reader finds that they are not there any more."""
    world = World(kind, nbytes)
    world.save(1)
    world.change(2, second)
    before = world.save(2)
    packs = list(world.tier.list("packs/"))
    bad = packs[lost % len(packs)]
    publication = world.begin(3)
    world.change(3, third)
    kept = publication.needless(world.digests)
    world.lose(bad, how)
    there = set(world.tier.list(""))
    named = np.array([before.layout.place(row).object == bad for row in ROWS.tolist()])  # type: ignore[union-attr]
    if (named & kept).any():
        with pytest.raises(Damaged):
            world.publish(3, publication, kept)
        assert set(world.tier.list("")) == there, "nothing is left of it"
    else:
        world.publish(3, publication, kept)
    # Whether it failed or not: the next one is whole, without what was damaged.
    last = world.save(4)
    assert bad not in last.layout.objects
    for seq in world.tier_run.log.seqs():
        if seq > 2:
            assert held(world.tier, world.tier_run.log.read(seq)) == world.truth[seq]
    assert world.arena.in_flight == 0


def test_a_file_that_is_found_damaged_after_all_has_come_is_not_in_the_version() -> None:
    world = World("safetensors", 1 << 20)
    for seq in (1, 2):
        world.save(seq)
    (pack,) = world.tier.list("packs/")
    publication = world.begin(3)
    assert publication.needless(world.digests).all()
    assert publication.keep(ROWS, world.digests)
    world.lose(pack, "damage")
    with pytest.raises(Damaged, match="the next save writes its leaves again") as caught:
        publication.commit(world.version(3))
    publication.abort(caught.value)
    assert list(world.tier.list("packs/")) == [pack]
    assert pack not in world.save(3).layout.objects


@pytest.mark.parametrize(("kind", "nbytes"), [("native", 4096), ("native", 1 << 20), ("safetensors", 4096)])
@given(cuts=st.sets(st.integers(1, LEAVES - 1)), changed=SETS, alike=SETS)
@example(cuts={1, 2, 3}, changed={0, 1, 2, 3}, alike=set())
@example(cuts={1, 2, 3}, changed={1, 3}, alike=set())
@example(cuts={1, 3}, changed={0, 2, 3}, alike={0, 3})
def test_slabs_that_come_together_are_each_written_as_far_as_the_tier_lacks_them(
    kind: str, nbytes: int, cuts: set[int], changed: set[int], alike: set[int]
) -> None:
    """With some chunks that the tier has from the version before, and some that are the same as others."""
    world = World(kind, nbytes)
    world.save(1)
    before = set(world.now)
    world.change(2, changed)
    world.now = [world.now[0] if i in alike else data for i, data in enumerate(world.now)]
    publication = world.begin(2)
    record = world.publish(2, publication, np.zeros(LEAVES, bool), np.split(ROWS, sorted(cuts)))
    assert held(world.tier, record) == world.now
    assert world.arena.in_flight == 0
    if kind == "native":
        assert publication.stored == nbytes * len({*world.now} - before)


@given(cuts=st.sets(st.integers(1, LEAVES - 1)), failing=st.integers(1, LEAVES))
@example(cuts={1, 2, 3}, failing=2)
def test_of_slabs_that_come_together_none_is_kept_where_the_tier_fails(cuts: set[int], failing: int) -> None:
    world = World("native", 4096, Faulty(Memory()))
    slabs = np.split(ROWS, sorted(cuts))
    assert isinstance(world.tier, Faulty)
    world.tier.add(Fault("append", min(failing, len(slabs)), TierFull("no room")))
    publication = world.begin(1)
    with pytest.raises(TierFull, match="no room"):
        world.publish(1, publication, np.zeros(LEAVES, bool), slabs)
    assert world.arena.in_flight == 0
    assert list(world.tier.list("packs/")) == []


def test_chunks_of_the_same_bytes_are_written_once_and_each_has_its_place() -> None:
    world = World("native", 4096)
    world.now = [b"a" * 4096, b"b" * 4096, b"a" * 4096, b"a" * 4096]
    publication = world.begin(1)
    record = world.publish(1, publication, np.zeros(LEAVES, bool))
    assert held(world.tier, record) == world.now
    assert publication.stored == 2 * 4096
