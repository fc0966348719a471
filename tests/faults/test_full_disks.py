"""Disks that are full, for real: the save fails where it says, leaves nothing, and a smaller one fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.checkpointer_worlds import alike, tensors
from support.filesystems import MIB, Disk, ext4, thin, tmpfs
from support.leaks import at_rest, nothing_left, objects, temporary

import tierstate as ts

SIZE = 24 * MIB

KINDS: dict[str, Callable[[Path], AbstractContextManager[Disk]]] = {
    "tmpfs": lambda folder: tmpfs(folder, SIZE),
    "ext4": lambda folder: ext4(folder, SIZE),
    "thin": lambda folder: thin(folder, 64 * MIB, SIZE),
}


@pytest.fixture(params=list(KINDS))
def disk(request: pytest.FixtureRequest, place: Path, root) -> Iterator[Disk]:
    """A disk of 24 MiB."""
    with KINDS[request.param](place / "disk") as made:
        yield made


def test_a_save_longer_than_the_disk_leaves_nothing_and_a_shorter_one_fits(disk, world):
    small, big, other = (tensors(n * MIB + 4000, 5000, seed=n) for n in (4, 40, 5))
    folder = disk.path / "ckpt"
    with nothing_left(disk.path), ts.Checkpointer(world.policy(folder), "run") as ckpt:
        ckpt.save(small, step=1).wait()
        before, free = objects(folder), disk.free
        with pytest.raises(ts.TierFull, match=r"^nvme: .*ENOSPC") as found:
            ckpt.save(big, step=2).wait()
        assert str(folder) in str(found.value)
        assert objects(folder) == before
        assert temporary(disk.path) == []
        assert free - disk.free < 100_000, "room for tables of the file system's own"
        assert at_rest(ckpt)
        if disk.path.name == "thin":
            disk.trim()
        ckpt.save(other, step=3).wait()
        assert alike(ckpt.load(step=1), small)
        assert alike(ckpt.load(), other)
        assert [v.step for v in ckpt.versions()] == [1, 3]
        assert ckpt.verify(deep=True).ok
        world.check(ckpt)


def test_a_full_disk_that_nobody_asked_about_is_told_at_the_next_save_and_at_close(disk, world):
    folder = disk.path / "ckpt"
    with nothing_left(disk.path):
        ckpt = ts.Checkpointer(world.policy(folder), "run")
        lost = ckpt.save(tensors(40 * MIB), step=1)
        while not lost.errors():
            lost.wait_captured()
        with pytest.raises(ts.TierFull, match="ENOSPC"):
            ckpt.save(tensors(MIB), step=2)
        ckpt.save(tensors(40 * MIB), step=3)
        with pytest.raises(ts.TierFull, match="ENOSPC"):
            ckpt.close()
        assert objects(folder) == []
