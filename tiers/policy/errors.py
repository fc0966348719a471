"""Validation errors of a policy: pydantic's errors as lines of text, each with the place in the file and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .models import (
    AgentKeys,
    AlarmsKeys,
    ArenaKeys,
    AutoEvery,
    BestKeys,
    FailuresKeys,
    KeepKeys,
    MaxLagKeys,
    MetricsKeys,
    OnFailureKeys,
    PreemptionKeys,
    RanksKeys,
    RuleKeys,
    SecretKeys,
    key_names,
)
from .yaml import KeyPath, PolicyErrors, show_value

M = TypeVar("M", bound=BaseModel)


_INNER: Mapping[str, type[BaseModel]] = {
    "agent": AgentKeys,
    "alarms": AlarmsKeys,
    "arena": ArenaKeys,
    "best": BestKeys,
    "encrypt": SecretKeys,
    "every": AutoEvery,
    "failures": FailuresKeys,
    "keep": KeepKeys,
    "max_lag": MaxLagKeys,
    "metrics": MetricsKeys,
    "on_failure": OnFailureKeys,
    "preemption": PreemptionKeys,
    "ranks": RanksKeys,
    "rules": RuleKeys,
    "seal": SecretKeys,
}


_MEANT: Mapping[str, Sequence[str]] = {
    "stripes": ("stripe_count",),
    "count": ("stripe_count", "last"),
    "interval": ("every",),
    "frequency": ("every",),
    "cadence": ("every",),
    "retention": ("keep",),
    "retain": ("keep",),
    "compression": ("codec",),
    "compress": ("codec",),
    "encoding": ("codec",),
    "directory": ("path",),
    "dir": ("path",),
    "folder": ("path",),
    "root": ("path",),
    "uri": ("url",),
    "bucket": ("url",),
    "kind": ("type",),
    "backend": ("type",),
    "timeout": ("deadline", "timeout"),
    "limit": ("bandwidth",),
    "rate": ("bandwidth",),
    "iops": ("operations",),
    "quota": ("capacity",),
    "max_size": ("capacity",),
    "storage_options": ("options",),
    "pattern": ("match",),
    "glob": ("match",),
    "steps": ("every",),
    "time": ("seconds", "within"),
    "newest": ("last",),
    "buffer": ("arena",),
}
"""What a key that is none of ours probably means: the first of these that is known at its place."""


_BRANCH = re.compile(rf"bool|interval|auto|.*\b{SecretKeys.__name__}\b.*")
"""What pydantic adds to the place of an error in `encrypt` and `every`, which may also be mappings."""


_HIDDEN = "the value, which is not shown as it may be secret,"


_NUMBER = "{found} is not a number; write one, as in 8"


_TEXT = "{found} is not text; put it in quotes"


_MAPPING = "{found} is not a mapping; write keys and values"


_LIST = "{found} is not a list; write one, as in '[nvme]'"


_SAY = {
    "missing": "is missing; write '{key}: ...'",
    "literal_error": "{found} is not known; write {expected}",
    "int_type": _NUMBER,
    "int_parsing": _NUMBER,
    "int_from_float": "{found} is not a whole number; write one, as in 8",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _NUMBER,
    "bool_type": "{found} is neither true nor false; write one of them",
    "bool_parsing": "{found} is neither true nor false; write one of them",
    "string_type": _TEXT,
    "path_type": _TEXT,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "string_too_short": "is empty; write at least one character",
    "too_short": "is empty; write at least one, or leave the key out",
    "greater_than": "{found} is too small; write more than {gt:g}",
    "greater_than_equal": "{found} is too small; write at least {ge}",
    "less_than_equal": "{found} is too big; write at most {le}",
}


def validate_keys(model: type[M], data: Any, at: KeyPath, findings: PolicyErrors, also: Sequence[str] = ()) -> M | None:
    """The model made of the data; or None, and then every error is added to ``findings``.

    Args:
        at: the place of the data in the file.
        also: keys that are allowed at this place, though the model does not have them.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["loc"][-1] == "bool" and isinstance(detail["input"], dict):
                continue  # `encrypt` may also be a mapping, as it is here; what is wrong in it is another error
            keys = _place(detail, data)
            findings.add((*at, *keys), _explain(detail, model, keys, at, also))
    return None


def unknown_name(name: object, known: Iterable[str], what: str) -> str:
    """``what``, followed by the known name that is nearest in spelling or meaning, or by all known names."""
    names = list(known)
    meant = _MEANT.get(str(name).lower().replace("-", "_"), ())
    near = [other for other in meant if other in names] or get_close_matches(str(name).lower(), names, n=1)
    return f"{what}; did you mean {near[0]!r}?" if near else f"{what}; known are {', '.join(names)}"


def _place(detail: ErrorDetails, data: Any) -> KeyPath:
    """The error's place in the file, without the names that pydantic adds for the branches of a union."""
    keys: list[str | int] = []
    for key in detail["loc"]:
        if _BRANCH.fullmatch(str(key)) and not (isinstance(data, dict) and key in data):
            continue
        new = isinstance(data, dict) and detail["type"] == "missing"
        if not (new or (isinstance(data, dict) and key in data) or (isinstance(data, list) and isinstance(key, int))):
            break
        keys.append(key)
        data = data.get(key) if isinstance(data, dict) else data[int(key)]
    return tuple(keys)


def _explain(detail: ErrorDetails, model: type[BaseModel], keys: KeyPath, at: KeyPath, also: Sequence[str]) -> str:
    context = detail.get("ctx", {})
    whole = (*at, *keys)
    options = len(whole) > 2 and whole[0] == "tiers" and whole[2] == "options"
    secret = options or "seal" in whole[:1] or "encrypt" in whole[2:3]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(model, keys, also)
    if detail["type"] == "value_error" and not options:
        return str(context["error"])
    found = _HIDDEN if secret else show_value(detail["input"])
    say = _SAY.get(detail["type"], "{found} does not fit" if secret else "{found}: " + _plain(detail["msg"]))
    return say.format(found=found, key=whole[-1] if whole else "", **context)


def _unknown_key(model: type[BaseModel], keys: KeyPath, also: Sequence[str]) -> str:
    around = [key for key in keys[:-1] if isinstance(key, str)]
    owner = _INNER.get(around[-1]) if around else model
    known = [*key_names(owner), *(() if around else also)] if owner else []
    return unknown_name(keys[-1], known, "unknown key") if known else "unknown key; leave it out"


def _plain(message: str) -> str:
    return message.replace("{", "{{").replace("}", "}}")
