"""Tables of text that fit a terminal: numbers stay whole, names are shortened in the middle, text is broken at words.

What still does not fit loses columns from the right, and a last line says which. Widths are those on a terminal, where
some characters take two places and some none.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

GAP = "  "


SHORTEST = 12
"""A name is not shortened to less than this, and text is not broken into lines shorter than twice this."""


ELLIPSIS = "…"


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The lines of a table, the first of which has the columns' names.

    Args:
        columns: names; one that begins with ``>`` is of numbers, which are right-aligned and never shortened.
        rows: printable text.
        width: of the terminal; None if any is right, as for a file.
    """
    names, right = [name.lstrip(">") for name in columns], [name.startswith(">") for name in columns]
    needed = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    if width is None:
        return _lines(names, right, needed, rows)
    texts = [not flush and any(" " in row[i] for row in rows) for i, flush in enumerate(right)]
    least = [
        need if flush else max(cell_len(name), min(need, 2 * SHORTEST if text else SHORTEST))
        for name, flush, need, text in zip(names, right, needed, texts, strict=True)
    ]
    kept = len(names)
    while kept > 1 and _total(least[:kept]) > width:
        kept -= 1
    widths = _narrowed(needed[:kept], least[:kept], width)
    broken = [line for row in rows for line in _broken(row[:kept], widths, texts)]
    lines = _lines(names[:kept], right[:kept], widths, broken)
    if kept < len(names):
        lines += _wrapped(f"(too narrow for {', '.join(name or '-' for name in names[kept:])})", width)
    return lines


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _narrowed(needed: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Take from the widest column again and again, until all fit."""
    widths = list(needed)
    while (over := _total(widths) - width) > 0:
        rest = [have for have, low in zip(widths, least, strict=True) if have > low]
        if not rest:
            break
        widest = max(rest)
        i = next(i for i, have in enumerate(widths) if have == widest and have > least[i])
        second = max([have for have in rest if have < widest] + [least[i]])
        widths[i] = max(least[i], min(widest - 1, max(second, widest - over)))
    return widths


def _lines(
    names: Sequence[str], right: Sequence[bool], widths: Sequence[int], rows: Sequence[Sequence[str]]
) -> list[str]:
    return [
        GAP.join(_padded(cell, width, flush) for cell, width, flush in zip(row, widths, right, strict=True)).rstrip()
        for row in [names, *rows]
    ]


def _padded(cell: str, width: int, flush: bool) -> str:
    blank = " " * max(0, width - cell_len(cell))
    return blank + cell if flush else cell + blank


def _broken(row: Sequence[str], widths: Sequence[int], texts: Sequence[bool]) -> list[list[str]]:
    """A row as one line or, where text is broken, several."""
    cells = [
        [cell] if cell_len(cell) <= width else _wrapped(cell, width) if text else [shortened(cell, width)]
        for cell, width, text in zip(row, widths, texts, strict=False)
    ]
    height = max(map(len, cells))
    return [[cell[i] if i < len(cell) else "" for cell in cells] for i in range(height)]


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        word = shortened(word, width)
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def shortened(text: str, width: int) -> str:
    """The text, or its beginning and its end, in so many places of a terminal."""
    if cell_len(text) <= width:
        return text
    left = (width - 1) // 2
    return _cut(text, left) + ELLIPSIS + _cut(text[::-1], width - 1 - left)[::-1]


def _cut(text: str, width: int) -> str:
    while text and cell_len(text) > width:
        text = text[: min(len(text) - 1, width)]
    return text
