"""Docstrings give a policy's keys their meaning and an example, also those of tiers of other packages."""

from tierstate.tiers.base import Tier
from tierstate.tiers.policy.descriptions import example_in, key_descriptions, model_description
from tierstate.tiers.policy.schema import policy_schema
from tierstate.tiers.registry import register_tier


class Shelf(Tier):
    """Boxes on a shelf.

    They stand side by side.

    Args:
        row, column: where the shelf is, as in ``3``;
            from the door on.
        label: what is ``written`` on it.

    Raises:
        ValueError: there is no such shelf.
    """

    def __init__(self, *, row: int = 0, column: int = 0, label: str = "", bare: bool = False) -> None: ...


class LongShelf(Shelf):
    """A long one.

    Attributes:
        label: its name.
    """


def test_items_of_a_docstring_are_meanings():
    found = key_descriptions(Shelf)
    assert found["row"] == found["column"] == "where the shelf is, as in `3`; from the door on."
    assert found["label"] == "what is `written` on it."
    assert "ValueError" not in found
    assert key_descriptions(LongShelf) == {**found, "label": "its name."}
    assert model_description(Shelf) == "Boxes on a shelf. They stand side by side."


def test_a_meaning_has_an_example_where_it_says_so():
    assert example_in("where it is, as in `3`; from the door on.") == {"examples": [3]}
    assert example_in("keys, as in `{file: /a}`") == {"examples": [{"file": "/a"}]}
    assert example_in("`3` or more") == {}


def test_the_schema_describes_the_keys_of_any_tier(monkeypatch):
    monkeypatch.setattr("tierstate.tiers.registry._registered", {})
    register_tier("shelf", Shelf)
    keys = policy_schema(["shelf"])["$defs"]["tier-shelf"]["properties"]
    assert keys["row"]["description"].startswith("where the shelf is")
    assert keys["row"]["examples"] == [3]
    assert "description" not in keys["bare"]
    assert "tests" not in str(keys)
