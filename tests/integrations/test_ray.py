"""Ray Train itself: workers report versions, one is killed by SIGKILL, and later losses are equal to the last bit."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")

import ray
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from support import ray_job
from support.equality import difference
from support.ray_job import STEPS, new_state

import tierstate as ts
from tierstate.integrations.ray import restore
from tierstate.integrations.version_folders import write_reference

TESTS = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine, with its processes, which end with it."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # it takes one report of each worker at a time
        warnings.simplefilter("ignore")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )
        yield
        ray.shutdown()


def policy_of(place: Path, keep: str = "all: true", more: str = "") -> str:
    return (
        f"version: 1\narena: {{size: 32MiB}}\nranks: {{timeout: 60s, silence: 20s}}\n{more}"
        f"tiers: {{nvme: {{type: nvme, path: '{place}/tier', keep: {{{keep}}}}}}}\n"
    )


def run(place: Path, size: int = 1, keep: int | None = None, policy: str = "", **job: Any) -> Result:
    """A whole job of Ray Train, that may restart once."""
    place.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        ray_job.train,
        train_loop_config={"place": str(place), "policy": policy or policy_of(place), **job},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=size),
        run_config=RunConfig(
            name="job",
            storage_path=str(place / "ray"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
        ),
    )
    return trainer.fit()


def logged(place: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / f"{rank}.jsonl").read_text().splitlines()]


def reference(folder: str) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "tierstate.json").read_text()))


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    run(tmp_path / "whole", 2)
    result = run(tmp_path / "job", 2, kill=1, kill_at=5)
    assert result.error is None
    for rank in range(2):
        right = [(line["step"], line["loss"]) for line in logged(tmp_path / "whole", rank)[1:]]
        before, after = attempts(tmp_path / "job", rank)
        assert (before[0]["began"], before[0]["version"]) == (0, None)
        assert [(line["step"], line["loss"]) for line in before[1:]] == right[: len(before) - 1]
        begun = after[0]["began"]
        assert 1 <= begun <= 5
        assert [(line["step"], line["loss"]) for line in after[1:]] == right[begun:]
    assert difference(*(saved(tmp_path / name) for name in ("whole", "job"))) == ""
    assert result.checkpoint is not None
    found = reference(result.checkpoint.path)
    assert (found["run"], found["step"]) == ("job", STEPS)
    files = [file for file in (tmp_path / "job/ray/job").glob("checkpoint_*/*") if file.is_file()]
    assert len(files) >= STEPS
    assert {file.name for file in files} == {"tierstate.json"}


def attempts(place: Path, rank: int) -> list[list[dict[str, Any]]]:
    """What a rank has logged, from each of its two beginnings."""
    found: list[list[dict[str, Any]]] = []
    for line in logged(place, rank):
        if "began" in line:
            found.append([])
        found[-1].append(line)
    assert len(found) == 2
    return found


def saved(place: Path) -> Any:
    with ts.Checkpointer(ts.Policy.parse(policy_of(place)), "job") as ckpt:
        return ckpt.load()


@pytest.mark.usefixtures("cluster")
def test_folders_go_as_ray_says_and_versions_as_the_policy_says(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, keep="last: 2")
    run(tmp_path, keep=3, policy=policy, until=5)
    result = run(tmp_path, keep=3, policy=policy)
    assert [line["began"] for line in logged(tmp_path) if "began" in line] == [0, 5]
    assert result.best_checkpoints is not None
    found = [checkpoint for checkpoint, _ in result.best_checkpoints]
    assert [reference(checkpoint.path)["step"] for checkpoint in found] == [6, 7, 8]
    assert len(list((tmp_path / "ray/job").glob("checkpoint_2*"))) == 3
    with ts.Checkpointer(ts.Policy.parse(policy), "job") as ckpt:
        assert [version.step for version in ckpt.versions()] == [7, 8]
        state, model = new_state()
        with pytest.raises(ts.NotFound) as gone:
            restore(ckpt, found[0], state)
        assert found[0].path in str(gone.value.__notes__)
        assert "let each tier keep at least as many" in str(gone.value.__notes__)
        assert state["step"] == 0
        info = restore(ckpt, found[1], state)
        assert (info is not None and info.step, state["step"]) == (7, 7)
        right = logged(tmp_path)[-1]
        assert (right["step"], right["loss"]) == (8, ray_job.one_step(state, model).hex())
    with ts.Checkpointer(ts.Policy.parse(policy), "other") as ckpt, pytest.raises(ts.StateMismatch, match="run 'job'"):
        restore(ckpt, found[1], state)


@pytest.mark.usefixtures("cluster")
def test_a_tier_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, more="on_failure: {action: warn}\n")
    result = run(tmp_path, policy=policy, broken=[3, 5])
    assert result.error is None
    assert len([line for line in logged(tmp_path) if "began" in line]) == 1
    assert result.best_checkpoints is not None
    found = [reference(checkpoint.path) for checkpoint, _ in result.best_checkpoints]
    assert [bool(one["version"]) for one in found] == [True] * 3 + [False] * 2 + [True] * 3
    assert [one["step"] for one in found] == list(range(1, STEPS + 1))
    with ts.Checkpointer(ts.Policy.parse(policy), "job") as ckpt:
        state, _ = new_state()
        info = restore(ckpt, result.best_checkpoints[4][0], state)
        assert (info is not None and info.step, state["step"]) == (STEPS, STEPS)


def test_a_torn_reference_restores_the_newest_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "tierstate.json").touch()
    with ts.Checkpointer(ts.Policy.parse(policy_of(tmp_path)), run="job") as ckpt:
        ckpt.save({"a": 1}, step=1).wait()
        state = {"a": 0}
        restored = restore(ckpt, Checkpoint(str(folder)), state)
    assert restored is not None
    assert (restored.step, state["a"]) == (1, 1)
    assert "is torn; the newest version is restored" in caplog.text


def test_a_restart_goes_on_where_keep_is_ahead_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that dies just after a save is durable restarts from the one before, which is dropped by then."""
    folder = Checkpoint(str(tmp_path / "checkpoint"))
    with ts.Checkpointer(ts.Policy.parse(policy_of(tmp_path, "last: 1")), run="job") as ckpt:
        ckpt.save({"a": 1}, step=1).wait()
        write_reference(folder.path, ckpt.info())
        ckpt.save({"a": 2}, step=2).wait()
    with ts.Checkpointer(ts.Policy.parse(policy_of(tmp_path, "last: 1")), run="job") as ckpt:
        state = {"a": 0}
        with pytest.raises(ts.NotFound):
            restore(ckpt, folder, state)  # outside of Ray
        for given in (None, Checkpoint(str(tmp_path / "other"))):
            monkeypatch.setattr(ray.train, "get_checkpoint", lambda given=given: given)
            with pytest.raises(ts.NotFound):
                restore(ckpt, folder, state)
        assert state["a"] == 0
        monkeypatch.setattr(ray.train, "get_checkpoint", lambda: Checkpoint(folder.path))
        restored = restore(ckpt, folder, state)
        assert restored is not None
        assert (restored.step, state["a"]) == (2, 2)
        assert "restarts from step 1, whose version is gone" in caplog.text
    with ts.Checkpointer(ts.Policy.parse(policy_of(tmp_path / "empty")), run="job") as ckpt, pytest.raises(ts.NotFound):
        restore(ckpt, folder, state)


def test_what_is_no_reference_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/model.pt").touch()
    with ts.Checkpointer(ts.Policy.parse(policy_of(tmp_path)), "job") as ckpt:
        state, _ = new_state()
        assert restore(ckpt, None, state) is None
        with pytest.raises(ts.StateMismatch, match=r"theirs has no tierstate\.json"):
            restore(ckpt, Checkpoint(tmp_path / "theirs"), state)
