"""The census: all records of a run in one tier, as the packs that they name. For whoever deletes what none names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tierstate.manifest.digest import DIGEST_SIZE
from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.manifest.log import Log
from tierstate.manifest.record import Record

from .abreast import READERS


class Unclear(TierstateError):
    """Nobody can tell what the records name, so that nothing must be deleted."""


class Changed(TierstateError):
    """The records changed while they were looked at: look again."""


@dataclass(frozen=True)
class Named:
    """What one record names.

    Attributes:
        seq, generation: which record.
        id: its commit id.
        packs: those in which its chunks lie, or what its chunks are made from, and their lengths.
        mended: digests that it has of those that were asked for.
    """

    seq: int
    generation: int
    id: str
    packs: Mapping[str, int]
    mended: frozenset[bytes]


class Census:
    """The records of a run in a tier; each is read once, since it never changes.

    Args:
        log: of the run.
        wanted: digests of which it matters whether a record has them.
    """

    def __init__(self, log: Log, wanted: Collection[bytes] = ()) -> None:
        self._log, self._wanted = log, frozenset(wanted)
        self._known: dict[str, Named] = {}

    def keys(self) -> frozenset[str]:
        """Keys of all records.

        Raises:
            Unclear: the log could not be listed, or has a key that is not understood.
        """
        try:
            return frozenset(self._log.keys())
        except TierstateError as error:
            raise Unclear(str(error)) from error

    def take(self, keys: Collection[str]) -> list[Named]:
        """What these records name.

        Raises:
            Unclear: one cannot be read.
            Changed: one is not there any more.
        """
        new = sorted(set(keys) - set(self._known))
        with ThreadPoolExecutor(READERS, thread_name_prefix="tierstate-census") as pool:
            self._known |= zip(new, pool.map(self._read, new), strict=True)
        return [self._known[key] for key in sorted(keys)]

    def _read(self, key: str) -> Named:
        seq, _, generation = key.rpartition("/")[2].partition(".")
        try:
            record = self._log.read_generation(int(seq), int(generation or 0))
        except NotFound as error:
            raise Changed(str(error)) from error
        except TierstateError as error:
            raise Unclear(str(error)) from error
        layout = record.layout
        packs = dict(zip(layout.objects, layout.object_sizes.tolist(), strict=True))
        return Named(int(seq), int(generation or 0), record.commit["id"], packs, self._mended(record))

    def _mended(self, record: Record) -> frozenset[bytes]:
        if not self._wanted:
            return frozenset()
        data = record.version.digests.tobytes()
        return frozenset(data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)) & self._wanted
