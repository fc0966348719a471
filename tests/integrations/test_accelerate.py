"""Hugging Face's accelerate itself: `save_state`, SIGKILL, `load_state`, and every later loss to the last bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.accelerate_job import STEPS, Job, run

import tierstate as ts
from tierstate.integrations.accelerate import AcceleratorVersions, use

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["support.accelerate_job"])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """accelerate's state is one per process; each test is a process of its own, as it were."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


@pytest.fixture
def policy(tmp_path: Path) -> str:
    file = tmp_path / "policy.yaml"
    file.write_text(f"version: 1\narena: {{size: 64MiB}}\ntiers: {{nvme: {{type: nvme, path: '{tmp_path}/tier'}}}}\n")
    return str(file)


def new_job(*args: Any, **kwargs: Any) -> Job:
    _fresh.__wrapped__()  # type: ignore[attr-defined]
    return Job(*args, **kwargs)


def trained(job: Job, **given: Any) -> dict[int, str]:
    found: dict[int, str] = {}
    job.train(found.__setitem__, **given)
    return found


def step_of(folder: Path) -> int:
    return int(json.loads((folder / "tierstate.json").read_text())["step"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "save"),
    [
        pytest.param({}, None, id="plain"),
        pytest.param({"accumulate": 2}, [2, 4, 6, 8, 10, 12], id="accumulated", marks=pytest.mark.soak),
        pytest.param({"mixed_precision": "bf16"}, None, id="bf16", marks=pytest.mark.soak),
        pytest.param({"stateful": True}, None, id="stateful loader"),
        pytest.param({}, [5, 10], id="at the end of an epoch"),
    ],
)
def test_killed_and_resumed_to_the_last_bit(
    given: dict[str, Any], save: list[int] | None, tmp_path: Path, policy: str
) -> None:
    whole = trained(new_job(tmp_path / "whole", **given))
    assert len(whole) == STEPS
    place = tmp_path / "job"
    first = 5 if save == [5, 10] else 4
    job = {"place": str(place), "policy": policy, "kill": 8, "wait": f"step_{first}", "given": given, "save": save}
    process = SERVER.Process(target=run, args=(job,))
    process.start()
    process.join(100)
    assert process.exitcode == -9
    before = dict(json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert before == {step: whole[step] for step in range(1, 9)}

    newest = max(place.glob("step_*"), key=step_of)
    again = new_job(place, policy, **given)
    again.accelerator.load_state(str(newest))
    done = step_of(newest)
    assert again.seen.samples == 4 * done
    losses = trained(again, done=done, save=save)
    assert losses == {step: whole[step] for step in range(done + 1, STEPS + 1)}
    again.accelerator.end_training()


def test_the_training_goes_on_while_its_state_is_captured(tmp_path: Path, policy: str) -> None:
    job = new_job(tmp_path, policy)
    trained(job, save=[2])
    assert job.versions is not None
    assert job.versions.ckpt._guard.lazy
    job.accelerator.end_training()


def test_whatever_keeps_a_version_from_its_folder_is_told(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstate.integrations.accelerate.saved_version", {}.__getitem__)
    job = new_job(tmp_path, policy)
    trained(job, save=[2])
    job.accelerator.end_training()
    assert "step_2 does not stand for a version: TypeError" in caplog.text


@pytest.mark.parametrize("stateful", [False, True], ids=["skipped", "stateful"])
@pytest.mark.parametrize("done", [3, 4, 5, 7])
def test_resumed_twice_in_one_epoch(done: int, stateful: bool, tmp_path: Path, policy: str) -> None:
    whole = trained(new_job(tmp_path / "whole", stateful=stateful))
    first = new_job(tmp_path, policy, stateful=stateful)
    trained(first, save=[done])
    first.accelerator.end_training()
    second = new_job(tmp_path, policy, stateful=stateful)
    second.accelerator.load_state(str(tmp_path / f"step_{done}"))
    assert trained(second, done=done, save=[done + 1]) == {step: whole[step] for step in range(done + 1, STEPS + 1)}
    second.accelerator.end_training()
    third = new_job(tmp_path, policy, stateful=stateful)
    third.accelerator.load_state(str(tmp_path / f"step_{done + 1}"))
    assert trained(third, done=done + 1, save=[]) == {step: whole[step] for step in range(done + 2, STEPS + 1)}
    third.accelerator.end_training()


@pytest.mark.parametrize("stateful", [False, True], ids=["skipped", "stateful"])
@pytest.mark.parametrize("done", [1, 3, 5, 8])
def test_a_loader_for_evaluation_goes_on_too(done: int, stateful: bool, tmp_path: Path, policy: str) -> None:
    """Also where it was not used before the save: its first iterator of all draws nothing if it is stateful."""
    given = {"stateful": stateful, "evaluates": True}
    whole = trained(new_job(tmp_path / "whole", **given))
    first = new_job(tmp_path, policy, **given)
    trained(first, save=[done])
    first.accelerator.end_training()
    second = new_job(tmp_path, policy, **given)
    second.accelerator.load_state(str(tmp_path / f"step_{done}"))
    assert trained(second, done=done, save=[]) == {step: whole[step] for step in range(done + 1, STEPS + 1)}
    second.accelerator.end_training()


@pytest.mark.parametrize("skips", [False, True])
def test_generators_wait_for_the_loader_of_the_last_restore(skips: bool, tmp_path: Path, policy: str) -> None:
    """Of two loaders; the restore before it was in the middle of the other one."""

    def made(seed: int) -> tuple[Accelerator, AcceleratorVersions, list[Any]]:
        _fresh.__wrapped__()  # type: ignore[attr-defined]
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        versions = use(accelerator, policy, "two")
        data = [torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2) for _ in range(2)]
        return accelerator, versions, list(accelerator.prepare(*data))

    accelerator, versions, loaders = made(1)
    for name, loader in zip("ab", loaders, strict=True):
        drawn = []
        for place, _ in enumerate(loader):
            drawn.append(float(torch.rand(1)))
            if place == 1:
                accelerator.save_state(str(tmp_path / name))
    versions.close()
    accelerator, versions, loaders = made(9)
    for name in "ab":
        accelerator.load_state(str(tmp_path / name))
    for _ in accelerator.skip_first_batches(loaders[0], 1) if skips else loaders[0]:
        torch.rand(1)
    assert [float(torch.rand(1)) for _ in accelerator.skip_first_batches(loaders[1], 2)] == drawn[2:]
    versions.close()


@pytest.mark.parametrize("stateful", [False, True], ids=["skipped", "stateful"])
@pytest.mark.parametrize("done", [3, 5])
def test_saved_again_before_the_first_batch_after_a_restore(
    done: int, stateful: bool, tmp_path: Path, policy: str
) -> None:
    whole = trained(new_job(tmp_path / "whole", stateful=stateful))
    first = new_job(tmp_path, policy, stateful=stateful)
    trained(first, save=[done])
    first.accelerator.end_training()
    second = new_job(tmp_path, policy, stateful=stateful)
    second.accelerator.load_state(str(tmp_path / f"step_{done}"))
    second.accelerator.save_state(str(tmp_path / f"again_{done}"))
    second.accelerator.end_training()
    third = new_job(tmp_path, policy, stateful=stateful)
    third.accelerator.load_state(str(tmp_path / f"again_{done}"))
    assert trained(third, done=done, save=[]) == {step: whole[step] for step in range(done + 1, STEPS + 1)}
    third.accelerator.end_training()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param({}, "", id="seedable"),
        pytest.param({"stateful": True}, "", id="seedable and stateful"),
        pytest.param({"seedable": False}, "use_seedable_sampler=True", id="drawn"),
        pytest.param({"seedable": False, "stateful": True}, "use_seedable_sampler=True", id="drawn, stateful"),
        pytest.param({"stateful": True, "workers": 1}, "stateful loader with workers", id="workers in the first epoch"),
    ],
)
def test_an_order_that_cannot_be_made_again_is_told(
    given: dict[str, Any], why: str, tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = new_job(tmp_path, policy, **given)
    trained(first, save=[3, 4, 10])
    first.accelerator.end_training()
    told = [line for line in caplog.messages if "order of an interrupted epoch" in line]
    assert len(told) == bool(why), "once"
    for step, times in ((3, 1), (10, 0)):  # within the first epoch, and at the end of the second one
        caplog.clear()
        again = new_job(tmp_path, policy, **given)
        again.accelerator.load_state(str(tmp_path / f"step_{step}"))
        again.accelerator.end_training()
        told += (now := [line for line in caplog.messages if "order of an interrupted epoch" in line])
        assert len(now) == (times if why else 0)
    assert all(why in line for line in told)


def test_no_file_of_accelerate_itself_is_written(tmp_path: Path, policy: str) -> None:
    job = new_job(tmp_path, policy)
    trained(job, save=[2, 4])
    job.accelerator.end_training()
    for step in (2, 4):
        assert [file.name for file in (tmp_path / f"step_{step}").iterdir()] == ["tierstate.json"]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in files if file.read_bytes()[:4] == b"PK\x03\x04"], "torch.save writes zip files"


