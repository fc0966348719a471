"""DeepSpeed's ZeRO in whole parameters: other numbers of ranks, other stages, and what its own script makes of it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from support.deepspeed_job import policy
from support.equality import same
from support.state_strategies import arrays
from support.torchrun import Torchrun

import tierstate as ts
from tierstate.files.importing import import_version

pytest.importorskip("deepspeed")

CONFIGS: dict[str, dict[str, Any]] = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-2-bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "zero-3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40}},
    "bf16-optimizer": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}
TRAINED = ("first.weight", "first.bias", "last.weight", "last.bias")


def run(ranks: int, function: str, folder: Path, config: str, *args: object) -> None:
    folder.mkdir(exist_ok=True)
    job = f"support.deepspeed_universal_job:{function}"
    with Torchrun(ranks, job, folder, json.dumps(CONFIGS[config]), *args) as started:
        started.wait()


def reported(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.pt")
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert set(one) == set(other)
    return [
        key
        for key, value in one.items()
        if not (torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key])
    ]


@contextmanager
def without_warnings() -> Iterator[None]:
    """In this process DeepSpeed is imported, whose own modules warn."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def exported(folder: Path) -> Path:
    return export_universal()(policy(str(folder)), "job", folder / "universal/tag", step=3)


def export_universal() -> Callable[..., Path]:
    with without_warnings():
        os.environ["DS_ACCELERATOR"] = "cpu"
        from tierstate.integrations import deepspeed as integration

    found: Callable[..., Path] = integration.export_universal
    return found


