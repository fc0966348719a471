"""Merged versions: one for all tiers, each the child of the one before, and no more memory than they need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from support.thread_teams import World, each, together

from tierstate.engine.ranks.save.commit import GroupCommit
from tierstate.engine.ranks.save.leader import MergedVersions
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.boxes import Box
from tierstate.manifest.errors import (
    StateMismatch,
)
from tierstate.manifest.format.layout import ChunkPlace, Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.log import Log
from tierstate.manifest.sharded.part import PartReader, encode_part


def test_a_version_is_merged_once_and_is_the_same_on_all_tiers() -> None:
    near, far = World("process", [0, 1, 2]), World("site", [0, 1, 2])
    far.merged = near.merged

    def rank(team: Team) -> None:
        for seq in (1, 2, 3):
            GroupCommit(
                team, "near", near.tier_of[team.rank], Log(near.tier_of[team.rank], "run"), near.merged[team.rank]
            ).commit(near.part(team.rank, seq))
        far.group_commit(team).commit(far.part(team.rank, 2))
        team.gather("end", b"")

    assert together(3, rank, hosts=near.hosts) == [None] * 3
    (record,) = far.records(2)
    assert {r.version.id for r in near.records(2)} == {record.version.id}
    assert near.records(3)[0].version.head.parent == record.version.id
    assert near.is_whole(2)
    assert far.is_whole(2)


def test_a_part_of_another_version_than_is_known_by_that_number_does_not_belong() -> None:
    world = World("site", [0, 0])
    other = World("site", [0, 0])
    each(world, lambda team, group_commit: group_commit.commit(world.part(team.rank, 1)))
    other.merged = world.merged
    world.part(0, 9)

    def rank(team: Team, group_commit: GroupCommit) -> Any:
        found = other.part(team.rank, 1)
        return group_commit.commit(
            replace(found, version=found.version.again(found.version.head, found.version.digests + 1))
        )

    assert [type(one) for one in each(other, rank)] == [StateMismatch] * 2
    assert not other.records(1)


def test_merged_versions_know_the_last_few_and_whose_child_the_next_one_is() -> None:
    world, merged = World("site", [0]), MergedVersions(kept=2)
    merged.continue_from("ff" * 16)
    found = {seq: merged.merge(seq, [world.part(0, seq).version])[0] for seq in (1, 2, 4)}
    assert [v.head.parent for v in found.values()] == ["ff" * 16, found[1].id, found[2].id]
    assert [merged.known(seq) for seq in (1, 2, 4)] == [None, found[2], found[4]]
    merged.learn(found[1])
    assert merged.known(1) is found[1]
    assert merged.merge(3, [world.part(0, 3).version])[0].head.parent == found[2].id


def test_what_is_restored_is_the_parent_of_later_saves_and_of_none_that_is_merged_late() -> None:
    world, merged = World("site", [0]), MergedVersions()
    first = merged.merge(1, [world.part(0, 1).version])[0]
    merged.continue_from("ff" * 16, 2)
    found = {seq: merged.merge(seq, [world.part(0, seq).version])[0] for seq in (2, 3, 4)}
    assert [v.head.parent for v in found.values()] == [first.id, "ff" * 16, found[3].id]


def test_leaves_of_earlier_saves_are_not_kept() -> None:
    """A value whose length changes is another leaf in each save, and there may be thousands of saves."""
    merged, key = MergedVersions(), "packs/run/x"
    for seq in range(1, 20):
        leaf, digests = Leaf(("w",), Spec("tensor", "uint8", 1, (seq,))), np.zeros((1, 2), "<u8")
        head = Head("run", seq, seq, 1.0, chunk=64)
        version = Version.build(head, [leaf], [ShardRow(0, 0, Box.whole((seq,)))], digests)
        record = Record(version, Layout.build([ChunkPlace(key, 0, seq, "raw")], {key: seq}), {"id": "x"})
        read = [PartReader(merged.pieces).decode(encode_part(record)).version for _ in range(2)]
        assert read[0].catalog is read[1].catalog, "they are known again all the same"
        merged.merge(seq, read[:1])
        assert len(merged.pieces) == 1
        assert PartReader(merged.pieces).decode(encode_part(record)).version.catalog is read[0].catalog
