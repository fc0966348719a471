"""The JSON schema of policy files, for editors and validators; ``tierstate policy schema`` prints it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from tierstate.manifest.errors import TierstateError
from tierstate.tiers.registry import known_tiers, tier_class

from .models import PolicyKeys, TierKeys, keys_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def policy_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a whole policy file, with the options of every tier type installed here.

    A tier type whose class cannot be loaded, since a package is missing, has only the keys that every tier has.
    """
    schema = _schema(PolicyKeys)
    defs: dict[str, Any] = schema.setdefault("$defs", {})
    types = known_tiers()
    for name in types:
        tier = _tier_schema(name)
        defs.update(tier.pop("$defs", {}))
        defs[f"tier-{name}"] = tier
    schema["properties"]["tiers"] = {
        "description": "fastest first",
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
    return model.model_json_schema(schema_generator=_WithVariables)


def _or_variable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "string", "pattern": r"\$\{"}]}


class _WithVariables(GenerateJsonSchema):
    """Allows the text of a variable, ``${NAME}``, in place of a number, a boolean or a word."""

    def int_schema(self, schema: core_schema.IntSchema) -> dict[str, Any]:
        return _or_variable(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> dict[str, Any]:
        return _or_variable(super().float_schema(schema))

    def bool_schema(self, schema: core_schema.BoolSchema) -> dict[str, Any]:
        return _or_variable(super().bool_schema(schema))

    def literal_schema(self, schema: core_schema.LiteralSchema) -> dict[str, Any]:
        return _or_variable(super().literal_schema(schema))