def test_named_by_accelerate_with_a_limit(tmp_path: Path, policy: str) -> None:
    whole = trained(new_job(tmp_path / "whole"))
    job = new_job(tmp_path, policy, naming=True, limit=2)
    trained(job, save=[2, 4, 6])
    assert job.versions is not None
    job.versions.wait()
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    job.accelerator.end_training()  # retention drops a version some time after the one that it makes room for
    with ts.Checkpointer(policy, job.versions.ckpt.run) as ckpt:
        assert [version.metadata["folder"] for version in ckpt.versions()] == ["checkpoint_1", "checkpoint_2"]
    again = new_job(tmp_path, policy, naming=True, limit=2)
    again.accelerator.load_state()
    assert trained(again, done=6, save=[8]) == {step: whole[step] for step in range(7, STEPS + 1)}
    again.accelerator.end_training()
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


def test_a_limit_counts_folders_with_numbers_only(tmp_path: Path, policy: str) -> None:
    job, place = new_job(tmp_path, policy, naming=True, limit=2), tmp_path / "checkpoints"
    trained(job, save=[2])
    assert job.versions is not None
    job.versions.wait()
    for name in ("checkpoint_best", "checkpoint_", "checkpoint_0_copy", "checkpoint_²"):
        shutil.copytree(place / "checkpoint_0", place / name)
    kept = {folder.name for folder in place.iterdir()} - {"checkpoint_0"}
    for step in (4, 6, 8):
        job.accelerator.save_state(step=step)
    job.versions.wait()
    assert {folder.name for folder in place.iterdir()} == {"checkpoint_2", "checkpoint_3", *kept}
    job.accelerator.end_training()


