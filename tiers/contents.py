"""Contents: which chunks lie where in a tier, as its packs say themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tierstate.manifest.bases import Base
from tierstate.manifest.errors import FormatError, NotFound
from tierstate.manifest.layout import Place, is_pack
from tierstate.manifest.log import check_run
from tierstate.manifest.version import Version

from .base import Tier
from .footers import has_footer
from .packs import Row, is_mend, read_footer, version_sections
from .part_keys import is_part

_NUMBER = re.compile(r"([0-9]{12})-")
_PIN = re.compile(r"leases/([^/]+)/[0-9]+-fork-([^/@]+)(?:@[^/]*)?")


class Contents:
    """All chunks in a run's packs, and in those of the runs that it was forked from, by digest.

    Args:
        tier: where.
        run: whose.

    Attributes:
        packs: how many were looked into.
        sizes: lengths of packs by key.
        seqs: numbers of the run's versions that packs were written for, or say what they were.
        unread: packs that say nothing of what they hold, and why.
    """

    def __init__(self, tier: Tier, run: str) -> None:
        self._tier = tier
        self.packs = 0
        self.sizes: dict[str, int] = {}
        self.seqs: set[int] = set()
        self.unread: dict[str, str] = {}
        self._places: dict[bytes, tuple[int, Place]] = {}
        based: list[Row] = []
        for key in self._keys(run):
            based += self._look(key)
        for row in based:
            # A chunk that is stored as a difference is of use only with the one that it differs from.
            place = self._on_base(row)
            if place is not None:
                self._places.setdefault(row.digest, (row.nbytes, place))

    def place(self, digest: bytes, nbytes: int) -> Place | None:
        """Where a chunk of that digest and raw length lies."""
        found = self._places.get(digest)
        return found[1] if found is not None and found[0] == nbytes else None

    def versions(self, run: str) -> Iterator[Version]:
        """The versions of a run of which saves have put a copy into its packs."""
        for key in self.sizes:
            if key.startswith(f"packs/{run}/"):
                try:
                    found = [Version.decode(section) for section in version_sections(self._tier, key)]
                except (FormatError, NotFound) as error:
                    self.unread[key] = str(error)
                    continue
                here = [version for version in found if version.head.run == run]
                self.seqs.update(version.head.seq for version in here)
                yield from (version for version in here if not _may_be_part(version))

    def _keys(self, run: str) -> Iterator[str]:
        """Packs of the run, those that mended others last; before them, those of runs that it was forked from."""
        for name in [*reversed(self._forked_from(check_run(run))), run]:
            keys = [key for key in self._tier.list(f"packs/{name}/") if is_pack(key) and not is_part(key)]
            for key in sorted(keys, key=lambda key: (is_mend(key), key)):
                if name == run and not is_mend(key) and (number := _NUMBER.match(key.rpartition("/")[2])):
                    self.seqs.add(int(number[1]))
                yield key

    def _forked_from(self, run: str) -> list[str]:
        """The runs that it was forked from, those that they were forked from, and so on, as pins say; nearest first."""
        pins: dict[str, set[str]] = {}
        for key in self._tier.list("leases/"):
            if match := _PIN.fullmatch(key):
                pins.setdefault(match[2], set()).add(match[1])
        found = [run]
        for by in found:
            found += sorted(pins.get(by, set()) - set(found))
        return found[1:]

    def _look(self, key: str) -> list[Row]:
        """Take down what a pack holds; what of it needs other chunks to be read is returned."""
        if not has_footer(key):
            self.unread[key] = "a file of another kind has no list of its chunks"
            return []
        try:
            rows, size = read_footer(self._tier, key), self._tier.size(key)
        except (FormatError, NotFound) as error:
            self.unread[key] = str(error)
            return []
        self.packs += 1
        self.sizes[key] = size
        self._places |= {row.digest: (row.nbytes, row.place) for row in rows if not row.base}
        return [row for row in rows if row.base]

    def _on_base(self, row: Row) -> Place | None:
        """The place of a chunk that is stored as a difference, where what it differs from lies here too by itself."""
        known = self._places.get(row.base)
        if known is None or known[0] != row.nbytes or known[1].base is not None:
            return None
        place = known[1]
        return row.place._replace(base=Base(place.object, place.offset, place.stored, place.codec, row.base))


def _may_be_part(version: Version) -> bool:
    """Whether it may be one rank's part of a larger version: of those, packs hold no more than each rank's own."""
    return version.head.world > 1 and len(set(version.shard_rank.tolist())) < 2
