"""Records: version, layout and checks in one object, whose creation commits a version to a tier.

::

    0    8   magic
    8    4   format number
    12   4   number of sections
    16   8   length of the whole record
    24   n * 48   per section: name (16 bytes, zero-padded), offset, length (u64), xxh3-128 of its bytes
    ...      the sections, each at a multiple of 64 bytes
    end  16  xxh3-128 of everything before

All integers are little-endian. Format 1 has the sections ``version``, ``layout`` and ``commit``; a section of another
name is skipped, so that later programs may add some; what older programs must not skip goes into ``requires``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .digest import checksum
from .errors import FormatError
from .layout import Layout
from .version import Version

MAGIC = b"\x89TSR\r\n\x1a\n"
FORMAT = 1
MAX_RECORD = 4 << 30
MAX_SECTIONS = 64
WHAT = "record"
_FIXED, _ENTRY, _TAIL, _ALIGN = 24, 48, 16, 64


@dataclass(frozen=True)
class Record:
    """One committed version in one tier.

    Attributes:
        version, layout: what was saved, and where in this tier.
        commit: who wrote it: a unique ``id``, and whatever else is of use to people.
    """

    version: Version
    layout: Layout
    commit: Mapping[str, Any]

    def encode(self) -> bytes:
        """The record's bytes.

        Raises:
            FormatError: it could not be read back: the layout is another version's, the commit has no id, or it is
                larger than MAX_RECORD.
        """
        self.layout.check(self.version)
        commit = json.dumps(dict(self.commit), sort_keys=True).encode()
        _commit(memoryview(commit))
        return frame({"version": self.version.data, "layout": self.layout.encode(), "commit": commit})

    @classmethod
    def decode(cls, data: memoryview) -> Record:
        """A record from its bytes.

        Raises:
            FormatError: foreign, truncated or changed bytes, or a format this program does not know.
        """
        sections = unframe(data)
        missing = {"version", "layout", "commit"} - set(sections)
        if missing:
            raise FormatError(f"{WHAT} has no section {', '.join(sorted(missing))}")
        version = Version.decode(sections["version"])
        return cls(version, Layout.decode(sections["layout"], version), _commit(sections["commit"]))


def _commit(data: memoryview) -> Mapping[str, Any]:
    try:
        commit = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{WHAT} has a commit section that is not JSON") from error
    if not isinstance(commit, dict) or not isinstance(commit.get("id"), str):
        raise FormatError(f"{WHAT} has a commit section without an id")
    return commit


def frame(sections: Mapping[str, bytes], number: int = FORMAT) -> bytes:
    """Sections as one record."""
    at = _FIXED + _ENTRY * len(sections)
    table, body = b"", []
    for name, data in sections.items():
        body += [bytes(-at % _ALIGN), data]
        at += len(body[-2])
        place = at.to_bytes(8, "little") + len(data).to_bytes(8, "little")
        table += name.encode("ascii").ljust(16, b"\0") + place + checksum(data)
        at += len(data)
    if at + _TAIL > MAX_RECORD:
        raise FormatError(f"a {WHAT} of {at + _TAIL} bytes is too long; at most {MAX_RECORD} are read back")
    total = (at + _TAIL).to_bytes(8, "little")
    head = MAGIC + number.to_bytes(4, "little") + len(sections).to_bytes(4, "little") + total
    record = b"".join([head, table, *body])
    return record + checksum(record)


def unframe(data: memoryview) -> dict[str, memoryview]:
    """The sections of a record, every check done.

    Raises:
        FormatError: foreign, truncated or changed bytes, or a format number this program does not know.
    """
    count = _check_frame(data)
    sections = {}
    for i in range(count):
        entry = data[_FIXED + i * _ENTRY : _FIXED + (i + 1) * _ENTRY]
        offset, length = int.from_bytes(entry[16:24], "little"), int.from_bytes(entry[24:32], "little")
        name = bytes(entry[:16]).rstrip(b"\0").decode("ascii", "replace")
        if offset < _FIXED + count * _ENTRY or offset + length > len(data) - _TAIL:
            raise FormatError(f"{WHAT}: section {name!r} lies outside the record")
        sections[name] = data[offset : offset + length]
        if checksum(sections[name]) != bytes(entry[32:48]):
            raise FormatError(f"{WHAT}: section {name!r} is not what was written: its checksum differs")
    if len(sections) != count:
        raise FormatError(f"{WHAT}: two sections of one name")
    return sections


def _check_frame(data: memoryview) -> int:
    """The number of sections, after the checks that need no section."""
    if bytes(data[:8]) != MAGIC[: min(8, len(data))] or len(data) == 0:
        raise FormatError(f"not a record: it starts with {bytes(data[:8])!r}, a record with {MAGIC!r}")
    if len(data) < _FIXED + _TAIL:
        raise FormatError(f"{WHAT} is truncated: {len(data)} bytes")
    number, count = int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")
    if number != FORMAT:
        raise FormatError(f"{WHAT} has format number {number}; this program reads {FORMAT}: use a newer one")
    total = int.from_bytes(data[16:24], "little")
    if total != len(data):
        raise FormatError(f"{WHAT} is truncated or padded: {len(data)} bytes where its head says {total}")
    if count > MAX_SECTIONS or _FIXED + count * _ENTRY + _TAIL > len(data):
        raise FormatError(f"{WHAT} lists {count} sections in {len(data)} bytes")
    if checksum(data[:-_TAIL]) != bytes(data[-_TAIL:]):
        raise FormatError(f"{WHAT} is not what was written: its checksum differs")
    return count
