"""Choices: `auto` is raw until it knows better, remembers what it tried, and lets go of what does not pay."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.codecs.adaptive import RECALLED, TRIALS, WORTH_ENCODING, CodecChooser
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.wrappers.limit import Limited

MIB = 1 << 20
NOISE = torch.randint(0, 256, (MIB,), dtype=torch.uint8)
ZEROS = torch.zeros(MIB, dtype=torch.uint8)


def weights(nbytes: int = MIB) -> Buffer:
    """Weights of bf16."""
    return torch.randn(nbytes // 2, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)


def slow() -> CodecChooser:
    """Of a tier that is known to take 1 MiB/s, which any codec keeps up with on any machine."""
    return CodecChooser(Limited(Memory(), bandwidth=1.0 * MIB), workers=1)


def test_of_a_tier_that_nobody_knows_and_of_a_fast_one_everything_goes_raw() -> None:
    unknown = CodecChooser(Memory(), workers=1)
    assert unknown.codec("w", weights(), 2) == "raw"
    assert not unknown._kinds, "nothing is tried in vain"
    speed = unknown.timed.speed
    speed.begin()
    speed.end(1 << 40)
    assert speed.bandwidth is not None
    assert unknown.codec("w", ZEROS, 2) == "raw"


def test_on_a_thin_line_what_pays_is_chosen_kind_by_kind() -> None:
    choices = slow()
    for _ in range(2 * TRIALS):
        assert choices.codec("weights", weights(), 2) in ("fast", "small")
        assert choices.codec("noise", NOISE, 4) == "raw"
    assert choices.codec("weights", weights(WORTH_ENCODING - 2), 2) == "raw"
    assert {kind: trial.samples for kind, trial in choices._kinds.items()} == {"weights": TRIALS, "noise": TRIALS}


def test_a_kind_is_tried_anew_and_ever_more_seldom() -> None:
    choices, found, begun = slow(), {}, set()
    for save in range(1, 48):
        choices.begin()
        found[save] = choices.codec("moments", NOISE if save <= 8 else weights(), 2)
        begun.add(choices._kinds["moments"].save)
    assert begun == {1, 3, 7, 15, 31, 47}
    assert {found[save] for save in range(1, 9)} == {"raw"}
    assert {found[save] for save in range(15, 48)} <= {"fast", "small"}, "it has changed, and the next trial said so"


def test_what_encoding_shows_counts_more_than_a_sample_of_before() -> None:
    """Moments are zeros at the first save, and are not at the second."""
    choices = slow()
    assert choices.codec("moments", ZEROS, 4) != "raw"
    for codec in ("fast", "small"):
        choices.learn("moments", codec, 64 * MIB, 64 * MIB, 0.01, 0.02)
    assert choices.codec("moments", NOISE, 4) == "raw"
    choices.learn("unheard of", "fast", 1, 1, 1.0, 1.0)
    assert "unheard of" not in choices._kinds


@given(chunks=st.lists(st.tuples(st.integers(1, RECALLED), st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_an_outcome_lies_within_what_was_seen(chunks: list[tuple[int, float, float]]) -> None:
    choices = slow()
    choices.codec("w", NOISE, 4)
    trial = choices._kinds["w"]
    seen = [trial.outcomes["fast"].ratio]
    for nbytes, ratio, seconds in chunks:
        stored = int(ratio * nbytes)
        choices.learn("w", "fast", nbytes, stored, seconds, 2 * seconds)
        seen.append(stored / nbytes)
        outcome = trial.outcomes["fast"]
        assert min(seen) - 1e-9 <= outcome.ratio <= max(seen) + 1e-9
        assert outcome.speed > 0
