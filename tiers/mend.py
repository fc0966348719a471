"""Mending: chunks that one tier had damaged are written into it again, from where they are whole."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.layout import RAW
from tierstate.manifest.version import Version

from .fetch import Holding
from .packs import MEND, PackWriter, Row

log = logging.getLogger("tierstate")


class Mender:
    """Gathers good chunks for tiers that had them damaged, and writes each tier a pack of them.

    Packs and records never change, so a mended chunk gets a new place: a pack named as a mend, whose footer says what
    it holds. Readers look there when the first place fails, and later saves build on it. Being told is enough: a tier
    that cannot be written to stays as it is.
    """

    def __init__(self, version: Version, holdings: Sequence[Holding]) -> None:
        self._version, self._holdings = version, holdings
        self._lock = threading.Lock()
        self._packs: dict[int, PackWriter] = {}
        self._rows: dict[int, list[Row]] = {}
        self._given_up: set[int] = set()

    def __call__(self, holding: int, row: int, raw: Buffer) -> None:
        """The good bytes of a chunk that a tier had damaged. ``raw`` must stay as it is."""
        with self._lock:
            if holding in self._given_up:
                return
            try:
                self._add(holding, row, raw)
            except TierstateError as error:
                self._give_up(holding, error)

    def _add(self, holding: int, row: int, raw: Buffer) -> None:
        head = self._version.head
        tier = self._holdings[holding].shelf.tier
        pack = self._packs.setdefault(holding, PackWriter(tier, head.run, head.seq, label=MEND))
        digest = self._version.digests[row].tobytes()
        rows = self._rows.setdefault(holding, [])
        if all(known.digest != digest for known in rows):
            rows.append(Row(digest, len(raw), pack.add(raw, digest, len(raw), RAW)))

    def _give_up(self, holding: int, error: TierstateError) -> None:
        name = self._holdings[holding].shelf.name
        log.warning("%s: damaged chunks could not be mended there: %s", name, error)
        self._given_up.add(holding)
        self._rows.pop(holding, None)
        try:
            self._packs.pop(holding).abort()
        except TierstateError as second:
            log.warning("%s: clearing up after that failed too: %s", name, second)

    def close(self) -> dict[str, int]:
        """Finish the packs; how many chunks were mended in each tier."""
        mended = {}
        for holding in list(self._packs):
            shelf = self._holdings[holding].shelf
            try:
                self._packs[holding].close()
            except TierstateError as error:
                self._give_up(holding, error)
                continue
            shelf.add_mends(self._rows[holding])
            mended[shelf.name] = len(self._rows[holding])
            log.warning("%s: %d damaged chunks were mended", shelf.name, len(self._rows[holding]))
        return mended
