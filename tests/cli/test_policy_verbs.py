"""The verbs about policies: check, check --live, schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.cli_calls import Call


def test_policy_check_says_what_a_policy_does(call: Call, policy: Path) -> None:
    answer = call("policy", "check", policy)
    assert answer.status == 0
    assert "durable: nvme" in answer.out
    found = call("policy", "check", policy, "--json").json
    assert found["ok"] is True
    assert [t["tier"] for t in found["tiers"]] == ["nvme", "store"]


def test_policy_check_says_what_is_kept(call: Call, place: Path) -> None:
    path = place / "keeps.yaml"
    keep = "{last: 3, every: 1000, within: 2d, best: {metric: loss, mode: min, count: 2}, tags: true}"
    path.write_text(f"tiers:\n  nvme: {{type: nvme, path: x, keep: {keep}}}\n  all: {{type: nvme, path: y}}\n")
    found = call("policy", "check", path, "--json").json["tiers"]
    assert [t["keep"] for t in found] == ["last 3, every 1000, within 2d, best 2 loss (min), tags", "all"]


def test_policy_check_tells_of_a_network_that_is_trusted(call: Call, place: Path) -> None:
    path = place / "trusting.yaml"
    path.write_text("ranks: {trust: network}\ntiers:\n  nvme: {type: nvme, path: x}\n")
    answer = call("policy", "check", path)
    assert answer.status == 0
    assert "whoever reaches the network between the hosts can read and change" in answer.err


def test_policy_check_shows_cadences_in_the_notation_of_a_policy(call: Call, tmp_path: Path) -> None:
    cadences = {"a": "90min", "b": "{min: 1min, max: 2h}", "c": "auto", "d": "100"}
    lines = [f"  {name}: {{type: nvme, path: {tmp_path / name}, every: {every}}}" for name, every in cadences.items()]
    file = tmp_path / "cadences.yaml"
    file.write_text("\n".join(["tiers:", *lines]))
    shown = json.loads(call("policy", "check", file, "--json").out)["tiers"]
    assert [tier["every"] for tier in shown] == ["90min", "auto (1min to 2h)", "auto (at most 1h)", "100 steps"]


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


@pytest.mark.slow
def test_policy_schema_is_a_schema_that_good_policies_pass(call: Call, policy: Path) -> None:
    schema = call("policy", "schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    document = yaml.safe_load(policy.read_text())
    validator.validate(document)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**document, "chunks": 3})
