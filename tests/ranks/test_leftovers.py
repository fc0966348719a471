"""What a commit of many ranks leaves when they die: the sweep removes it, and nobody takes it for anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, opened, scratch
from support.clock_tiers import Aged
from support.damage import saved, two
from support.small_records import text
from support.thread_teams import Seen, World, part, together

import tierstate as ts
from tierstate.engine.maintain.sweep import DAY, sweep
from tierstate.engine.packs.keys import PackKey, is_mend, seq_of
from tierstate.engine.packs.pack import PackWriter
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.digest import checksum
from tierstate.manifest.format.layout import PART, holds_chunks, is_pack_key
from tierstate.manifest.history.log import Log
from tierstate.manifest.sharded.part import encode_part
from tierstate.tiers.base import Tier, check_key


def part_key(run: str, seq: int, rank: int) -> str:
    return str(PackKey.new(run, seq, rank, PART))


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,99}", fullmatch=True),
    st.integers(0, 10**12 - 1),
    st.integers(0, 2**32),
)
def test_parts_are_named_as_packs_and_told_from_them(run: str, seq: int, rank: int) -> None:
    key = check_key(part_key(run, seq, rank))
    assert is_pack_key(key)
    assert not holds_chunks(key)
    assert (is_mend(key), seq_of(key)) == (False, seq)
    assert holds_chunks(f"packs/{run}/{seq:012d}-{rank}-0-abc")
    assert part_key(run, seq, rank) != key


def left(tier: Tier, seq: int, rank: int, size: int) -> str:
    """What a rank that died after its vote leaves, beside its packs."""
    found = part(tier, rank, size, seq)
    key = part_key("run", seq, rank)
    tier.put(key, as_buffer(encode_part(found)))
    return key


def test_what_is_left_goes_when_it_is_old() -> None:
    """The ranks commit one version; one dies in the next."""
    world = World("site", [0, 0])
    tier = Aged(world.tiers[0])
    together(2, lambda team: world.group_commit(team).commit(world.part(team.rank, 1)))
    tier.born = dict.fromkeys(tier.list(""), 0.0)
    named = set(tier.list("packs/"))
    key = left(tier, 2, 1, 2)
    others = set(tier.list("packs/")) - named
    assert key in others
    tier_run = TierRun(tier, "run")
    tier.clock = DAY - 1
    assert set(sweep(tier_run).young) == others
    assert not sweep(tier_run, grace=0.0, busy=lambda: {2}).packs
    tier.clock = DAY + 1
    assert set(sweep(tier_run).packs) == others
    assert set(tier.list("packs/")) == named
    assert world.is_whole(1)


def test_what_is_left_is_no_damage_and_is_not_rebuilt_from() -> None:
    with scratch() as place:
        spec = two(place)
        truth = saved(spec)
        tier = opened(spec, "nvme")
        keys = {left(tier, 2, 1, 2), left(tier, 9, 0, 2)}
        for path in (place / "nvme" / "versions" / "run").iterdir():
            path.unlink()
        with ts.Checkpointer(spec, "run") as ckpt:
            found = ckpt.rebuild("nvme")
            assert [v.rebuilt for v in found.versions] == [True] * 3
            assert not keys & set(found.unread)
            assert found.unknown == [9], "of which there is a pack, and nothing says what it was"
            assert ckpt.verify(deep=True).ok
            assert [v.step for v in ckpt.versions()] == [0, 1, 2]
            assert all(alike(was, ckpt.load(step=step)) for step, was in enumerate(truth))


@pytest.mark.parametrize("size", [1, 2])
def test_a_version_is_not_made_smaller_by_rebuilding_it_from_one_ranks_pack(place: Path, size: int) -> None:
    """The last pack of a rank says what its part consists of, and that it is one of several."""
    spec = two(place)
    saved(spec, 1)
    tier = opened(spec, "nvme")
    version = part(Seen("site"), 0, size, 7).version
    data = [text("a", 16), text("b", 16), text("c", 8), text("d", 16)]
    digests = version.digests.copy()
    writer = PackWriter(tier, "run", 7)
    for row, chunk in enumerate(data):
        writer.add(as_buffer(chunk), checksum(chunk), len(chunk), "raw")
        digests[row] = as_words(checksum(chunk))
    writer.close(version.again(version.head, digests).data)
    with ts.Checkpointer(spec, "run") as ckpt:
        found = ckpt.rebuild("nvme")
    assert [v.seq for v in found.versions] == ([7] if size == 1 else [])
    assert found.unknown == ([] if size == 1 else [7])
    assert Log(tier, "run").seqs() == ([1, 7] if size == 1 else [1])


def as_words(digest: bytes) -> list[int]:
    return [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
