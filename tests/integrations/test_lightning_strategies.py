"""Lightning's sharding strategies under torchrun: ranks save, rank, remove, resume and reshard versions in tiers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")

import torch
from support.equality import difference
from support.torchrun import Torchrun

import tierstate as ts
from tierstate.integrations.lightning_strategies import TierFSDPStrategy, TierModelParallelStrategy
from tierstate.integrations.lightning_versions import TAG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # of Lightning; the ranks are processes of their own
]
JOB = "support.lightning_ranks"
POLICY = "version: 1\ntiers: {{a: {{type: nvme, path: {place}/a}}}}\n"


def run(ranks: int, function: str, *args: object) -> list[list[str]]:
    """What each rank of a job has printed, which ends well."""
    with Torchrun(ranks, f"{JOB}:{function}", *args) as job:
        job.wait()
        return [job.said(rank) for rank in range(ranks)]


def losses(folder: Path, rank: int) -> dict[int, list[str]]:
    """By step, the loss of each time that it was trained."""
    found: dict[int, list[str]] = {}
    for line in (folder / f"losses-{rank}.txt").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), []).append(loss)
    return found


def references(folder: Path) -> dict[str, dict[str, Any]]:
    """By file name, what each reference names first."""
    return {path.name: json.loads(path.read_text())["targets"][0] for path in (folder / "ckpt").iterdir()}


def versions(folder: Path) -> dict[str, ts.VersionInfo]:
    policy = "version: 1\ntiers:\n" + "".join(
        f"  {name}: {{type: nvme, path: {folder / name}}}\n" for name in ("fast", "slow")
    )
    with ts.Checkpointer(ts.Policy.parse(policy), "small") as ckpt:
        return {version.id: version for version in ckpt.versions()}


def state(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave that have trained without interruption."""
    folder = tmp_path_factory.mktemp("trained")
    run(2, "train", folder, "steps")
    return folder


@pytest.mark.parametrize(
    ("kind", "killed_at", "which"), [pytest.param("steps", 17, "all", marks=pytest.mark.soak), ("link", 14, "1")]
)
def test_after_a_kill_every_later_loss_is_the_same_to_the_last_bit(
    trained: Path, kind: str, killed_at: int, which: str, tmp_path: Path
) -> None:
    with Torchrun(2, f"{JOB}:train", tmp_path, kind, killed_at, which) as job:
        assert job.code() != 0
    assert max(losses(tmp_path, 1)) == killed_at
    run(2, "train", tmp_path, kind)
    for rank in range(2):
        truth, found = losses(trained, rank), losses(tmp_path, rank)
        assert sorted(found) == sorted(truth) == list(range(30))
        assert {step: told[-1] for step, told in found.items()} == {step: told[0] for step, told in truth.items()}
        again = [step for step, told in found.items() if len(told) > 1]
        assert 0 < again[0] <= killed_at, "it went on from a version"
    assert losses(trained, 0) != losses(trained, 1)
    assert difference(state(trained, "state-2.pt"), state(tmp_path, "state-2.pt")) == ""


def test_tiers_have_the_checkpoints_that_lightning_keeps_and_no_others(trained: Path) -> None:
    kept, found = references(trained), versions(trained)
    assert set(kept) == {"last.ckpt", "step=21.ckpt", "step=6.ckpt"}
    assert {one["version"] for one in kept.values()} == set(found)
    for name, step in (("last.ckpt", 30), ("step=21.ckpt", 21), ("step=6.ckpt", 6)):
        version = found[kept[name]["version"]]
        assert (version.step, version.tiers) == (step, ("fast", "slow"))
        assert [tag.startswith(TAG) for tag in version.tags] == [True]
    assert found[kept["step=6.ckpt"]["version"]].metadata["score"] == 0
    packs = {path.name.split("-")[1] for path in (trained / "fast" / "packs" / "small").iterdir()}
    assert packs == {"0", "1"}, "each rank has written its own shards"


def test_best_and_last_are_loaded_by_lightning_and_without_a_strategy(tmp_path: Path) -> None:
    assert run(2, "best_and_last", tmp_path) == [["ended"], ["ended"]]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (2, 1, ""),
        pytest.param(2, 3, "", marks=pytest.mark.soak),
        (2, 2, "tensor"),
        pytest.param(1, 2, "", marks=pytest.mark.soak),
    ],
)
def test_another_number_of_ranks_or_mesh_restores_the_same_state(
    trained: Path, before: int, after: int, kind: str, tmp_path: Path
) -> None:
    folder = trained
    if before != 2:
        folder = tmp_path
        run(before, "train", folder, "steps")
    run(after, "resume", folder, folder / "ckpt" / "last.ckpt", kind)
    truth, found = state(folder, f"state-{before}.pt"), state(folder, f"resumed-{after}.pt")
    assert truth["step"] == 30
    assert difference(truth, found) == ""


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_save_that_fails_on_one_rank_raises_on_all(failing: int, tmp_path: Path) -> None:
    said = run(2, "one_rank_fails", tmp_path, failing)
    assert said[failing][0].startswith("said 4 CaptureError state_dict.bad")
    assert said[1 - failing][0].startswith(f"said 4 RankFailed rank {failing}: CaptureError: state_dict.bad")
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["2.ckpt", "6.ckpt"]
    assert [version.step for version in versions(tmp_path).values()] == [2, 6]


def test_what_is_saved_after_a_restore_is_waited_for_only_before_a_requeue(trained: Path, tmp_path: Path) -> None:
    folder, refused = tmp_path / "copied", "a Linear in a checkpoint would come back as its state_dict"
    shutil.copytree(trained, folder)
    for rank, said in enumerate(run(2, "goes_on", folder)):
        if rank == 0:
            assert said[0] == "step.ckpt captured"
        assert said[1] == "hpc_ckpt_1.ckpt durable"
        assert said[2].startswith("odd.ckpt RankFailed rank 0" if rank else "odd.ckpt CaptureError")
        assert refused in said[2]
    assert not (folder / "odd.ckpt").exists()


def test_what_does_not_fit_is_refused_by_all_ranks(tmp_path: Path) -> None:
    first, second = run(2, "wrong", tmp_path)
    assert first == ["refused FileNotFoundError", "refused StateMismatch", "ended"]
    assert second == ["refused RankFailed", "refused StateMismatch", "ended"]


def test_fsdp1_goes_on_to_the_last_bit_after_a_kill(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run(2, "train", whole, "wrapped")
    with Torchrun(2, f"{JOB}:train", killed, "wrapped", 17) as job:
        assert job.code() != 0
    run(2, "train", killed, "wrapped")
    for rank in range(2):
        truth, found = losses(whole, rank), losses(killed, rank)
        assert {step: told[-1] for step, told in found.items()} == {step: told[0] for step, told in truth.items()}
        assert 0 < min(step for step, told in found.items() if len(told) > 1) <= 17


@pytest.mark.parametrize(
    ("kind", "option"),
    [(TierModelParallelStrategy, "save_distributed_checkpoint"), (TierFSDPStrategy, "state_dict_type")],
)
def test_gathering_on_one_rank_is_refused(kind: Any, option: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=option):
        kind(ts.Policy.parse(POLICY.format(place=tmp_path)), run="r", **{option: "full"})
    with pytest.raises(TypeError, match="storage_options"):
        kind(ts.Policy.parse(POLICY.format(place=tmp_path)), run="r").save_checkpoint({}, "x", storage_options={})
