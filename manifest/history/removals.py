"""Removals: which versions of a run were removed from a tier by hand, so that nothing brings them back.

A removed version may still have all of its chunks in packs that other versions share, and a copy of its tables in one
of them. Without a mark ``rebuild``, ``doctor`` and the cascade would take it for lost. A mark is the key
``removed/<run>/<seq>-<id>``; numbers are never used again, so it never means another version.
"""

from __future__ import annotations

import json
import re
import time

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import AlreadyExists

from .log import KeyValueStore, check_run

_MARK = re.compile(r"([0-9]{12})-([0-9a-f]{1,64})")


def removal_key(run: str, seq: int, id: str) -> str:
    """The key of the mark of a removed version; ``id`` is its id, or ``0`` if no record of it could be read."""
    return f"removed/{check_run(run)}/{seq:012d}-{id or '0'}"


def mark_removed(tier: KeyValueStore, run: str, seq: int, id: str) -> None:
    """Mark a version as removed from a tier; once more is no error.

    Raises:
        TierError: the tier could not be written to.
    """
    try:
        tier.put(removal_key(run, seq, id), as_buffer(json.dumps({"time": time.time()}).encode()))
    except AlreadyExists:
        return


def is_removed(tier: KeyValueStore, run: str, seq: int) -> bool:
    """Whether a version was removed from a tier by hand, by a mark that is read: a forged one raises.

    Raises:
        Unauthentic: the tier's objects are sealed, and a mark is not.
        TierError: the tier could not be read.
    """
    marks = list(tier.list(f"removed/{check_run(run)}/{seq:012d}-"))
    for key in marks:
        tier.get(key)
    return bool(marks)


def removed_seqs(tier: KeyValueStore, run: str) -> set[int]:
    """Numbers of the versions that were removed from a tier.

    Raises:
        TierError: the tier could not be listed.
    """
    prefix = f"removed/{check_run(run)}/"
    return {int(m[1]) for key in tier.list(prefix) if (m := _MARK.fullmatch(key.removeprefix(prefix)))}
