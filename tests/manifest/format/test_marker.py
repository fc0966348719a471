"""Markers of tiers: what is written comes back, and what is damaged is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.errors import FormatError, WrongTier
from tierstate.manifest.format.marker import TierMarker, TierName, check_same_tier, named_tiers, names_tiers

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
MARKERS = st.builds(TierMarker, IDS, st.text(max_size=64), st.floats(0, 2**33), st.lists(IDS, max_size=3).map(tuple))


@given(MARKERS)
def test_a_marker_comes_back(marker):
    assert TierMarker.decode(marker.encode(), "here") == marker


@given(MARKERS, st.data())
def test_a_damaged_one_is_told(marker, data):
    whole = marker.encode()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.one_of(
            st.just(whole[:at]),
            st.integers(1, 255).map(lambda flip: whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]),
            st.binary(max_size=40),
        )
    )
    with pytest.raises(FormatError, match=r"^here: "):
        raise_if_other(TierMarker.decode(damaged, "here"), marker)


def raise_if_other(found: TierMarker, marker: TierMarker) -> None:
    """A damage may change nothing of what is read: a blank, or nothing at all."""
    assert found == marker
    raise FormatError("here: as it was")


def test_a_marker_of_a_later_format_is_not_read():
    later = TierMarker().encode().replace(b'"format": 1', b'"format": 2')
    with pytest.raises(FormatError):
        TierMarker.decode(later, "here")


@given(st.dictionaries(st.text(max_size=9), st.builds(TierName, IDS, st.text(max_size=9)), max_size=3))
def test_records_name_tiers(tiers):
    assert named_tiers(json.loads(json.dumps(names_tiers(tiers)))) == tiers


@given(st.recursive(st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_what_else_a_record_says_names_none(value):
    assert named_tiers({"tiers": value}) == {}


@given(IDS, IDS)
def test_ranks_write_to_one_tier(one, other):
    mine, theirs = (names_tiers({"site": TierName(id, "")}) for id in (one, other))
    check_same_tier("site", mine, mine, 1)
    check_same_tier("site", {}, theirs, 1)
    if one != other:
        with pytest.raises(WrongTier, match="rank 1 has written to tier"):
            check_same_tier("site", mine, theirs, 1)
