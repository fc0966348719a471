"""Versions as references in W&B (offline) and MLflow (a local database and a local folder), with nothing uploaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load

import tierstate as ts
from tierstate.integrations.version_uri import version_facts, version_uri

SECRET, KEY = "a-comment-in-the-policy", "5e" * 32

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "policy.yaml"
    monkeypatch.setenv("SEAL_KEY", KEY)
    file.write_text(
        "version: 1\narena: {size: 32MiB}\nseal: {key: '${SEAL_KEY}'}\n"
        f"tiers: {{nvme: {{type: nvme, path: '{tmp_path}/tier'}}}}  # {SECRET}\n"
    )
    return file


@pytest.fixture
def info(policy: Path) -> ts.VersionInfo:
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.save({"w": torch.arange(4000.0)}, step=120, metadata={"loss": 0.5, "gap": math.inf}).wait()
        ckpt.tag("best")
        return ckpt.info()


def read(uri: str) -> Any:
    """What a program that gets the URI from a tracker reads of the version."""
    with fsspec.filesystem("tierstate", skip_instance_cache=True) as files:
        arrays = load(files.cat_file(f"{uri}/model.safetensors"))
        assert torch.equal(arrays["w"], torch.arange(4000.0))
        return files.info(uri)


def written(folder: Path) -> bytes:
    """Everything in the files below a folder."""
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def check_nothing_but_a_reference(folder: Path, uri: str) -> None:
    found = written(folder)
    assert uri.encode() in found
    assert torch.arange(4000.0).numpy().tobytes()[:4000] not in found
    assert SECRET.encode() not in found
    assert KEY.encode() not in found


def test_the_uri_names_the_version_for_ever(
    policy: Path, info: ts.VersionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = version_uri(policy, info)
    assert uri == f"tierstate://{policy}/gpt@{info.id}"
    monkeypatch.chdir(policy.parent)
    assert version_uri("policy.yaml", info) == uri
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.save({"w": torch.zeros(3)}, step=121).wait()
    assert read(uri)["step"] == 120
    facts = version_facts(info)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["metadata"] == {"loss": 0.5, "gap": "inf"}
    assert (facts["step"], facts["tiers"], facts["bytes"]) == (120, ["nvme"], info.nbytes)


def test_what_cannot_be_read_by_its_uri_gets_none(policy: Path, info: ts.VersionInfo) -> None:
    with pytest.raises(FileNotFoundError, match="no part of it is an existing policy file"):
        version_uri(policy.with_name("other.yaml"), info)
    with pytest.raises(ValueError, match="has no id"):
        version_uri(policy, ts.VersionInfo("gpt", 3, -1, "", 0.0, 0, ()))


def test_a_reference_artifact_of_wandb(
    policy: Path, info: ts.VersionInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from tierstate.integrations.wandb import log_version

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    with pytest.raises(RuntimeError, match="no W&B run"):
        log_version(policy, info)
    with wandb.init(mode="offline", project="p", dir=tmp_path / "runs") as run:
        artifact = log_version(policy, info, aliases=["candidate"])
        log_version(policy, info, run=run, name="other")
    (entry,) = artifact.manifest.entries.values()
    uri = version_uri(policy, info)
    assert (entry.path, entry.ref, entry.local_path) == ("version", uri, None)
    assert artifact.metadata == version_facts(info)
    assert (artifact.type, artifact.name) == ("model", "gpt")
    assert read(entry.ref)["version"] == info.id
    kept = written(tmp_path / "runs")
    for alias in (b"step-120", b"best", b"candidate", b"other"):
        assert alias in kept
    assert len(kept) < 200_000
    check_nothing_but_a_reference(tmp_path / "runs", uri)


@pytest.mark.parametrize("store", ["sqlite:///{place}/db/mlflow.db", "file://{place}/db/mlruns"])
def test_a_model_version_of_mlflow(
    store: str, policy: Path, info: ts.VersionInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    if store.startswith("sqlite"):
        pytest.importorskip("sqlalchemy")
    from tierstate.integrations.mlflow import log_version

    (tmp_path / "db").mkdir()
    monkeypatch.chdir(tmp_path / "db")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(store.format(place=tmp_path))
    with pytest.raises(RuntimeError, match="no MLflow run"):
        log_version(policy, info)
    with mlflow.start_run() as run:
        assert log_version(policy, info) is None
        with pytest.raises(ValueError, match="give model= too"):
            log_version(policy, info, aliases=["champion"])
        first = log_version(policy, info, model="gpt", aliases=["champion"])
    second = log_version(policy, info, model="gpt", run_id=run.info.run_id)
    uri = version_uri(policy, info)
    client = mlflow.MlflowClient()
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["tierstate.uri"] == uri
    assert (tags["tierstate.step"], tags["tierstate.version"]) == ("120", info.id)
    assert json.loads(tags["tierstate.metadata"]) == {"loss": 0.5, "gap": "inf"}
    assert [int(first.version), int(second.version)] == [1, 2]
    found = client.get_model_version_by_alias("gpt", "champion")
    assert (found.source, found.run_id, int(found.version)) == (uri, run.info.run_id, 1)
    assert found.tags["tierstate.step"] == "120"
    assert client.get_model_version_download_uri("gpt", "1") == uri
    assert read(found.source)["version"] == info.id
    assert not client.list_artifacts(run.info.run_id)
    check_nothing_but_a_reference(tmp_path / "db", uri)
