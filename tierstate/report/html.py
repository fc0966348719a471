"""HTML of a report's parts: numbers that say where they stand in the data, tables, and text that cannot be markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tierstate.tiers.units import rough_size

Place: TypeAlias = tuple[str | int, ...]
"""Where a number stands in the report's data: keys and indices from its root on."""


NOTHING = "–"
"""What is shown for a number that is not known."""


def escape(text: object) -> str:
    """Text as HTML shows it, also within the quotes of an attribute."""
    return html.escape(str(text), quote=True)


def embedded_json(value: Any) -> str:
    """JSON that can stand in a ``script`` element: without ``<``, ``>`` and ``&``, so that nothing ends the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def as_count(value: float) -> str:
    """``12,345``."""
    return f"{value:,}"


def as_seconds(value: float) -> str:
    """In the unit that fits, with three digits."""
    for below, length, unit in ((1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if 0 < value < below:
            return f"{value / length:.3g} {unit}"
    if value <= 0:
        return "0 s"
    return f"{value / 3600:.3g} h" if value < 172_800 else f"{value / 86_400:.3g} d"


def as_size(value: float) -> str:
    """In the unit that fits, with three digits."""
    return rough_size(value) if value >= 0 else f"-{rough_size(-value)}"


def as_share(value: float) -> str:
    """In percent, with three digits."""
    return f"{100 * value:.3g} %"


def as_time(value: float) -> str:
    """In UTC, as the page may be read anywhere."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))


Format: TypeAlias = Callable[[Any], str]


class Numbers:
    """Shows the numbers of a report.

    Args:
        data: of the report, as JSON values.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def at(self, *place: str | int) -> Any:
        """What stands at a place of the data."""
        found: Any = self._data
        for key in place:
            found = found[key]
        return found

    def show(self, how: Format, *place: str | int) -> str:
        """The number at a place, formatted; its exact value and the place are attributes."""
        value = self.at(*place)
        if value is None:
            return NOTHING
        pointer = "".join(f"/{key}" for key in place)
        return f'<data value="{escape(json.dumps(value))}" data-at="{escape(pointer)}">{escape(how(value))}</data>'


def whole_page(
    title: str, header: str, main: str, foot: str, scripts: Sequence[str], style: str, refresh: float = 0.0
) -> str:
    """A page that is one file, and may load nothing else.

    Args:
        title: text.
        header, main, foot: HTML.
        scripts: that run, in this order.
        style: a style sheet.
        refresh: seconds after which a page that is served asks for what is new; 0 for a file.
    """
    allowed = " ".join(map(_hash_of, scripts))
    rules = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    rules += "; base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if refresh else "")
    run = "".join(f"<script>{script}</script>" for script in scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{escape(title)} – tierstate</title><style>{style}</style></head>'
        f'<body data-refresh="{refresh:g}"><a class="skip" href="#glance">To the numbers</a>'
        f"<header>{header}</header><main>{main}</main><footer><p>{foot}</p></footer>{run}</body></html>\n"
    )


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, name: str = "", whole: bool = False
) -> str:
    """A table whose first column names its rows; columns whose name begins with ``>`` hold numbers.

    Args:
        caption: text.
        columns: texts.
        rows: of HTML.
        name: a class of the table.
        whole: it is short, and not scrolled.
    """
    numeric = [column.startswith(">") for column in columns]
    head = "".join(
        f'<th scope="col"{_is_n(n)}>{escape(c.lstrip(">"))}</th>' for c, n in zip(columns, numeric, strict=True)
    )
    body = "".join(f"<tr>{_row(row, numeric)}</tr>" for row in rows)
    if not body:
        return f'<p class="soft">{escape(caption)}: none.</p>'
    return (
        f'<div class="scroll{" whole" if whole else ""}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{escape(name)}"><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[str], numeric: Sequence[bool]) -> str:
    first, *others = row
    cells = "".join(f"<td{_is_n(n)}>{cell}</td>" for cell, n in zip(others, numeric[1:], strict=True))
    return f'<th scope="row"{_is_n(numeric[0])}>{first}</th>{cells}'


def _is_n(numeric: bool) -> str:
    return ' class="n"' if numeric else ""
