"""The promises of a tier, in a table: what each is called, and what tries it."""

from __future__ import annotations

from functools import wraps

from . import promises_reading as reading
from . import promises_writing as writing
from .base import Tier
from .evidence import Check


def _leaving_nothing(check: Check) -> Check:
    @wraps(check)
    def run(tier: Tier, prefix: str, other: Tier | None = None) -> None:
        try:
            check(tier, prefix, other)
        finally:
            for key in list(tier.list(f"{prefix}/")):
                tier.delete(key)

    return run


PROMISES: tuple[tuple[str, Check], ...] = tuple(
    (name, _leaving_nothing(check))
    for name, check in (
        ("what is put is read", writing.check_put),
        ("objects of every size", writing.check_sizes),
        ("many pieces, and parts of longer buffers", writing.check_many_pieces),
        ("absent until closed", writing.check_absent_until_closed),
        ("aborted objects leave nothing", writing.check_abort),
        ("leases are released once", writing.check_leases),
        ("create only", writing.check_create_only),
        ("one winner of a race", writing.check_race),
        ("ranges are filled exactly", reading.check_ranges),
        ("no read beyond the end", reading.check_beyond_end),
        ("lists are whole and in order", reading.check_list),
        ("deletes", reading.check_delete),
        ("deletes while reading", reading.check_delete_while_read),
        ("ages rise", reading.check_age),
        ("many are deleted at once", reading.check_discard),
        ("keys that are none are refused", reading.check_keys),
        ("traits are sane", reading.check_traits),
    )
)
