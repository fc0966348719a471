"""Folders of Megatron-core, made as it makes them, are imported without Megatron and without running code."""

from __future__ import annotations

import io
import json
import random
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_calls import Call

import tierstate as ts
from tierstate.files.importing import import_version

GENERATORS = {"random": random.getstate(), "numpy": np.random.RandomState(1).get_state(), "torch": torch.arange(3)}


def written(folder: Path, *, common: Any = None, **objects: Any) -> Path:
    """A folder with a tensor and objects, each a list of one item, as Megatron's strategy gives them to DCP."""
    state = {"decoder.layers.mlp.linear_fc1.weight": torch.arange(24.0).view(2, 3, 4) / 7}
    state |= {"rng_state/shard_0_1": [GENERATORS], **objects}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if common is not None:
        torch.save(common, folder / "common.pt")
    return folder


COMMON = {"iteration": 7, "args": Namespace(lr=0.5, dtype=torch.bfloat16), "groups": [{"betas": (0.9, 0.99)}]}
PLAIN = COMMON | {"args": {"argparse.Namespace": {"lr": 0.5, "dtype": torch.bfloat16}}}


@pytest.mark.parametrize("later", [False, True])
def test_tensors_objects_and_the_common_state(later: bool, policy: Path, tmp_path: Path) -> None:
    extra = {"layer._extra_state/shard_0_1": [io.BytesIO(b"fp8")]}
    own = {"common_state/shard_0_1": [COMMON]} if later else {}  # later versions have it as an object
    folder = written(tmp_path / "iter_7", common=None if later else COMMON, **extra, **own)
    with ts.Checkpointer(policy, "run") as ckpt:
        info = import_version(ckpt, folder)
        found = ckpt.load()
    assert info.step == 7
    assert found.pop("common") == PLAIN
    assert found["layer._extra_state/shard_0_1"] == {"io.BytesIO": b"fp8"}
    assert torch.equal(found["decoder.layers.mlp.linear_fc1.weight"], torch.arange(24.0).view(2, 3, 4) / 7)
    numbers = found["rng_state/shard_0_1"]
    assert numbers["random"] == GENERATORS["random"]
    assert np.array_equal(numbers["numpy"][1], GENERATORS["numpy"][1])
    assert set(found) == {
        "decoder.layers.mlp.linear_fc1.weight",
        "layer._extra_state/shard_0_1",
        "rng_state/shard_0_1",
    }


def test_a_class_in_the_common_state_is_refused_or_left_out(call: Call, policy: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "iter_7", common={"opens": open})
    refused = call("import", "-p", policy, "-r", "run", folder)
    assert refused.status == 2
    assert "--skip-values" in refused.err
    assert call("import", "-p", policy, "-r", "run", folder, "--skip-values").status == 0
    with ts.Checkpointer(policy, "run") as ckpt:
        assert "common" not in ckpt.load()


def test_a_folder_of_another_kind_is_one_of_dcp(policy: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "iter_7")
    (folder / "metadata.json").write_text("[]")
    # NumPy's generator is read where Megatron has it, and nowhere else.
    with ts.Checkpointer(policy, "run") as ckpt, pytest.raises(ts.Unsafe):
        import_version(ckpt, folder)
