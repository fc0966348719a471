"""`log`: what changed from version to version; and `bisect` by the statistics of versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_calls import Call

import tierstate as ts

ARGUMENTS = ("-r", "gpt")

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 256KiB}}
statistics: {statistics}
alarms: {{action: "off"}}
tiers:
  nvme: {{type: nvme, path: {place}/nvme}}
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Five versions: layer 1 moves, layer 0 does not, and has a NaN from step 3 on."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(place=tmp_path, statistics="true"))
    layers = {f"layers.{i}.weight": torch.ones(100) for i in range(2)}
    with ts.Checkpointer(ts.Policy.load(path), "gpt") as ckpt:
        for step in range(5):
            layers["layers.1.weight"] *= 2
            if step == 3:
                layers["layers.0.weight"][5] = float("nan")
            ckpt.save({"model": layers, "step": step}, step=step).wait()
    return path


def rows(call: Call, policy: Path, *more: str) -> list[dict[str, Any]]:
    found = call("log", "-p", policy, *ARGUMENTS, "--json", *more)
    assert found.status == 0, found.err
    made: list[dict[str, Any]] = json.loads(found.out)
    return made


def test_the_history_of_layers(call: Call, trained: Path) -> None:
    found = rows(call, trained)
    assert [(row["step"], row["nonfinite"]) for row in found] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]
    # 400 of 800 bytes of tensors, and a number that is pickled into some bytes more.
    assert [row["changed"] and round(row["changed"], 1) for row in found] == [None, 0.5, 0.5, 1.0, 0.5]
    assert [row["layer"] for row in found] == ["-", *["model.layers.1"] * 2, *["model.layers.0"] * 2]
    assert found[1]["norm_change"] == pytest.approx(1.0)
    assert rows(call, trained, "--last", "2") == found[-2:]
    text = call("log", "-p", trained, *ARGUMENTS).out
    assert text.splitlines()[0].split() == ["step", "changed", "not", "finite", "norm", "norm", "changed", "layer"]


def test_the_history_of_leaves(call: Call, trained: Path) -> None:
    found = rows(call, trained, "--leaf", 'model."layers.1.weight"', "--drift", "--last", "2")
    assert [(row["step"], row["min"], row["max"], row["nan"], row["changed"]) for row in found] == [
        (3, 16.0, 16.0, 0, 1.0), (4, 32.0, 32.0, 0, 1.0)
    ]  # fmt: skip
    assert [row["drift"] for row in found] == [1.0, 1.0]
    assert found[1]["norm"] == pytest.approx(320.0)
    other = rows(call, trained, "--leaf", 'model."layers.0.weight"')
    assert [(row["nan"], row["changed"]) for row in other] == [(0, None), (0, 0.0), (0, 0.0), (1, 1.0), (1, 0.0)]
    assert "1.0000" not in call("log", "-p", trained, *ARGUMENTS, "--leaf", "model.**").out
    refused = call("log", "-p", trained, *ARGUMENTS, "--drift")
    assert (refused.status, "say which by --leaf" in refused.err) == (2, True)


def test_of_versions_without_statistics_changes_are_known(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(place=tmp_path, statistics="false").replace('alarms: {action: "off"}', ""))
    with ts.Checkpointer(ts.Policy.load(path), "gpt") as ckpt:
        for step in range(3):
            ckpt.save({"a": torch.full((50,), float(step)), "b": torch.ones(50)}, step=step).wait()
    assert [(row["norm"], row["changed"]) for row in rows(call, path)] == [(None, None), (None, 0.5), (None, 0.5)]
    shutil.rmtree(tmp_path / "nvme" / "packs")  # no value is read where its size is not known
    found = rows(call, path, "--leaf", "*", "--drift", "--last", "1")
    assert [(row["leaf"], row["drift"]) for row in found] == [("a", None), ("b", 0.0)]
    for more in ((), ("--leaf", "a")):
        missing = call("log", "-p", path, "-r", "other", "--json", *more)
        assert (missing.status, missing.out) == (2, "")


def test_drift_is_from_the_version_before_whatever_its_step_and_leaves(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(place=tmp_path, statistics="true"))
    with ts.Checkpointer(ts.Policy.load(path), "gpt") as ckpt:
        ckpt.save({"other": torch.ones(9)}, step=0).wait()
        ckpt.save({"other": torch.ones(8)}, step=1).wait()  # as the first, it has no such leaf
        for step, value in ((1, 1.0), (2, 2.0), (2, 8.0), (2, 8.0)):  # a step that was trained again is saved again
            ckpt.save({"a": torch.full((50,), value)}, step=step).wait()
        first, second = ckpt.versions()[-3:-1]
        assert [leaf.change for leaf in ckpt.diff(first.id, second.id[:12])] == ["changed"]
        assert [leaf.change for leaf in ckpt.diff(2, second.id)] == ["same"]
    found = rows(call, path, "--leaf", "a", "--drift")
    assert [(row["step"], row["drift"]) for row in found] == [(1, None), (2, 1.0), (2, 3.0), (2, 0.0)]


@pytest.mark.slow
def test_a_nan_in_five_hundred_versions_is_found_without_a_restore(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(place=tmp_path, statistics="true"))
    layer, alarms = torch.ones(200), []
    with ts.Checkpointer(ts.Policy.load(path), "gpt") as ckpt:
        for step in range(500):
            layer += 1
            if step == 317:
                layer[11] = float("nan")
            ckpt.save({"model": {"layers.7": layer}}, step=step)
    monkeypatch.setattr(ts.Checkpointer, "load", lambda *_a, **_k: alarms.append("a restore"))
    found = call("bisect", "-p", path, *ARGUMENTS, "--when", "nonfinite(model.**)", "--json").json
    assert (found["first"]["step"], found["before"]["step"]) == (317, 316)
    assert len(found["looks"]) <= 10
    assert not alarms
