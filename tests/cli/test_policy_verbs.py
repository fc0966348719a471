"""The verbs about policies: check, check --live, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from calling import Answer, Call
from worlds import names, opened

import tierstate as ts


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
