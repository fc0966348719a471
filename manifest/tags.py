"""Tags: names that versions of a run were given, as objects of a tier.

A tag is ``tags/<run>/<name>@<number>``. Of one name the highest number counts, over all tiers: a tier that was away
when the name was given anew, or taken back, has a lower one. That a name was taken back is an object too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from .chunk import as_buffer, to_bytes
from .errors import FormatError, NotFound
from .head import MAX_SEQ
from .log import RACES, Objects, check_run

MAX_TAG = 4096
"""Bytes of a tag's object."""

MAX_NUMBER = 10**17
"""The highest number that counts; in milliseconds it is more than three million years."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]{0,63}")
_KEY = re.compile(rf"({_NAME.pattern})@([0-9]{{6,18}})")


class Tag(NamedTuple):
    """A version that has a name: its number and its id."""

    seq: int
    id: str


def check_tag(name: str) -> str:
    """The name itself, if it can name a version.

    Raises:
        ValueError: anything but letters, digits, ``.``, ``_``, ``-``, starting with a letter, a digit or ``_``.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} cannot be a tag; use up to 64 letters, digits, '.', '_' and '-', and no '.' or '-' first"
        )
    return name


def numbers(tier: Objects, run: str, odd: Callable[[str], object] = lambda _key: None) -> dict[str, list[int]]:
    """The names that a tier knows, each with its numbers, rising; without reading any.

    Args:
        odd: told the keys whose number is above MAX_NUMBER, which nobody gives; they do not count.

    Raises:
        TierError: the tier could not be listed.
    """
    prefix = f"tags/{check_run(run)}/"
    found: dict[str, list[int]] = {}
    for key in tier.list(prefix):
        if match := _KEY.fullmatch(key.removeprefix(prefix)):
            number = int(match[2])
            if number > MAX_NUMBER:
                odd(key)
            else:
                found.setdefault(match[1], []).append(number)
    return {name: sorted(found[name]) for name in sorted(found)}


def read_tag(tier: Objects, run: str, name: str, number: int) -> Tag | None:
    """Which version has the name, by one object; None: the name was taken back.

    Raises:
        NotFound: there is no such object.
        FormatError: it is no tag.
        TierError: it could not be read.
    """
    key = _key(run, name, number)
    what = f"{tier.name}: {key}"
    if (size := tier.size(key)) > MAX_TAG:
        raise FormatError(f"{what}: {size} bytes are too many for a tag")
    try:
        found = json.loads(to_bytes(tier.get(key)))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: a tag is a JSON object, and this is none; give or delete the tag again") from error
    if isinstance(found, dict) and "seq" in found and found["seq"] is None:
        return None
    if not (isinstance(found, dict) and type(found.get("seq")) is int and isinstance(found.get("id"), str)):
        raise FormatError(f"{what}: a tag has a number `seq` and an `id`; give or delete the tag again")
    if not 0 <= found["seq"] <= MAX_SEQ:
        raise FormatError(f"{what}: no version has the number {found['seq'] % 10**15}; give or delete the tag again")
    return Tag(found["seq"], found["id"])


def write_tag(tier: Objects, run: str, name: str, number: int, tag: Tag | None) -> None:
    """Give a version a name, or take the name back.

    Raises:
        AlreadyExists: another writer has used the number.
        FormatError: there is no such number.
        TierError: it could not be written.
    """
    if number > MAX_NUMBER:
        text = f"tag {name!r} of run {run!r} has the highest number there is; delete its objects and give it again"
        raise FormatError(f"{tier.name}: {text}")
    said = {"seq": None} if tag is None else tag._asdict()
    tier.put(_key(run, check_tag(name), number), as_buffer(json.dumps(said, sort_keys=True).encode()))


def drop_tag(tier: Objects, run: str, name: str, number: int) -> None:
    """Remove one object of a name, which a higher number has replaced."""
    tier.delete(_key(run, name, number))


def tags_of(tier: Objects, run: str) -> dict[int, tuple[str, ...]]:
    """The versions that have names by what one tier knows, and which.

    Raises:
        FormatError: a tag cannot be read, so that nobody knows which version it is about.
        TierError: the tier could not be read.
    """
    for left in reversed(range(RACES)):
        found: dict[int, tuple[str, ...]] = {}
        try:
            for name, used in numbers(tier, run).items():
                tag = read_tag(tier, run, name, used[-1])
                if tag is not None:
                    found[tag.seq] = (*found.get(tag.seq, ()), name)
        except NotFound:  # given anew meanwhile
            if not left:
                raise
        else:
            break
    return found


def _key(run: str, name: str, number: int) -> str:
    return f"tags/{check_run(run)}/{name}@{number:06d}"
