"""Tiers with objects that cannot be read as they should: damaged, away, denied, in a bad sector, lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import tierstate as ts
from tierstate.manifest.errors import MediaError
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Range
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.wrappers.base import Wrapping

Health = Literal["sound", "flipped", "damaged", "away", "denied", "bad sector", "lost"]
"""Of an object: as it was written; with a byte flipped in the first answer only, or in every one; a tier that does not
answer, refuses, or has an I/O error when it is read; gone."""

HEALTH: Sequence[Health] = ("sound", "sound", "flipped", "damaged", "away", "denied", "bad sector", "lost")
ANSWERS = ("sound", "flipped")
SILENT = ("away", "denied", "bad sector")


class Ill(Wrapping):
    """A tier with objects that cannot be read as they should.

    Attributes:
        silent: whether it answers nothing at all.
    """

    def __init__(self) -> None:
        super().__init__(Memory())
        self.health: dict[str, Health] = {}
        self.silent = False

    def list(self, prefix: str) -> Iterator[str]:
        if self.silent:
            raise ts.TierUnavailable("no answer", key=prefix)
        return super().list(prefix)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        health = self.health.get(key, "sound")
        if self.silent or health == "away":
            raise ts.TierUnavailable("no answer", key=key)
        if health == "denied":
            raise ts.AccessDenied("not allowed", key=key)
        if health == "bad sector":
            raise MediaError("cannot be read (EIO)", key=key)
        super().read(key, ranges)
        if health in ("damaged", "flipped"):
            for one in ranges:
                one.out[one.out.numel() // 2] ^= 1
        if health == "flipped":
            self.health[key] = "sound"

    def fall_ill(self, step: int, record: Health, pack: Health) -> None:
        """From now on the record and the packs of a version are in that health."""
        log = Log(self.inner, "run")
        (found,) = [one for one in map(log.read, log.seqs()) if one.version.head.step == step]
        for key, health in ((log.key(found.version.head.seq), record), *((pk, pack) for pk in found.layout.objects)):
            if health == "lost":
                self.inner.delete(key)
            else:
                self.health[key] = health
