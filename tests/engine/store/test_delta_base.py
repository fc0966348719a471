"""Deltas and anchors: what is made against a base comes back with that base alone, and nothing is made that does not
pay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierstate.engine.codecs.codecs import BLOSC, compress
from tierstate.engine.maintain.sweep import sweep
from tierstate.engine.packs.keys import MEND
from tierstate.engine.packs.pack import FooterRow, PackWriter
from tierstate.engine.publish import encode as encode_module
from tierstate.engine.publish.encode import LEAST, MAX_BASE_USES, SAMPLE, DeltaBases, codec_sample
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.catalog import Holding
from tierstate.engine.store.delta_base import SLACK, WrongBase, undo_delta, xor
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import Buffer, as_buffer, to_bytes
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import Damaged, NotFound
from tierstate.manifest.format.layout import ChunkPlace, DeltaBase, Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.retention import RetentionPolicy
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory

HASH = digest_function("xxh3-128")
fewer = settings(max_examples=max(8, settings().max_examples // 2))
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.complex64])


def values(dtype: torch.dtype, nbytes: int, seed: int) -> torch.Tensor:
    """Random numbers; of any bits where ``seed`` is odd, NaNs of every sort among them."""
    generator = torch.Generator().manual_seed(seed)
    if seed % 2:
        noise = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        return noise[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
    return torch.randn(nbytes // dtype.itemsize, generator=generator).mul(9).to(dtype)


def data(tensor: torch.Tensor) -> Buffer:
    """A tensor's bytes, copied."""
    return tensor.clone().view(torch.uint8)


