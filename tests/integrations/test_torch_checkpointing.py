"""torch_checkpointing: its manager on tiers, by one and many ranks; its storage's promises; lost and damaged tiers."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torchrun import Torchrun

import tierstate as ts

pytest.importorskip("torch_checkpointing")
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.base_storage import ReadArgs, StorageConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from tierstate.integrations import torch_checkpointing as tiered

JOB = "support.torch_checkpointing_job"

POLICY = """
version: 1
chunk: 64KiB
arena: {{size: 1MiB}}
tiers:
  disk: {{type: nvme, path: "{place}/disk"}}
  slow: {{type: nvme, path: "{place}/slow", every: 2, keep: {{last: 2}}}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tiered.TierStorageConfig]:
    """Paths of checkpoints are relative to the test's folder."""
    monkeypatch.chdir(tmp_path)
    yield tiered.TierStorageConfig(ts.Policy.parse(POLICY.format(place=tmp_path)), "job")
    tiered.close()


def manager(config: StorageConfig, how: str = "sync") -> CheckpointManager:
    made = getattr(CheckpointManager.Config, f"with_{how}_save")()
    made.storage_config = config
    return CheckpointManager(made)


def state(step: int) -> dict[str, Any]:
    """Of 4 MB, four times the arena."""
    weights = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000) + step
    return {"model": {"weight": weights, "bias": torch.ones(3) * step}, "step": step}