def test_a_save_that_failed_is_raised_by_the_next_one(tmp_path: Path, policy: str) -> None:
    job = new_job(tmp_path, policy)
    job.accelerator.save_state(str(tmp_path / "step_1"))
    assert job.versions is not None
    job.versions.wait()
    (tmp_path / "tier").rename(tmp_path / "away")
    (tmp_path / "tier").touch()
    job.accelerator.save_state(str(tmp_path / "step_2"))
    job.versions.wait()  # its thread knows of the failure, and has no folder to write
    (tmp_path / "tier").unlink()
    (tmp_path / "away").rename(tmp_path / "tier")
    with pytest.raises(ts.TierstateError, match="what became of the save of step 2"):
        job.accelerator.save_state(str(tmp_path / "step_3"))
    job.accelerator.save_state(str(tmp_path / "step_3"))
    job.accelerator.end_training()
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_1", "step_3"]


def test_a_folder_that_is_lost_is_found_by_its_name(tmp_path: Path, policy: str) -> None:
    job = new_job(tmp_path, policy)
    trained(job, save=[2, 4])
    job.accelerator.end_training()
    shutil.rmtree(tmp_path / "step_2")
    again = new_job(tmp_path, policy)
    again.accelerator.load_state(str(tmp_path / "step_2"))
    assert again.seen.samples == 8
    (tmp_path / "step_4" / "tierstate.json").write_bytes(b"")  # a crash of the machine
    again.accelerator.load_state(str(tmp_path / "step_4"))
    assert again.seen.samples == 16
    with pytest.raises(ts.NotFound, match="step_3 does not exist, and run 'job' has no version"):
        again.accelerator.load_state(str(tmp_path / "step_3"))
    again.accelerator.end_training()


