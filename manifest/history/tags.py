"""Tags: names of versions of a run, as objects of a tier; and forks of a version into another run.

A tag has the key ``tags/<run>/<name>@<number>``; these keys are made and parsed only here. Of all objects with one name
the highest number over all tiers is valid: a tier that was unavailable when the tag was moved or removed has a lower
one. The removal of a tag is an object too (a tombstone).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.arguments import as_text
from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.digest import json_checksum, json_with_checksum
from tierstate.manifest.errors import FormatError, NotFound
from tierstate.manifest.format import table as col
from tierstate.manifest.format.layout import ChunkPlace, Layout, LayoutBuilder
from tierstate.manifest.format.version import MAX_SEQ, WHAT, Head, Version

from .log import RACE_RETRIES, KeyValueStore, check_run

MAX_TAG_BYTES = 4096
"""Largest size of a tag's object, in bytes."""


MAX_TAG_NUMBER = 10**17
"""The highest valid number of a tag. Numbers are at least milliseconds since 1970; this is three million years."""


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,63}")


_KEY = re.compile(rf"({_NAME.pattern})@([0-9]{{6,18}})")


class TaggedVersion(NamedTuple):
    """A tag: its name, and the sequence number and id of its version."""

    name: str
    seq: int
    id: str


def fork_version(version: Version, head: Head) -> Version:
    """The same leaves and chunks with another head; unknown fields of later programs are kept."""
    fields, columns = col.decode_table(memoryview(version.data), WHAT)
    return Version.decode(memoryview(col.encode_table({**fields, **head.encode()}, columns)))


def move_rows(layout: Layout, places: Mapping[int, ChunkPlace], sizes: Mapping[str, int]) -> Layout:
    """The layout with some chunks at new places.

    Args:
        places: row of a moved chunk -> its new place.
        sizes: key -> length of every object that is named there.
    """
    if not places:
        return layout
    draft = LayoutBuilder(len(layout.object))
    here = np.flatnonzero(layout.present)
    draft.put_like(here, layout, here)
    for row, place in places.items():
        draft.put(row, place)
    return draft.build({**layout.pack_sizes, **sizes})


class TagTarget(NamedTuple):
    """The version that a tag names: its sequence number and its id."""

    seq: int
    id: str


def check_tag(name: str) -> str:
    """Check that a name can be a tag; returns it.

    Raises:
        TypeError: it is no text.
        ValueError: it is not up to 64 letters, digits, ``.``, ``_``, ``-``, starting with a letter, a digit or ``_``.
    """
    name = as_text(name, "tag", "a tag is text, as in 'best'")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} cannot be a tag; use up to 64 letters, digits, '.', '_' and '-', and no '.' or '-' first"
        )
    return name


def tag_numbers(
    tier: KeyValueStore, run: str, odd: Callable[[str], object] = lambda _key: None
) -> dict[str, list[int]]:
    """The tags in a tier, each with its numbers, ascending; from the keys, without a read.

    Args:
        odd: called with each key whose number is above `MAX_TAG_NUMBER`. No program writes such numbers; they are
            ignored.

    Raises:
        TierError: the tier could not be listed.
    """
    prefix = f"tags/{check_run(run)}/"
    found: dict[str, list[int]] = {}
    for key in tier.list(prefix):
        if match := _KEY.fullmatch(key.removeprefix(prefix)):
            number = int(match[2])
            if number > MAX_TAG_NUMBER:
                odd(key)
            else:
                found.setdefault(match[1], []).append(number)
    return {name: sorted(found[name]) for name in sorted(found)}


