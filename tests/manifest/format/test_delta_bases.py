"""Bases: they go with the chunks that need them, keep their packs named, and are checked before they are believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import (
    PACK,
    Table,
    layouts,
    place,
    sections_of,
    sizes_of,
    small_record,
    small_version,
    versions,
)

from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import DeltaBase, Layout, LayoutBuilder
from tierstate.manifest.format.record import Record, encode_sections

BASE = DeltaBase("packs/run/0-0-0-old", 4, 16, "raw", bytes(range(16)), 3, 40)
DELTA = place(0, 5, "delta")._replace(base=BASE)
PLACES = [DELTA, place(16), DELTA._replace(offset=8, base=BASE._replace(offset=32, stored=8))]


def based() -> Record:
    """The small version with two deltas, the second shorter than a whole chunk."""
    record = small_record()
    return Record(record.version, Layout.build(PLACES, {PACK: 40, BASE.object: 40}), record.commit)


def test_layouts_without_bases_are_what_they_were():
    """Digests of what the program wrote before there were bases."""
    assert checksum(small_record().layout.encode()).hex() == "ae041f7e12bcd5a2f5bbf06a91263b4f"
    layout = Layout.build([place(), None, place(32, 5, "blosc")], {PACK: 40})
    assert checksum(layout.encode()).hex() == "e88407c082325ace01666c587169c7d7"


@pytest.mark.slow
@given(st.data())
def test_a_draft_like_other_layouts_has_their_places(data):
    version = data.draw(versions())
    rows = len(version.digests)
    many = [data.draw(layouts(version)) for _ in range(2)]
    expected = [None] * rows
    draft = LayoutBuilder(rows)
    for layout in [*many, many[0]]:
        present = np.flatnonzero(layout.present)
        chosen = np.array(data.draw(st.permutations(present.tolist())), "i8")[: data.draw(st.integers(0, rows))]
        draft.put_like(chosen, layout, chosen)
        for row in chosen.tolist():
            expected[row] = layout.place(row)
    pairs = data.draw(st.lists(st.tuples(*2 * [st.integers(0, rows - 1)]), max_size=3)) if rows else []
    for one, of in pairs:
        if expected[of] is not None:
            draft.put_twins(np.array([one]), np.array([of]))
            expected[one] = expected[of]
    here = [p for p in expected if p]
    assert set(draft.objects()) == sizes_of(here).keys()
    found = draft.build(sizes_of(here))
    assert [found.place(row) for row in range(rows)] == expected
    assert found.bases is None or set(np.unique(found.bases.row[found.bases.based])) == set(
        range(len(found.bases.table))
    )
    assert set(found.objects) == sizes_of(here).keys()


def test_a_layout_says_what_it_requires_and_only_then_has_bases():
    head, columns = col.decode_table(memoryview(based().layout.encode()), "layout")
    assert head["requires"] == ["delta"]
    plain, others = col.decode_table(memoryview(small_record().layout.encode()), "layout")
    assert plain["requires"] == []
    assert {name for name in columns.keys() - others.keys()} == {
        "row.base", *(f"base.{name}" for name in ("object", "offset", "stored", "codec", "digest", "uses", "spent"))
    }  # fmt: skip
    found = Record.decode(memoryview(based().encode())).layout
    assert [found.place(row) for row in range(3)] == PLACES
    assert found.base(1) is None
    assert found.stored_nbytes == 5 + 16 + 5 + 16 + 8
    assert [found.objects[i] if i < 2 else "" for i in found.base_object] == [BASE.object, "", BASE.object]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row.base": [0, 0xFFFFFFFF, 2]}, "a base that is not listed"),
        ({"row.base": [0, 0, 1]}, "what is no delta has one"),
        ({"row.base": [0, 0xFFFFFFFF, 0xFFFFFFFF]}, "a delta has no base"),
        ({"row.object": [0, 0, 0xFFFFFFFF]}, "what is no delta has one"),
        ({"row.base": [0, 0xFFFFFFFF]}, "rows where 3 are right"),
        ({"row.base": [1, 0xFFFFFFFF, 0]}, "a raw base is not as long"),
        ({"base.object": [0, 2]}, "an object or a codec that is not listed"),
        ({"base.codec": [1, 2]}, "an object or a codec that is not listed"),
        ({"base.codec": [0, 1]}, "a base is a delta itself"),
        ({"base.stored": [15, 8]}, "a raw base is not as long"),
        ({"base.offset": [25, 32]}, "a base ends behind its pack"),
        ({"base.offset": [2**64 - 8, 32]}, "a base ends behind its pack"),
        ({"base.stored": [2**32 - 1, 8]}, "a base ends behind its pack"),
        ({"base.offset": [4]}, "rows where 2 are right"),
        ({"base.digest": [0, 1, 2]}, "rows where 4 are right"),
        ({"base.digest": None}, "no column 'base.digest'"),
        ({"row.base": None}, "no column 'row.base'"),
    ],
)
def test_hostile_bases_are_refused(changes, words):
    sections = sections_of(based())
    table = Table(sections["layout"])
    for column, numbers in changes.items():
        item = next(item for item in table.listed if item[0] == column)
        if numbers is None:
            del table.columns[column]
            table.listed.remove(item)
        else:
            table.columns[column] = np.array(numbers, table.columns[column].dtype)
            item[2] = len(numbers)
    with pytest.raises(FormatError, match=words):
        Record.decode(memoryview(encode_sections(sections | {"layout": table.encode()})))


def test_deltas_without_the_word_are_refused():
    """A program that does not ask for `requires` would take them for a codec it does not know."""
    sections = sections_of(based())
    table = Table(sections["layout"])
    table.head["requires"] = []
    with pytest.raises(FormatError, match="a delta has no base"):
        Record.decode(memoryview(encode_sections(sections | {"layout": table.encode()})))


@pytest.mark.parametrize("wrong", [DELTA._replace(base=None), place()._replace(base=BASE)])
def test_what_could_not_be_read_back_is_not_written(wrong):
    layout = Layout.build([wrong, place(16), place(32, 8)], {PACK: 40, BASE.object: 40})
    with pytest.raises(FormatError, match="a delta has no base, or what is no delta has one"):
        Record(small_version(), layout, {"id": "x"}).encode()


def test_a_chunk_that_is_written_anew_has_no_base_any_more():
    draft = LayoutBuilder(1)
    draft.put(0, DELTA)
    draft.put(0, place(32))
    layout = draft.build({PACK: 48})
    assert layout.place(0) == place(32)
    assert layout.objects == (PACK,)
