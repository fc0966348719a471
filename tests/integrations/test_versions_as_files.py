"""Other libraries read the files of a version: `from_pretrained` of transformers, and pandas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

import tierstate as ts


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Where the versions of run ``gpt`` are."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"{{version: 1, arena: {{size: 64MiB}}, tiers: {{nvme: {{type: nvme, path: '{tmp_path}/t'}}}}}}")
    yield f"tierstate://{policy}/gpt"
    fsspec.filesystem("tierstate").close()


def save(tmp_path: Path, model: nn.Module) -> None:
    with ts.Checkpointer(tmp_path / "policy.yaml", run="gpt") as ckpt:
        ckpt.save({"model": model, "epoch": 2}, step=200).wait()


def test_from_pretrained(tmp_path: Path, url: str) -> None:
    """Of a folder into which fsspec has copied the weights, beside the configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=50)
    torch.manual_seed(4)
    model = transformers.GPT2LMHeadModel(config)  # its first and last weights are tied
    save(tmp_path, model)
    folder = tmp_path / "hf"
    folder.mkdir()
    config.save_pretrained(folder)
    fsspec.filesystem("tierstate").get(f"{url}@step-200/model.safetensors", f"{folder}/")
    torch.manual_seed(5)
    found, loaded = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not [problem for problem in loaded.values() if problem], loaded
    saved = model.state_dict()
    assert found.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in found.state_dict().items())
    assert found.lm_head.weight is found.transformer.wte.weight


def test_pandas(tmp_path: Path, url: str) -> None:
    pandas = pytest.importorskip("pandas")
    save(tmp_path, nn.Linear(3, 2))
    leaves = pandas.read_json(f"{url}/version.json", typ="series")["leaves"]
    with fsspec.open(f"{url}/version.json") as file:
        assert leaves == json.load(file)["leaves"]
