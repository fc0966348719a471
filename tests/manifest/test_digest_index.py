"""The index of digests against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierstate.manifest.arrays import digest_array
from tierstate.manifest.digest import DigestIndex

halves = st.integers(0, 2) | st.sampled_from([2**63, 2**64 - 1])
tables = st.integers(0, 12).flatmap(lambda n: hnp.arrays("<u8", (n, 2), elements=halves, fill=st.nothing()))


def lookup(table, wanted):
    first = {}
    for row, digest in enumerate(map(tuple, table.tolist())):
        first.setdefault(digest, row)
    return [first.get(digest, -1) for digest in map(tuple, wanted.tolist())]


@given(tables, tables)
def test_it_finds_what_a_dict_finds(table, wanted):
    index = DigestIndex(table)
    assert index.find(wanted).tolist() == lookup(table, wanted)
    assert index.find(table).tolist() == lookup(table, table)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=8))
def test_bytes_as_an_array(digests):
    array = digest_array(digests)
    assert array.shape == (len(digests), 2)
    assert [row.tobytes() for row in array] == digests


def test_a_table_made_to_collide_is_searched_all_the_same():
    """200,000 digests with one first half: a walk through equals would be 2 * 10^10 steps."""
    table = np.zeros((200_000, 2), "<u8")
    table[:, 1] = np.random.default_rng(0).permutation(200_000)
    index = DigestIndex(table)
    assert np.array_equal(index.find(table), np.arange(200_000))
    assert index.find(table + np.array([0, 200_000], "<u8")).max() == -1


def test_views_of_other_strides_are_indexed():
    table = np.arange(40, dtype="<u8").reshape(10, 4)[::2, 1:3]
    assert DigestIndex(table).find(table[::-1]).tolist() == [4, 3, 2, 1, 0]