def saved(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        if (future := manager.save(f"out/step_{step}", state(step))) is not None:
            future.result()


def loaded(manager: CheckpointManager, step: int) -> bool:
    """Whether what a load gives is what was saved."""
    into = {"model": {"weight": torch.zeros(1000, 1000), "bias": torch.zeros(3)}, "step": 0}
    found, right = manager.load(f"out/step_{step}", into), state(step)
    same = (torch.equal(found["model"][name], right["model"][name]) for name in ("weight", "bias"))
    return all(same) and found["step"] == step


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_checkpoint_is_a_version_and_nothing_stays_on_the_disk(
    how: str, config: tiered.TierStorageConfig, tmp_path: Path
) -> None:
    kept = manager(config, how)
    saved(kept, 1, 2, 3)
    assert [loaded(kept, step) for step in (1, 2, 3)] == [True] * 3
    kept.close()
    tiered.close()
    assert list((tmp_path / "out").iterdir()) == []
    assert "(deleted)" not in "".join(x for x in Path("/proc/self/maps").read_text().splitlines() if "/out/" in x)
    with ts.Checkpointer(config.policy, "job") as ckpt:
        assert [(one.step, one.tiers) for one in ckpt.versions()] == [
            (1, ("disk", "slow")),
            (2, ("disk", "slow")),
            (3, ("disk",)),
        ]
        assert ckpt.versions()[0].metadata == {"torch_checkpointing": "out/step_1"}
        assert set(ckpt.load(step=2)) == {"model_0.pt", "step_0.pt"}
    shutil.rmtree(tmp_path / "disk")
    again = manager(config)
    assert loaded(again, 2)
    again.close()


def test_a_damaged_chunk_is_read_from_the_other_tier_or_the_load_fails(
    config: tiered.TierStorageConfig, tmp_path: Path
) -> None:
    kept = manager(config)
    saved(kept, 2)
    tiered.close()
    damage(tmp_path / "disk")
    assert loaded(kept, 2)
    tiered.close()
    damage(tmp_path / "slow")
    with pytest.raises(ts.Damaged, match=r"model_0\.pt.*is whole in no tier"):
        loaded(kept, 2)
    kept.close()


def damage(tier: Path) -> None:
    for pack in (tier / "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)


def test_a_save_that_fails_leaves_no_checkpoint_and_can_be_made_again(
    config: tiered.TierStorageConfig, tmp_path: Path
) -> None:
    small = ts.Policy.parse(POLICY.format(place=tmp_path).replace('disk"', 'disk", capacity: 64KiB'))
    kept = manager(tiered.TierStorageConfig(small, "job"))
    with pytest.raises(ts.TierFull):
        saved(kept, 1)
    assert (tmp_path / "out/tmp_step_1/model_0.pt").exists()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        loaded(kept, 1)
    kept.close()
    with pytest.raises(ts.TierstateError, match="step 1 did not arrive at slow"):
        tiered.close()
    large = manager(config)
    saved(large, 1)
    assert loaded(large, 1)
    large.close()


def commit(storage: tiered.TierStorage, folder: str, **files: bytes) -> None:
    path = Path(folder)
    temporary = path.with_name(f"tmp_{path.name}")
    for name, data in files.items():
        file = temporary / name.replace("__", "/")
        storage.mkdir(file.parent)
        storage.write(file, data)
    storage.rename(temporary, path, is_directory=True)


def test_paths_of_versions(config: tiered.TierStorageConfig) -> None:
    storage = config.create_storage()
    commit(storage, "out/a/step_3", one=b"1234567", empty=b"", deep__er__two=b"22")
    commit(storage, "out/best", one=b"other")
    assert storage.ls(Path()) == ["disk", "out", "slow"]
    assert storage.ls(Path("out")) == ["a", "best"]
    assert storage.ls(Path("out/a/step_3")) == ["deep", "empty", "one"]
    assert storage.ls(Path("out/a/step_3/deep/er")) == ["two"]
    assert sorted(storage.glob("out/b*")) == ["out/best"]
    there = ("out/a", "out/a/step_3", "out/a/step_3/deep", "out/a/step_3/one")
    assert [(storage.exists(Path(one)), storage.isdir(Path(one))) for one in there] == [(True, True)] * 3 + [
        (True, False)
    ]
    assert not any(storage.exists(Path(one)) for one in ("out/a/step_4", "out/a/step_3/on", "out/a/step_3/deep/e"))
    assert storage.getsize(Path("out/a/step_3/one")) == 7
    assert (storage.read(Path("out/a/step_3/deep/er/two")), storage.read(Path("out/a/step_3/empty"))) == (b"22", b"")
    assert storage.remap_path(Path("out/best")) == "out/best"
    for absent in (storage.ls, storage.getsize, storage.read, storage.delete, storage.rmdir):
        with pytest.raises(FileNotFoundError):
            absent(Path("out/a/step_4"))
    with ts.Checkpointer(config.policy, "job") as ckpt:
        assert [one.step for one in ckpt.versions()] == [3, 4]  # a name without a number: one more


def test_a_file_is_read_by_ranges(config: tiered.TierStorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "PIECE", 100_000)
    data, storage = bytes(torch.randint(0, 256, (300_000,), dtype=torch.uint8).tolist()), config.create_storage()
    commit(storage, "out/step_1", file=data)
    with storage.stream_read(Path("out/step_1/file"), ReadArgs(pre_read_full_file=False)) as stream:
        assert (stream.readable(), stream.seekable(), stream.writable()) == (True, True, False)
        assert stream.read(10) == data[:10]
        assert stream.seek(150_000) == stream.tell() == 150_000
        out = bytearray(120_000)
        assert stream.readinto(out) == 120_000
        assert out == data[150_000:270_000]
        assert stream.seek(-5, io.SEEK_END) == 299_995
        assert (stream.read(), stream.read()) == (data[-5:], b"")
        assert stream.seek(7, io.SEEK_END) == 300_007
        assert (stream.read(), stream.read(5)) == (b"", b"")
        with pytest.raises(ValueError, match="before the beginning"):
            stream.seek(-1)
    assert storage.stream_read(Path("out/step_1/file")).getbuffer() == data


def test_what_would_not_be_whole_or_not_durable_is_refused(config: tiered.TierStorageConfig, tmp_path: Path) -> None:
    storage = config.create_storage()
    commit(storage, "out/step_1", one=b"first")
    for write in (storage.stream_write, lambda path: storage.write(path, b"")):
        for path in ("out/step_2/one", "out/step_1/two", "tmp_one"):
            with pytest.raises(PermissionError, match="is in no temporary folder"):
                write(Path(path))
    with pytest.raises(FileExistsError, match="exists as a version of run 'job'"):
        commit(storage, "out/step_1", one=b"second")
    assert storage.read(Path("out/step_1/one")) == b"first"
    assert storage.read(Path("out/tmp_step_1/one")) == b"second"
    with pytest.raises(PermissionError, match="part of a version"):
        storage.delete(Path("out/step_1/one"))
    Path("out/other").mkdir()
    Path("out/other/file").touch()
    for source, target, error in (
        ("out/step_1", "out/step_2", PermissionError),
        ("out/tmp_step_1/one", "out/step_2", PermissionError),
        ("out/tmp_step_1", "out/other", FileExistsError),
        ("out/tmp_step_1", "out/other/file", FileExistsError),
        ("out/tmp_absent", "out/step_2", PermissionError),
    ):
        with pytest.raises(error):
            storage.rename(Path(source), Path(target), is_directory=True)
    storage.write(Path("out/tmp_step_1/part"), b"third")
    storage.rename(Path("out/tmp_step_1/part"), Path("out/tmp_step_1/one"))
    Path("out/step_2").mkdir()  # an empty folder is no checkpoint
    storage.rename(Path("out/tmp_step_1"), Path("out/step_2"), is_directory=True)
    assert storage.read(Path("out/step_2/one")) == b"third"
    assert not (tmp_path / "out/tmp_step_1").exists()


def test_removing_a_checkpoint(config: tiered.TierStorageConfig, tmp_path: Path) -> None:
    storage = tiered.TierStorageConfig(ts.Policy.default(tmp_path / "one"), "job").create_storage()
    for step in (1, 2):
        commit(storage, f"out/step_{step}", one=b"%d" % step)
    assert storage.read(Path("out/step_1/one")) == b"1"
    storage.rmdir(Path("out/step_1"))
    assert not storage.exists(Path("out/step_1"))
    with pytest.raises(ts.TierstateError, match="newest"):
        storage.rmdir(Path("out/step_2"))
    storage.mkdir(Path("out/tmp_step_3/deep"))
    storage.rmdir(Path("out/tmp_step_3"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_version_that_retention_has_dropped_is_a_file_that_is_not_there(
    config: tiered.TierStorageConfig, tmp_path: Path
) -> None:
    one = tiered.TierStorageConfig(ts.Policy.default(tmp_path / "one"), "job")
    storage, other = one.create_storage(), one.create_storage()
    for step in (1, 2):
        commit(storage, f"out/step_{step}", one=b"%d" % step)
    stream = storage.stream_read(Path("out/step_1/one"), ReadArgs(pre_read_full_file=False))
    other.rmdir(Path("out/step_1"))
    with pytest.raises(FileNotFoundError):
        stream.read()


def test_checkpoints_of_its_own_storage_still_load(config: tiered.TierStorageConfig) -> None:
    own = manager(LocalFileSystemStorageConfig(use_direct_io=False))
    saved(own, 1)
    own.close()
    kept = manager(config)
    assert loaded(kept, 1)
    with pytest.raises(FileExistsError, match="exists on the disk"):
        saved(kept, 1)
    saved(kept, 2)
    assert loaded(kept, 2)
    assert kept._reader._storage.ls(Path("out")) == ["step_1", "step_2", "tmp_step_1"]
    kept.close()


def test_a_policy_or_a_run_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY.format(place=tmp_path) + "nonsense: 1\n")
    with pytest.raises(ts.PolicyError, match="nonsense"):
        tiered.TierStorageConfig(tmp_path / "policy.yaml", "job")
    with pytest.raises(ValueError, match="a/b"):
        tiered.TierStorageConfig(ts.Policy.default(tmp_path), "a/b")


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("sync", marks=pytest.mark.soak), "async"])
def test_ranks_killed_before_the_commit_go_on_from_the_checkpoint_before(how: str, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name / "job").mkdir(parents=True)
        (tmp_path / name / "policy.yaml").write_text(POLICY.format(place=tmp_path / name))
    with Torchrun(2, f"{JOB}:main", tmp_path / "whole/job", how, 6, forked=False) as whole:
        whole.wait()
        right = losses(whole)
    with Torchrun(2, f"{JOB}:main", tmp_path / "killed/job", how, 6, 4, forked=False) as killed:
        for rank in range(2):
            killed.hear(rank, "halts")
        killed.kill(0)
        assert killed.code() != 0
    assert (tmp_path / "killed/job/out/tmp_step_4/model_1.pt").exists()
    with Torchrun(2, f"{JOB}:main", tmp_path / "killed/job", how, 6, forked=False) as resumed:
        resumed.wait()
        assert resumed.hear(0, "begins") == "3"
        assert losses(resumed) == {step: loss for step, loss in right.items() if step > 3}
    if how == "sync":
        return  # a manager's synchronous saves lack the metadata of the shards, but for its first one
    with Torchrun(1, f"{JOB}:reshard", tmp_path / "killed/job", 6, forked=False) as fewer:
        fewer.wait()
        assert fewer.hear(0, "same") == "6"


def losses(job: Torchrun) -> dict[int, str]:
    said = [line.split() for line in job.said(0) if line.startswith("loss ")]
    return {int(step): loss for _, step, loss in said}
