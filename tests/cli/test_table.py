"""Tables fit any terminal: no line is too long, no number is broken, and what is left out is named."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tierstate.cli.output.table import ELLIPSIS, shortened, table_lines

NAMES = st.text(string.ascii_letters + string.digits + "._-/ 検査é", min_size=1, max_size=90)
NUMBERS = st.integers(0, 10**12).map(str)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=9))
    columns = [f">n{i}" if number else f"name {i}" for i, number in enumerate(kinds)]
    row = st.tuples(*(NUMBERS if number else NAMES for number in kinds)).map(list)
    return columns, draw(st.lists(row, max_size=8))


@given(table=tables(), width=st.integers(60, 200))
def test_a_table_fits_its_terminal(table: tuple[list[str], list[list[str]]], width: int) -> None:
    columns, rows = table
    lines = table_lines(columns, rows, width)
    assert all(cell_len(line) <= width for line in lines)
    kept = [name for name in columns if name.lstrip(">") in lines[0]]
    assert kept == columns[: len(kept)]
    assert kept
    left_out = " ".join(lines[1:]).partition("(too narrow for ")[2]
    assert all(name.lstrip(">") in left_out for name in columns[len(kept) :])
    for row in rows:  # every number of a column that is there is there as a whole
        numbers = [cell for name, cell in zip(kept, row, strict=False) if name.startswith(">")]
        assert all(any(f" {number} " in f" {line} " for line in lines) for number in numbers)


@given(table=tables())
def test_what_is_no_terminal_gets_all(table: tuple[list[str], list[list[str]]]) -> None:
    columns, rows = table
    lines = table_lines(columns, rows)
    assert len(lines) == len(rows) + 1
    assert all(cell.strip() in line for row, line in zip(rows, lines[1:], strict=True) for cell in row)


@pytest.mark.parametrize("text", ["model.layers.0.attention.weight", "検査検査検査検査検査検査"])
def test_names_are_shortened_in_the_middle(text: str) -> None:
    for width in range(5, 40):
        short = shortened(text, width)
        assert cell_len(short) <= width
        assert short == text or (ELLIPSIS in short and short[0] == text[0] and short[-1] == text[-1])


def test_names_give_way_before_columns_and_text_is_broken_at_words() -> None:
    columns, row = ["leaf", ">size", "why"], ["model." + "x" * 60, "12.5MiB", "it is needed by a delta " * 3]
    wide, narrow = table_lines(columns, [row], 200), table_lines(columns, [row], 60)
    assert wide[1].split() == " ".join(row).split()
    assert "12.5MiB" in narrow[1]
    assert ELLIPSIS in narrow[1]
    words = " ".join(line[narrow[0].index("why") :] for line in narrow[1:])
    assert words.split() == row[2].split()
