"""Records: the object whose creation commits a version to a tier, and the index object with summaries of many records.

A record has a version, its layout in the tier, and commit data. An index has the summaries of many records, so that
listing and retention need not read each record. Both have the same frame, with checksums of each section and of all::

    0    8   magic
    8    4   format number
    12   4   number of sections
    16   8   length of the whole record
    24   n * 48   per section: name (16 bytes, zero-padded), offset, length (u64), xxh3-128 of its bytes
    ...      the sections, each at a multiple of 64 bytes
    end  16  xxh3-128 of everything before

All integers are little-endian. Format 1 has the sections ``version``, ``layout`` and ``commit``. Readers skip a section
with another name, so that later programs may add sections; features that must not be skipped are in ``requires``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.arrays import Array, check_rising, starts_of
from tierstate.manifest.digest import checksum, checksum_of
from tierstate.manifest.errors import FormatError, untrusted
from tierstate.manifest.seal import is_encrypted, sealed_with

from . import table as col
from .layout import Layout, is_pack_key
from .leaf import stored_lossy_methods
from .version import MAX_SEQ, MAX_TIME, Version, check_features

RECORD_MAGIC = b"\x89TSR\r\n\x1a\n"


RECORD_FORMAT = 1


MAX_RECORD = 4 << 30


MAX_SECTIONS = 64


RECORD_NAME = "record"


_FIXED, _ENTRY, _TAIL, _ALIGN = 24, 48, 16, 64


INDEX_NAME = "index"


MAX_INDEX_BYTES = 64 << 20
"""Largest index that is written or read, in bytes."""


MAX_SUMMARY_JSON = 16 << 10
"""Largest size of one version's metadata in an index, in bytes; a version with more is always read from its record."""


MAX_SUMMARY_PACKS = 1 << 16
"""Largest number of packs of a version in an index; a version with more is always read from its record."""


_GENERATION = 999_999


_SECTION = "index"


_MORE = (("parent", str), ("commit", str), ("metadata", dict))


@dataclass(frozen=True)
class Record:
    """One committed version in one tier.

    Attributes:
        version, layout: what was saved, and where its chunks are in this tier.
        commit: a unique ``id`` of the commit, and facts about the writer for people.
    """

    version: Version
    layout: Layout
    commit: Mapping[str, Any]

    @property
    def present_nbytes(self) -> int:
        """Raw bytes of the chunks that this tier has."""
        present = self.layout.present
        return self.version.nbytes if present.all() else int(self.version.chunk_nbytes[present].sum())

    def encode(self) -> bytes:
        """The record's bytes.

        Raises:
            FormatError: it could not be decoded again: the layout belongs to another version, the commit has no id, or
                the record is larger than `MAX_RECORD`.
        """
        self.layout.check(self.version)
        commit = json.dumps(dict(self.commit), sort_keys=True).encode()
        _commit(memoryview(commit))
        return encode_sections({"version": self.version.data, "layout": self.layout.encode(), "commit": commit})

    @classmethod
    @untrusted(RECORD_NAME, named=False)
    def decode(cls, data: memoryview) -> Record:
        """A record from its bytes.

        Raises:
            FormatError: the bytes are not a record, are truncated or damaged, or have an unknown format number.
        """
        sections = decode_sections(data)
        missing = {"version", "layout", "commit"} - set(sections)
        if missing:
            raise FormatError(f"{RECORD_NAME} has no section {', '.join(sorted(missing))}")
        version = Version.decode(sections["version"])
        return cls(version, Layout.decode(sections["layout"], version), _commit(sections["commit"]))


def _commit(data: memoryview) -> Mapping[str, Any]:
    try:
        commit = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{RECORD_NAME} has a commit section that is not JSON") from error
    if not isinstance(commit, dict) or not isinstance(commit.get("id"), str):
        raise FormatError(f"{RECORD_NAME} has a commit section without an id")
    col.check_depth(commit, f"{RECORD_NAME}: a commit section")
    return commit


