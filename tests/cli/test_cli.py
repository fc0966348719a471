"""The command line: every verb, for people and for machines, and its exit status."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cli_calls import Call, damage, state
from support.equality import difference

import tierstate as ts
from tierstate.cli.output import lines as output
from tierstate.tiers.units import rough_size

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
    head, *rows, behind = (line.split() for line in versions.out.splitlines())
    assert head == ["seq", "step", "id", "saved", "size", "nvme", "store", "metadata"]
    assert [row[1] for row in rows] == ["1", "2", "3"]
    assert rows[-1][-3:] == ["yes", "-", "loss=0.333333"]
    assert " ".join(behind).startswith("store has step 2 as its newest; 1 version, 1 step and ")


@pytest.mark.parametrize("above", [0, 1000])
def test_numbers_that_json_does_not_have_are_text(
    call: Call, policy: Path, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    monkeypatch.setattr(output, "PLAIN_ABOVE", above)
    losses = {"loss": math.nan, "all": [1.5, math.inf, {"least": -math.inf}]}
    with ts.Checkpointer(policy, "nan") as ckpt:
        ckpt.save({"w": torch.ones(3)}, step=1, metadata=losses).wait()
        ckpt.tag("bad", 1)
    told = {"loss": "NaN", "all": [1.5, "Infinity", {"least": "-Infinity"}]}
    found = [call(verb, "-p", policy, "-r", "nan", "--json").json for verb in ("ls", "tag", "show")]
    assert [found[0][0]["metadata"], found[1][0]["metadata"], found[2]["metadata"]] == [told] * 3


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


def test_ls_shows_versions_that_cannot_be_read(call: Call, policy: Path) -> None:
    """Of version 2 there is another record, of version 3 none."""
    for seq in (2, 3):
        path = policy.parent / f"nvme/versions/gpt/{seq:012d}"
        path.write_bytes(path.read_bytes()[:-1])
    found = call("ls", "-p", policy, "-r", "gpt")
    assert found.status == 1
    rows = [line.split() for line in found.out.splitlines()[1:4]]
    assert rows[1][0:2] == ["2", "2"]
    assert rows[1][-3:-1] == ["unreadable", "yes"]
    assert rows[2] == ["3", "?", "?", "?", "?", "unreadable", "-"]
    assert "version 2 cannot be read: nvme: " in found.err
    assert "version 3 cannot be read: nvme: " in found.err
    told = call("ls", "-p", policy, "-r", "gpt", "--json")
    assert told.status == 1
    assert [(v["step"], v["tiers"], list(v["unreadable"])) for v in told.json[1:]] == [
        (2, ["store"], ["nvme"]),
        (-1, [], ["nvme"]),
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


@pytest.mark.slow
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
    assert rough_size(len(before)) in answer.out, "of the file, which may have only some of the leaves"
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
        ckpt.save({"trust": print, "a": 1}, step=2)
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
    **{
        f"no such run, {verb}": ([verb, "-r", "nobody", *rest], "'nobody' has no")
        for verb, *rest in (["events"], ["explain", "--step", "1"], ["tag"], ["log"], ["status"], ["verify"], ["prune"])
    },
    "no such step": (["show", "-r", "gpt", "--step", "9"], "no version with step 9"),
    "no such id": (
        ["restore", "-r", "gpt", "/tmp/never-written.pt", "--version", "ff00ff00ff00"],
        "no version with id",
    ),
    "no run's name": (["ls", "-r", "../../etc"], "cannot name a run"),
    "no folder": (
        ["restore", "-r", "gpt", "/nowhere/at/all.pt"],
        "all.pt has no folder to be in; make it first: '/nowhere/at'",
    ),
    "no leaf": (["restore", "-r", "gpt", "/tmp/never-written.pt", "--only", "optimizer.**"], "optimizer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_message_and_status_2(call: Call, policy: Path, name: str) -> None:
    (verb, *rest), expected = ERRORS[name]
    answer = call(verb, "-p", policy, *rest)
    assert answer.status == 2, answer
    assert answer.err.startswith("tierstate: ")
    assert expected in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["ls"], ["show"], ["events"], ["diff", "1", "2"], ["copy", "--to", "store"], ["tag", "best"], ["fork", "new"],
        ["rm", "--step", "1"], ["prune"], ["log"], ["status"], ["explain", "--step", "1"], ["doctor"], ["verify"],
        ["rebuild", "nvme"], ["restore", "/tmp/never-written.pt"], ["export", "/tmp/never-written.safetensors"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_misspelt_run_is_answered_with_the_runs_that_there_are(call: Call, policy: Path, words: list[str]) -> None:
    answer = call(*words, "-p", policy, "-r", "gtp")
    assert answer.status == 2, answer
    assert answer.err.endswith("; did you mean run 'gpt'?\n")
    as_json = call(*words, "-p", policy, "-r", "nobody", "--json")
    assert as_json.status == 2
    assert json.loads(as_json.err)["error"]["message"].endswith("; the runs that there are: gpt, other")


def test_a_run_that_has_versions_is_told_of_no_other_runs(call: Call, policy: Path) -> None:
    assert call("fork", "-p", policy, "-r", "gpt", "gpt-2").status == 0
    answer = call("show", "-p", policy, "-r", "gpt", "--step", "9")
    assert "no version with step 9" in answer.err
    assert "gpt-2" not in answer.err


def test_a_broken_policy_is_status_2_with_its_lines(call: Call, place: Path) -> None:
    path = place / "broken.yaml"
    path.write_text("version: 1\nchunk: 3 bananas\ntiers:\n  nvme: {type: nvmee, path: x}\n")
    answer = call("ls", "-p", path, "-r", "gpt")
    assert answer.status == 2
    assert "broken.yaml:2:1: chunk: " in answer.err
    assert "broken.yaml:4:10: tiers.nvme.type: " in answer.err
    missing = call("ls", "-p", place / "none.yaml")
    assert missing.status == 2
    assert "cannot be read" in missing.err


@pytest.mark.slow
def test_wrong_usage_is_status_2(call: Call, policy: Path) -> None:
    for arguments in (["show", "-p", policy], ["nonsense"], ["show", "-p", policy, "-r", "gpt", "--step", "x"]):
        answer = call(*arguments)
        assert answer.status == 2
        assert "Traceback" not in answer.err


# As a program


def program(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierstate.cli", *map(str, arguments)]
    if (Path(sys.executable).parent / "tierstate").exists():
        command[:3] = [str(Path(sys.executable).parent / "tierstate")]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=env)


@pytest.mark.slow
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


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

_, module, asked = sys.argv
sys.argv[1:] = ["--version"]

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.SIG_IGN if asked == "ignored" else signal.default_int_handler)
runpy.run_module("tierstate", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "torch", "tierstate.cli.tiers"])
@pytest.mark.parametrize("asked", ["", "ignored"])
def test_an_interrupt_during_the_imports_ends_it_without_a_traceback(module: str, asked: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, asked]
    found = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (found.returncode, found.stderr) == (0 if asked else -signal.SIGINT, "")


@pytest.mark.slow
def test_its_version_and_python_m(call: Call) -> None:
    assert call("--version").out == f"tierstate {ts.__version__}\n"
    found = subprocess.run([sys.executable, "-m", "tierstate", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"tierstate {ts.__version__}\n")


def test_events_of_another_kind_are_not_taken_for_none(call: Call, policy: Path) -> None:
    assert "no events are logged" in call("events", "-p", policy, "-r", "gpt", "--kind", "failed").out
    policy.write_text(f"{policy.read_text()}\nmetrics: {{events: true}}\n")
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.save({"w": 1}, step=9)
    assert "committed" in call("events", "-p", policy, "-r", "gpt").out
    said = call("events", "-p", policy, "-r", "gpt", "--kind", "failed").out
    assert said.endswith("events are logged, and none of such a kind\n")
