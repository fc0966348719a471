"""What every command prints with: JSON, tables and lines. What a terminal would obey is written as an escape."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tierstate.manifest.printable import escape_controls, escape_json, finite_json

from .table import table_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


PLAIN_ABOVE = 1000
"""JSON of more items than this has a line for each, which is much faster."""


def print_json(value: Any) -> None:
    """Print JSON on standard output; values that JSON does not have, such as paths and NaN, are printed as text."""
    if isinstance(value, list) and len(value) > PLAIN_ABOVE:  # one line for each
        print("[" + ",\n".join(map(as_json_text, value)) + "]")
        return
    print(as_json_text(value, 2))


def as_json_text(value: Any, indent: int | None = None) -> str:
    try:
        text = json.dumps(value, indent=indent, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:  # there is a NaN
        text = json.dumps(finite_json(value), indent=indent, default=str, ensure_ascii=False)
    return escape_json(text)


def say(line: str, file: TextIO | None = None) -> None:
    """Print one line, on standard output if no file is given."""
    print(escape_controls(line), file=file)


def print_fields(value: DataclassInstance, **more: object) -> None:
    """The fields of a dataclass, and more beside them, as one JSON object."""
    print_json({**dataclasses.asdict(value), **more})


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output, on a terminal as wide as that; names that begin with ``>`` are of numbers."""
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    head, *lines = table_lines(columns, printable(rows), width)
    print("\n".join([f"\x1b[1m{head}\x1b[0m" if bold else head, *lines]))


def printable(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    """The cells of a table as text that a terminal does not obey."""
    return [[escape_controls(str(cell)) for cell in row] for row in rows]


def when(seconds: float) -> str:
    """A time as people write it, in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def plural(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