def by_deepspeed(folder: Path) -> Path:
    """What DeepSpeed's script makes of the folder that DeepSpeed has saved."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", folder / "native/tag"]
    command += ["--output_folder", folder / "script/tag", "--num_extract_workers", 1, "--num_merge_workers", 1]
    command += ["--inject_missing_state"]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=env)
    return folder / "script/tag"


def check_as_the_script(made: Path, script: Path, *, bytes_too: bool) -> None:
    """Each parameter's files are those of DeepSpeed's script."""
    for name in TRAINED:
        there = {path.name for path in (script / "zero" / name).iterdir()}
        assert {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"} <= there
        assert {path.name for path in (made / "zero" / name).iterdir()} == there | {"step.pt"}
        for file in there:
            mine, theirs = made / "zero" / name / file, script / "zero" / name / file
            if bytes_too:
                assert mine.read_bytes() == theirs.read_bytes()
            else:  # for ZeRO-3 it saves them flat
                assert torch.equal(torch.load(mine)["param"].flatten(), torch.load(theirs))


def check_imported(folder: Path, truth: dict[str, Any]) -> None:
    """The version, DeepSpeed's folder and both universal ones are the same state of whole parameters."""
    uri = folder / "policy.yaml"
    uri.write_text(f"version: 1\ntiers: {{disk: {{type: nvme, path: {folder}/tier}}}}\n")
    sources = [f"tierstate://{uri}/job", folder / "native/tag", folder / "universal/tag", folder / "script/tag"]
    for i, source in enumerate(sources):
        with ts.Checkpointer(policy(str(folder / "imported")), f"run-{i}") as ckpt:
            assert import_version(ckpt, source).step == 3
            found = ckpt.load()
        assert found["deepspeed"]["model_states"]["extra"] == {"text": "ü", "pair": (1, 2.5)}
        for name in TRAINED:
            assert torch.equal(found["model"][name], truth[f"{name}.fp32"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found["optimizer"][name][key], truth[f"{name}.{key}"])
        for name in ("calls", "mean"):
            assert torch.equal(found["model"][name], truth[name])
        if i < 3 or "frozen.weight" in found["model"]:  # DeepSpeed's script has no frozen parameter of ZeRO-3
            assert torch.equal(found["model"]["frozen.weight"], truth["frozen.weight"])


@pytest.mark.parametrize(
    ("name", "states", "said"),
    [
        ("../w", {}, "name of a folder"),
        ("optimizer_state.pt", {}, "name of a folder"),
        ("w", {"count": 3}, "count"),
        ("w", {"rows": torch.ones(3)}, "rows"),
        ("w", {"../rows": torch.ones(3, 2)}, "name of a folder"),
    ],
)
def test_what_a_universal_folder_has_no_place_for(name: str, states: Any, said: str, tmp_path: Path) -> None:
    rest = {"model_states": {"global_steps": 3}, "optimizer_state": {"param_groups": []}}
    state = {"model": {name: torch.ones(3, 2)}, "optimizer": {name: states}, "deepspeed": rest}
    with ts.Checkpointer(policy(str(tmp_path)), "job") as ckpt:
        ckpt.save(state, step=3).wait()
    with pytest.raises(ts.StateMismatch, match=said):
        exported(tmp_path)
    assert not list((tmp_path / "universal").iterdir())


@given(arrays())
def test_arrays_of_the_client_state_come_along(array: Any) -> None:
    model_states = {"global_steps": 3, "rng": ("MT19937", array)}
    rest = {"model_states": model_states, "optimizer_state": {"param_groups": []}}
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"w": {}}, "deepspeed": rest}
    with tempfile.TemporaryDirectory() as folder:
        with ts.Checkpointer(policy(folder), "job") as ckpt:
            ckpt.save(state, step=3).wait()
        made = exported(Path(folder))
        found = torch.load(made / "mp_rank_00_model_states.pt", weights_only=False)
    name, came = found["rng"]
    # As from DeepSpeed's own files: NumPy pickles every array in the byte order of the machine, and of records not what
    # is between their fields.
    right = pickle.loads(pickle.dumps(array))
    assert (name, came.dtype, came.shape) == ("MT19937", right.dtype, right.shape)
    assert np.array_equal(came, right) if right.dtype.names else same(came, right)


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "universal/tag").mkdir(parents=True)
    with pytest.raises(ts.AlreadyExists):
        exported(tmp_path)
    with ts.Checkpointer(policy(str(tmp_path)), "job") as ckpt:
        ckpt.save({"model": torch.ones(3)}, step=3).wait()
    (tmp_path / "universal/tag").rmdir()
    with pytest.raises(ts.StateMismatch, match="ZeRO"):
        exported(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("config", CONFIGS)
def test_another_number_of_ranks(config: str, before: int, after: int, tmp_path: Path) -> None:
    run(before, "save", tmp_path, config)
    truth = reported(tmp_path, "saved")
    made, script = exported(tmp_path), by_deepspeed(tmp_path)
    assert (made.parent / "latest_universal").read_text() == "tag"
    assert {path.name for path in made.parent.iterdir()} == {"tag", "latest_universal"}
    check_as_the_script(made, script, bytes_too=config != "zero-3")
    check_imported(tmp_path, truth)

    run(after, "resume", tmp_path, config, made.parent)
    left = {"calls", "mean", "frozen.weight", "frozen.bias"}  # DeepSpeed loads no buffers and frozen parameters
    left |= {"groups"} if config == "zero-3" else set()  # and gives all groups what the first one has
    assert set(differing(truth, reported(tmp_path, "resumed"))) <= left

    run(after, "load", tmp_path, config)
    assert differing(truth, reported(tmp_path, "resumed")) == []
    assert differing(reported(tmp_path, "next"), reported(tmp_path, "went_on")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [("zero-3", "zero-1"), ("zero-1", "zero-3")])
def test_another_stage(saved: str, loaded: str, tmp_path: Path) -> None:
    run(2, "save", tmp_path, saved)
    truth = reported(tmp_path, "saved")
    run(2, "load", tmp_path, loaded)
    assert differing(truth, reported(tmp_path, "resumed")) == []
    assert differing(reported(tmp_path, "next"), reported(tmp_path, "went_on")) == []


@pytest.mark.slow
def test_no_older_checkpoint_is_loaded_where_the_newest_version_cannot_be_read(tmp_path: Path) -> None:
    run(2, "save", tmp_path, "zero-1")
    with ts.Checkpointer(policy(str(tmp_path)), "job") as ckpt:
        ckpt.save({"model": torch.ones(3)}, step=9).wait()
    *_, newest = sorted((tmp_path / "tier/versions/job").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    for ranks in (2, 1):
        run(ranks, "refuse", tmp_path, "zero-1")


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero-1", "zero-3"])
def test_weights_without_the_optimizer(config: str, tmp_path: Path) -> None:
    run(2, "save", tmp_path, config)
    truth = reported(tmp_path, "saved")
    weights = {key: value for key, value in truth.items() if not key.endswith((".exp_avg", ".exp_avg_sq"))}
    for ranks in (2, 1):
        run(ranks, "load_weights", tmp_path, config)
        assert differing(weights, reported(tmp_path, "weights")) == ["groups"]
