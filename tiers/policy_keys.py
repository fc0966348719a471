"""The keys of a policy as frozen models, those of a tier read off its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema, create_model
from pydantic.errors import PydanticUserError

from tierstate.manifest.chunk import CHUNK_GRAIN, CHUNK_SIZE, MAX_CHUNK_SIZE
from tierstate.manifest.leaf import check_glob

from .base import Tier
from .keep_keys import Frozen, Keep, no_bool
from .units import DURATION_PATTERN, Rate, Seconds, Size, Times, format_size, parse_seconds
from .yaml_lines import show

MIN_CHUNK_SIZE = 4096
ARENA_SIZE = 2 << 30
MAX_RETRIES = 100

Codec: TypeAlias = Literal["raw", "fast", "small", "delta", "auto"]


def _no_tilde(value: object) -> object:
    if isinstance(value, str) and value.startswith("~"):
        raise ValueError(f"{value!r} starts with '~', which only shells know; write '${{HOME}}'")
    return value


def _chunk(nbytes: int) -> int:
    if nbytes % CHUNK_GRAIN or not MIN_CHUNK_SIZE <= nbytes <= MAX_CHUNK_SIZE:
        least, most = format_size(MIN_CHUNK_SIZE), format_size(MAX_CHUNK_SIZE)
        raise ValueError(
            f"{format_size(nbytes)} is no length of a chunk; write a multiple of {CHUNK_GRAIN} bytes "
            f"from {least} to {most}, as in '16MiB'"
        )
    return nbytes


def _every(value: object) -> int | timedelta:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    try:
        time = value if isinstance(value, timedelta) else timedelta(seconds=parse_seconds(str(value)))
    except ValueError:
        time = timedelta(0)
    if time <= timedelta(0):
        raise ValueError(f"{show(value)} is neither steps nor a time; write a number of steps, or a time as in '30min'")
    return time


Every: TypeAlias = Annotated[
    int | timedelta,
    BeforeValidator(_every),
    WithJsonSchema(
        {
            "description": "steps, or a time as in 30min",
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": rf"^\s*(?:[0-9]+|{DURATION_PATTERN})\s*$|\$\{{"},
            ],
        }
    ),
]
"""A cadence: an int counts steps, a timedelta is a time."""


class Arena(Frozen):
    """The memory through which saves go.

    Attributes:
        size: bytes.
        on_full: ``block`` waits for room; ``skip`` gives up the save, and says so.
    """

    size: Size = ARENA_SIZE
    on_full: Literal["block", "skip"] = "block"


class Ranks(Frozen):
    """How long the ranks of a job wait for one another.

    Attributes:
        timeout: seconds that a rank may be behind the others before their save fails.
        silence: seconds without a sign of life after which a rank counts as dead.
    """

    timeout: Seconds = 1800.0
    silence: Seconds = 60.0


class Rule(Frozen):
    """What holds for the leaves that match, key by key, unless an earlier rule that matched them said it already.

    Attributes:
        match: glob over leaf paths.
        tiers: names of the tiers they go to; None where this rule does not say.
        codec: how they are encoded; None where this rule does not say.
        pickle: whether an object of no known type may be pickled here; None where this rule does not say.
        lossy: how floating-point tensors are saved with fewer bits, in every tier; None where this rule does not say.
        keep: in which versions they stay, on every tier, in place of the tier's own ``keep``; None where this rule
            does not say.
    """

    match: Annotated[str, AfterValidator(check_glob)]
    tiers: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    codec: Codec | None = None
    pickle: bool | None = None
    lossy: Literal["bf16", "int8"] | None = None
    keep: Keep | None = None


class TierKeys(Frozen):
    """The keys that every tier has.

    Attributes:
        type: name of the tier's class, as its entry point has it.
        every: steps or time between saves that go there; None for every save.
        keep: which versions stay there.
        codec: how chunks are encoded there.
        format: what kind of file a pack is there.
        bandwidth: bytes per second that this process reads and writes there at most; None for no limit.
        operations: calls per second of the tier, at most; None for no limit.
        retries: how often a call that failed for a moment is tried again.
        on_lag: what becomes of older saves that wait to be copied there when newer ones wait, too: ``queue`` copies
            all of them, ``skip`` leaves them out.
    """

    type: str
    every: Every | None = None
    keep: Keep = Keep(all=True)
    codec: Codec = "raw"
    format: Literal["native", "safetensors", "hdf5"] = "native"
    bandwidth: Rate | None = None
    operations: Times | None = None
    retries: Annotated[int, Field(ge=0, le=MAX_RETRIES), BeforeValidator(no_bool)] = 0
    on_lag: Literal["queue", "skip"] = "queue"


class PolicyKeys(Frozen):
    """The keys of a policy that stand beside ``tiers``; see `tierstate.tiers.policy.Policy`."""

    version: Annotated[Literal[1], BeforeValidator(no_bool)] = 1
    chunk: Annotated[Size, AfterValidator(_chunk)] = CHUNK_SIZE
    digest: Literal["xxh3-128", "blake3"] = "xxh3-128"
    arena: Arena = Arena()
    ranks: Ranks = Ranks()
    durable: str | None = None
    rules: tuple[Rule, ...] = ()


_OPTION = "option_"


@lru_cache(maxsize=256)
def keys_of(tier: type[Tier]) -> type[TierKeys]:
    """A model with the keys that every tier has, and the keyword-only parameters of this class's constructor.

    Raises:
        TypeError: the constructor cannot be read so: a parameter has the name of a common key, or an annotation
            that is no type of data.
    """
    where = f"{tier.__module__}.{tier.__qualname__}"
    try:
        hints = get_type_hints(tier.__init__, include_extras=True)
        fields = {
            # The prefix keeps an option such as `copy` or `schema` from hiding a method of the model.
            f"{_OPTION}{p.name}": (_checked(hints.get(p.name, Any)), _field(p))
            for p in inspect.signature(tier.__init__).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name != "arena"
        }
        model: type[TierKeys] = create_model(tier.__name__, __base__=TierKeys, **fields)  # type: ignore[call-overload]
    except (AttributeError, NameError, TypeError, PydanticUserError) as error:
        what = str(error).splitlines()[0]
        raise TypeError(f"the constructor of {where} cannot be read as keys of a policy: {what}") from error
    if taken := sorted(TierKeys.model_fields.keys() & {name.removeprefix(_OPTION) for name in fields}):
        raise TypeError(f"the constructor of {where} has the parameter {taken[0]!r}, which is a key of every tier")
    return model


def options_of(keys: TierKeys) -> dict[str, Any]:
    """What the file gave for the tier's own keys, validated: keyword arguments for the constructor."""
    fields = type(keys).model_fields
    return {str(fields[f].alias): getattr(keys, f) for f in fields if f in keys.model_fields_set and _is_option(f)}


def names_of(model: type[BaseModel]) -> list[str]:
    """The keys of a model as they are written in a file."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_option(field: str) -> bool:
    return field.startswith(_OPTION)


def _field(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if default is parameter.empty:
        return Field(alias=parameter.name)
    if default is None or isinstance(default, (bool, int, float, str)):
        return Field(default, alias=parameter.name)
    # A default that JSON does not know is kept out of the schema.
    return Field(default_factory=lambda: default, alias=parameter.name)


def _checked(annotation: Any) -> Any:
    """The annotation, with the traps closed that pydantic leaves open."""
    parts = _alternatives(annotation)
    check: Callable[[object], object] | None = None
    if parts & {int, float} and not parts & {bool, object}:
        check = no_bool
    elif Path in parts:
        check = _no_tilde
    return Annotated[annotation, BeforeValidator(check)] if check else annotation


def _alternatives(annotation: Any) -> set[Any]:
    """The types that a value of this annotation may have."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_alternatives, get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else {object}
