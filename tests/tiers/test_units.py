"""Units: what is written comes back exact, and anything else is refused with a remedy."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tierstate.tiers.units import (
    BYTES,
    MAX_SECONDS,
    MAX_SIZE,
    SECONDS,
    Rate,
    Seconds,
    Size,
    format_size,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_times,
    rough_size,
)


@given(st.integers(0, MAX_SIZE) | st.builds(lambda n, k: n << k, st.integers(0, 1023), st.integers(0, 52)))
def test_a_formatted_size_parses_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(0, 10**6), st.sampled_from(sorted(BYTES)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str) -> None:
    expected = number * BYTES[unit]
    if expected > MAX_SIZE:
        with pytest.raises(ValueError, match="is not between"):
            parse_size(f"{number}{space}{unit}")
    else:
        assert parse_size(f"{number}{space}{unit}") == expected


@given(st.integers(0, 1000), st.integers(0, 999), st.sampled_from(sorted(BYTES)))
def test_a_fraction_counts_only_if_it_comes_to_whole_bytes(whole: int, thousandths: int, unit: str) -> None:
    text = f"{whole}.{thousandths:03}{unit}"
    exact = Fraction(whole * 1000 + thousandths, 1000) * BYTES[unit]
    if exact.denominator == 1:
        assert parse_size(text) == exact
    else:
        with pytest.raises(ValueError, match="is not a whole number of bytes"):
            parse_size(text)
    if exact >= 1:
        assert parse_rate(f"{text}/s") == int(exact), "of a rate, which is measured, the rest does not count"
    else:
        with pytest.raises(ValueError, match="is not a rate"):
            parse_rate(f"{text}/s")


@given(st.text(max_size=12) | st.text("0123456789. KMGiBs/hmind-+e_", max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_rate, parse_seconds, parse_times):
        told = ""
        try:
            assert parse(text) >= 0
        except ValueError as error:
            told = str(error)
        assert not told or (told.startswith(repr(text)) and "; write a" in told)


@given(st.lists(st.tuples(st.integers(1, 500), st.sampled_from(sorted(SECONDS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse_seconds(text) == float(sum(number * SECONDS[unit] for number, unit in parts))


def test_examples() -> None:
    assert parse_size("16MiB") == 16 * 1024 * 1024
    assert parse_size("2 TiB") == 2 * 1024**4
    assert parse_size("1.5GiB") == 3 * 512 * 1024**2
    assert parse_size("4096") == parse_size(4096) == 4096
    assert parse_size("2TB") == 2 * 10**12
    assert parse_seconds("1h30min") == 5400
    assert parse_seconds("250ms") == 0.25
    assert parse_seconds(1.5) == 1.5
    assert parse_rate("500MiB/s") == 500 * 1024**2
    assert parse_times("100/s") == parse_times(" 100 ") == parse_times(100) == 100.0
    assert parse_times("600 / min") == parse_times("36000/h") == 10.0
    assert parse_times(0.5) == 0.5
    assert format_size(0) == "0B"
    assert format_size(3 << 30) == "3GiB"


@pytest.mark.parametrize("bad", ["2 tebibyte", "", "MiB", "-1", "1e9", "16mib", "1,5GiB", "²", True, 1.5, None, [1]])
def test_what_is_no_size_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number and KiB, MiB, GiB or TiB, as in '2 TiB'"):
        parse_size(bad)


@pytest.mark.parametrize("bad", ["30", "1:30", "", "30 minutes", "-1s", True, None])
def test_what_is_no_duration_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="is not a duration; write a number and s, min, h or d"):
        parse_seconds(bad)


@pytest.mark.parametrize("bad", [0, -1, "0s", float("inf"), float("nan"), MAX_SECONDS + 1])
def test_a_duration_has_bounds(bad: object) -> None:
    with pytest.raises(ValueError, match="is not more than nothing and at most a century"):
        parse_seconds(bad)


@pytest.mark.parametrize("bad", ["500MiB", "MiB/s", "0B/s", 0, -5, None])
def test_what_is_no_rate_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="is not a rate; write a size per second, as in '500MiB/s'"):
        parse_rate(bad)


@pytest.mark.parametrize("bad", ["100/d", "/s", "100/", "-1", "1e3", True, None, [1]])
def test_what_is_no_number_of_times_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="is not a number of times per second; write a number per second, as in"):
        parse_times(bad)


@pytest.mark.parametrize("bad", [0, -1, "0/s", float("inf"), float("nan"), 10**10])
def test_a_number_of_times_has_bounds(bad: object) -> None:
    with pytest.raises(ValueError, match="is not more than nothing and at most a billion per second"):
        parse_times(bad)


class Model(BaseModel):
    size: Size | None = None
    rate: Rate = 1
    time: Seconds = 1.0


def test_the_types_parse_in_models() -> None:
    model = Model.model_validate({"size": "1KiB", "rate": "1kB/s", "time": "2min"})
    assert model == Model(size=1024, rate=1000, time=120.0)
    assert Model(size=None).size is None


def test_a_size_in_a_model_is_never_nothing() -> None:
    with pytest.raises(ValidationError, match="'0MiB' is nothing at all; write a number and KiB"):
        Model.model_validate({"size": "0MiB"})


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (15451399, "14.7 MiB"),
        (216319559, "206 MiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_rough_sizes_have_three_digits(nbytes: int, text: str) -> None:
    assert rough_size(nbytes) == text