def encode_sections(sections: Mapping[str, bytes], number: int = RECORD_FORMAT) -> bytes:
    """Frame sections as one object, with lengths and checksums."""
    at = _FIXED + _ENTRY * len(sections)
    table, body = b"", []
    for name, data in sections.items():
        body += [bytes(-at % _ALIGN), data]
        at += len(body[-2])
        place = at.to_bytes(8, "little") + len(data).to_bytes(8, "little")
        table += name.encode("ascii").ljust(16, b"\0") + place + checksum(data)
        at += len(data)
    if at + _TAIL > MAX_RECORD:
        raise FormatError(f"a {RECORD_NAME} of {at + _TAIL} bytes is too long; at most {MAX_RECORD} are read back")
    total = (at + _TAIL).to_bytes(8, "little")
    head = RECORD_MAGIC + number.to_bytes(4, "little") + len(sections).to_bytes(4, "little") + total
    pieces = [head, table, *body]
    return b"".join([*pieces, checksum_of(pieces)])  # one copy: a record may have more than a GiB


def decode_sections(data: memoryview) -> dict[str, memoryview]:
    """The sections of a framed object, after all checks.

    Raises:
        FormatError: the bytes are not such an object, are truncated or damaged, or have an unknown format number.
    """
    count = _check_frame(data)
    sections = {}
    for i in range(count):
        entry = data[_FIXED + i * _ENTRY : _FIXED + (i + 1) * _ENTRY]
        offset, length = int.from_bytes(entry[16:24], "little"), int.from_bytes(entry[24:32], "little")
        name = bytes(entry[:16]).rstrip(b"\0").decode("ascii", "replace")
        if offset < _FIXED + count * _ENTRY or offset + length > len(data) - _TAIL:
            raise FormatError(f"{RECORD_NAME}: section {name!r} lies outside the record")
        sections[name] = data[offset : offset + length]
        if checksum(sections[name]) != bytes(entry[32:48]):
            raise FormatError(f"{RECORD_NAME}: section {name!r} is not what was written: its checksum differs")
    if len(sections) != count:
        raise FormatError(f"{RECORD_NAME}: two sections of one name")
    return sections


def surviving_parts(data: memoryview) -> tuple[Version | None, Layout | None]:
    """The version and the layout in a damaged record, each as far as its own section is unchanged by its checksum.

    A truncated record may still have its version, and one with a damaged layout too. Not for records that are whole.
    """
    sections = {}
    for i in range(min(int.from_bytes(data[12:16], "little"), MAX_SECTIONS)):
        entry = data[_FIXED + i * _ENTRY : _FIXED + (i + 1) * _ENTRY]
        offset, length = int.from_bytes(entry[16:24], "little"), int.from_bytes(entry[24:32], "little")
        section = data[offset : offset + length]
        if len(entry) == _ENTRY and len(section) == length and checksum(section) == bytes(entry[32:48]):
            sections[bytes(entry[:16]).rstrip(b"\0")] = section
    try:
        version = Version.decode(sections[b"version"])
    except (KeyError, FormatError):
        return None, None
    try:
        return version, Layout.decode(sections[b"layout"], version)
    except (KeyError, FormatError):
        return version, None


def _not_a_record(data: memoryview) -> FormatError:
    """The error for what does not begin as a record; what is sealed or encrypted lacks a key in the policy."""
    if id := sealed_with(data):
        return FormatError(f"{RECORD_NAME} is sealed with key {id}; give it to the policy, as in 'seal: {{file: ...}}'")
    if is_encrypted(data):
        how = "give the tier its key in the policy, as in 'encrypt: {file: ...}'"
        return FormatError(f"{RECORD_NAME} is encrypted; {how}")
    return FormatError(f"not a record: it starts with {bytes(data[:8])!r}, a record with {RECORD_MAGIC!r}")


def _check_frame(data: memoryview) -> int:
    """Check magic, format number, length and checksum; returns the number of sections."""
    if bytes(data[:8]) != RECORD_MAGIC[: min(8, len(data))] or len(data) == 0:
        raise _not_a_record(data)
    if len(data) < _FIXED + _TAIL:
        raise FormatError(f"{RECORD_NAME} is truncated: {len(data)} bytes")
    number, count = int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")
    if number != RECORD_FORMAT:
        raise FormatError(
            f"{RECORD_NAME} has format number {number}; this program reads {RECORD_FORMAT}: use a newer one"
        )
    total = int.from_bytes(data[16:24], "little")
    if total != len(data):
        raise FormatError(f"{RECORD_NAME} is truncated or padded: {len(data)} bytes where its head says {total}")
    if count > MAX_SECTIONS or _FIXED + count * _ENTRY + _TAIL > len(data):
        raise FormatError(f"{RECORD_NAME} lists {count} sections in {len(data)} bytes")
    if checksum(data[:-_TAIL]) != bytes(data[-_TAIL:]):
        raise FormatError(f"{RECORD_NAME} is not what was written: its checksum differs")
    return count


