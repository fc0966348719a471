"""The command line: every verb, for people and for machines, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
import yaml
from strategies import difference
from worlds import names, opened

import tierstate as ts
from tierstate.cli import main

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 64KiB}}
tiers:
  nvme: {{type: nvme, path: {place}/nvme}}
  store: {{type: object, url: "file://{place}/object", every: 2}}
rules:
  - {{match: "trust", pickle: true}}
"""


class Answer(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Answer]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process, by the entry point itself."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["tierstate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return Answer(code, out, err)

    return run


def state(step: int) -> dict[str, Any]:
    """A state with containers of several kinds."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": OrderedDict(w=torch.randn(3000, generator=generator), b=torch.ones(4, dtype=torch.bfloat16)),
        "sizes": (1, 2.5, "three"),
        "step": step,
    }


@pytest.fixture
def policy(place: Path) -> Path:
    """A policy file, and two runs: ``gpt`` with steps 1, 2, 3, of which 1 and 2 are in both tiers, and ``other``."""
    path = place / "policy.yaml"
    path.write_text(POLICY.format(place=place))
    with ts.Checkpointer(path, "gpt") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step), step=step, metadata={"loss": 1.0 / step})
    with ts.Checkpointer(path, "other") as ckpt:
        ckpt.save({}, step=0)
    return path


def damage(policy: Path, tier: str = "nvme") -> None:
    """Flip a bit in the newest pack of a tier."""
    folder = policy.parent / {"nvme": "nvme", "store": "object"}[tier]
    path = sorted((folder / "packs/gpt").iterdir())[-1]
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


# ls, show


def test_ls_lists_runs_and_versions(call: Call, policy: Path) -> None:
    everything = call("ls", "-p", policy)
    assert everything.status == 0
    assert [line.split() for line in everything.out.splitlines()[1:]] == [
        ["gpt", "nvme,", "store"],
        ["other", "nvme,", "store"],
    ]
    versions = call("ls", "--policy", policy, "--run", "gpt")
    assert versions.status == 0
    head, *rows = (line.split() for line in versions.out.splitlines())
    assert head == ["seq", "step", "id", "saved", "size", "nvme", "store", "metadata"]
    assert [row[1] for row in rows] == ["1", "2", "3"]
    assert rows[-1][-3:] == ["yes", "-", "loss=0.333333"]


def test_ls_speaks_json(call: Call, policy: Path) -> None:
    assert call("ls", "-p", policy, "--json").json == [
        {"run": "gpt", "tiers": ["nvme", "store"]},
        {"run": "other", "tiers": ["nvme", "store"]},
    ]
    found = call("ls", "-p", policy, "-r", "gpt", "--json").json
    assert [(v["step"], v["tiers"], v["metadata"]["loss"]) for v in found] == [
        (1, ["nvme", "store"], 1.0),
        (2, ["nvme", "store"], 0.5),
        (3, ["nvme"], 1 / 3),
    ]


def test_policy_and_run_come_from_the_environment(call: Call, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTATE_POLICY", str(policy))
    monkeypatch.setenv("TIERSTATE_RUN", "gpt")
    assert len(call("ls", "--json").json) == 3
    assert call("show").status == 0


def test_show_lists_leaves(call: Call, policy: Path) -> None:
    shown = call("show", "-p", policy, "-r", "gpt", "--step", "2")
    assert shown.status == 0
    assert "version 2 of run gpt, step 2" in shown.out
    leaves = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines()[3:]}
    assert leaves["model.w"][:3] == ["tensor", "float32", "3000"]
    assert set(leaves) == {"model.w", "model.b", "sizes", "step"}
    found = call("show", "-p", policy, "-r", "gpt", "--json").json
    assert found["step"] == 3
    assert {leaf["path"]: leaf["nbytes"] for leaf in found["leaves"]}["model.w"] == 12_000
    again = call("show", "-p", policy, "-r", "gpt", "--version", found["id"][:8], "--json").json
    assert again == found


# verify


def test_verify_is_content_with_what_is_whole(call: Call, policy: Path) -> None:
    for arguments in ([], ["--data"]):
        answer = call("verify", "-p", policy, "-r", "gpt", *arguments)
        assert answer.status == 0, answer
        assert "no problem found" in answer.out
    report = call("verify", "-p", policy, "-r", "gpt", "--data", "--json").json
    assert (report["ok"], report["versions"], report["problems"]) == (True, 5, [])
    assert report["nbytes"] > 3 * 12_000


def test_verify_finds_damage_and_says_so_by_its_status(call: Call, policy: Path) -> None:
    damage(policy)
    assert call("verify", "-p", policy, "-r", "gpt").status == 0, "lengths are right"
    answer = call("verify", "-p", policy, "-r", "gpt", "--data")
    assert answer.status == 1
    assert "model.w" in answer.out
    report = call("verify", "-p", policy, "-r", "gpt", "--data", "--json").json
    assert report["ok"] is False
    assert [(p["tier"], p["step"], p["leaf"]) for p in report["problems"]] == [("nvme", 3, "model.w")]
    record = policy.parent / "nvme/versions/gpt/000000000002"
    record.write_bytes(record.read_bytes()[:50])
    answer = call("verify", "-p", policy, "-r", "gpt")
    assert answer.status == 1
    assert "truncated" in " ".join(answer.out.split())


# restore


def test_restore_writes_a_file_that_torch_reads(call: Call, policy: Path) -> None:
    to = policy.parent / "out.pt"
    answer = call("restore", "-p", policy, "-r", "gpt", to, "--step", "2")
    assert answer.status == 0, answer
    assert "restored step 2" in answer.out
    assert difference(state(2), torch.load(to, weights_only=True)) == ""
    before = to.read_bytes()
    refused = call("restore", "-p", policy, "-r", "gpt", to)
    assert refused.status == 2
    assert "--force" in refused.err
    assert to.read_bytes() == before
    found = call("restore", "-p", policy, "-r", "gpt", to, "--force", "--json").json
    assert (found["step"], found["file"]) == (3, str(to))
    assert difference(state(3), torch.load(to, weights_only=True)) == ""
    part = policy.parent / "part.pt"
    assert call("restore", "-p", policy, "-r", "gpt", part, "--only", "model.**", "--only", "step").status == 0
    loaded = torch.load(part, weights_only=True)
    assert set(loaded) == {"model", "step"}
    assert difference(state(3)["model"], loaded["model"]) == ""


def test_restore_of_what_is_damaged_writes_nothing(call: Call, policy: Path) -> None:
    damage(policy)
    to = policy.parent / "out.pt"
    answer = call("restore", "-p", policy, "-r", "gpt", to)
    assert answer.status == 2
    assert "leaf model.w of version 3 (step 3" in answer.err
    assert sorted(p.name for p in policy.parent.iterdir()) == ["nvme", "object", "policy.yaml"]
    assert call("restore", "-p", policy, "-r", "gpt", to, "--older").status == 0
    assert torch.load(to, weights_only=True)["step"] == 2


def test_a_pickle_is_loaded_only_where_that_is_said(call: Call, policy: Path, tmp_path: Path) -> None:
    with ts.Checkpointer(policy, "pickled") as ckpt:
        ckpt.save({"trust": {1, 2}, "a": 1}, step=1)
        ckpt.save({"trust": Path("x"), "a": 1}, step=2)
    bare = tmp_path / "bare.yaml"
    bare.write_text(policy.read_text().partition("rules:")[0])
    to = tmp_path / "out.pt"
    refused = call("restore", "-p", bare, "-r", "pickled", to)
    assert refused.status == 2
    assert "trust" in refused.err
    assert call("restore", "-p", bare, "-r", "pickled", to, "--only", "a").status == 0
    assert call("restore", "-p", bare, "-r", "pickled", to, "--force", "--allow-pickle", "trust").status == 0


# Errors


ERRORS = {
    "no such run": (["ls", "-r", "nobody"], "'nobody' has no version in nvme, store"),
    "no such step": (["show", "-r", "gpt", "--step", "9"], "no version with step 9"),
    "no such id": (["restore", "-r", "gpt", "/nowhere/x.pt", "--version", "ff00ff00ff00"], "no version with id"),
    "no run's name": (["ls", "-r", "../../etc"], "cannot name a run"),
    "no folder": (["restore", "-r", "gpt", "/nowhere/at/all.pt"], "No such file or directory"),
    "no leaf": (["restore", "-r", "gpt", "/tmp/never-written.pt", "--only", "optimizer.**"], "optimizer"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_message_and_status_2(call: Call, policy: Path, name: str) -> None:
    (verb, *rest), expected = ERRORS[name]
    answer = call(verb, "-p", policy, *rest)
    assert answer.status == 2, answer
    assert answer.err.startswith("tierstate: ")
    assert expected in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""


def test_a_broken_policy_is_status_2_with_its_lines(call: Call, place: Path) -> None:
    path = place / "broken.yaml"
    path.write_text("version: 1\nchunk: 3 bananas\ntiers:\n  nvme: {type: nvmee, path: x}\n")
    answer = call("ls", "-p", path, "-r", "gpt")
    assert answer.status == 2
    assert "broken.yaml:2: chunk: " in answer.err
    assert "broken.yaml:4: tiers.nvme.type: " in answer.err
    missing = call("ls", "-p", place / "none.yaml")
    assert missing.status == 2
    assert "cannot be read" in missing.err


def test_wrong_usage_is_status_2(call: Call, policy: Path) -> None:
    for arguments in (["show", "-p", policy], ["nonsense"], ["show", "-p", policy, "-r", "gpt", "--step", "x"]):
        answer = call(*arguments)
        assert answer.status == 2
        assert "Traceback" not in answer.err


# policy


def test_policy_check_says_what_a_policy_does(call: Call, policy: Path) -> None:
    answer = call("policy", "check", policy)
    assert answer.status == 0
    assert "durable: nvme" in answer.out
    found = call("policy", "check", policy, "--json").json
    assert found["ok"] is True
    assert [t["tier"] for t in found["tiers"]] == ["nvme", "store"]


def test_policy_check_lists_every_error(call: Call, place: Path) -> None:
    path = place / "broken.yaml"
    path.write_text("version: 1\nchunk: 3 bananas\ntiers:\n  nvme: {type: nvmee, path: x}\n")
    answer = call("policy", "check", path)
    assert answer.status == 1
    assert len(answer.out.splitlines()) == 2
    found = call("policy", "check", path, "--json")
    assert found.status == 1
    assert found.json["ok"] is False
    assert len(found.json["errors"]) == 2


def test_policy_schema_is_a_schema_that_good_policies_pass(call: Call, policy: Path) -> None:
    schema = call("policy", "schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    document = yaml.safe_load(policy.read_text())
    validator.validate(document)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**document, "chunks": 3})


def live(call: Call, place: Path, tiers: dict[str, Any]) -> Answer:
    path = place / "live.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tiers": tiers}, sort_keys=False))
    return call("policy", "check", path, "--live", "--json")


def test_policy_check_live_tries_every_tier_and_leaves_nothing(call: Call, place: Path) -> None:
    tiers = {
        "memory": {"type": "memory"},
        "host": {"type": "host"},
        "nvme": {"type": "nvme", "path": str(place / "nvme")},
        "lustre": {"type": "lustre", "path": str(place / "lustre"), "stripe_count": 2},
        "store": {"type": "object", "url": f"file://{place}/object"},
        "bucket": {"type": "object", "url": f"memory://{place.name}"},
    }
    answer = live(call, place, tiers)
    assert answer.status == 0, answer
    assert [(f["name"], f["ok"], f["broken"], f["error"]) for f in answer.json] == [(n, True, {}, "") for n in tiers]
    assert all(f["write"] > 0 and f["read"] > 0 and len(f["kept"]) >= 10 for f in answer.json)
    assert [p for p in place.rglob("*") if p.is_file()] == [place / "live.yaml"]
    spec = ts.Policy.load(place / "live.yaml")
    assert names(opened(spec, "bucket")) == []
    table = call("policy", "check", place / "live.yaml", "--live")
    assert table.status == 0
    assert table.out.count(" ok ") == len(tiers)


def test_policy_check_live_reports_what_cannot_be_used(call: Call, place: Path) -> None:
    (place / "file").write_text("")
    tiers = {
        "good": {"type": "nvme", "path": str(place / "good")},
        "file": {"type": "nvme", "path": str(place / "file")},
        "below": {"type": "nvme", "path": str(place / "file/below")},
        "proc": {"type": "nvme", "path": "/proc/none/such"},
        "nowhere": {"type": "object", "url": "nonsense"},
        "protocol": {"type": "object", "url": "gopher://bucket/x"},
    }
    answer = live(call, place, tiers)
    assert answer.status == 1, answer
    found = {f["name"]: f for f in answer.json}
    assert set(found) == set(tiers)
    assert [name for name, f in found.items() if f["ok"]] == ["good"]
    assert all(f["error"] or f["broken"] for name, f in found.items() if name != "good")


# As a program


def program(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierstate.cli", *map(str, arguments)]
    if (Path(sys.executable).parent / "tierstate").exists():
        command[:3] = [str(Path(sys.executable).parent / "tierstate")]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_the_program_itself(policy: Path) -> None:
    listed = program("ls", "--json", TIERSTATE_POLICY=str(policy), TIERSTATE_RUN="gpt")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert [v["step"] for v in json.loads(listed.stdout)] == [1, 2, 3]
    failed = program("show", "-p", policy, "-r", "nobody")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.startswith("tierstate: run 'nobody' has no version")
    assert len(failed.stderr.splitlines()) == 1
    damage(policy)
    assert program("verify", "-p", policy, "-r", "gpt", "--data").returncode == 1
    helped = program("--help")
    assert helped.returncode == 0
    assert all(verb in helped.stdout for verb in ("ls", "show", "verify", "restore", "policy"))
