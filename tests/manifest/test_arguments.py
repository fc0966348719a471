"""Arguments of public calls: what is taken, and errors that name the argument, what was found and what is right."""

import math
import os
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.arguments import (
    as_int,
    as_number,
    as_path,
    as_seconds,
    as_step,
    as_text,
    as_timeout,
    check_callable,
    check_class,
    check_flags,
    short_repr,
)

anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.integers(), max_size=3)
    | st.dictionaries(st.text(), st.integers(), max_size=2)
    | st.sampled_from(
        [
            object(),
            int,
            len,
            10**5000,
            Path("x"),
            np.arange(3),
            np.float32(1.5),
            torch.ones(2),
            torch.empty(1, device="meta"),
        ]
    )
)


class Color(str, Enum):  # noqa: UP042 - a StrEnum has its text in f-strings too
    RED = "red"


@given(anything)
def test_every_check_takes_a_value_or_names_the_argument_and_what_is_right(value: Any) -> None:
    for check in (
        lambda: as_text(value, "name", "right is this"),
        lambda: as_int(value, "name", "right is this"),
        lambda: as_number(value, "name", "right is this"),
        lambda: as_seconds(value, "name", "right is this"),
        lambda: as_path(value, "name", "right is this"),
        lambda: check_callable(value, "name", "right is this"),
    ):
        told = ""
        try:
            check()
        except (TypeError, ValueError) as error:
            told = str(error)
        assert not told or (told.startswith("name ") and told.endswith(("right is this", "in its name")))
        assert len(told) < 200


@given(
    st.integers(0, (1 << 63) - 1), st.sampled_from([int, np.uint64, lambda n: torch.tensor(n), lambda n: np.array(n)])
)
def test_a_step_is_any_integer_and_becomes_an_int(step: int, kind: Any) -> None:
    found = as_step(kind(step))
    assert (found, type(found)) == (step, int)


@pytest.mark.parametrize("step", [-1, 1 << 63, 10**5000, True, 5.0, "5", None, [5]], ids=short_repr)
def test_anything_else_is_no_step(step: Any) -> None:
    with pytest.raises(ValueError, match="a step is an int, 0 or more, and less than 2"):
        as_step(step)


@pytest.mark.parametrize("text", ["red", Color.RED, np.str_("red")], ids=repr)
def test_text_is_plain_text(text: str) -> None:
    found = as_text(text, "run", "")
    assert (f"{found}", type(found)) == ("red", str)


@given(st.floats(allow_nan=False))
def test_a_timeout_is_a_time_or_no_limit(seconds: float) -> None:
    assert as_timeout(None) is None
    assert as_timeout(seconds) == (None if seconds == math.inf else max(0.0, seconds))


@pytest.mark.parametrize(
    "number", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), Decimal(2), Fraction(2)], ids=repr
)
def test_numbers_of_every_kind_are_seconds(number: Any) -> None:
    assert as_seconds(number, "grace") == 2.0


@pytest.mark.parametrize("number", [10**400, math.inf])
def test_more_than_any_float_has_no_end(number: Any) -> None:
    assert as_seconds(number, "grace") == math.inf
    assert as_timeout(number) is None


@pytest.mark.parametrize("value", [math.nan, "2", b"2", True, None, [2], print], ids=repr)
def test_what_is_no_number_is_none(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"grace .*: right is a number of seconds, 0 or more"):
        as_seconds(value, "grace")


@pytest.mark.parametrize("path", ["x", b"x", Path("x")], ids=repr)
def test_paths_are_text_bytes_or_paths(path: Any) -> None:
    assert as_path(path, "file") == "x"


@pytest.mark.parametrize("path", ["a\0b", "\ud800", b"a\0b"], ids=repr)
def test_a_path_that_no_file_can_have_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match=r"file .*: no file has NUL or a lone surrogate in its name"):
        as_path(path, "file")


def test_a_path_may_be_no_utf_8() -> None:
    assert os.fsencode(as_path(b"\xff", "file")) == b"\xff"


def test_a_flag_is_no_text() -> None:
    check_flags(apply=True, force=None, dry_run=np.bool_(False), deep=0)
    with pytest.raises(TypeError, match="force 'false': text counts as true, whatever it says; write True or False"):
        check_flags(apply=True, force="false")


def test_a_class_is_no_value_of_it() -> None:
    check_class(bool, "kind", int)
    for value, base, right in ((5, object, "give a class"), (str, int, "give a class derived from tierstate's int")):
        with pytest.raises(TypeError, match=rf"kind .*: {right}"):
            check_class(value, "kind", base)
