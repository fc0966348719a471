"""Arguments of public calls, checked at the door: errors name the argument, what was found, and what is right.

A wrong type is a TypeError, a wrong value a ValueError. Subclasses and scalars of NumPy and torch become plain values
of Python: an Enum that is also text has another form in an f-string, and JSON has none for ``np.int64``.
"""

from __future__ import annotations

import math
import operator
import os
import reprlib


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # The base class raises, or from Python 3.14 on writes an address, which differs from process to process.
        try:
            repr(x)
        except ValueError:
            return f"<int of {x.bit_length()} bits>"
        return super().repr_int(x, level)


short_repr = _Short().repr
"""A value as Python writes it, shortened, for messages; also one with an int of more digits than Python writes."""


def as_text(value: object, name: str, right: str) -> str:
    """Text, as a plain ``str``.

    Args:
        name: of the argument, for the message.
        right: what is right, for the message.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} {short_repr(value)}: {right}")
    return str.__str__(value)


def as_path(value: object, name: str, right: str = "give text, or a pathlib.Path") -> str:
    """The path of a file or a folder, as text.

    Raises:
        TypeError: it is no path.
        ValueError: no file can have this path.
    """
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} of type {type(value).__qualname__}: {right}")  # the value may hold secrets
    path = os.fsdecode(value)
    try:
        if "\0" in path:
            raise ValueError
        os.fsencode(path)
    except ValueError:
        raise ValueError(f"{name} {short_repr(value)}: no file has NUL or a lone surrogate in its name") from None
    return path


def as_int(value: object, name: str, right: str, least: int = 0) -> int:
    """An int that is not too small.

    Raises:
        TypeError: it is none; also a bool.
        ValueError: it is less than ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} {short_repr(value)}: {right}") from None
    if number < least:
        raise ValueError(f"{name} {short_repr(number)}: {right}")
    return number


def as_step(value: object) -> int:
    """A training step; other integers, as those of NumPy, are taken too.

    Raises:
        ValueError: it is no int of 0 or more, below 2^63.
    """
    try:
        if (step := as_int(value, "step", "")) < 1 << 63:
            return step
    except (TypeError, ValueError):
        pass
    raise ValueError(f"step {short_repr(value)}: a step is an int, 0 or more, and less than 2^63")


def as_seconds(value: object, name: str, right: str = "right is a number of seconds, 0 or more") -> float:
    """A number of 0 or more, which may be infinite.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or NaN.
    """
    seconds = as_number(value, name, right)
    if seconds < 0:
        raise ValueError(f"{name} {short_repr(value)}: {right}")
    return seconds


def as_timeout(value: object) -> float | None:
    """Seconds to wait at most, or None for no limit. What is left of a time that is over is negative, and means 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN.
    """
    if value is None:
        return None
    seconds = as_number(value, "timeout", "write a number of seconds, or None for no limit")
    return None if seconds == math.inf else max(0.0, seconds)


def as_number(value: object, name: str, right: str) -> float:
    """A number, which may be infinite.

    Raises:
        TypeError: it is none.
        ValueError: it is NaN.
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int that no float can have
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} {short_repr(value)}: {right}") from None
    if math.isnan(number):
        raise ValueError(f"{name} {short_repr(value)}: {right}")
    return number


def check_flags(**flags: object) -> None:
    """Check that none of these arguments, which are True or False, is text: ``"false"`` from a file or a command line
    would be taken for True.

    Raises:
        TypeError: one is text.
    """
    for name, value in flags.items():
        if isinstance(value, (str, bytes)):
            raise TypeError(f"{name} {short_repr(value)}: text counts as true, whatever it says; write True or False")


def check_class(value: object, name: str, base: type) -> None:
    """Check that an argument is a class of a kind, and not a value of it.

    Raises:
        TypeError: it is no class, or not derived from ``base``.
    """
    if not (isinstance(value, type) and issubclass(value, base)):
        derived = "" if base is object else f" derived from tierstate's {base.__name__}"
        raise TypeError(f"{name} {short_repr(value)}: give a class{derived}")


def check_callable(value: object, name: str, right: str) -> None:
    """Check that an argument can be called, before its first call deep in other work.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} {short_repr(value)} cannot be called; {right}")
