"""diff, copy and rebuild, and what show and verify say, from the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cli_calls import Call, damage


@pytest.mark.slow
def test_diff_says_by_its_status_whether_versions_differ(call: Call, policy: Path) -> None:
    same = call("diff", "-p", policy, "-r", "gpt", "2", "2")
    assert (same.status, same.out) == (0, "4 leaves: 0 added, 0 removed, 0 changed, 4 same; 0 B differ\n")
    answer = call("diff", "-p", policy, "-r", "gpt", "1", "3", "--values")
    assert answer.status == 1
    rows = {line.split()[0]: line.split() for line in answer.out.splitlines()[1:-1]}
    assert rows["step"][-3:] == ["1", "->", "3"]
    assert rows["model.w"][1] == "changed"
    assert "3000/3000" in rows["model.w"]
    assert answer.out.splitlines()[-1].startswith("4 leaves: 0 added, 0 removed, 2 changed, 2 same; ")
    found = call("diff", "-p", policy, "-r", "gpt", "1", "3", "--values", "--only", "model", "--json").json
    assert [(leaf["path"], leaf["change"]) for leaf in found] == [("model.w", "changed"), ("model.b", "same")]
    assert found[0]["numbers"]["changed"] == 3000
    wrong = call("diff", "-p", policy, "-r", "gpt", "1", "9")
    assert (wrong.status, "no version with step 9" in wrong.err) == (2, True)


@pytest.mark.slow
def test_show_says_where_leaves_are(call: Call, policy: Path) -> None:
    shown = call("show", "-p", policy, "-r", "gpt", "--step", "2", "--only", "model.w")
    assert (
        " ".join(shown.out.splitlines()[-1].split()) == "model.w tensor float32 3000 11.7 KiB raw 11.7 KiB raw 11.7 KiB"
    )
    sums = call("show", "-p", policy, "-r", "gpt", "--depth", "1").out.splitlines()[3:]
    assert [(line.split()[0], line.split()[1]) for line in sums] == [
        ("all", "4"), ("model", "2"), ("sizes", "1"), ("step", "1")
    ]  # fmt: skip
    found = call("show", "-p", policy, "-r", "gpt", "--depth", "0", "--json").json["leaves"]
    assert [(one["below"], one["leaves"], list(one["tiers"])) for one in found] == [([], 4, ["nvme"])]
    assert found[0]["tiers"]["nvme"]["stored"] == found[0]["nbytes"]
    leaves = call("show", "-p", policy, "-r", "gpt", "--json").json["leaves"]
    held = {leaf["path"]: leaf["tiers"] for leaf in leaves}
    assert held["model.w"] == {"nvme": {"has": "all", "codecs": ["raw"], "stored": 12_000}}
    assert held["model"] == {}


@pytest.mark.slow
def test_verify_mends_and_says_so(call: Call, policy: Path) -> None:
    call("copy", "-p", policy, "-r", "gpt", "--to", "store")
    damage(policy)
    report = call("verify", "-p", policy, "-r", "gpt", "--data", "--json").json
    assert [(p["leaf"], p["whole"], p["mended"]) for p in report["problems"]] == [("model.w", True, False)]
    mended = call("verify", "-p", policy, "-r", "gpt", "--mend")
    assert mended.status == 0
    assert "nvme: 1 damaged chunks were written again" in mended.out
    assert call("verify", "-p", policy, "-r", "gpt", "--deep").status == 0
    damage(policy)  # now what mended it, whose name comes last
    shutil.rmtree(policy.parent / "object")
    lost = call("verify", "-p", policy, "-r", "gpt", "--data")
    assert lost.status == 1
    told = "version 3 (step 3) cannot be restored as a whole: 1 of its leaves are damaged wherever a record names them"
    assert told in lost.out
    sampled = call("verify", "-p", policy, "-r", "gpt", "--sample", "50%", "--seed", "3")
    assert "a sample, by seed 3: of the bytes in nvme" in sampled.out
    for wrong in ("0%", "101%", "much"):
        answer = call("verify", "-p", policy, "-r", "gpt", "--sample", wrong)
        assert (answer.status, "is no share" in answer.err) == (2, True)
    assert call("verify", "-p", policy, "-r", "gpt", "--sample", "1%", "--data").status == 2


@pytest.mark.slow
def test_copy_goes_to_tiers_and_policies(call: Call, policy: Path) -> None:
    first = call("copy", "-p", policy, "-r", "gpt", "--to", "store")
    assert (first.status, first.out.startswith("copied step 3 (")) == (0, True)
    again = call("copy", "-p", policy, "-r", "gpt", "--to", "store")
    assert (again.status, again.out.startswith("store has step 3 (")) == (0, True)
    assert call("ls", "-p", policy, "-r", "gpt", "--json").json[-1]["tiers"] == ["nvme", "store"]
    other = policy.parent / "other.yaml"
    other.write_text(policy.read_text().replace("/nvme", "/nvme2").replace("/object", "/object2"))
    found = call("copy", "-p", policy, "-r", "gpt", "--step", "2", "--into", other, "--into-run", "gpt2", "--json").json
    assert (found["copied"], found["run"], found["step"], found["metadata"]) == (
        ["nvme", "store"], "gpt2", 2, {"loss": 0.5}
    )  # fmt: skip
    assert call("verify", "-p", other, "-r", "gpt2", "--deep").status == 0
    assert call("copy", "-p", policy, "-r", "gpt").status == 2
    assert call("copy", "-p", policy, "-r", "gpt", "--to", "tape").status == 2


@pytest.mark.slow
def test_rebuild_brings_records_back(call: Call, policy: Path) -> None:
    shutil.rmtree(policy.parent / "nvme/versions/gpt")
    assert [v["tiers"] for v in call("ls", "-p", policy, "-r", "gpt", "--json").json] == [["store"], ["store"]]
    dry = call("rebuild", "-p", policy, "-r", "gpt", "nvme", "--dry-run")
    assert dry.status == 0
    assert dry.out.count("would be rebuilt") == 3
    done = call("rebuild", "-p", policy, "-r", "gpt", "nvme", "--json").json
    assert [(v["seq"], v["rebuilt"]) for v in done["versions"]] == [(3, True), (2, True), (1, True)]
    assert call("verify", "-p", policy, "-r", "gpt", "--deep").status == 0
    assert "no record is known to be lost" in call("rebuild", "-p", policy, "-r", "gpt", "nvme").out
    for pack in (policy.parent / "nvme/packs/gpt").glob("000000000003-*"):
        pack.unlink()
    (policy.parent / "nvme/versions/gpt/000000000003").write_bytes(b"")
    answer = call("rebuild", "-p", policy, "-r", "gpt", "nvme")
    assert answer.status == 1
    assert "no pack says what it consists of" in answer.out