def read_tag(tier: KeyValueStore, run: str, name: str, number: int) -> TagTarget | None:
    """The version that one object of a tag names; None if the object is a removal.

    Raises:
        NotFound: there is no such object.
        FormatError: it is not a tag.
        TierError: it could not be read.
    """
    key = tag_key(run, name, number)
    what = f"{tier.name}: {key}"
    try:
        found = json.loads(to_bytes(tier.get_within(key, MAX_TAG_BYTES, "a tag")))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: a tag is a JSON object, and this is none; give or delete the tag again") from error
    _check_own(found, run, name, number, what)
    if isinstance(found, dict) and "seq" in found and found["seq"] is None:
        return None
    if not (isinstance(found, dict) and type(found.get("seq")) is int and isinstance(found.get("id"), str)):
        raise FormatError(f"{what}: a tag has a number `seq` and an `id`; give or delete the tag again")
    if not 0 <= found["seq"] <= MAX_SEQ:
        raise FormatError(f"{what}: no version has the number {found['seq'] % 10**15}; give or delete the tag again")
    return TagTarget(found["seq"], found["id"])


def write_tag(tier: KeyValueStore, run: str, name: str, number: int, tag: TagTarget | None) -> None:
    """Write one object of a tag: it names this version, or with ``tag=None`` removes the tag.

    Raises:
        AlreadyExists: another writer has used the number.
        FormatError: the number is out of range.
        TierError: it could not be written.
    """
    if number > MAX_TAG_NUMBER:
        text = f"tag {name!r} of run {run!r} has the highest number there is; delete its objects and give it again"
        raise FormatError(f"{tier.name}: {text}")
    said: dict[str, Any] = {"seq": None} if tag is None else tag._asdict()
    said |= {"run": run, "name": check_tag(name), "number": number}
    tier.put(tag_key(run, name, number), as_buffer(json_with_checksum(said)))


def _check_own(found: Any, run: str, name: str, number: int, what: str) -> None:
    """Raise FormatError if an object is damaged, or was written under another key and copied to this one. Objects of
    earlier programs say neither."""
    if not isinstance(found, dict) or "sum" not in found:
        return
    fields = {key: value for key, value in found.items() if key != "sum"}
    if found["sum"] != json_checksum(fields):
        raise FormatError(f"{what}: is not what was written: its checksum differs; give or delete the tag again")
    written = fields.get("run"), fields.get("name"), fields.get("number")
    if written != (run, name, number):
        raise FormatError(
            f"{what}: was written as tag {written[1]!r:.80} of run {written[0]!r:.120}, number {written[2]!r:.20}; "
            "give or delete the tag again"
        )


def drop_tag(tier: KeyValueStore, run: str, name: str, number: int) -> None:
    """Delete one object of a tag, which an object with a higher number has replaced."""
    tier.delete(tag_key(run, name, number))


class TagReader:
    """Reads the tags of one run in one tier. An object of a tag is never changed, so each is read once."""

    def __init__(self, tier: KeyValueStore, run: str) -> None:
        self._tier, self._run = tier, run
        self._known: Mapping[tuple[str, int], TagTarget | None] = {}

    def by_version(self) -> dict[int, tuple[str, ...]]:
        """Sequence numbers of the versions that have tags, each with its tags.

        Raises:
            FormatError: a tag cannot be read, so that its version is not known.
            TierError: the tier could not be read.
        """
        found: dict[int, tuple[str, ...]] = {}
        for (name, _), tag in self._newest().items():
            if tag is not None:
                found[tag.seq] = (*found.get(tag.seq, ()), name)
        return found

    def _newest(self) -> Mapping[tuple[str, int], TagTarget | None]:
        """The newest object of each tag, by name and number."""
        for left in reversed(range(RACE_RETRIES)):
            known, there = self._known, dict[tuple[str, int], TagTarget | None]()
            try:
                for name, used in tag_numbers(self._tier, self._run).items():
                    one = name, used[-1]
                    there[one] = known[one] if one in known else read_tag(self._tier, self._run, *one)
                break
            except NotFound:  # the tag was moved meanwhile
                if not left:
                    raise
        self._known = there
        return there


def tag_key(run: str, name: str, number: int) -> str:
    """The key of one object of a tag."""
    return f"tags/{check_run(run)}/{name}@{number:06d}"
