"""Text for people and logs: characters that a terminal obeys, or that hide what is there, are written as escapes.

Names and metadata come from whoever wrote them, and messages from servers: an escape sequence could rewrite what a
terminal shows, a line break could forge a line, and a bidirectional override could turn a name round.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def escape_controls(text: str, keep: str = "") -> str:
    """The text with every character that is not printable as Python writes it in a literal, as in ``\\x1b``.

    Args:
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escaped(one) for one in text)


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", "surrogatepass").decode("ascii")


def escape_lines(text: str) -> str:
    """The same for a message of several lines. Those after the first are indented, so that none can pass for another
    message."""
    return "\n  ".join(map(escape_controls, text.split("\n")))


def escape_json(text: str) -> str:
    """JSON whose strings have such characters as JSON's own escapes; it means the same."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else _json_escaped(one) for one in text)


def _json_escaped(one: str) -> str:
    return f"\\u{ord(one):04x}" if ord(one) < 0x80 else json.dumps(one)[1:-1]


def finite_json(value: Any) -> Any:
    """JSON values with NaN, Infinity and -Infinity as text. JSON has no such numbers, and `json.dumps` writes them
    bare, so that strict readers refuse the whole document. A loss in the metadata of a version may well be NaN."""
    if isinstance(value, Mapping):
        return {key: finite_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(one) for one in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


class PrintableRecords(logging.Filter):
    """Escapes the messages of a logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.isprintable():
            record.msg, record.args = escape_lines(text), ()
        return True


def contain_handlers(logger: logging.Logger) -> None:
    """Let no filter or handler of the program end what is being logged about: a message is logged amid saves, by the
    threads of tiers, which nobody would start again. What it raises is printed, as `logging` prints a handler's errors.
    """
    handle = logger.handle

    def contained(record: logging.LogRecord) -> None:
        try:
            handle(record)
        except Exception:
            with suppress(Exception):  # standard error may be anything, too
                logging.Handler().handleError(record)

    logger.handle = contained  # type: ignore[method-assign]
