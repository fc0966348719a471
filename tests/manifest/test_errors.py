"""The tree of errors is the one that its docstring draws."""

from __future__ import annotations

import inspect
import re

import pytest

from tierstate.manifest import errors

CLASSES = {name: c for name, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, BaseException)}


def drawn():
    """Class and parent of each line of the drawing, by how far it is moved in."""
    stack, found = [], {}
    for line in errors.__doc__.splitlines():
        if match := re.match(r"( {4}[ │├└─]*)([A-Z]\w+)( {2,}\S.*)?$", line):
            depth, name = len(match[1]), match[2]
            while stack and stack[-1][0] >= depth:
                stack.pop()
            found[name] = stack[-1][1] if stack else None
            stack.append((depth, name))
    return found


def test_the_drawing_names_exactly_the_classes_that_are_there():
    parents = {name: c.__bases__[0].__name__ for name, c in CLASSES.items()}
    assert drawn() == parents | {"TierstateError": None}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_is_one_of_ours_and_says_what_it_is(name):
    assert issubclass(CLASSES[name], errors.TierstateError)
    assert CLASSES[name].__doc__
    error = CLASSES[name]("what was found")
    assert str(error) == "what was found"


def test_only_an_unavailable_tier_is_transient():
    assert {c for c in CLASSES.values() if c.transient} == {
        c for c in CLASSES.values() if issubclass(c, errors.TierUnavailable)
    }


def test_errors_of_a_tier_know_tier_and_key():
    error = errors.TierFull("no room", tier="nvme", key="packs/run/x")
    assert (error.tier, error.key) == ("nvme", "packs/run/x")
    assert (errors.NotFound("x").tier, errors.NotFound("x").key) == ("", "")


def test_an_error_of_a_policy_is_a_value_error():
    assert issubclass(errors.PolicyError, ValueError)


def test_an_error_of_a_tier_has_its_name_once():
    assert errors.tier_text("nvme", errors.NotFound("nvme: no object k")) == "nvme: no object k"
    assert errors.tier_text("nvme", errors.NotFound("no object k")) == "nvme: no object k"
