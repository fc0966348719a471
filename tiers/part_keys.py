"""Keys of parts: of what ranks put into a tier for whoever creates the record of all of them."""

from __future__ import annotations

import uuid

PART = "part"
"""What stands in place of a pack's number in the key of a part, which holds no chunks."""


def part_key(run: str, seq: int, rank: int) -> str:
    """A new key for a rank's part. It is named as packs are, so that the sweep finds what is left of one."""
    return f"packs/{run}/{seq:012d}-{rank}-{PART}-{uuid.uuid4().hex[:12]}"


def is_part(key: str) -> bool:
    """Whether an object is a rank's part of a record, and no pack, by its name."""
    return key.rpartition("/")[2].split("-")[2:3] == [PART]
