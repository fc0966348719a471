"""Layouts and records: written, read back, and refused before they are written where they could not be read."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.manifest_strategies import PACK, layouts, place, records, small_record, small_version, versions

from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format import record as record_module
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import Layout, is_pack_key
from tierstate.manifest.format.record import Record, decode_sections, encode_sections


@given(st.data())
def test_a_layout_comes_back(data):
    version = data.draw(versions())
    layout = data.draw(layouts(version))
    found = Layout.decode(memoryview(layout.encode()), version)
    assert (found.objects, found.codecs) == (layout.objects, layout.codecs)
    places = [layout.place(row) for row in range(len(version.digests))]
    assert [found.place(row) for row in range(len(version.digests))] == places
    assert found.present.tolist() == [p is not None for p in places]
    here = [p for p in places if p]
    needed = {(p.object, p.offset) for p in [*here, *(p.base for p in here if p.base)]}
    assert {o for o, _ in needed} == set(found.objects)
    assert found.stored_nbytes <= sum(p.stored + (p.base.stored if p.base else 0) for p in here)
    if len(needed) == len(here) + sum(p.base is not None for p in here):
        assert found.stored_nbytes == sum(p.stored + (p.base.stored if p.base else 0) for p in here)
    assert {o: found.size_of(o) for o in found.objects} == layout.pack_sizes
    assert found.encode() == layout.encode()


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ([place(), place(16), place(32, 8)], 39),  # ends behind its pack
        ([place(2**63), place(16), place(32, 8)], 40),
        ([place(2**64 - 8), place(16), place(32, 8)], 40),  # offset + length wraps around
        ([place(), place(16), place(32, 9)], 50),  # raw, with a length not its own
        ([place(), place(16)], 50),  # a row too few
        ([place(), place(16), place(32, 8), None], 50),
        ([place(key="versions/run/000000000001"), place(16), place(32, 8)], 50),
        ([place(key="packs/../../etc/passwd"), place(16), place(32, 8)], 50),
    ],
)
def test_a_layout_that_points_astray_is_neither_written_nor_read(places, size):
    version = small_version()
    layout = Layout.build(places, dict.fromkeys({p.object for p in places if p}, size))
    with pytest.raises(FormatError, match="layout"):
        Record(version, layout, {"id": "x"}).encode()
    with pytest.raises(FormatError, match="layout"):
        Layout.decode(memoryview(layout.encode()), version)


def test_a_pack_listed_twice_is_refused():
    layout = dataclasses.replace(
        Layout.build([place(), place(16), place(32, 8)], {PACK: 40}),
        objects=(PACK, PACK),
        object_sizes=np.array([40, 400], "<u8"),
    )
    with pytest.raises(FormatError, match="twice"):
        Layout.decode(memoryview(layout.encode()), small_version())


def test_which_keys_are_packs():
    assert is_pack_key(PACK)
    for key in ["packs/run", "packs/run/.x", "packs/run/a/b", "versions/run/000000000001", "packs/run/a\n"]:
        assert not is_pack_key(key)


@pytest.mark.slow
@given(records())
def test_a_record_comes_back(record):
    data = record.encode()
    found = Record.decode(memoryview(data))
    assert found.commit == record.commit
    assert found.version.id == record.version.id
    assert found.layout.encode() == record.layout.encode()
    assert found.encode() == data


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=16), st.binary(max_size=200), max_size=6))
def test_sections_come_back_aligned(sections):
    data = encode_sections(sections)
    found = decode_sections(memoryview(data))
    assert {name: bytes(section) for name, section in found.items()} == sections


def test_a_section_of_another_name_is_skipped():
    version = small_version()
    record = Record(version, Layout.build([None] * 3, {}), {"id": "x"})
    sections = {name: bytes(data) for name, data in decode_sections(memoryview(record.encode())).items()}
    assert Record.decode(memoryview(encode_sections(sections | {"later": b"?" * 100}))).version.id == version.id


@pytest.mark.parametrize("name", ["version", "layout", "commit"])
def test_a_missing_section_is_named(name):
    record = Record(small_version(), Layout.build([None] * 3, {}), {"id": "x"})
    sections = {n: bytes(d) for n, d in decode_sections(memoryview(record.encode())).items() if n != name}
    with pytest.raises(FormatError, match=f"no section {name}"):
        Record.decode(memoryview(encode_sections(sections)))


@pytest.mark.parametrize("section", ["version", "layout"])
def test_a_required_feature_is_refused_by_name(section):
    record = Record(small_version(), Layout.build([None] * 3, {}), {"id": "x"})
    sections = {name: bytes(data) for name, data in decode_sections(memoryview(record.encode())).items()}
    head, columns = col.decode_table(memoryview(sections[section]), section)
    sections[section] = col.encode_table(head | {"requires": ["holograms"]}, columns)
    with pytest.raises(FormatError, match=f"{section} requires holograms"):
        Record.decode(memoryview(encode_sections(sections)))


def test_another_format_number_is_refused():
    with pytest.raises(FormatError, match="format number 2"):
        Record.decode(memoryview(encode_sections({}, number=2)))


@pytest.mark.parametrize("commit", [{}, {"id": 1}, {"id": None}])
def test_a_commit_without_an_id_is_not_written(commit):
    with pytest.raises(FormatError, match="without an id"):
        Record(small_version(), Layout.build([None] * 3, {}), commit).encode()


def test_a_record_that_could_not_be_read_back_is_not_written(monkeypatch):
    record = Record(small_version(), Layout.build([None] * 3, {}), {"id": "x"})
    monkeypatch.setattr(record_module, "MAX_RECORD", len(record.encode()) - 1)
    with pytest.raises(FormatError, match="too long"):
        record.encode()


def test_the_bytes_of_format_one_do_not_change():
    """Records outlive programs: whoever changes these bytes must give the format another number."""
    record = Record(small_version(), Layout.build([place(), None, place(16, 5, "fast")], {PACK: 21}), {"id": "x"})
    assert json.loads(json.dumps(record.version.head.encode())) == record.version.head.encode()
    assert (record.version.id, checksum(record.encode()).hex()) == (
        "9d432c2a8bb6413b4bb1a87ee0065302",
        "7637d96b298dd65323914873b359eb70",
    )


def test_every_byte_of_a_record_is_under_a_checksum():
    """Also those of its head and table, and the padding between sections."""
    data = small_record().encode()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(FormatError):
            decode_sections(memoryview(flipped))
