"""What pages have from the code is what the code says today, and says it of every key of a policy and public name."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"


def site_module(name):
    """A module of ``docs/site``, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tables = site_module("tables")
KEYS = list(tables.Tables().keys())


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in tables.written()])
def test_what_is_made_from_the_code_is_current(path):
    assert path.read_text("utf-8") == tables.written()[path], f"{path.name} is not current: run make reference"


def test_every_key_of_a_policy_says_what_it_means_and_has_an_example_that_is_valid():
    defs = tables.policy_schema(tables.TIER_TYPES)["$defs"]
    for key in KEYS:
        assert key.schema.get("description"), f"{key.name}: no meaning; write it in the docstring of its model or tier"
        for example in key.schema.get("examples", []):
            jsonschema.Draft202012Validator({**key.schema, "$defs": defs}).validate(example)
        assert key.row().split(" | ")[-1] != " |\n" or key.name in ("version", "tiers"), f"{key.name}: no example"
    assert len(KEYS) > 100


def test_every_key_is_in_a_table():
    page = tables.POLICY_PAGE.read_text()
    missing = {key.name for key in KEYS if not re.search(rf"^\| `(?:\w+\.)*{key.name}` \|", page, re.MULTILINE)}
    assert not missing


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in (DOCS / "policies").glob("*.yaml")])
def test_editors_find_the_schema_of_the_example_policies(path):
    text = path.read_text()
    assert "\n# yaml-language-server: $schema=schema.json\n" in text
    jsonschema.Draft202012Validator(yaml.safe_load((DOCS / "policies" / "schema.json").read_text())).validate(
        yaml.safe_load(text)
    )