class Summary(NamedTuple):
    """The facts about one record that listing and retention need, without its tables.

    Attributes:
        seq, generation: sequence number and generation of the record.
        step, time: the version's step and time.
        id: the version's id, the same in every tier.
        nbytes: raw bytes of the state.
        stored: stored bytes of its chunks in this tier, including chunks that it shares with other versions.
        whole: whether this tier has all of its chunks.
        leaves: number of leaves.
        paths: a checksum of the leaves' paths: versions with the same paths are placed on the same tiers.
        packs: keys of the packs that have its chunks in this tier.
        more: fields of JSON types: ``parent``, ``commit`` (its id), ``metadata``, perhaps ``lossy``, and those of
            later programs.
    """

    seq: int
    generation: int
    step: int
    time: float
    id: str
    nbytes: int
    stored: int
    whole: bool
    leaves: int
    paths: str
    packs: tuple[str, ...]
    more: Mapping[str, Any]

    @classmethod
    def of(cls, record: Record, generation: int = 0) -> Summary:
        """The summary of a record."""
        version, layout, head = record.version, record.layout, record.version.head
        return cls(
            head.seq,
            generation,
            head.step,
            head.time,
            version.id,
            version.nbytes,
            layout.stored_nbytes,
            bool(layout.present.all()),
            len(version.leaves),
            checksum("\n".join(version.leaf_index).encode()).hex(),
            layout.objects,
            {"parent": head.parent, "commit": record.commit["id"], "metadata": dict(head.metadata)}
            | ({"lossy": list(lossy)} if (lossy := stored_lossy_methods(version.leaves)) else {}),
        )

    @property
    def parent(self) -> str:
        """Id of the previous version, or empty."""
        return str(self.more["parent"])

    @property
    def commit(self) -> str:
        """Id of the commit that created the record."""
        return str(self.more["commit"])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The user's metadata of the save."""
        found: Mapping[str, Any] = self.more["metadata"]
        return found

    @property
    def lossy(self) -> tuple[str, ...]:
        """Names of the lossy methods with which leaves were saved."""
        found = self.more.get("lossy")
        return tuple(map(str, found)) if isinstance(found, list) else ()


