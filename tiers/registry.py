"""The registry of backends: tier classes under the names that a policy's ``type`` gives, from entry points."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tierstate.manifest.arguments import as_text
from tierstate.manifest.errors import NotFound

from .base import Tier
from .secrets import scrub, secrets_of, shows

GROUP = "tierstate.tiers"
"""The entry-point group: the name is the tier's type, the object its class."""


_registered: dict[str, type[Tier]] = {}


def register_tier(name: str, cls: type[Tier]) -> None:
    """Register a class under a type name in this process; it takes precedence over installed classes.

    Raises:
        TypeError: it is not a subclass of `Tier`, or the name is no text.
    """
    name = as_text(name, "name", "a type of tier is named by text, as a policy's `type` has it")
    _registered[name] = _checked(name, cls)


def known_tiers() -> list[str]:
    """Type names of all registered and installed tiers, sorted. Loads none of them."""
    return sorted({*_registered, *_installed()})


def tier_class(type_name: str) -> type[Tier]:
    """The class of that type name, loaded at the first use.

    Raises:
        NotFound: the name is not known; the message has the nearest known one, and all of them.
        ImportError: a package that it needs is missing; the message says how to install it.
        TypeError: the object installed under that name is not a subclass of `Tier`.
    """
    if type_name in _registered:
        return _registered[type_name]
    entry = _installed().get(type_name)
    if entry is None:
        known = known_tiers()
        near = difflib.get_close_matches(type_name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise NotFound(f"{type_name!r} is not a type of tier; {hint}known are {', '.join(known)}")
    try:
        return _checked(type_name, entry.load())
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        remedy = f"pip install {package}" if package and package != "tierstate" else "install it again"
        raise ImportError(
            f"tier type {type_name!r} ({entry.value}) cannot be loaded: {error}; {remedy}", name=error.name
        ) from error


def open_tier(name: str, type: str, options: Mapping[str, Any], arena: object | None = None) -> Tier:
    """Construct a tier from its keys in the policy. Storage is first touched when the tier is used, not here.

    Args:
        name: the tier's name in the policy.
        type: its type.
        options: keyword arguments of the class.
        arena: the engine's arena, for a class whose constructor has a parameter of that name.

    Raises:
        NotFound, ImportError: as for `tier_class`.
        ValueError: the class rejects the options.
    """
    cls = tier_class(type)
    takes_arena = "arena" in inspect.signature(cls).parameters
    try:
        tier = cls(**options, **({"arena": arena} if takes_arena else {}))
    except Exception as error:
        secrets = secrets_of(options)
        if not shows(error, secrets):
            raise
        raise _without(error, secrets) from None
    tier.name = name
    return tier


def _without(error: Exception, secrets: frozenset[str]) -> Exception:
    """An error without the secrets in its message; of the same class, if its message is made of its arguments."""
    told = scrub(f"{type(error).__name__}: {error}", secrets)
    error.args = tuple(scrub(one, secrets) if isinstance(one, str) else one for one in error.args)
    error.__cause__ = error.__context__ = None
    return ValueError(told) if shows(error, secrets) else error


@cache  # reading the metadata of all installed packages takes milliseconds
def _installed() -> dict[str, EntryPoint]:
    # Sorted so that our own come last and take precedence: an installed package must not replace a built-in tier.
    entries = sorted(entry_points(group=GROUP), key=lambda entry: entry.value.startswith("tierstate."))
    return {entry.name: entry for entry in entries}


def _checked(name: str, cls: object) -> type[Tier]:
    if not (isinstance(cls, type) and issubclass(cls, Tier)):
        raise TypeError(f"tier type {name!r}: {cls!r} is not a class derived from tierstate's Tier")
    return cls
