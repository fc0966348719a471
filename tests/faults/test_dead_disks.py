"""Disks that die, for real: writes and syncs fail with EIO, and what was saved before is still read."""

from __future__ import annotations

import pytest
from support.checkpointer_worlds import alike, tensors
from support.filesystems import MIB, ext4
from support.leaks import at_rest, nothing_left, objects, temporary

import tierstate as ts


@pytest.fixture
def disk(place, root):
    with ext4(place / "disk", 48 * MIB) as made:
        yield made


def test_a_dead_disk_fails_every_save_and_gives_what_it_has(disk, world):
    first, folder = tensors(5 * MIB + 4, 3000), disk.path / "ckpt"
    with nothing_left(disk.path), ts.Checkpointer(world.policy(folder), "run") as ckpt:
        ckpt.save(first, step=1).wait()
        before = objects(folder)
        disk.die()
        for step in (2, 3):
            with pytest.raises(ts.TierUnavailable, match=r"^nvme: .*EIO"):
                ckpt.save(tensors(6 * MIB, seed=step), step=step).wait()
            assert objects(folder) == before
            assert temporary(folder) == []
            assert at_rest(ckpt)
        assert [v.step for v in ckpt.versions()] == [1]
        assert alike(ckpt.load(), first)
        assert ckpt.verify(deep=True).ok
        world.check(ckpt)
    with ts.Checkpointer(world.policy(folder), "run") as ckpt:
        assert alike(ckpt.load(), first)


def test_a_dead_disk_does_not_hold_up_the_tier_before_it(disk, world, place):
    spec = world.policy(disk.path / "ckpt", first={"type": "nvme", "path": str(place / "first")})
    with nothing_left(disk.path):
        ckpt = ts.Checkpointer(spec, "run")
        ckpt.save(tensors(5 * MIB), step=1).wait("nvme")
        disk.die()
        for step in (2, 3):
            ckpt.save(tensors(5 * MIB, seed=step), step=step).wait("first")
        assert alike(ckpt.load(), tensors(5 * MIB, seed=3))
        with pytest.raises(ts.TierUnavailable, match="EIO") as found:
            ckpt.close()
        assert "step 2 did not arrive at nvme" in "\n".join(found.value.__notes__)
        assert at_rest(ckpt)