def changed(tensor: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Some of its bytes changed."""
    generator, found = torch.Generator().manual_seed(seed), tensor.clone().view(torch.uint8)
    hit = torch.rand(found.shape, generator=generator) < share
    found[hit] ^= torch.randint(1, 256, found.shape, generator=generator, dtype=torch.uint8)[hit]
    return found.view(tensor.dtype)


class World:
    """A run in a memory tier, whose versions are one leaf in one chunk."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.tier, self.dtype = Memory(), dtype
        self.tier_run = TierRun(self.tier, "run")
        self.seq = 0

    def head(self, **keys: object) -> Head:
        return Head(**{"run": "run", "seq": self.seq, "step": self.seq, "time": 0.0, "chunk": 1 << 20} | keys)

    def leaf(self, nbytes: int, path: str = "w") -> Leaf:
        return Leaf((path,), Spec("tensor", str(self.dtype)[6:], self.dtype.itemsize, (nbytes // self.dtype.itemsize,)))

    def anchors(self, nbytes: int, faster: tuple[TierRun, ...] = (), path: str = "w", **keys: object) -> DeltaBases:
        return DeltaBases(self.tier_run, self.head(**keys), (self.leaf(nbytes, path),), np.zeros(1, "i8"), faster)

    def save(self, raw: Buffer, faster: tuple[TierRun, ...] = ()) -> ChunkPlace:
        """Publish a version of this chunk; where it lies."""
        self.seq += 1
        codec, stored, base = self.anchors(len(raw), faster).encode(0, raw, self.dtype.itemsize)
        packs, leaf = PackWriter(self.tier, "run", self.seq), self.leaf(len(raw))
        place = packs.add(stored, HASH(raw), len(raw), codec, None, base)
        sizes = packs.close() | ({base.object: self.tier.size(base.object)} if base else {})
        digests = np.frombuffer(HASH(raw), "<u8")
        version = Version.build(self.head(), [leaf], [ShardRow(0, 0, Box.whole(leaf.spec.shape))], digests)
        self.tier_run.publish(Record(version, Layout.build([place], sizes), {"id": str(self.seq)}))
        return place

    def read(self, place: ChunkPlace, nbytes: int) -> Buffer:
        """A delta's raw bytes."""
        stored = self.tier.get(place.object)[place.offset : place.offset + place.stored]
        return undo_delta(self.tier_run, place.base, stored, nbytes, HASH)


@given(one=st.binary(max_size=200), seed=st.integers(0, 99), at=st.integers(0, 7))
def test_a_difference_taken_twice_is_nothing(one: bytes, seed: int, at: int) -> None:
    """Also of bytes that do not start at a multiple of their length."""
    other = np.random.default_rng(seed).bytes(len(one))
    raw, base = as_buffer(bytes(at) + one)[at:], as_buffer(bytes(at) + other)[at:]
    found = xor(raw, base)
    assert found is raw
    assert to_bytes(found) == bytes(a ^ b for a, b in zip(one, other, strict=True))
    assert to_bytes(xor(found, base)) == one
    assert to_bytes(base) == other


@pytest.mark.slow
@fewer
@given(
    dtype=DTYPES,
    nbytes=st.sampled_from([16, LEAST, LEAST + 8, 70_000, 2 * SAMPLE + 4096]),
    seed=st.integers(0, 9),
    shares=st.lists(st.sampled_from([0.001, 0.02, 0.3, 1.0]), min_size=1, max_size=4),
)
def test_chains_of_chunks_come_back_by_one_base_each(
    dtype: torch.dtype, nbytes: int, seed: int, shares: list[float]
) -> None:
    world, now = World(dtype), values(dtype, nbytes, seed)
    places, truth = [world.save(data(now))], [data(now)]
    for i, share in enumerate(shares):
        now = changed(now, share, i)
        places.append(world.save(data(now)))
        truth.append(data(now))
    assert places[0].codec in ("raw", BLOSC)
    alone = {HASH(raw): p for raw, p in zip(truth, places, strict=True) if p.codec != "delta"}
    for place, raw in zip(places, truth, strict=True):
        assert (place.codec == "delta") == (place.base is not None)
        if place.base is not None:
            assert place.base[:4] == alone[place.base.digest][:4], "a base stands by itself"
            assert to_bytes(world.read(place, len(raw))) == to_bytes(raw)
            assert place.stored < 0.95 * len(raw)
            assert len(raw) >= LEAST
        else:
            assert place.stored <= len(raw)
    if nbytes >= LEAST and shares[0] < 0.01:
        assert places[1].codec == "delta", "one byte in a thousand pays"


@fewer
@given(
    shares=st.lists(st.sampled_from([0.001, 0.02, 1.0]), min_size=1, max_size=5),
    dropped=st.sets(st.integers(1, 5)),
    retired=st.booleans(),
)
@example(shares=[0.001] * 3, dropped={1, 2}, retired=False)
@example(shares=[0.001] * 3, dropped={1, 2, 3}, retired=True)
def test_what_deltas_are_made_against_stays_when_its_version_goes(
    shares: list[float], dropped: set[int], retired: bool
) -> None:
    world, now = World(), values(torch.float32, 8000, 0)
    world.save(data(now))
    truth = {1: data(now)}
    for i, share in enumerate(shares, 2):
        now = changed(now, share, i)
        world.save(data(now))
        truth[i] = data(now)
    last = len(truth)
    if retired:
        assert TierRun(world.tier, "run", RetentionPolicy(last=1)).retire().drop == tuple(range(1, last))
    else:
        for seq in dropped - {last}:
            world.tier_run.log.forget(seq)
    before, needed = set(world.tier.list("packs/")), set()
    found = sweep(TierRun(world.tier, "run"), grace=0)
    for seq in world.tier_run.log.seqs():
        record, got = world.tier_run.log.read(seq), []
        holdings = [Holding(TierRun(world.tier, "run"), record.layout)]
        Fetch(record.version, holdings, Arena(1 << 20, 1 << 16)).run([0], lambda _, raw, __, got=got: got.append(raw))
        assert [to_bytes(raw) for raw in got] == [to_bytes(truth[seq])]
        place = record.layout.place(0)
        needed |= {place.object, *([place.base.object] if place.base else [])}
    assert set(found.packs) == before - needed
    assert set(world.tier.list("packs/")) == needed


def test_a_wrong_base_is_named() -> None:
    world, raw = World(), data(values(torch.float32, 8000, 2))
    anchor = world.save(raw)
    world.save(other := data(changed(raw, 0.01, 1)))
    layout = world.tier_run.newest().layout
    place = layout.place(0)
    assert place.codec == "delta"
    for base in (
        place.base._replace(digest=bytes(16)),
        place.base._replace(offset=1, stored=place.base.stored - 1),
        place.base._replace(object="packs/run/none"),
    ):
        with pytest.raises(WrongBase, match=f"{base.object} at byte {base.offset}, which a delta is made against"):
            world.read(place._replace(base=base), len(raw))
        assert not world.tier_run.is_sound(base.object, layout)
    with pytest.raises(Damaged, match="a delta without a base"):
        world.read(place._replace(base=None), len(raw))
    for stored in (len(raw) + SLACK + 1, 2**32 - 1):
        with pytest.raises(WrongBase, match=f"{stored} bytes stored for {len(raw)}"):
            world.read(place._replace(base=place.base._replace(stored=stored)), len(raw))
    # Another whole chunk in the base's place, with its right digest: the delta's own digest tells.
    swapped = DeltaBase(*anchor[:4], HASH(raw))
    assert HASH(world.read(place._replace(base=swapped), len(raw))) == HASH(other)
    again = world.save(data(values(torch.float32, 8000, 4)))
    wrong = DeltaBase(*again[:4], HASH(data(values(torch.float32, 8000, 4))))
    assert HASH(world.read(place._replace(base=wrong), len(raw))) != HASH(other)


def test_a_base_is_read_where_it_was_mended() -> None:
    world, raw = World(), data(values(torch.float32, 8000, 2))
    anchor = world.save(raw)
    place = world.save(data(changed(raw, 0.01, 1)))
    world.tier.delete(anchor.object)
    with pytest.raises(WrongBase):
        world.read(place, len(raw))
    mend = PackWriter(world.tier, "run", 1, label=MEND)
    row = FooterRow(HASH(raw), len(raw), mend.add(raw, HASH(raw), len(raw), "raw"))
    mend.close()
    world.tier_run.add_mends([row])
    assert to_bytes(world.read(place, len(raw))) == to_bytes(data(changed(raw, 0.01, 1)))


@pytest.mark.slow
def test_an_anchor_is_used_so_often_and_then_another() -> None:
    world, now = World(), values(torch.float32, 40_000, 0)
    world.save(data(now))
    uses = []
    for i in range(2 * MAX_BASE_USES + 4):
        now[i * 5] += 1.0
        place = world.save(data(now))
        uses.append(place.base.uses if place.base else 0)
    assert uses == [*range(1, MAX_BASE_USES + 1), 0, *range(1, MAX_BASE_USES + 1), 0, 1, 2]


def test_an_anchor_is_given_up_when_deltas_outgrow_their_average() -> None:
    """Each version is further from the anchor than the one before, as in training."""
    world, start = World(torch.bfloat16), values(torch.bfloat16, 200_000, 0)
    total, count, renewed = world.save(data(start)).stored, 1, 0
    for i in range(12):
        place = world.save(data(changed(start, 0.004 * 2**i, i)))
        if place.base is None:
            renewed += 1
            assert i > 2, "the first deltas are a tenth of it"
            break
        assert place.stored <= 1.05 * total / count
        total, count = total + place.stored, count + 1
        assert (place.base.uses, place.base.spent) == (count - 1, total)
    assert renewed == 1


def test_what_is_no_anchor() -> None:
    world, raw = World(), data(values(torch.float32, 8000, 2))
    world.save(raw)
    assert world.anchors(8000).base(0, 8000) == DeltaBase(
        *world.tier_run.newest().layout.place(0)[:4],
        HASH(raw),
        uses=0,
        spent=world.tier_run.newest().layout.place(0).stored,
    )
    assert world.anchors(8000, path="v").base(0, 8000) is None, "another leaf"
    assert world.anchors(8004).base(0, 8004) is None, "another shape"
    assert world.anchors(8000).base(0, 7996) is None, "another length, as of another box"
    assert world.anchors(8000, chunk=1 << 16).base(0, 8000) is None, "cut otherwise"
    assert world.anchors(8000, digest="blake3").base(0, 8000) is None, "digested otherwise"
    assert world.anchors(8000, run="fork").base(0, 8000) is None, "a pack of another run"
    world.dtype = torch.int32
    assert world.anchors(8000).base(0, 8000) is None, "another type"
    world.dtype = torch.float32
    world.tier_run.distrust(world.tier_run.newest().layout.objects[0])
    assert world.anchors(8000).base(0, 8000) is None, "a pack that was found damaged"
    assert (
        DeltaBases(TierRun(Memory(), "run"), world.head(), (world.leaf(8000),), np.zeros(1, "i8")).base(0, 8000) is None
    )


def test_a_base_that_cannot_be_read_makes_the_chunk_stand_alone(caplog: pytest.LogCaptureFixture) -> None:
    world, now = World(), values(torch.float32, 8000, 2)
    anchor = world.save(data(now))
    damaged = world.tier.get(anchor.object).clone()
    damaged[100] ^= 1
    world.tier.delete(anchor.object)
    world.tier.put(anchor.object, damaged)
    now[0] += 1
    assert world.save(data(now)).base is None
    assert "chunks are stored whole, and not as deltas" in caplog.text
    now[0] += 1
    assert world.save(data(now)).base is not None, "against the new one"


def test_a_base_is_read_from_a_faster_tier_if_its_version_is_there() -> None:
    world, fast, now = World(), World(), values(torch.float32, 8000, 2)
    fast.save(data(now))
    anchor = world.save(data(now))
    reads: list[str] = []
    world.tier.read = lambda key, ranges: reads.append(key)  # type: ignore[method-assign]
    now[0] += 1
    assert world.save(data(now), (fast.tier_run,)).base.object == anchor.object
    assert not reads
    fast.tier.delete(next(iter(fast.tier.list("packs/"))))
    del world.tier.read
    now[0] += 1
    assert world.save(data(now), (fast.tier_run,)).base.object == anchor.object, "read where it lies"
    with pytest.raises(NotFound):
        fast.tier_run.record(2)


@given(nbytes=st.integers(0, 3 * SAMPLE), itemsize=st.sampled_from([1, 2, 3, 8, 300]))
def test_samples_are_of_whole_elements_and_bounded(nbytes: int, itemsize: int) -> None:
    raw = torch.arange(nbytes // 8 + 1).view(torch.uint8)[:nbytes]
    part = codec_sample(raw, itemsize)
    assert len(part) <= SAMPLE
    assert part is raw or nbytes > SAMPLE


def test_the_best_of_the_codecs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    world, raw = World(torch.bfloat16), data(values(torch.bfloat16, 400_000, 0))
    lengths = {codec: len(compress(codec, raw, 2)[1]) for codec in ("fast", "small")}
    assert world.save(raw).stored == min(lengths.values())
    noise = torch.randint(0, 256, (40_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert world.anchors(40_000).encode(0, noise, 2) == ("raw", noise, None)
    # Even where a sample promised much, a delta that is not shorter than its chunk is none.
    monkeypatch.setattr(encode_module, "best_codec", lambda data, itemsize: ("fast", 0.1 if data is not noise else 1.0))
    assert world.anchors(400_000).encode(0, noise[:0], 2).codec == "raw"
