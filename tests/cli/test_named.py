"""The verbs tag and fork, and --tag of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cli_calls import Call, state
from support.equality import difference

import tierstate as ts


@pytest.mark.slow
def test_tags_are_given_listed_and_taken_back(call: Call, policy: Path) -> None:
    where = ("-p", policy, "-r", "gpt")
    assert call("tag", *where).out == "no tags\n"
    given = call("tag", *where, "best", "--step", 2)
    assert given.status == 0, given
    assert given.out.startswith("best: version 2 of run gpt, step 2 (")
    assert call("tag", *where, "last", "--json").json["step"] == 3
    rows = [line.split() for line in call("tag", *where).out.splitlines()]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("tag", "seq", "step"),
        ("best", "2", "2"),
        ("last", "3", "3"),
    ]
    listed = call("ls", *where).out.splitlines()
    assert "tags" in listed[0].split()
    assert "best" in listed[2].split()
    found = call("tag", *where, "--delete", "best", "--json").json
    assert [(one["tag"], one["step"], one["there"]) for one in found] == [("last", 3, True)]


@pytest.mark.slow
def test_a_tag_says_which_version(call: Call, policy: Path) -> None:
    where = ("-p", policy, "-r", "gpt")
    call("tag", *where, "best", "--step", 2)
    to = policy.parent / "out.pt"
    assert call("restore", *where, to, "--tag", "best", "--json").json["step"] == 2
    assert difference(state(2), torch.load(to, weights_only=True)) == ""
    assert call("show", *where, "--tag", "best", "--json").json["tags"] == ["best"]
    exported = call("export", *where, policy.parent / "out.safetensors", "--tag", "best", "--skip-values", "--json")
    assert exported.status == 0, exported
    assert exported.json["version"]["step"] == 2
    unknown = call("show", *where, "--tag", "worst")
    assert unknown.status == 2
    assert "no tag 'worst'; known tags: best" in unknown.err
    both = call("show", *where, "--tag", "best", "--step", 2)
    assert both.status == 2
    assert "give no step" in both.err


def test_the_tag_of_a_version_that_is_gone_is_listed_as_such(call: Call, policy: Path) -> None:
    where = ("-p", policy, "-r", "gpt")
    call("tag", *where, "best", "--step", 1)
    for name in ("nvme", "object"):
        (policy.parent / name / "versions/gpt/000000000001").unlink()
    assert "none: the version is not there any more" in call("tag", *where).out
    (found,) = call("tag", *where, "--json").json
    assert (found["tag"], found["seq"], found["there"]) == ("best", 1, False)


def test_wrong_use_of_tag_is_told(call: Call, policy: Path) -> None:
    where = ("-p", policy, "-r", "gpt")
    for arguments in (["a", "--delete", "b"], ["--step", "2"], ["a/b"], ["--delete", "nobody"]):
        answer = call("tag", *where, *arguments)
        assert answer.status == 2, answer
        assert answer.err.startswith("tierstate: ")


def test_fork(call: Call, policy: Path) -> None:
    made = call("fork", "-p", policy, "-r", "gpt", "gpt-b", "--step", 2)
    assert made.status == 0, made
    assert made.out.startswith("run gpt-b begins with step 2 of run gpt (")
    assert made.out.endswith("in nvme, store\n")
    with ts.Checkpointer(policy, "gpt-b") as ckpt:
        assert difference(state(2), ckpt.load()) == ""
    again = call("fork", "-p", policy, "-r", "gpt", "gpt-b")
    assert again.status == 2
    assert "has versions in nvme already" in again.err
    assert call("fork", "-p", policy, "-r", "gpt", "gpt-c", "--json").json["run"] == "gpt-c"
