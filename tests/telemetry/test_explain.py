"""`explain` says where the time of a save went, and what would change it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import policy, tier

import tierstate as ts
from tierstate.engine.events import Event
from tierstate.telemetry.explain import explain


def event(kind: str, time: float, **values: object) -> Event:
    return Event(kind, time, "run", step=7, seq=3, **values)  # type: ignore[arg-type]


SAVED = [
    event("captured", 101.0, seconds=1.0, nbytes=1 << 30),
    event("saved", 101.0, seconds=1.0),
    event("committed", 102.0, tier="nvme", seconds=2.0, nbytes=1 << 30),
]


def test_a_save_that_was_not_lazy() -> None:
    text = "\n".join(explain(SAVED, 7))
    assert "blocked the training for 1.000 s" in text
    assert "1 GiB were captured after 1.000 s" in text or "1.0 GiB were captured after 1.000 s" in text
    assert "ckpt.guard(optimizer)" in text
    assert "nvme: there after 2.000 s" in text
    lazy = [SAVED[0], event("saved", 100.1, seconds=0.1), SAVED[2]]
    assert "guard" not in "\n".join(explain(lazy, 7))


def test_a_tier_that_lags() -> None:
    earlier = [Event("captured", float(t), "run", step=t, seq=t - 90) for t in range(91, 93)]
    late = event("cascaded", 130.0, tier="lustre", seconds=5.0, nbytes=1 << 30)
    text = "\n".join(explain([*earlier, *SAVED, late], 7))
    assert "lustre: there after 30.000 s; copied in 5.000 s" in text
    assert "it waited 23.000 s before that" in text
    assert "saves come every 5.000 s" not in text
    often = [Event("captured", 98.0 + t, "run", step=t, seq=t) for t in range(2)]
    text = "\n".join(explain([*often, *SAVED, late], 7))
    assert "saves come every 1.500 s: a larger `every` of lustre" in text


def test_a_clock_that_is_set_back_gives_no_times_below_zero() -> None:
    late = [event("cascaded", 50.0, tier="lustre", seconds=5.0), event("failed", 60.0, tier="s3", reason="gone")]
    text = "\n".join(explain([*late, *SAVED], 7))
    assert "lustre: there after a time that is not known, as the clock was set back; copied in 5.000 s" in text
    assert "s3: failed after a time that is not known" in text


def test_failures_and_what_was_left_out() -> None:
    failed = [
        event("failed", 103.0, tier="s3", reason="TierUnavailable: gone"),
        event("owed", 103.0, tier="s3"),
        event("left_out", 104.0, tier="tape", reason="newer saves wait"),
        event("brought", 200.0, tier="s3", nbytes=5),
    ]
    text = "\n".join(explain([*SAVED, *failed], 7))
    assert "s3: failed after 3.000 s: TierUnavailable: gone" in text
    assert "s3: it is brought when the tier works again" in text
    assert "tape: left out: newer saves wait" in text
    assert "s3: there after 100.000 s; brought later" in text


def test_a_step_that_nobody_saved() -> None:
    with pytest.raises(ts.NotFound, match="no event of step 8 is logged"):
        explain(SAVED, 8)


@pytest.mark.slow
def test_of_a_real_run(place: Path) -> None:
    spec = policy(
        {"nvme": tier("nvme", place), "lustre": tier("lustre", place, bandwidth="1MiB/s")}, metrics={"events": True}
    )
    state = {"w": torch.randn(100_000)}
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(4):
            state["w"] += 1
            save = ckpt.save(state, step)
        save.wait("lustre")
    with ts.Checkpointer(spec, "run") as ckpt:
        text = "\n".join(explain(ckpt.events(), 3))
    assert "nvme: there after" in text
    assert "lustre: there after" in text
    assert "copied in" in text
