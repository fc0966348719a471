"""Places that are full, read-only, missing, or no folders."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpointer_worlds import arena_of, opened, policy, tensors, tier, unreferenced
from support.equality import difference

import tierstate as ts


@contextlib.contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    """A real file system of so many bytes."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
def test_a_disk_that_is_full_keeps_what_it_has(place, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        spec = policy({"host": tier("host", place), "nvme": tier("nvme", disk), "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(600_000), step=1).wait()
            save = ckpt.save(tensors(600_000, seed=1), step=2)
            with pytest.raises(ts.TierFull, match=r"nvme: packs/run/.*ENOSPC.*free some space"):
                save.wait()
            save.wait("file")
            assert [v.tiers for v in ckpt.versions()] == [("host", "nvme", "file"), ("host", "file")]
            assert ckpt.verify(deep=True).ok
            assert unreferenced(opened(spec, "nvme"), "run") == set()
            assert [p.name for p in disk.rglob(".tmp*")] == []
            assert difference(tensors(600_000, seed=1), ckpt.load()) == ""
            assert difference(tensors(600_000), ckpt.load(step=1)) == ""
            assert arena_of(ckpt).in_flight == 0


def test_a_capacity_is_full_too(place):
    spec = policy({"nvme": tier("nvme", place, capacity="50KiB", keep={"last": 1})})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(30_000), step=1).wait()
        with pytest.raises(ts.TierFull, match=r"capacity of 50 ?KiB"):
            ckpt.save(tensors(30_000, seed=1), step=2).wait()
        assert difference(tensors(30_000), ckpt.load()) == ""
        ckpt.save({"a": tensors(8000, seed=2)["a"]}, step=3).wait()
        ckpt.save(tensors(30_000, seed=3), step=4).wait()


@pytest.mark.root
def test_a_read_only_place_is_read_and_not_written(place, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        spec = policy({"host": tier("host", place), "nvme": tier("nvme", disk), "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000), step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with ts.Checkpointer(spec, "run") as ckpt:
            assert difference(tensors(9000), ckpt.load()) == ""
            save = ckpt.save(tensors(9000, seed=1), step=2)
            with pytest.raises(ts.AccessDenied, match=r"nvme: .*EROFS"):
                save.wait()
            save.wait("file")
            assert ckpt.verify(deep=True).ok


def test_a_folder_that_is_a_file_is_told(place):
    (place / "nvme").write_text("not a folder")
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        save = ckpt.save(tensors(9000), step=1)
        with pytest.raises(ts.TierError, match=r"nvme.*is not a folder"):
            save.wait()
        save.wait("file")
        assert difference(tensors(9000), ckpt.load()) == ""


def test_a_folder_that_vanishes_is_made_again(place):
    spec = policy({"nvme": tier("nvme", place), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000), step=1).wait("file")
        shutil.rmtree(place / "nvme")
        assert difference(tensors(9000), ckpt.load()) == ""
        # Its newest record named packs that are gone: the first save may find that out, the next builds on nothing.
        found = ckpt.save(tensors(9000), step=2)
        for name in ("nvme", "file"):
            with contextlib.suppress(ts.TierstateError):
                found.wait(name)
        ckpt.save(tensors(9000), step=3).wait()
        assert ckpt.verify(deep=True).ok
        assert "nvme" in ckpt.info(step=3).tiers
