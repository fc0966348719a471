"""The JSON schema of policy files, for editors and validators; ``tierstate policy schema`` prints it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from tierstate.manifest.errors import TierstateError
from tierstate.manifest.history.retention import format_duration
from tierstate.tiers.registry import known_tiers, tier_class
from tierstate.tiers.units import format_size

from .descriptions import example_in, key_descriptions, model_description
from .models import PolicyKeys, TierKeys, keys_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def policy_schema(types: Sequence[str] | None = None) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a whole policy file, with a description of each key, which editors show.

    A tier type whose class cannot be loaded, since a package is missing, has only the keys that every tier has.

    Args:
        types: the tier types, whose options it has; by default all that are installed here.
    """
    schema = _schema(PolicyKeys)
    defs: dict[str, Any] = schema.setdefault("$defs", {})
    types = list(known_tiers() if types is None else types)
    for name in types:
        tier = _tier_schema(name)
        defs.update(tier.pop("$defs", {}))
        defs[f"tier-{name}"] = tier
    schema["properties"]["tiers"] = {
        "description": "the tiers by name, fastest first: the order in which versions are copied to slower ones",
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": types}},
            "allOf": [{"if": _is(name), "then": {"$ref": f"#/$defs/tier-{name}"}} for name in types],
        },
    }
    return {**schema, "$schema": DIALECT, "title": "tierstate policy", "required": ["tiers"]}


def _is(name: str) -> dict[str, Any]:
    return {"required": ["type"], "properties": {"type": {"const": name}}}


def _tier_schema(name: str) -> dict[str, Any]:
    try:
        return _schema(keys_of(tier_class(name)))
    except (TierstateError, ImportError, TypeError, PydanticUserError):
        return _schema(_Unread)


class _Unread(TierKeys, extra="allow"):
    pass


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(schema_generator=_ForPolicies)
    for each in [schema, *schema.get("$defs", {}).values()]:
        each.pop("title", None)  # the name of a class of ours
        for key in each.get("properties", {}).values():
            for kind in key.get("anyOf", ()):
                kind.pop("default", None)  # of another key of this type; so do versions of pydantic before 2.11
    return schema


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "string", "pattern": r"\$\{"}]}


_SHOWN: dict[str | None, Callable[[Any], Any]] = {
    "size": format_size,
    "duration": format_duration,
    "mode of files": "{:04o}".format,
}
"""How a default is written in a policy file, by the title of its type."""


def _show_default(key: dict[str, Any]) -> None:
    default = key.pop("default", None)
    # Without a value a key is left out of a file, and the keys of a mapping say their own defaults.
    if default is not None and not isinstance(default, dict):
        key["default"] = _SHOWN.get(key.get("title"), lambda value: value)(default)


class _ForPolicies(GenerateJsonSchema):
    """Describes each key by the docstrings. A variable, ``${NAME}``, may be in place of a number, boolean or word."""

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        found, cls = super().model_schema(schema), schema["cls"]
        meanings = key_descriptions(cls)
        for name, key in found.get("properties", {}).items():
            if text := meanings.get(name) or key.get("description"):
                key.update(description=text, **example_in(text))
            _show_default(key)
        return {**found, "description": model_description(cls)}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # a title would only repeat the key

    def int_schema(self, schema: core_schema.IntSchema) -> dict[str, Any]:
        return _or_variable(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        return _or_variable(super().float_schema(schema))

    def bool_schema(self, schema: core_schema.BoolSchema) -> dict[str, Any]:
        return _or_variable(super().bool_schema(schema))

    def literal_schema(self, schema: core_schema.LiteralSchema) -> dict[str, Any]:
        return _or_variable(super().literal_schema(schema))
