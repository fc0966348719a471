"""Summaries: they say what records say, many of them as one object, and bytes of any kind are no harm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import Table, records, small_record

from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import record as room
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import (
    Record,
    Summary,
    decode_index,
    decode_sections,
    encode_index,
    encode_sections,
)


def summaries(count: int) -> list[Summary]:
    """Summaries of many versions, which share a pack."""
    one = Summary.of(small_record())
    return [one._replace(seq=seq, packs=(*one.packs, f"packs/run/{seq}-0-0-x")) for seq in range(1, count + 1)]


def stored(layout: Layout) -> int:
    """Each place counted once, by the row that comes first, and then the bases."""
    places: dict[tuple[str, int], int] = {}
    rows = range(len(layout.object))
    for place in (*map(layout.place, rows), *map(layout.base, rows)):
        if place is not None:
            places.setdefault((place.object, place.offset), place.stored)
    return sum(places.values())


@pytest.mark.slow
@given(records(), st.integers(0, 999_999))
def test_an_index_says_what_the_records_say(record: Record, generation: int) -> None:
    one = Summary.of(Record.decode(memoryview(record.encode())), generation)
    version, layout = record.version, record.layout
    assert one[:5] == (version.head.seq, generation, version.head.step, version.head.time, version.id)
    assert one[5:9] == (version.nbytes, stored(layout), layout.present.all(), len(version.leaves))
    assert (one.packs, one.parent, one.commit) == (layout.objects, version.head.parent, record.commit["id"])
    assert one.metadata == version.head.metadata
    made = [one._replace(generation=n) for n in (2, 1)]
    assert decode_index(memoryview(encode_index("run", made)), "run") == made[::-1]


def test_versions_of_the_same_paths_are_known_by_them() -> None:
    one, other = Summary.of(small_record()), Summary.of(small_record(), 1)
    assert one.paths == other.paths
    assert one.id == other.id


def test_what_a_later_program_says_more_survives() -> None:
    one = summaries(1)[0]
    one = one._replace(more={**one.more, "lossy": {"bound": 0.1}})
    (found,) = decode_index(memoryview(encode_index("run", [one])), "run")
    assert found.more["lossy"] == {"bound": 0.1}
    assert decode_index(memoryview(encode_index("run", [found])), "run") == [one]


def test_a_version_with_too_much_to_say_is_left_out() -> None:
    one, two = summaries(2)
    two = two._replace(more={**two.more, "metadata": {"text": "x" * room.MAX_SUMMARY_JSON}})
    assert decode_index(memoryview(encode_index("run", [one, two])), "run") == [one]


def test_an_index_that_would_be_too_long_has_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    made = summaries(100)
    monkeypatch.setattr(room, "MAX_INDEX_BYTES", len(encode_index("run", made)) // 3)
    found = decode_index(memoryview(encode_index("run", made)), "run")
    assert 0 < len(found) < 50
    assert found == made[-len(found) :]


# Hostile bytes


WHOLE = encode_index("run", summaries(3))


def changed(change: Callable[[Table], object]) -> bytes:
    """An index of which the table was changed, with checksums that are right."""
    table = Table(bytes(decode_sections(memoryview(WHOLE))["index"]))
    change(table)
    return encode_sections({"index": table.encode()})


def set_at(name: str, value: int) -> Callable[[Table], object]:
    return lambda table: table.columns[name].__setitem__(0, value)


def text(name: str, old: bytes, new: bytes) -> Callable[[Table], object]:
    def change(table: Table) -> None:
        data = table.columns[name].tobytes()
        assert old in data
        table.columns[name] = np.frombuffer(data.replace(old, new), "<u1")
        table.listed = [[n, d, len(table.columns[n])] for n, d, _ in table.listed]

    return change


WRONG = {
    "another run": (lambda table: table.head.update(run="other"), "of run 'other'"),
    "requires": (lambda table: table.head.update(requires=["more"]), "requires more"),
    "number": (set_at("seq", 10**12), "a number that no record has"),
    "generation": (set_at("generation", 10**6), "a number that no record has"),
    "time": (set_at("time", int(np.array(np.nan).view("<u8"))), "a time that no version has"),
    "twice": (set_at("seq", 2), "two entries of one record"),
    "pack behind": (set_at("pack.row", 99), "a pack that is not listed"),
    "ends fall": (set_at("pack.end", 5), "cumulative ends that fall"),
    "no pack": (text("pack.key.text", b"packs/run/1", b"packs+run/1"), "which is no pack"),
    "not JSON": (text("more", b"[{", b"[["), "is not JSON"),
    "deep": (text("more", b"[{", b"[" * 100_000), "is not JSON"),
    "no list": (text("more", b'"metadata":{}', b'"metadata":0'), "says too little"),
    "too few": (text("more", b'{"commit"', b'1,{"commit"'), "is no list of 3 objects"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(name: str) -> None:
    change, said = WRONG[name]
    data = changed(change)
    with pytest.raises(FormatError, match=said):
        decode_index(memoryview(data), "run")


def test_a_record_is_no_index() -> None:
    with pytest.raises(FormatError, match="no such section"):
        decode_index(memoryview(small_record().encode()), "run")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_index(memoryview(data), "run")


@given(st.data())
def test_mutated_tables_are_an_index_or_refused(data: st.DataObject) -> None:
    """Every single byte of the table may be another one, with all checksums right."""
    table = bytearray(decode_sections(memoryview(WHOLE))["index"])
    for _ in range(data.draw(st.integers(1, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_index(memoryview(encode_sections({"index": bytes(table)})), "run")
    except FormatError:
        return
    assert len(found) == 3
    assert all(one.metadata is not None and isinstance(one.parent, str) for one in found)
