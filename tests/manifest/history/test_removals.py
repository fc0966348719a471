"""Marks of removed versions: what they say is read back, and what no program writes is not believed."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.format.version import MAX_TIME, Head
from tierstate.manifest.history.removals import Removal, mark_removed, removal_key, removals
from tierstate.manifest.history.retention import RetentionEntry, RetentionPolicy, decide_retention
from tierstate.tiers.memory.host import Memory

times = st.integers(0, MAX_TIME) | st.floats(0, MAX_TIME)


def marked(mark: object) -> Removal:
    """The removal of version 1 with this mark."""
    tier = Memory()
    tier.put(removal_key("run", 1, "ab"), as_buffer(json.dumps(mark).encode()))
    (found,) = removals(tier, "run")
    return found


@given(st.integers(0, 1 << 60), times, st.dictionaries(st.text(), st.floats(allow_nan=False)))
def test_what_was_marked_is_read(step: int, time: float, metadata: dict[str, float]) -> None:
    tier = Memory()
    mark_removed(tier, "run", 1, "ab", Head("run", 1, step, time, metadata=metadata))
    (found,) = removals(tier, "run")
    assert found.entry == RetentionEntry(1, step, float(time), metadata)
    assert found.is_of(1, step, time)
    assert not found.is_of(1, step + 1, time)


def test_of_a_damaged_mark_its_number_alone_counts() -> None:
    tier, key = Memory(), removal_key("run", 1, "ab")
    mark_removed(tier, "run", 1, "ab", Head("run", 1, 5, 7.5, metadata={"loss": 0.5}))
    whole = to_bytes(tier.get(key))
    for at, bit in itertools.product(range(len(whole)), range(8)):
        data = bytearray(whole)
        data[at] ^= 1 << bit
        tier.delete(key)
        tier.put(key, as_buffer(bytes(data)))
        (found,) = removals(tier, "run")
        assert found.is_of(1, 5, 7.5), f"{data!r}: the version comes back"
        assert not found.known or found.entry == RetentionEntry(1, 5, 7.5, {"loss": 0.5})


def test_a_mark_without_a_checksum_is_one_of_an_earlier_program() -> None:
    found = marked({"time": 9.0, "version": {"step": 5, "time": 7.0, "metadata": {}}})
    assert (found.known, found.time) == (True, 9.0)
    assert found.is_of(1, 5, 7.0)


@pytest.mark.parametrize("time", [10**400, -1, 2 * MAX_TIME, math.nan, math.inf, -math.inf, "1", None, [1]], ids=repr)
def test_a_time_that_no_save_has_is_not_believed(time: object) -> None:
    found = marked({"time": time, "version": {"step": 5, "time": time, "metadata": {}}})
    assert (found.known, found.time, found.entry.time) == (False, math.inf, 0.0)
    assert found.is_of(1, 5, 7.0), "the number alone counts"
    kept = decide_retention([found.entry, RetentionEntry(2, 2, 50.0), RetentionEntry(3, 3, 60.0)],
                            RetentionPolicy(within=30), now=70.0).keep  # fmt: skip
    assert kept.keys() == {2, 3}
