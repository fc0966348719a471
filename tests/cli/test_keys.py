"""`tierstate rekey`, and `verify --trusted-key`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from support.cli_calls import Call
from support.secret_keys import key_file

import tierstate as ts


def write(place: Path, name: str, tier: dict[str, Any], **top: Any) -> Path:
    tiers = {"disk": {"type": "nvme", "path": str(place / "keyed"), **tier}}
    file = place / name
    file.write_text(yaml.safe_dump({"arena": {"size": "1MiB"}, "chunk": "64KiB", **top, "tiers": tiers}))
    return file


def save(policy: Path) -> None:
    with ts.Checkpointer(str(policy), "run") as ckpt:
        ckpt.save({"w": torch.ones(9)}, step=1).wait()


def test_verify_with_a_trusted_key(call: Call, place: Path) -> None:
    right, wrong = key_file(place, "right"), key_file(place, "wrong")
    policy = write(place, "sealed.yaml", {}, seal={"file": right})
    save(policy)
    plain = write(place, "plain.yaml", {}, digest="blake3")
    assert call("verify", "-p", policy, "-r", "run", "--data").status == 0
    assert call("verify", "-p", plain, "-r", "run", "--data", "--trusted-key", right).status == 0
    assert (
        call("verify", "-p", plain, "-r", "run", "--data", "--trusted-key", wrong, "--trusted-key", right).status == 0
    )
    refused = call("verify", "-p", policy, "-r", "run", "--trusted-key", wrong)
    assert refused.status == 1
    assert "is sealed with key" in refused.out
    assert call("verify", "-p", plain, "-r", "run", "--trusted-key", place / "none").status == 2


def test_rekey_replaces_the_key_of_a_tier(call: Call, place: Path) -> None:
    old, new = key_file(place, "old"), key_file(place, "new")
    before = write(place, "before.yaml", {"encrypt": {"file": old}})
    save(before)
    both = write(place, "both.yaml", {"encrypt": {"file": [new, old]}})
    (done,) = call("rekey", "-p", both, "--json").json
    assert (done["tier"], done["data_keys"]) == ("disk", 2)
    shown = call("rekey", "-p", both, "disk")
    assert shown.status == 0
    assert done["key"] in shown.out
    assert Path(new).read_text().strip() not in shown.out
    after = write(place, "after.yaml", {"encrypt": {"file": new}})
    assert call("verify", "-p", after, "-r", "run", "--data").status == 0
    refused = call("verify", "-p", before, "-r", "run")
    assert refused.status == 1
    assert done["key"] in refused.out
    none = call("rekey", "-p", write(place, "plain.yaml", {}))
    assert none.status == 2
    assert "no tier of this policy is sealed or encrypted" in none.err


def test_rekey_seals_what_is_there_again(call: Call, place: Path) -> None:
    old, new = key_file(place, "old"), key_file(place, "new")
    save(write(place, "before.yaml", {}, seal={"file": old}))
    both = write(place, "both.yaml", {}, seal={"file": [new, old]})
    shown = call("rekey", "-p", both)
    assert shown.status == 0
    assert shown.out.split()[-1] == "2", "the record and the marker"
    (done,) = call("rekey", "-p", both, "--json").json
    assert (done["tier"], done["sealed"], done["left"]) == ("disk", 0, [])
    after = write(place, "after.yaml", {}, seal={"file": new})
    assert call("verify", "-p", after, "-r", "run", "--data").status == 0
    refused = call("rekey", "-p", write(place, "other.yaml", {}, seal={"file": key_file(place, "other")}))
    assert refused.status == 2
    assert "is sealed with key" in refused.err
