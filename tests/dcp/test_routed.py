"""Code that gives DCP only a path saves and loads through the tiers."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_jobs import find_load_step
from support.dcp_jobs import policy_text as text
from torch.distributed.checkpoint import _storage_utils, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

import tierstate as ts
from tierstate.dcp import TierReader, TierWriter, routed


def loaded(path: Any, **how: Any) -> float:
    into = {"w": torch.zeros(3)}
    dcp.load(into, checkpoint_id=path, **how)
    return float(into["w"][0])


def test_paths_are_steps_and_other_names_are_tags(place: Path) -> None:
    out = place / "out"
    before = vars(_storage_utils).copy(), vars(state_dict_saver).copy()
    with routed(text(place), "run", metadata={"loss": 2}):
        for step in (1, 2):
            dcp.save({"w": torch.full((3,), float(step))}, checkpoint_id=out / f"step-{step}")
        dcp.save({"w": torch.full((3,), 7.0)}, checkpoint_id=str(out / "epoch=0-step=7-v1.ckpt"))
        dcp.save({"w": torch.full((3,), 9.0)}, checkpoint_id=out / "last.ckpt")
        found = [loaded(out / name) for name in ("step-1", "step-2/", "epoch=0-step=7.ckpt", "last.ckpt")]
        assert found == [1, 2, 7, 9]
        dcp.save({"w": torch.full((3,), 10.0)}, checkpoint_id=out / "last.ckpt")
        assert loaded(out / "last.ckpt") == 10
        with pytest.raises(CheckpointException, match="run 'run' has no tag 'best'"):
            loaded(out / "best")
        with pytest.raises(ValueError, match="cannot be a tag"):
            dcp.save({"w": torch.ones(3)}, checkpoint_id=out / "a name")
    assert (vars(_storage_utils), vars(state_dict_saver)) == before
    assert not out.exists()
    with ts.Checkpointer(ts.Policy.parse(text(place)), "run") as ckpt:
        assert [(v.step, v.tags, v.metadata) for v in ckpt.versions()] == [
            (1, (), {"loss": 2}),
            (2, (), {"loss": 2}),
            (7, (), {"loss": 2}),
            (8, (), {"loss": 2}),
            (9, ("last.ckpt",), {"loss": 2}),
        ]


def test_asynchronous_saves_are_routed_to_their_end(place: Path) -> None:
    """DCP chooses the storage in a thread, which may begin after the block."""
    out = place / "out"
    with routed(text(place), "run"):
        made = dcp.async_save({"w": torch.full((3,), 4.0)}, checkpoint_id=out / "step-4")
    assert isinstance(made, Future)
    made.result()
    assert not out.exists()
    assert loaded(None, storage_reader=TierReader(text(place), "run", step=4)) == 4


def test_a_marker_is_found_by_tools_and_told_from_a_checkpoint_of_dcp(place: Path) -> None:
    out = place / "out"
    dcp.save({"w": torch.full((3,), 1.0)}, checkpoint_id=out / "step-1")  # before the code was routed
    with routed(text(place), "run", marker=True):
        assert loaded(out / "step-1") == 1
        dcp.save({"w": torch.full((3,), 2.0)}, checkpoint_id=out / "step-2")
        assert find_load_step(out) == 2
        assert loaded(out / "step-2") == 2
    assert [path.name for path in (out / "step-2").iterdir()] == [".metadata"]
    dcp.save({"w": torch.ones(3)}, checkpoint_id=3, storage_writer=TierWriter(text(place), "run", marker=True))
    writer = TierWriter(text(place), "run", marker=True)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=out / "step-4", storage_writer=writer)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)  # without an id, and so without a folder
    assert find_load_step(out) == 4
    assert sorted(path.name for path in out.iterdir()) == ["step-1", "step-2", "step-4"]


def test_blocks_may_be_nested_and_explicit_storage_is_left_alone(place: Path) -> None:
    with routed(text(place), "outer"):
        with routed(text(place), "inner"):
            dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1")
        dcp.save({"w": torch.ones(3)}, checkpoint_id="step-2")
        dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(place / "own"))
        assert (place / "own" / ".metadata").is_file()
        assert loaded(None, storage_reader=dcp.FileSystemReader(place / "own")) == 1
    for run, step in (("inner", 1), ("outer", 2)):
        with ts.Checkpointer(ts.Policy.parse(text(place)), run) as ckpt:
            assert [v.step for v in ckpt.versions()] == [step]
