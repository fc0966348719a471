"""Units: sizes, rates and durations as people write them (``16MiB``, ``500MiB/s``, ``30min``), parsed and formatted."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

BYTES = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
}


SECONDS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
    "w": Fraction(604800),
}


MAX_SIZE = (1 << 63) - 1


MAX_SECONDS = 100 * 366 * 86400
"""A century: far inside what ``timedelta`` and file systems can hold, far outside any sensible interval."""


MAX_TIMES = 10**9


_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,19})?"


_SIZE = re.compile(rf"({_NUMBER}) ?({'|'.join(BYTES)})?")


_PART = rf"({_NUMBER}) ?({'|'.join(SECONDS)})"


DURATION_PATTERN = rf"{_PART}(?: ?{_PART})*"


_DURATION = re.compile(DURATION_PATTERN)


_SIZE_REMEDY = "write a number and KiB, MiB, GiB or TiB, as in '2 TiB'"


_RATE_REMEDY = "write a size per second, as in '500MiB/s'"


_TIMES = re.compile(rf"({_NUMBER})(?: ?/ ?(s|min|h))?")


_TIMES_REMEDY = "write a number per second, as in '100/s' or '600/min'"


_DURATION_REMEDY = "write a number and s, min, h or d, as in '30min' or '1h30min'"


def parse_size(value: object) -> int:
    """Bytes: of a whole number, or of text such as ``"16MiB"``, ``"1.5 GiB"``, ``"2TB"`` (decimal) or ``"4096"``.

    Raises:
        ValueError: anything else, a negative number, or one that is not a whole number of bytes.
    """
    nbytes = _amount(value)
    if nbytes != int(nbytes):
        raise ValueError(f"{value!r} is not a whole number of bytes; {_SIZE_REMEDY}")
    return int(nbytes)


def _amount(value: object) -> Fraction | int:
    """Bytes, perhaps not a whole number of them."""
    nbytes: Fraction | int
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if not found:
            raise ValueError(f"{value!r} is not a size; {_SIZE_REMEDY}")
        nbytes = Fraction(found[1]) * BYTES[found[2] or "B"]
    if not 0 <= nbytes <= MAX_SIZE:
        raise ValueError(f"{value!r} is not between 0 and 2^63 - 1 bytes; {_SIZE_REMEDY}")
    return nbytes


def format_size(nbytes: int) -> str:
    """A number of bytes as text that `parse_size` reads back exactly, in the largest binary unit that divides it."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % BYTES[unit] == 0:
            return f"{nbytes // BYTES[unit]}{unit}"
    return f"{nbytes}B"


def rough_size(nbytes: float) -> str:
    """Bytes rounded to three digits for display, as in ``14.7 MiB``; `parse_size` does not read it back exactly."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while nbytes >= 1000 and unit != "TiB":
        nbytes, unit = nbytes / 1024, next(units)
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"


def rough_duration(seconds: float) -> str:
    """A time for people, in one or two units and with about two digits, as in ``2.4 s``, ``7min 30s`` or ``264 d``."""
    if seconds < 1:
        milliseconds = 1000 * seconds
        return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
    if seconds < 60:
        return f"{seconds:.2g} s"
    for unit, name, below, smaller, part in (
        (60, "min", 3600, "s", 1),
        (3600, "h", 2 * 86400, "min", 60),
        (86400, "d", math.inf, "h", 3600),
    ):
        if seconds < below:
            whole, rest = divmod(round(seconds / part) * part, unit)
            return f"{whole:.0f} {name}" + (f" {rest / part:.0f} {smaller}" if rest and whole < 10 else "")
    raise AssertionError


def parse_seconds(value: object) -> float:
    """Seconds: of a number, or of text such as ``"90s"``, ``"30min"``, ``"1h30min"`` or ``"2d"``.

    Raises:
        ValueError: anything else, zero or less, or more than a century.
    """
    if isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        seconds = float(sum(Fraction(n) * SECONDS[unit] for n, unit in re.findall(_PART, value)))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError(f"{value!r} is not a duration; {_DURATION_REMEDY}")
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise ValueError(f"{value!r} is not more than nothing and at most a century; {_DURATION_REMEDY}")
    return seconds


def parse_rate(value: object) -> int:
    """Bytes per second, rounded down: of a whole number, or of text such as ``"500MiB/s"`` or ``"2.2GiB/s"``.

    Raises:
        ValueError: anything else, or less than one.
    """
    size = value.strip().removesuffix("/s") if isinstance(value, str) else value
    if isinstance(value, str) and size == value.strip():
        raise ValueError(f"{value!r} is not a rate; {_RATE_REMEDY}")
    try:
        rate = int(_amount(size))
    except ValueError:
        rate = 0
    if rate == 0:
        raise ValueError(f"{value!r} is not a rate; {_RATE_REMEDY}")
    return rate


def parse_times(value: object) -> float:
    """Times per second: of a number, or of text such as ``"100"``, ``"100/s"`` or ``"600/min"``.

    Raises:
        ValueError: anything else, zero, or more than a billion per second.
    """
    if isinstance(value, str) and (found := _TIMES.fullmatch(value.strip())):
        times = float(Fraction(found[1]) / SECONDS[found[2] or "s"])
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        times = float(value)
    else:
        raise ValueError(f"{value!r} is not a number of times per second; {_TIMES_REMEDY}")
    if not 0 < times <= MAX_TIMES:
        raise ValueError(f"{value!r} is not more than nothing and at most a billion per second; {_TIMES_REMEDY}")
    return times


def _positive_size(value: object) -> int:
    if (size := parse_size(value)) == 0:
        raise ValueError(f"{value!r} is nothing at all; {_SIZE_REMEDY}")
    return size


def _schema(title: str, description: str, pattern: str, kind: str = "integer") -> WithJsonSchema:
    number: dict[str, Any] = {"type": kind, "exclusiveMinimum": 0}
    text: dict[str, Any] = {"type": "string", "pattern": rf"^\s*(?:{pattern})\s*$|\$\{{"}
    return WithJsonSchema({"title": title, "description": description, "anyOf": [number, text]})


Size: TypeAlias = Annotated[
    int, BeforeValidator(_positive_size), _schema("size", "bytes, as in `16MiB`", _SIZE.pattern)
]
"""Bytes, at least one. In a policy a whole number, or text with a unit."""


Rate: TypeAlias = Annotated[
    int, BeforeValidator(parse_rate), _schema("rate", "bytes per second, as in `500MiB/s`", f"{_SIZE.pattern}/s")
]
"""Bytes per second, at least one. In a policy a whole number, or text such as ``500MiB/s``."""


Times: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_times),
    _schema("rate of calls", "times per second, as in `100/s`", _TIMES.pattern, "number"),
]
"""Times per second, more than zero. In a policy a number, or text such as ``100/s`` or ``600/min``."""


Seconds: TypeAlias = Annotated[
    float, BeforeValidator(parse_seconds), _schema("duration", "a time, as in `30min`", _DURATION.pattern, "number")
]
"""Seconds, more than zero. In a policy a number, or text such as ``30min``."""
