"""`ls` of a run whose slower tier lags: what is late there, and by how much."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from support.cli_calls import Call

import tierstate as ts


def lose(policy: Path, *seqs: int) -> None:
    """Take versions from the slower tier."""
    for seq in seqs:
        (policy.parent / f"object/versions/gpt/{seq:012d}").unlink()


def test_ls_says_which_tier_is_behind(call: Call, policy: Path) -> None:
    lose(policy, 2)
    text = call("ls", "-p", policy, "-r", "gpt").out
    rows = [line.split() for line in text.splitlines()]
    assert [row[-2] for row in rows[1:4]] == ["yes", "late", "-"], "2 is due there by its cadence, 3 is not"
    assert text.splitlines()[-1].startswith("store has step 1 as its newest, and lacks 1 that are due there: ")
    found = call("ls", "-p", policy, "-r", "gpt", "--json").json
    assert [v["late"] for v in found] == [[], ["store"], []]


def test_ls_says_how_far_a_tier_is_behind_the_newest_version(call: Call, policy: Path) -> None:
    found = call("ls", "-p", policy, "-r", "gpt").out.splitlines()
    (line,) = [line for line in found if line.startswith("store has step")]
    rows = call("ls", "-p", policy, "-r", "gpt", "--json").json
    newest = max(v["step"] for v in rows)
    (there,) = [v for v in rows if f"step {v['step']} as its newest" in line]
    newer = sum(v["seq"] > there["seq"] for v in rows)
    assert re.search(rf"; {newer} versions?, {newest - there['step']} steps? and [\d.e+-]+ s behind", line)
    assert line.endswith(f" s behind step {newest}")


def test_ls_of_a_tier_that_has_nothing(call: Call, policy: Path) -> None:
    lose(policy, 1, 2)
    text = call("ls", "-p", policy, "-r", "gpt").out
    assert text.splitlines()[-1].startswith("store has none, and lacks 2 that are due there: ")


def test_what_is_not_due_or_older_than_the_newest_is_not_late(call: Call, policy: Path) -> None:
    lose(policy, 1)
    found = call("ls", "-p", policy, "-r", "gpt", "--json").json
    assert [v["late"] for v in found] == [[], [], []]


def test_of_a_tier_that_cannot_be_asked_nobody_says_that_it_is_late(policy: Path) -> None:
    folder = policy.parent / "object"
    shutil.rmtree(folder)
    folder.write_text("a file in place of the folder")
    with ts.Checkpointer(policy, "gpt") as ckpt:
        late = [v.late for v in ckpt.versions()]
        reached = "store" not in ckpt._catalog().unreachable
    assert late == [(), (), ()] or reached


def test_rules_that_send_nothing_there_make_nothing_late(place: Path) -> None:
    spec = ts.Policy.parse(
        f"""
tiers:
  nvme: {{type: nvme, path: "{place}/nvme"}}
  far: {{type: nvme, path: "{place}/far"}}
rules:
  - {{match: "**", tiers: [nvme]}}
"""
    )
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({"a": 1}, step=0).wait()
        assert [v.late for v in ckpt.versions()] == [()]