def test_folders_of_accelerate_itself_are_loaded_as_ever(tmp_path: Path, policy: str) -> None:
    plain = new_job(tmp_path)
    trained(plain, save=[])
    plain.accelerator.save_state(str(tmp_path / "plain"))
    job = new_job(tmp_path, policy)
    job.accelerator.load_state(str(tmp_path / "plain"))
    assert job.seen.samples == 4 * STEPS
    assert all(torch.equal(one, other) for one, other in zip(job.net.parameters(), plain.net.parameters(), strict=True))
    job.accelerator.end_training()


def test_a_folder_that_accelerate_itself_has_written_anew_is_not_taken_for_the_version(
    tmp_path: Path, policy: str
) -> None:
    job = new_job(tmp_path, policy)
    trained(job, save=[4])
    job.accelerator.end_training()
    plain, folder = new_job(tmp_path), tmp_path / "step_4"
    trained(plain, save=[])
    plain.accelerator.save_state(str(folder))
    job, written = new_job(tmp_path, policy), (folder / "tierstate.json").stat().st_mtime
    for file in folder.glob("random_states_*.pkl"):
        os.utime(file, (written + 1, written + 1))
    with pytest.raises(ts.StateMismatch, match=r"version of step 4, .* later: delete tierstate\.json"):
        job.accelerator.load_state(str(folder))
    os.utime(folder / "tierstate.json", (written + 2, written + 2))  # saved as a version again
    job.accelerator.load_state(str(folder))
    assert job.seen.samples == 16
    (folder / "tierstate.json").unlink()
    job.accelerator.load_state(str(folder))
    assert job.seen.samples == 4 * STEPS
    job.accelerator.end_training()


def test_errors_say_what_does_not_fit(tmp_path: Path, policy: str) -> None:
    job = new_job(tmp_path, policy)
    trained(job, save=[2])
    job.accelerator.end_training()
    folder = str(tmp_path / "step_2")
    wide = new_job(tmp_path, policy, width=48)
    with pytest.raises(ts.StateMismatch, match=r"first\.weight.*\(48, 16\) here, \(32, 16\) in") as error:
        wide.accelerator.load_state(folder)
    assert f"while resuming from {folder}" in error.value.__notes__
    wide.accelerator.end_training()
    other = new_job(tmp_path)
    versions = use(other.accelerator, policy, run="other")
    with pytest.raises(ts.StateMismatch, match="is of the run 'job', and here is 'other'"):
        other.accelerator.load_state(folder)
    other.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(ValueError, match="hooks of register_save_state_pre_hook write files of their own"):
        other.accelerator.save_state(folder)
    versions.close()
    assert "save_state" not in vars(other.accelerator)


def test_a_folder_whose_new_reference_was_not_written_stands_for_what_it_was_given_last(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The process was killed when `keep` had dropped the version before, or the folder's disk was full."""
    Path(policy).write_text(Path(policy).read_text().replace("tier'}", "tier', keep: {last: 1}}"))
    folder = tmp_path / "last"
    file = folder / "tierstate.json"
    job = new_job(tmp_path, policy)
    job.accelerator.save_state(str(folder), step=7)
    job.accelerator.end_training()
    written = file.read_text()
    job = new_job(tmp_path, policy)
    trained(job, save=[])
    job.accelerator.save_state(str(folder), step=3)
    job.accelerator.end_training()
    file.write_text(written)
    again = new_job(tmp_path, policy)
    again.accelerator.load_state(str(folder))
    assert again.seen.samples == 4 * STEPS
    assert "names a version that is gone; step 3 was saved to it later" in caplog.text
    # What is older than what the folder names is another matter, and so is a folder of which that is not known.
    for change in ({"seq": 10**12 - 1}, {"seq": 0}):
        file.write_text(json.dumps(json.loads(written) | change))
        with pytest.raises(ts.NotFound, match="no version with id"):
            again.accelerator.load_state(str(folder))
    again.accelerator.end_training()
