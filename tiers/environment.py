"""Environment variables in the texts of a policy: ``${NAME}``, ``${NAME:-default}``, and ``$$`` for a dollar sign."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .yaml_lines import Findings, Keys

_DOLLAR = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^${}]*))?\})?")
_REMEDY = "write '${NAME}' or '${NAME:-default}', or '$$' for a dollar sign"


def expand(value: Any, environ: Mapping[str, str], findings: Findings, keys: Keys = ()) -> Any:
    """The same data with variables put in; keys of mappings stay as they are.

    A variable that is unset and has no default, or a ``$`` that starts neither, goes into ``findings``. As in a shell,
    a default also takes the place of an empty variable.
    """
    if isinstance(value, dict):
        return {key: expand(item, environ, findings, (*keys, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, environ, findings, (*keys, i)) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    return _DOLLAR.sub(lambda found: _put_in(found, environ, findings, keys), value)


def _put_in(found: re.Match[str], environ: Mapping[str, str], findings: Findings, keys: Keys) -> str:
    dollar, name, default = found.groups()
    if dollar:
        return "$"
    if name is None:
        findings.add(keys, f"has a '$' that starts no variable; {_REMEDY}")
        return "$"
    if default is not None:
        return environ.get(name) or str(default)
    if name not in environ:
        findings.add(keys, f"the variable {name} is not set; set it, or write '${{{name}:-default}}'")
    return environ.get(name, "")


def protect(text: str) -> str:
    """Text that expands to this very text."""
    return text.replace("$", "$$")
