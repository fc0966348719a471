"""What records and events say of a run, as columns and groups: held against the plain definitions."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstate.engine.events import Event
from tierstate.engine.info import VersionInfo
from tierstate.report.data import STATES
from tierstate.report.history import Groups, exposures, history_of

TIERS = ("nvme", "lustre")


def version(seq: int, tiers: tuple[str, ...] = (), **more: object) -> VersionInfo:
    return VersionInfo(
        "run", seq, 10 * seq, f"{seq:032x}", 100.0 * seq, 1000, tiers, stored=dict.fromkeys(tiers, 700), **more
    )  # type: ignore[arg-type]


def arrived(seq: int, tier: str, after: float, kind: str = "committed") -> Event:
    return Event(kind, 100.0 * seq + after, "run", tier, 10 * seq, seq, nbytes=300, raw=1000, seconds=after)


@given(st.lists(st.one_of(st.just(math.nan), st.floats(0, 1e6)), max_size=60), st.integers(1, 20))
def test_groups_sum_and_compare_what_is_known(values: list[float], points: int) -> None:
    groups, column = Groups(len(values), points), np.array(values)
    size = groups.size
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    known = [[value for value in part if not math.isnan(value)] for part in parts]
    assert len(parts) <= points
    assert groups.longest(column) == [max(part) if part else None for part in known]
    assert groups.sums(column) == [
        int(np.nansum(part)) if some else None for part, some in zip(parts, known, strict=True)
    ]
    for mean, part in zip(groups.means(column), known, strict=True):
        assert mean is None if not part else math.isclose(mean or 0.0, sum(part) / len(part), abs_tol=1e-9)
    found = groups.durations(column)
    assert found.count == sum(map(len, known))
    assert found.longest_of_all == max((value for part in known for value in part), default=None)
    assert sum(groups.counts(column > 5)) == sum(value > 5 for value in values)


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 2000)),
        unique_by=(lambda one: one[0], lambda one: 100.0 * one[0] + one[1]),
        max_size=20,
    )
)
def test_what_would_have_been_lost_is_the_age_of_the_newest_version_before(saves: list[tuple[int, float]]) -> None:
    """Of versions that arrive one after the other: which of two was before, if they come at once, nobody can say."""
    events = sorted((arrived(seq, "nvme", after) for seq, after in saves), key=lambda event: event.time)
    captured = [Event("captured", 100.0 * seq, "run", step=10 * seq, seq=seq, seconds=0.0) for seq, _ in saves]
    found = history_of([], [*captured, *events], TIERS)
    expected = {}
    for at, event in enumerate(events):
        before = [100.0 * (one.seq or 0) for one in events[:at]]
        if before:
            expected[event.seq] = max(0.0, event.time - max(before))
    got = dict(zip(found.seq.tolist(), exposures(found, "nvme").tolist(), strict=True))
    assert {seq: value for seq, value in got.items() if not math.isnan(value)} == expected
    assert all(math.isnan(value) for value in exposures(found, "lustre"))


def test_each_state_of_a_version() -> None:
    versions = [
        version(1, ("nvme",), partial=("nvme",)),
        version(2, ("nvme",), late=("lustre",)),
        version(3, ("nvme",)),
        version(4, unreadable={"nvme": "damaged"}),
    ]
    events = [
        arrived(0, "nvme", 1.0),  # and gone since
        Event("dropped", 500.0, "run", "lustre", seq=1),
        Event("failed", 501.0, "run", "lustre", 20, 2, reason="full"),
        Event("failed", 502.0, "run", "lustre", 30, 3, reason="full"),
        Event("left_out", 503.0, "run", "lustre", 40, 4, reason="newer saves wait"),
    ]
    found = history_of(versions, events, TIERS)
    assert found.seq.tolist() == [0, 1, 2, 3, 4]
    names = {tier: [STATES[number] for number in columns.state.tolist()] for tier, columns in found.tiers.items()}
    assert names == {
        "nvme": ["dropped", "in part", "whole", "whole", "unreadable"],
        "lustre": ["not sent", "dropped", "owed", "failed", "left out"],
    }
    assert found.step.tolist() == [0, 10, 20, 30, 40]


def test_without_events_a_version_counts_as_there_when_it_was_saved() -> None:
    found = history_of([version(seq, ("nvme",)) for seq in (1, 2, 5)], [], TIERS)
    assert exposures(found, "nvme").tolist()[1:] == [100.0, 300.0]
    groups = Groups(3, 250)
    assert groups.axis(found).last == [10, 20, 50]
    assert groups.sums(found.tiers["nvme"].written) == [None, None, None]
    assert groups.sums(found.tiers["nvme"].stored) == [700, 700, 700]
