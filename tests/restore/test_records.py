"""Records that are none of ours: foreign, cut, of a later format, or made to harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import opened, policy, scratch, tensors, tier
from support.damage import FOLDER, STATE, objects, saved, two
from support.equality import difference

import tierstate as ts
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.record import RECORD_FORMAT, Record, decode_sections, encode_sections
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log


def rewritten(place: Path, change: Any) -> None:
    """Put another record in the place of the only one."""
    (path,) = objects(place, "nvme", "versions")
    path.write_bytes(change(path.read_bytes()))


def sections(data: bytes, number: int = RECORD_FORMAT, **changed: Any) -> bytes:
    """A sound frame around sections of which some were changed."""
    found = {name: bytes(part) for name, part in decode_sections(memoryview(data)).items()}
    return encode_sections({**found, **{name: change(found[name]) for name, change in changed.items()}}, number)


def hostile(attribute: str, value: Any) -> Any:
    """A change of one of the layout's columns, which does not pass by its own checks."""

    def change(data: bytes) -> bytes:
        record = Record.decode(memoryview(data))
        layout = record.layout
        fields = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
        made = Layout(**{**fields, attribute: value(fields[attribute])})
        return sections(data, layout=lambda _: made.encode())

    return change


def requiring(section: bytes) -> bytes:
    """A section that a later program wrote, and of which it said that older ones must not read it."""
    head, columns = col.decode_table(memoryview(section), "section")
    return col.encode_table({**head, "requires": ["erasure-codes"]}, columns)


RECORDS = {
    "foreign": (lambda _: b"PK\x03\x04" + bytes(100), "not a record"),
    "empty": (lambda _: b"", "not a record"),
    "truncated": (lambda data: data[: len(data) // 2], "truncated"),
    "padded": (lambda data: data + bytes(64), "truncated or padded"),
    "future": (lambda data: sections(data, 2), "format number 2; this program reads 1: use a newer one"),
    "requires": (lambda data: sections(data, layout=requiring), "layout requires erasure-codes, which this program"),
    "later": (lambda data: sections(data, version=requiring), "version requires erasure-codes, which this program"),
    "escape": (hostile("objects", lambda _: ("../../../etc/passwd",)), "no pack"),
    "absolute": (hostile("objects", lambda _: ("/etc/passwd",)), "no pack"),
    "inside": (hostile("objects", lambda _: ("packs/../../secret",)), "no pack"),
    "record": (hostile("objects", lambda _: ("versions/run/000000000001",)), "no pack"),
    "behind": (hostile("offset", lambda old: old + np.uint64(1 << 40)), "behind its pack"),
    "wrap": (hostile("offset", lambda old: old + np.uint64((1 << 64) - 8)), "behind its pack"),
    "long": (hostile("stored", lambda old: old + np.uint32(4)), "length|behind"),
    "object": (hostile("object", lambda old: old + np.uint32(7)), "not listed"),
    "codec": (hostile("codec", lambda old: old + np.uint8(200)), "not listed"),
    "rows": (hostile("offset", lambda old: old[:-1]), "rows"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_none_of_ours_is_refused(place, name):
    spec = policy({"nvme": tier("nvme", place)})
    saved(spec, 1)
    secret = place / "secret"
    secret.write_bytes(bytes(100_000))
    change, match = RECORDS[name]
    rewritten(place, change)
    with ts.Checkpointer(spec, "run") as ckpt:
        into = tensors(*STATE, seed=3)
        for call in (ckpt.load, lambda: ckpt.restore(into=into), lambda: ckpt.load(step=0)):
            with pytest.raises(ts.Damaged, match=match):
                call()
        assert difference(tensors(*STATE, seed=3), into) == "", "memory is untouched"
        with pytest.raises(ts.FormatError, match=match):
            Log(opened(spec, "nvme"), "run").read(1)
        report = ckpt.verify(deep=True)
        assert [p.seq for p in report.problems] == [1]
        # The number stays taken, and the run goes on.
        ckpt.save(tensors(*STATE), step=1).wait()
        assert [(v.seq, list(v.unreadable)) for v in ckpt.versions()] == [(1, ["nvme"]), (2, [])]
        assert difference(tensors(*STATE), ckpt.load()) == ""


def test_an_unknown_codec_and_lying_lengths_are_damage(place):
    """What only reading the chunks can tell."""
    spec = policy({"nvme": tier("nvme", place, codec="small")})
    state = {"a": torch.zeros(4096)}
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0)
    (path,) = objects(place, "nvme", "versions")
    sound = path.read_bytes()
    for change, match in (
        (hostile("codecs", lambda _: ("quantum",)), "'quantum', which this program does not know"),
        (hostile("stored", lambda old: old - np.uint32(1)), "compressed chunk says"),
        (hostile("codecs", lambda _: ("raw",)), "a length that is not its own"),
    ):
        path.write_bytes(change(sound))
        with ts.Checkpointer(spec, "run") as ckpt, pytest.raises(ts.Damaged, match=match):
            ckpt.load()


@given(
    section=st.sampled_from(["version", "layout", "commit"]),
    at=st.floats(0, 1),
    new=st.binary(min_size=1, max_size=9),
    cut=st.integers(0, 8),
)
def test_any_bytes_in_a_sound_frame_end_in_an_error_of_ours(section: str, at: float, new: bytes, cut: int) -> None:
    """Somebody who can write checksums can write anything; they get an error of ours, and never a wrong state."""

    def change(old: bytes) -> bytes:
        start = int(at * len(old))
        return old[:start] + new + old[start + cut :]

    with scratch() as place:
        spec = policy({"nvme": tier("nvme", place)})
        truth = saved(spec, 1)
        rewritten(place, lambda data: sections(data, **{section: change}))
        with ts.Checkpointer(spec, "run") as ckpt:
            try:
                found = ckpt.load()
            except ts.TierstateError:
                return
            assert isinstance(found, dict)
            report = ckpt.verify(deep=True)
            if section != "version":
                assert difference(truth[0], found) == ""
                # A pack's length that is not the right one is no reason not to load, and one to be told of.
                assert report.ok or section == "layout"


def test_a_record_of_another_run_or_number_is_refused(place):
    spec = policy({"nvme": tier("nvme", place)})
    saved(spec, 2)
    one, another = objects(place, "nvme", "versions")
    another.write_bytes(one.read_bytes())
    (place / "nvme/versions/other").mkdir()
    (place / "nvme/versions/other/000000000001").write_bytes(one.read_bytes())
    with ts.Checkpointer(spec, "run") as ckpt, pytest.raises(ts.Damaged, match="holds version 1 of run 'run'"):
        ckpt.load()
    with ts.Checkpointer(spec, "other") as ckpt, pytest.raises(ts.Damaged, match="holds version 1 of run 'run'"):
        ckpt.load()


def test_a_version_of_the_same_id_is_the_same_everywhere(place):
    """The version section is the same bytes in each tier, and its digest the id."""
    spec = two(place)
    saved(spec, 1)
    found = {
        bytes(decode_sections(memoryview(path.read_bytes()))["version"])
        for name in FOLDER
        for path in objects(place, name, "versions")
    }
    assert len(found) == 1
    with ts.Checkpointer(spec, "run") as ckpt:
        assert Version.decode(memoryview(found.pop())).id == ckpt.info().id
