"""`doctor`: damage of several kinds in several tiers, which no other command repairs in one go."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.cli_calls import Call, damage, state
from support.equality import difference

ARGUMENTS = ("-r", "gpt")


def packs(policy: Path, tier: str) -> list[Path]:
    return sorted((policy.parent / tier / "packs/gpt").iterdir())


def records(policy: Path, tier: str) -> list[Path]:
    return sorted((policy.parent / tier / "versions/gpt").iterdir())


def test_nothing_is_wrong_with_what_is_whole(call: Call, policy: Path) -> None:
    answer = call("doctor", "-p", policy, *ARGUMENTS)
    assert (answer.status, answer.err) == (0, "")
    assert "nothing is lost, and nothing is to be repaired" in answer.out
    found = call("doctor", "-p", policy, *ARGUMENTS, "--json").json
    assert (found["ok"], found["repairs"], [v["state"] for v in found["versions"]]) == (True, [], ["whole"] * 3)
    assert call("doctor", "-p", policy, "-r", "nobody").status == 2


@pytest.mark.slow
def test_damage_that_combines_is_repaired_in_one_go(call: Call, policy: Path) -> None:
    """Of version 2 one tier has lost its record, the other has damaged chunks: each has what the other lacks."""
    records(policy, "nvme")[1].unlink()
    for path in packs(policy, "object"):
        path.write_bytes(path.read_bytes()[:2000])
    to = policy.parent / "out.pt"
    lost = call("restore", "-p", policy, *ARGUMENTS, to, "--step", "2")
    assert lost.status == 2
    assert "`tierstate doctor` looks in all packs" in lost.err
    told = call("verify", "-p", policy, *ARGUMENTS, "--data")
    assert "nowhere" not in told.out
    assert "`tierstate doctor` looks in all packs" in told.out
    dry = call("doctor", "-p", policy, *ARGUMENTS)
    assert dry.status == 1
    assert "`tierstate doctor --apply`" in dry.out
    plan = call("doctor", "-p", policy, *ARGUMENTS, "--json").json
    assert {(r["tier"], r["kind"], r["seq"]) for r in plan["repairs"]} == {
        ("nvme", "rebuild", 2), ("store", "mend", 2), ("store", "mend", 1)
    }  # fmt: skip
    assert {v["seq"]: v["restorable"] for v in plan["versions"]} == {1: True, 2: False, 3: True}
    done = call("doctor", "-p", policy, *ARGUMENTS, "--apply")
    assert (done.status, "all of it has been repaired" in done.out) == (0, True), done
    assert call("doctor", "-p", policy, *ARGUMENTS).status == 0
    assert call("verify", "-p", policy, *ARGUMENTS, "--deep").status == 0
    for tier in ("nvme", "object"):  # each tier alone
        shutil.move(policy.parent / tier, policy.parent / "away")
        assert call("restore", "-p", policy, *ARGUMENTS, to, "--step", "2", "--force").status == 0
        assert difference(state(2), torch.load(to, weights_only=True)) == ""
        shutil.rmtree(policy.parent / tier, ignore_errors=True)
        shutil.move(policy.parent / "away", policy.parent / tier)


def test_what_is_lost_is_said_by_leaf(call: Call, policy: Path) -> None:
    damage(policy)  # version 3 is in one tier only
    answer = call("doctor", "-p", policy, *ARGUMENTS, "--apply")
    assert answer.status == 1
    told = " ".join(answer.out.split())
    assert "version 3 is lost: chunks that are undamaged in no pack of any tier: 1; not whole: model.w" in told
    assert "1 version cannot be had as a whole; `tierstate rm --seq N` removes one for good" in told
    assert call("rm", "-p", policy, *ARGUMENTS, "--seq", "3", "--force").status == 0
    assert call("doctor", "-p", policy, *ARGUMENTS).status == 0


def test_a_run_without_any_record(call: Call, policy: Path) -> None:
    for tier in ("nvme", "object"):
        shutil.rmtree(policy.parent / tier / "versions/gpt")
    answer = call("ls", "-p", policy, *ARGUMENTS)
    assert answer.status == 2
    assert "there are packs of it in nvme, store, whose records are lost: `tierstate doctor`" in answer.err
    assert call("doctor", "-p", policy, *ARGUMENTS, "--apply").status == 0
    assert [v["step"] for v in call("ls", "-p", policy, *ARGUMENTS, "--json").json] == [1, 2, 3]


def test_a_tier_that_cannot_be_asked_is_not_called_lost(call: Call, policy: Path) -> None:
    shutil.rmtree(policy.parent / "nvme/packs/gpt")
    shutil.move(policy.parent / "object", policy.parent / "aside")
    (policy.parent / "object").write_text("no folder")
    found = call("doctor", "-p", policy, *ARGUMENTS, "--apply", "--json")
    assert found.status == 1
    assert list(found.json["unreachable"]) == ["store"]
    assert {v["state"] for v in found.json["versions"]} == {"unknown"}
    assert found.json["repairs"] == []
    told = call("doctor", "-p", policy, *ARGUMENTS).out
    assert "may be had yet: remove none, and look again when every tier answers" in " ".join(told.split())
    assert "tierstate rm" not in told


def test_a_lost_tier_gets_what_is_due_there(call: Call, policy: Path) -> None:
    shutil.rmtree(policy.parent / "object")
    plan = call("doctor", "-p", policy, *ARGUMENTS, "--json").json
    assert {(r["tier"], r["kind"], r["seq"]) for r in plan["repairs"]} == {("store", "copy", 1), ("store", "copy", 2)}
    assert call("doctor", "-p", policy, *ARGUMENTS, "--apply").status == 0
    assert call("doctor", "-p", policy, *ARGUMENTS).status == 0
    assert [p.name for p in records(policy, "object")] == ["000000000001", "000000000002"]


def test_a_damaged_tag_is_given_again(call: Call, policy: Path) -> None:
    call("tag", "-p", policy, *ARGUMENTS, "best", "--step", "2")
    (path,) = (policy.parent / "nvme/tags/gpt").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert call("doctor", "-p", policy, *ARGUMENTS, "--apply").status == 0
    assert call("verify", "-p", policy, *ARGUMENTS).status == 0
    assert call("show", "-p", policy, *ARGUMENTS, "--tag", "best", "--json").json["step"] == 2
    for tier in ("nvme", "object"):
        for path in (policy.parent / tier / "tags/gpt").iterdir():
            path.write_bytes(b"?")
    answer = call("doctor", "-p", policy, *ARGUMENTS)
    assert (answer.status, "tag best cannot be read in any tier" in answer.out) == (1, True)
