"""Tagging: the names of a run's versions, over all tiers that last."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tierstate.manifest.errors import AlreadyExists, FormatError, NotFound, TierError, TierstateError
from tierstate.manifest.log import RACES
from tierstate.manifest.tags import MAX_NUMBER, Tag, check_tag, drop_tag, numbers, read_tag, write_tag
from tierstate.tiers.catalog import Entry
from tierstate.tiers.shelf import Shelf

log = logging.getLogger("tierstate")


class Tagged(NamedTuple):
    """A name, and the number and id of the version that has it."""

    name: str
    seq: int
    id: str


@dataclass
class _Look:
    """Which numbers each tier has of each name, and the tiers that could not be asked."""

    there: dict[str, Mapping[str, list[int]]] = field(default_factory=dict)
    failed: dict[str, TierstateError] = field(default_factory=dict)

    @property
    def highest(self) -> dict[str, int]:
        """The number that counts, of each name."""
        found: dict[str, int] = {}
        for names in self.there.values():
            for name, used in names.items():
                found[name] = max(found.get(name, 0), used[-1])
        return dict(sorted(found.items()))


class Tags:
    """The names of a run's versions.

    Args:
        shelves: the run in each tier, nearest first; those that do not last know no names.
        clock: seconds since 1970. A new number is above every one that is seen, and at least the time in
            milliseconds, so that it is also above those of tiers that are away.
    """

    def __init__(self, shelves: Sequence[Shelf], clock: Callable[[], float] = time.time) -> None:
        self._shelves, self._clock = shelves, clock
        self._run = shelves[0].run

    def current(self) -> dict[str, Tag]:
        """All names and their versions; a name whose object cannot be read is left out with a warning."""
        found: dict[str, Tag] = {}
        look = self._look()
        self._tell(look.failed, "its tags cannot be listed, and may be newer")
        for name in look.highest:
            try:
                tag = self._read(name, look)
            except TierstateError as error:
                log.warning("tag %r of run %s cannot be read: %s", name, self._run, error)
                continue
            if tag is not None:
                found[name] = tag
        return found

    def by_version(self) -> dict[tuple[int, str], tuple[str, ...]]:
        """The names of each version, by its number and id."""
        found: dict[tuple[int, str], tuple[str, ...]] = {}
        for name, tag in self.current().items():
            found[tag] = (*found.get(tag, ()), name)
        return found

    def resolve(self, name: str) -> Tagged:
        """The version that has a name.

        Raises:
            NotFound: none has it.
            FormatError: the name is there, and cannot be read in any tier.
        """
        look = self._look()
        tag = self._read(check_tag(name), look) if name in look.highest else None
        if tag is None:
            known = ", ".join(self.current()) or "there are none"
            lost = "".join(f"; {tier} cannot be asked: {error}" for tier, error in look.failed.items())
            raise NotFound(f"run {self._run!r} has no tag {name!r}; known tags: {known}{lost}")
        self._tell(look.failed, f"its tags cannot be listed, and {name!r} may be another version's there")
        return Tagged(name, *tag)

    def give(self, name: str, tag: Tag | None) -> None:
        """Give a name to a version, whoever had it; None takes it back. Tiers that fail are told by a warning.

        Raises:
            AlreadyExists: other writers give the same name all the time.
            TierError: no tier took it.
        """
        check_tag(name)
        for _ in range(RACES):
            look = self._look()
            number = max(look.highest.get(name, 0) + 1, int(self._clock() * 1000))
            if self._write(name, number, tag, look):
                self._level(name, look)
                return
        raise AlreadyExists(f"tag {name!r} of run {self._run!r} is being given by others; try again")

    def give_to(self, name: str, entry: Entry) -> None:
        """Give a name to a version, and look whether it is there still: who drops versions may have begun before.

        Raises:
            NotFound: it was dropped meanwhile; the name is what it was before.
            TierstateError: as `give`.
        """
        check_tag(name)
        tag, before = Tag(entry.version.head.seq, entry.version.id), self._now(name)
        self.give(name, tag)
        if _is_there(entry):
            return
        if self._now(name) == tag:  # otherwise another has given it meanwhile
            self.give(name, before)
        head = entry.version.head
        raise NotFound(
            f"version {head.seq} (step {head.step}) of run {self._run!r} was dropped while it was named {name!r}; "
            "it has no tag"
        )

    def _now(self, name: str) -> Tag | None:
        """The version that has a name, as far as that can be told."""
        look = self._look()
        try:
            return self._read(name, look) if name in look.highest else None
        except TierstateError as error:
            log.warning("tag %r of run %s cannot be read: %s", name, self._run, error)
            return None

    def _write(self, name: str, number: int, tag: Tag | None, look: _Look) -> bool:
        """Write to every tier that answers; False where another writer has used the number."""
        taken = 0
        for shelf in self._lasting():
            if shelf.name not in look.there:
                continue
            try:
                if not self._put(shelf, name, number, tag):
                    return False
                taken += 1
                for old in look.there[shelf.name].get(name, ()):
                    drop_tag(shelf.tier, self._run, name, old)
            except TierstateError as error:
                look.failed[shelf.name] = error
        if not taken:
            told = "; ".join(f"{tier}: {error}" for tier, error in look.failed.items()) or "none of the tiers lasts"
            raise TierError(f"no tier took the tag {name!r} of run {self._run!r}: {told}")
        self._tell(look.failed, f"tag {name!r} is not up to date there")
        return True

    def _put(self, shelf: Shelf, name: str, number: int, tag: Tag | None) -> bool:
        try:
            write_tag(shelf.tier, self._run, name, number, tag)
        except AlreadyExists:
            # Also where an answer was lost, and a second try met the first one.
            return read_tag(shelf.tier, self._run, name, number) == tag
        return True

    def _level(self, given: str, look: _Look) -> None:
        """Bring the other names to tiers that were away when they were given."""
        for name, number in look.highest.items():
            behind = [s for s in self._lasting() if number > max(look.there.get(s.name, {}).get(name, [0]))]
            for shelf in behind if name != given else ():
                if shelf.name in look.failed:
                    continue
                try:
                    write_tag(shelf.tier, self._run, name, number, self._read(name, look))
                    for old in look.there[shelf.name].get(name, ()):
                        drop_tag(shelf.tier, self._run, name, old)
                except TierstateError as error:
                    log.info("%s: tag %r is still to come there: %s", shelf.name, name, error)

    def _read(self, name: str, look: _Look) -> Tag | None:
        """What the highest number of a name says, by the first tier where it can be read."""
        number = look.highest[name]
        errors: dict[str, TierstateError] = {}
        for shelf in self._lasting():
            if number in look.there.get(shelf.name, {}).get(name, ()):
                try:
                    return read_tag(shelf.tier, self._run, name, number)
                except NotFound:
                    return self._again(name, number)
                except TierstateError as error:
                    errors[shelf.name] = error
        kind = FormatError if any(isinstance(e, FormatError) for e in errors.values()) else TierError
        raise kind(f"tag {name!r} of run {self._run!r} cannot be read: " + "; ".join(map(str, errors.values())))

    def _again(self, name: str, number: int) -> Tag | None:
        """The same once more: the name has been given anew since the listing."""
        look = self._look()
        if look.highest.get(name, 0) <= number:
            raise NotFound(f"tag {name!r} of run {self._run!r} has gone while it was read")
        return self._read(name, look)

    def _look(self) -> _Look:
        look = _Look()
        for shelf in self._lasting():
            try:
                look.there[shelf.name] = numbers(shelf.tier, self._run, partial(_ignored, shelf.name))
            except TierstateError as error:
                look.failed[shelf.name] = error
        return look

    def _lasting(self) -> list[Shelf]:
        return [shelf for shelf in self._shelves if shelf.tier.traits.persistent]

    def _tell(self, failed: Mapping[str, TierstateError], what: str) -> None:
        for tier, error in failed.items():
            log.warning("%s: %s: %s", tier, what, error)


def _ignored(tier: str, key: str) -> None:
    log.warning("%s: %s: a tag's number is %d at most, so this is none; delete it", tier, key, MAX_NUMBER)


def _is_there(entry: Entry) -> bool:
    """Whether a version is still in one of the tiers that last and had it; True too where that cannot be told."""
    copies = [(h.shelf, r) for h, r in zip(entry.holdings, entry.records, strict=True)]
    told = True
    for shelf, record in [c for c in copies if c[0].tier.traits.persistent] or copies:
        try:
            if shelf.log.holds(record) or shelf.log.read(entry.version.head.seq).version.id == entry.version.id:
                return True
        except NotFound:
            continue
        except TierstateError as error:
            log.warning("%s: whether it still has the version cannot be told: %s", shelf.name, error)
            told = False
    return not told
