"""The trial: a codec is taken where it is clearly sooner done, and a faster tier never makes it work more."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from tierstate.engine.codecs.adaptive import CLEARLY, EFFORT, RAW_SPEED, CodecSpeed, fastest_codec, seconds_per_byte

OUTCOMES = st.dictionaries(
    st.sampled_from([codec for codec in EFFORT if codec != "raw"]),
    st.builds(
        CodecSpeed,
        ratio=st.floats(0.0, 1.2),
        speed=st.floats(1e5, 1e11),
        pace=st.floats(1e3, 1e11) | st.just(math.inf),
    ),
)
BANDWIDTH = st.floats(1e3, 1e12) | st.just(math.inf)
WORKERS = st.integers(1, 64)


def of(outcomes: dict[str, CodecSpeed], codec: str) -> CodecSpeed:
    """What a codec is worth, raw too."""
    return {"raw": RAW_SPEED, **outcomes}[codec]


@given(outcomes=OUTCOMES, bandwidth=BANDWIDTH, workers=WORKERS)
def test_nothing_is_chosen_that_is_not_clearly_faster_than_all_that_is_less_work(
    outcomes: dict[str, CodecSpeed], bandwidth: float, workers: int
) -> None:
    chosen = fastest_codec(outcomes, bandwidth, workers)
    own = seconds_per_byte(of(outcomes, chosen), bandwidth, workers)
    for codec in {"raw", *outcomes}:
        other = seconds_per_byte(of(outcomes, codec), bandwidth, workers)
        if EFFORT[codec] < EFFORT[chosen]:
            assert own <= CLEARLY * other * (1 + 1e-9), f"{chosen} is hardly faster than {codec}"
        elif EFFORT[codec] > EFFORT[chosen]:
            assert other >= CLEARLY**2 * own * (1 - 1e-9), f"{codec} is much faster than {chosen}"


@given(outcomes=OUTCOMES, slow=BANDWIDTH, fast=BANDWIDTH, workers=WORKERS)
def test_what_does_not_pay_on_a_tier_does_not_on_a_faster_one(
    outcomes: dict[str, CodecSpeed], slow: float, fast: float, workers: int
) -> None:
    slow, fast = sorted([slow, fast])
    if fastest_codec(outcomes, slow, workers) == "raw":
        assert fastest_codec(outcomes, fast, workers) == "raw"


@given(outcomes=OUTCOMES, bandwidth=BANDWIDTH, few=WORKERS, many=WORKERS)
def test_more_workers_never_make_it_slower(
    outcomes: dict[str, CodecSpeed], bandwidth: float, few: int, many: int
) -> None:
    few, many = sorted([few, many])
    for outcome in outcomes.values():
        assert seconds_per_byte(outcome, bandwidth, many) <= seconds_per_byte(outcome, bandwidth, few)


@given(outcomes=OUTCOMES, workers=WORKERS)
def test_a_tier_without_end_gets_raw_bytes(outcomes: dict[str, CodecSpeed], workers: int) -> None:
    assert fastest_codec(outcomes, math.inf, workers) == "raw"


@example(1e12)
@given(bandwidth=BANDWIDTH)
def test_of_nothing_tried_raw_is_chosen(bandwidth: float) -> None:
    assert fastest_codec({}, bandwidth, 1) == "raw"


def test_what_it_comes_to_with_weights_of_bf16() -> None:
    """Figures of one core of 2026: a disk gets raw bytes, a network `fast`, a thin line `small`."""
    tried = {"fast": CodecSpeed(0.755, 2.0e9), "small": CodecSpeed(0.65, 0.5e9)}
    found = {rate: fastest_codec(tried, rate, 1) for rate in (3e9, 1.2e9, 500e6, 100e6)}
    assert found == {3e9: "raw", 1.2e9: "fast", 500e6: "fast", 100e6: "small"}
    assert fastest_codec(tried, 3e9, 4) == "fast", "four workers keep up with the disk"
    busy = {"fast": CodecSpeed(0.755, 2.0e9, 50e6)}
    assert fastest_codec(busy, 500e6, 1) == "raw", "the cores have other things to do"
    assert fastest_codec(busy, 100e6, 1) == "fast", "even a few chunks are a tenth of what such a tier writes"