def encode_index(run: str, summaries: Iterable[Summary]) -> bytes:
    """An index of a run. The oldest versions are left out if it would be larger than `MAX_INDEX_BYTES`."""
    pairs = [(s, json.dumps(dict(s.more), sort_keys=True, separators=(",", ":"))) for s in summaries]
    rows = sorted(
        ((s, more) for s, more in pairs if len(more) <= MAX_SUMMARY_JSON and len(s.packs) <= MAX_SUMMARY_PACKS),
        key=_place,
    )
    while len(data := encode_sections({_SECTION: _table(run, rows)})) > MAX_INDEX_BYTES:
        rows = rows[len(rows) // 2 + 1 :]
    return data


def _place(pair: tuple[Summary, str]) -> tuple[int, int]:
    return pair[0].seq, pair[0].generation


def _table(run: str, pairs: Sequence[tuple[Summary, str]]) -> bytes:
    rows, more = [summary for summary, _ in pairs], [text for _, text in pairs]
    keys: dict[str, int] = {}
    packs = [keys.setdefault(key, len(keys)) for s in rows for key in s.packs]
    return col.encode_table(
        {"run": run, "requires": []},
        {
            "seq": np.array([s.seq for s in rows], "<u8"),
            "generation": np.array([s.generation for s in rows], "<u4"),
            "step": np.array([s.step for s in rows], "<i8"),
            "time": np.array([s.time for s in rows], "<f8").view("<u8"),
            "id": _digests([s.id for s in rows]),
            "nbytes": np.array([s.nbytes for s in rows], "<u8"),
            "stored": np.array([s.stored for s in rows], "<u8"),
            "whole": np.array([s.whole for s in rows], "<u1"),
            "leaves": np.array([s.leaves for s in rows], "<u8"),
            "paths": _digests([s.paths for s in rows]),
            **col.text_columns(list(keys), "pack.key"),
            "pack.end": np.cumsum([len(s.packs) for s in rows], dtype="<u8"),
            "pack.row": np.array(packs, "<u4"),
            "more": np.frombuffer(f"[{','.join(more)}]".encode(), "<u1"),
        },
    )


def _digests(names: Sequence[str]) -> Array:
    return np.frombuffer(bytes.fromhex("".join(names)), "<u1")


@untrusted(INDEX_NAME, named=False)
def decode_index(data: memoryview, run: str) -> list[Summary]:
    """The summaries of an index.

    Raises:
        FormatError: the bytes are not an index, belong to another run, or are inconsistent.
    """
    section = decode_sections(data).get(_SECTION)
    if section is None:
        raise FormatError(f"no {INDEX_NAME}: it has no such section")
    head, columns = col.decode_table(section, INDEX_NAME)
    check_features(head, INDEX_NAME)
    if col.json_field(head, "run", str, INDEX_NAME) != run:
        raise FormatError(f"{INDEX_NAME} is of run {head['run'][:100]!r}")
    seq = col.column(columns, "seq", "<u8", INDEX_NAME)
    count = len(seq)
    numbers = {
        name: col.column(columns, name, kind, INDEX_NAME, count)
        for name, kind in (
            ("generation", "<u4"), ("step", "<i8"), ("time", "<u8"), ("nbytes", "<u8"), ("stored", "<u8"),
            ("whole", "<u1"), ("leaves", "<u8"),
        )
    }  # fmt: skip
    time = numbers["time"].view("<f8")
    _check(seq, numbers["generation"], time)
    more = _more(col.column(columns, "more", "<u1", INDEX_NAME).tobytes(), count)
    step, nbytes, stored, leaves = (numbers[name].tolist() for name in ("step", "nbytes", "stored", "leaves"))
    rows = zip(
        seq.tolist(),
        numbers["generation"].tolist(),
        step,
        time.tolist(),
        _names(columns, "id", count),
        nbytes,
        stored,
        numbers["whole"].astype(bool).tolist(),
        leaves,
        _names(columns, "paths", count),
        _packs(columns, count),
        more,
        strict=True,
    )
    return [Summary(*row) for row in rows]


def _check(seq: Array, generation: Array, time: Array) -> None:
    if not len(seq):
        return
    if int(seq.max()) > MAX_SEQ or int(generation.max()) > _GENERATION:
        raise FormatError(f"{INDEX_NAME} has a number that no record has")
    if not bool(np.all((time >= 0) & (time <= MAX_TIME))):  # also fails for NaN
        raise FormatError(f"{INDEX_NAME} has a time that no version has")
    if len(np.unique(np.stack([seq, generation.astype("<u8")], 1), axis=0)) != len(seq):
        raise FormatError(f"{INDEX_NAME} has two entries of one record")


def _names(columns: col.Columns, name: str, count: int) -> list[str]:
    text = col.column(columns, name, "<u1", INDEX_NAME, 16 * count).tobytes().hex()
    return [text[at : at + 32] for at in range(0, 32 * count, 32)]


def _packs(columns: col.Columns, count: int) -> list[tuple[str, ...]]:
    keys = col.column_texts(columns, "pack.key", INDEX_NAME)
    if wrong := next((key for key in keys if not is_pack_key(key)), None):
        raise FormatError(f"{INDEX_NAME} names {wrong[:80]!r}, which is no pack")
    ends = check_rising(col.column(columns, "pack.end", "<u8", INDEX_NAME, count), INDEX_NAME)
    rows = col.column(columns, "pack.row", "<u4", INDEX_NAME, int(ends[-1]) if count else 0)
    if len(rows) and int(rows.max()) >= len(keys):
        raise FormatError(f"{INDEX_NAME}: a version names a pack that is not listed")
    named, starts = [keys[row] for row in rows.tolist()], starts_of(ends).tolist()
    return [tuple(named[a:b]) for a, b in zip(starts, ends.tolist(), strict=True)]


def _more(text: bytes, count: int) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{INDEX_NAME}: {text[:60]!r} is not JSON") from error
    if not isinstance(found, list) or len(found) != count:
        raise FormatError(f"{INDEX_NAME}: {text[:60]!r} is no list of {count} objects")
    for one in found:
        if not isinstance(one, dict) or any(not isinstance(one.get(name), kind) for name, kind in _MORE):
            raise FormatError(f"{INDEX_NAME}: {str(one)[:60]!r} says too little of a version")
    col.check_depth(found, INDEX_NAME)
    return found
