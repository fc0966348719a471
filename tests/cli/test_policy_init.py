"""``policy init``: a policy for this machine, which passes its own check and is that of ``Policy.auto``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.cli_calls import Call, state

import tierstate as ts
from tierstate.cluster import process
from tierstate.cluster.check import TierFinding


def test_what_it_writes_passes_the_check_and_is_what_auto_makes(call: Call, disk: Path) -> None:
    file, places = disk / "policy.yaml", [f"{disk}/a", f"file://{disk}/b"]
    answer = call("policy", "init", *places, "-o", file, "--no-measure")
    assert answer.status == 0, answer
    assert f"wrote {file}" in answer.out
    assert ts.Policy.load(file) == ts.Policy.auto(*places)
    assert call("policy", "check", file).status == 0
    text = file.read_text()
    assert text.startswith("# Made for this machine by `tierstate policy init` on 20")
    assert "What was found on this machine:" in text
    assert {path.name for path in disk.iterdir()} == {"policy.yaml"}, "nothing else is written"


def test_a_run_can_be_saved_and_restored_with_it(call: Call, disk: Path) -> None:
    file = disk / "policy.yaml"
    assert call("policy", "init", disk / "a", "-o", file, "--no-measure").status == 0
    file.write_text(file.read_text().replace("arena: {size: ", "arena: {size: 64MiB} # "))
    with ts.Checkpointer(file, "gpt") as ckpt:
        ckpt.save(state(7), step=7).wait()
    with ts.Checkpointer(file, "gpt") as ckpt:
        assert torch.equal(ckpt.load()["model"]["w"], state(7)["model"]["w"])
    assert "7" in call("ls", "-p", file, "-r", "gpt").out


def test_a_file_that_exists_is_replaced_only_by_force(call: Call, disk: Path) -> None:
    file = disk / "policy.yaml"
    file.write_text("mine\n")
    answer = call("policy", "init", disk / "a", "-o", file, "--no-measure")
    assert answer.status == 2
    assert "exists; name another file, or say --force to replace it" in answer.err
    assert file.read_text() == "mine\n"
    assert call("policy", "init", disk / "a", "-o", file, "--no-measure", "--force").status == 0
    assert ts.Policy.load(file) == ts.Policy.auto(disk / "a")


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (["s3:/bucket/x"], "two slashes and the bucket"),
        (["s3://me:password1@bucket/x"], "has a user or password in it"),
        (["{disk}/a", "{disk}/a/b"], "lie in one place, or one within the other"),
    ],
)
def test_places_that_cannot_be_leave_no_file(call: Call, disk: Path, places: list[str], said: str) -> None:
    answer = call("policy", "init", *(p.format(disk=disk) for p in places), "-o", disk / "p.yaml", "--no-measure")
    assert answer.status == 2
    assert said in answer.err
    assert "password1" not in answer.err
    assert list(disk.iterdir()) == []


def test_what_was_measured_is_in_the_comments_and_changes_nothing(
    call: Call, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = TierFinding("x", "nvme", reached=True, put_seconds=0.002, write=2.0**31, read=2.0**30, moved=1 << 28)
    measured.traits = {"persistent": True, "failure_domain": "host:a", "notes": ("a note\nwith: {two: lines",)}

    def found(policy: ts.Policy, limit: float, told: object) -> list[TierFinding]:
        return [TierFinding(**{**vars(measured), "name": t.name, "notes": []}) for t in policy.tiers]

    monkeypatch.setattr(process, "check_tiers", found)
    file = disk / "policy.yaml"
    answer = call("policy", "init", disk / "a", "-o", file, "--json")
    assert answer.status == 0, answer
    assert [tier["put_seconds"] for tier in answer.json["live"]] == [0.002] * len(answer.json["tiers"])
    said = " ".join(line.strip(" #") for line in file.read_text().splitlines())
    assert "2 ms to put 4 KiB, writes 2 GiB/s, reads 1 GiB/s, with an object of 256 MiB." in said
    assert r"A note\nwith: {two: lines." in said
    assert ts.Policy.load(file) == ts.Policy.auto(disk / "a")


def test_a_tier_that_fails_is_said_and_the_policy_is_written(
    call: Call, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(policy: ts.Policy, limit: float, told: object) -> list[TierFinding]:
        return [TierFinding(tier.name, tier.type, error=f"{tier.name}: no route") for tier in policy.tiers]

    monkeypatch.setattr(process, "check_tiers", found)
    file = disk / "policy.yaml"
    answer = call("policy", "init", disk / "a", "-o", file)
    assert answer.status == 1
    assert "FOUND no route" in answer.out
    assert "no route." in file.read_text()
    assert ts.Policy.load(file) == ts.Policy.auto(disk / "a")


@pytest.mark.slow
def test_tiers_are_measured_by_default(call: Call, disk: Path) -> None:
    file = disk / "policy.yaml"
    answer = call("policy", "init", disk / "a", "-o", file)
    assert answer.status == 0, answer
    assert "ms to put 4 KiB" in file.read_text()
    assert "write/s" in answer.out
    assert list((disk / "a").rglob("*")) == [], "what was measured with is removed"


def test_without_a_place_the_folder_of_the_job_is_used_with_a_warning(
    call: Call, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_TMPDIR", str(disk))
    answer = call("policy", "init", "-o", disk / "p.yaml", "--no-measure", "--json")
    assert answer.status == 0, answer
    assert "goes when the job ends" in json.loads(answer.err)["warning"]
    assert "path: ${SLURM_TMPDIR}/tierstate" in (disk / "p.yaml").read_text()
    assert ts.Policy.load(disk / "p.yaml") == ts.Policy.auto()
