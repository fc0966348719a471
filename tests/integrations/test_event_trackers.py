"""Trackers get the events of a run as numbers."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import policy, tier

import tierstate as ts
from tierstate.integrations.event_trackers import to_mlflow, to_tensorboard, to_wandb


def save(place: Path, begin: Any) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)}), "run") as ckpt:
        end = begin(ckpt)
        for step in (1, 2):
            ckpt.save({"w": torch.ones(1000)}, step).wait("lustre")
        end()
        ckpt.save({"w": torch.ones(1000)}, 3)


def test_tensorboard(place: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int | None]] = []

        def add_scalar(self, name: str, value: float, step: int | None) -> None:
            self.scalars.append((name, value, step))

    writer = Writer()

    def begin(ckpt: ts.Checkpointer) -> Any:
        end = to_tensorboard(ckpt, writer)
        return lambda: (ckpt._events.close(), end())

    save(place, begin)
    assert {(name, step) for name, _, step in writer.scalars} == {
        (name, step)
        for step in (1, 2)
        for name in (
            "tierstate/blocked_seconds",
            "tierstate/nvme/written_bytes",
            "tierstate/nvme/committed_seconds",
            "tierstate/lustre/written_bytes",
            "tierstate/lustre/copy_seconds",
        )
    }


@pytest.mark.filterwarnings("ignore")  # of what mlflow uses
def test_mlflow(place: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as active:

        def begin(ckpt: ts.Checkpointer) -> Any:
            end = to_mlflow(ckpt)
            return lambda: (ckpt._events.close(), end())

        save(place, begin)
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "tierstate/nvme/committed_seconds")
    assert [one.step for one in history] == [1, 2]


def test_wandb(place: Path, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="test") as run:

        def begin(ckpt: ts.Checkpointer) -> Any:
            end = to_wandb(ckpt)
            return lambda: (ckpt._events.close(), end())

        save(place, begin)
        for step in range(3):
            run.log({"loss": 1.0}, step=step)  # W&B's steps are the training's
        assert run.step <= 3
        assert run.summary["loss"] == 1.0
        assert run.summary["tierstate/step"] == run.summary["tierstate/lustre/step"] == 2
        assert run.summary["tierstate/lustre/written_bytes"] >= 0


def test_a_row_of_wandb_has_the_step_of_each_value(place: Path) -> None:
    """A slow tier gets a version when the next one is saved already, and the training has logged nothing between."""
    pytest.importorskip("wandb")

    class WandbRun:
        def __init__(self) -> None:
            self.row: dict[str, Any] = {}
            self.axes: dict[str, str] = {}

        def define_metric(self, name: str, step_metric: str = "") -> None:
            self.axes |= {name: step_metric} if step_metric else {}

        def log(self, values: dict[str, Any], commit: bool) -> None:
            assert not commit
            self.row |= values

    run, steps = WandbRun(), {"saved": 24, "restored": 24, "committed": 24, "cascaded": 12}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)}), "run") as ckpt:
        to_wandb(ckpt, run)
        for kind, step in steps.items():
            where = {"committed": "nvme", "cascaded": "lustre"}.get(kind, "")
            ckpt._events.emit(kind, tier=where, step=step, seconds=1.0, nbytes=2)
    shown = {
        name: run.row[axis]
        for name in run.row
        for pattern, axis in run.axes.items()
        if name != axis and fnmatch.fnmatchcase(name, pattern)
    }
    assert shown == {
        "tierstate/blocked_seconds": 24,
        "tierstate/restore_seconds": 24,
        "tierstate/nvme/committed_seconds": 24,
        "tierstate/nvme/written_bytes": 24,
        "tierstate/lustre/copy_seconds": 12,
        "tierstate/lustre/written_bytes": 12,
    }


def test_without_a_run(place: Path) -> None:
    wandb = pytest.importorskip("wandb")
    assert wandb.run is None
    with pytest.raises(RuntimeError, match="there is no W&B run"):
        to_wandb(None)  # type: ignore[arg-type]
