"""The keys of ``keep`` as frozen models: which versions stay, and for how long."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from .units import DURATION_PATTERN, Seconds
from .yaml_lines import show


def no_bool(value: object) -> object:
    """The value, unless it is a boolean."""
    # Python, and pydantic with it, takes true for 1.
    if isinstance(value, bool):
        raise ValueError(f"{show(value)} is not a number; write one, as in 8")
    return value


def _has_unit(value: object) -> object:
    # Beside `last` and `every`, which count versions and steps, a bare number could mean anything.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{show(value)} has no unit; write a number and s, min, h or d, as in '2d'")
    return value


Count: TypeAlias = Annotated[int, Field(ge=1), BeforeValidator(no_bool)]

Within: TypeAlias = Annotated[
    Seconds,
    BeforeValidator(_has_unit),
    WithJsonSchema(
        {"description": "a time, as in 2d", "type": "string", "pattern": rf"^\s*(?:{DURATION_PATTERN})\s*$|\$\{{"}
    ),
]


class Frozen(BaseModel):
    """A model that does not change and has no keys but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Best(Frozen):
    """The best versions by a number in their metadata.

    Attributes:
        metric: its name; dots lead into what is nested.
        mode: whether less or more is better.
        count: how many.
    """

    metric: Annotated[str, Field(min_length=1)]
    mode: Literal["min", "max"]
    count: Count = 1


class Keep(Frozen):
    """Which versions stay on a tier; the reasons add up.

    Attributes:
        last: the newest this many.
        every: the first version at or after each multiple of this many steps.
        within: those saved in the last so many seconds.
        best: the best ones by a metric.
        tags: those that have a tag; None: on tiers that survive the host.
        all: every one.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    last: Count | None = None
    every: Count | None = None
    within: Within | None = None
    best: Best | None = None
    tags: bool | None = None
    all: bool = False

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not (self.last or self.every or self.within or self.best or self.tags or self.all):
            raise ValueError("keeps nothing; write 'last: N', 'every: N', 'within: 2d', 'best: ...' or 'all: true'")
        return self
