"""What each key of a policy means, with an example: by the docstrings of the models and of the tiers' classes."""

from __future__ import annotations

import inspect
import re
from typing import Any

import yaml

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", re.MULTILINE)


_EXAMPLE = re.compile(r"\bas in `([^`]+)`")


def key_descriptions(cls: type) -> dict[str, str]:
    """The meaning of each key, as Markdown: the items of ``Args:`` and ``Attributes:`` in the docstrings of a class and
    of its bases, where that of the class itself counts first.
    """
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        found |= _items(each.__dict__.get("__doc__") or "")
    return found


def model_description(cls: type) -> str:
    """The text of a class's docstring before its first section, as Markdown."""
    text = _SECTION.split(inspect.cleandoc(cls.__doc__ or "") + "\n")[0]
    return _markdown(text)


def example_in(description: str) -> dict[str, list[Any]]:
    """What a description gives as an example, "as in `30min`", as ``examples`` of a JSON schema; empty without one."""
    found = _EXAMPLE.search(description)
    return {"examples": [yaml.safe_load(found[1])]} if found else {}


def _items(docstring: str) -> dict[str, str]:
    found = {}
    for section in _SECTION.findall(inspect.cleandoc(docstring) + "\n"):
        for item in re.split(r"^ {4}(?=\S)", section, flags=re.MULTILINE)[1:]:
            names, _, meaning = item.partition(":")
            found.update(dict.fromkeys(map(str.strip, names.split(",")), _markdown(meaning)))
    return found


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
