"""YAML with lines, and variables: plain data comes through exact, and nothing hostile gets further."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.errors import PolicyError
from tierstate.tiers.policy.yaml import (
    MAX_POLICY_BYTES,
    MAX_POLICY_DEPTH,
    PolicyErrors,
    escape_variables,
    expand_variables,
    read_yaml,
    show_value,
)

WORDS = st.sampled_from(["off", "yes", "1:30", "010", "0x10", "1e3", "2020-01-01", "~", "null", "", "<<", "=", "1_000"])
TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=12) | WORDS
SCALARS = TEXT | st.integers(-(10**18), 10**18) | st.booleans() | st.none() | st.floats(allow_nan=False, width=32)
DATA = st.recursive(
    SCALARS.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


def read(text: str) -> dict[str, Any]:
    findings = PolicyErrors("p.yaml")
    data = read_yaml(text, findings)
    findings.raise_any()
    return data


def told(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        read(text)
    return str(caught.value)


@given(st.dictionaries(TEXT, DATA, max_size=4))
def test_what_a_yaml_writer_wrote_comes_back(data: dict[str, Any]) -> None:
    assert read(yaml.safe_dump(data, allow_unicode=True)) == data


@given(st.text(max_size=60) | st.text("ab:-[]{}&*!|>'\"#%@,?\n \t~<", max_size=60))
def test_any_text_is_a_mapping_or_a_policy_error(text: str) -> None:
    try:
        assert isinstance(read(text), dict)
    except PolicyError as error:
        assert all(line.startswith("p.yaml:") for line in str(error).splitlines())  # noqa: PT017


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_every_key_has_its_line(blanks: list[int]) -> None:
    text = ""
    lines: dict[tuple[str | int, ...], int] = {}
    for i, blank in enumerate(blanks):
        text += "\n" * blank + f"k{i}:\n  # a comment\n  in:\n    - 1\n    - {{deep: 2}}\n"
        at = text.count("\n") - 4
        lines |= {
            (f"k{i}",): at,
            (f"k{i}", "in"): at + 2,
            (f"k{i}", "in", 0): at + 3,
            (f"k{i}", "in", 1, "deep"): at + 4,
        }
    findings = PolicyErrors("p.yaml")
    read_yaml(text, findings)
    assert {keys: findings.line(keys) for keys in lines} == lines
    assert findings.line(("k0", "absent", "deeper")) == lines[("k0",)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.yaml:1:1: is empty; write at least 'tiers:' and one tier"),
        ("\n# only this\n", "p.yaml:1:1: is empty; write at least 'tiers:' and one tier"),
        ("\n- a", "p.yaml:2:1: is not a mapping; write keys and values, as in 'version: 1'"),
        ("a: 1\nb: [", "p.yaml:2:5: is not YAML: while parsing a flow node expected the node content"),
        ("a: *b", "p.yaml:1:4: is not YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2", "p.yaml:2:1: is not YAML: expected a single document"),
        ("a:\n  b: 1\n\n  b: 2", "p.yaml:4:3: a.b: is written twice, first in line 2; keep one"),
        ("a: 1\n2: b", "p.yaml:2:1: the key '2' is not text; put it in quotes"),
        ("? [a]\n: b", "p.yaml:1:3: a key is a list or a mapping; write text"),
        (
            "a:\n  - !!python/object/apply:os.system [x]",
            "p.yaml:2:5: a.0: has the tag 'tag:yaml.org,2002:python/object",
        ),
        ("a: &a {x: 1}\nb: {<<: *a}", "p.yaml:2:5: b.<<: YAML's merge key is not known here; write the keys out"),
        ("a: !secret x", "p.yaml:1:4: a: has the tag '!secret'; take it away"),
        ("a: !!int x", "p.yaml:1:4: a: is tagged as int and is none; take the tag away"),
        (
            "tiers: {n: {type: nvme, path: ${HOME}/x}}",
            "p.yaml:1:32: is not YAML: while parsing a flow mapping expected ',' or '}', but got '{'; put text with "
            "'${...}' in quotes within {...} and [...], as in '{path: \"${SCRATCH}/ckpt\"}'",
        ),
        ("a: [${A}, ${B}]", "put text with '${...}' in quotes"),
        ("a: {b: ${A:-x}}", "put text with '${...}' in quotes"),
        ("a: b\n\nc: \x01", "p.yaml:3:4: is not YAML: the character U+0001 is not allowed"),
        ("a: &a [*a]", "nested more than 24 deep"),
        ("a: " + "[" * 100_000, "nested more than 24 deep"),
        ("a: [" + "1," * 20_000 + "]", "has more than 10000 values"),
        ("#" * (MAX_POLICY_BYTES + 1), "is larger than 1048576 bytes"),
    ],
)
def test_what_is_no_policy_is_refused_with_its_place(text: str, message: str) -> None:
    assert message in told(text)


def test_aliases_of_aliases_are_stopped() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "has more than 10000 values" in told("\n".join(lines))


def test_a_plain_alias_is_written_out() -> None:
    assert read("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


def test_depth_has_room_for_policies() -> None:
    depth = MAX_POLICY_DEPTH - 2
    assert read("a: " + "[" * depth + "]" * depth)


def test_findings_are_told_in_the_files_order_and_once_for_each_place() -> None:
    findings = PolicyErrors("p.yaml", {("b",): 1, ("a",): 2})
    findings.add(("a",), "second")
    findings.add(("b",), "first")
    findings.add(("a",), "what follows from the second")
    with pytest.raises(PolicyError) as caught:
        findings.raise_any()
    assert str(caught.value) == "p.yaml:1:1: b: first\np.yaml:2:1: a: second"


@given(st.text(max_size=30), st.text("${}:-AB", max_size=12))
def test_protected_text_expands_to_itself(text: str, dollars: str) -> None:
    findings = PolicyErrors("p.yaml")
    assert expand_variables(escape_variables(text + dollars), {}, findings) == text + dollars
    findings.raise_any()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${SET}/x", "value/x"),
        ("${SET:-other}", "value"),
        ("${UNSET:-other}", "other"),
        ("${UNSET:-}", ""),
        ("${EMPTY:-other}", "other"),
        ("${EMPTY}", ""),
        ("$${SET} $$", "${SET} $"),
        ("${SET}${SET}", "valuevalue"),
        ("${DOLLAR}", "${SET}"),
    ],
)
def test_variables_are_put_in_once(text: str, expected: str) -> None:
    environ = {"SET": "value", "EMPTY": "", "DOLLAR": "${SET}"}
    findings = PolicyErrors("p.yaml")
    assert expand_variables({"${SET}": [text, 1, None]}, environ, findings) == {"${SET}": [expected, 1, None]}
    findings.raise_any()


@pytest.mark.parametrize("text", ["$HOME", "${", "${}", "${1}", "${A-b}", "${A:-${B}}", "$", "a$"])
def test_a_dollar_that_starts_no_variable_is_refused(text: str) -> None:
    findings = PolicyErrors("p.yaml", {("a",): 3})
    expand_variables({"a": text}, {"A": "", "HOME": "x"}, findings)
    with pytest.raises(PolicyError, match=r"p.yaml:3:1: a: has a '\$' that starts no variable; write '\$\{NAME\}'"):
        findings.raise_any()


def test_an_unset_variable_is_refused() -> None:
    findings = PolicyErrors("p.yaml", {("a", 0): 3})
    expand_variables({"a": ["${NOPE}"]}, {}, findings)
    with pytest.raises(PolicyError, match=r"p.yaml:3:1: a.0: the variable NOPE is not set; set it, or write"):
        findings.raise_any()


def test_values_are_shown_in_a_line() -> None:
    values: list[Any] = [None, True, [1], {}, 8, "a"]
    assert [show_value(value) for value in values] == [
        "an empty value",
        "true",
        "a list",
        "a mapping",
        "8",
        "'a'",
    ]
    assert len(show_value("x\n" * 500)) == 80
