"""Every key of a policy and every public name says what it means, and pages have it from there as it is today."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pydoc
import re
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import tierstate as ts
from tierstate import integrations

DOCS = Path(__file__).resolve().parents[1] / "docs"


def site_module(name):
    """A module of ``docs/site``, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EXAMPLES = [*(DOCS / "policies").glob("*.yaml"), *(DOCS.parent / "examples").glob("*.yaml")]

tables = site_module("tables")
KEYS = list(tables.Tables().keys())


def plain(value):
    """A JSON schema without what some versions of pydantic add, and which means nothing; other values as they are."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    idle = (
        {"enum"} if "const" in value else {"additionalProperties"} if value.get("additionalProperties") is True else ()
    )
    return {key: plain(each) for key, each in value.items() if key not in idle}


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in tables.written()])
def test_what_is_made_from_the_code_is_current(path):
    have, made = path.read_text("utf-8"), tables.written()[path]
    if path.suffix == ".json":
        have, made = plain(json.loads(have)), plain(json.loads(made))
    assert have == made, f"{path.name} is not current: run make reference"


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


def test_every_page_has_its_place_in_the_site_and_in_the_index():
    placed = [page for part in site_module("hooks").nav((DOCS / "README.md").read_text()) for page in part.values()]
    pages = [page for part in placed for page in ([part] if isinstance(part, str) else part)]
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in EXAMPLES])
def test_editors_find_the_schema_of_the_example_policies(path):
    text = path.read_text()
    (place,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
    schema = json.loads((path.parent / place).read_text())
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text))


PACKAGE = Path(ts.__file__).parent
ADAPTERS = sorted(Path(integrations.__file__).parent.glob("*.py"))
OTHERS = [PACKAGE / "testing.py", PACKAGE / "providers" / "testing.py", *(PACKAGE / "dcp").glob("*.py")]


def public(nodes):
    """Classes and functions without an underscore."""
    return [n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in [*ADAPTERS, *OTHERS]])
def test_public_names_of_adapters_have_docstrings(path):
    """By the text, since most frameworks are not installed; what overrides a framework's method is documented there."""
    for node in public(ast.parse(path.read_text()).body):
        assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
        members = public(node.body) if isinstance(node, ast.ClassDef) and not node.bases else []
        missing = [f"{node.name}.{member.name}" for member in members if not ast.get_docstring(member)]
        assert not missing, f"{path.name}: no docstring: {missing}"


@pytest.mark.parametrize("module", ["tierstate", "tierstate.dcp", "tierstate.tiers.testing"])
def test_public_names_have_docstrings_and_so_have_their_methods(module):
    found = importlib.import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if not inspect.isclass(value):
            assert inspect.isfunction(value) is False or inspect.getdoc(value), f"{module}.{name} has no docstring"
            continue
        assert (value.__doc__ or "").strip(), f"{module}.{name} has no docstring"
        members = [n for n, v in vars(value).items() if inspect.isroutine(v) or isinstance(v, property | classmethod)]
        missing = [n for n in members if not n.startswith("_") and not inspect.getdoc(getattr(value, n))]
        assert not missing, f"{module}.{name}: no docstring: {missing}"


def test_help_reads_well():
    text = pydoc.render_doc(ts.Checkpointer, renderer=pydoc.plaintext)
    assert " at 0x" not in text
    assert "<lambda>" not in text
    assert text.index("with ts.Checkpointer(") < text.index("Methods defined here")
    named = set(re.findall(r"`(\w+)`", inspect.getdoc(ts.Checkpointer).partition("Threads may share it")[0]))
    methods = {n for n, v in inspect.getmembers(ts.Checkpointer) if not n.startswith("_") and callable(v)}
    assert methods - named == {"before_step", "located", "unguard"}  # beside `guard`, and for the command line
