"""Tags: names for versions of a run, written to all persistent tiers and read from any of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tierstate.engine.store.catalog import VersionCopies
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arguments import as_text
from tierstate.manifest.errors import (
    AlreadyExists,
    FormatError,
    NotFound,
    TierError,
    TierFull,
    TierstateError,
    Unreadable,
    cannot_be_asked,
    tier_text,
)
from tierstate.manifest.history.log import RACE_RETRIES
from tierstate.manifest.history.tags import (
    MAX_TAG_NUMBER,
    TaggedVersion,
    TagTarget,
    check_tag,
    drop_tag,
    read_tag,
    tag_key,
    tag_numbers,
    write_tag,
)
from tierstate.tiers.base import Tier
from tierstate.tiers.concurrency import run_concurrently

log = logging.getLogger("tierstate")


@dataclass
class _Look:
    """For each tier the numbers of each tag, and the tiers that could not be listed."""

    there: dict[str, Mapping[str, list[int]]] = field(default_factory=dict)
    failed: dict[str, TierstateError] = field(default_factory=dict)

    @property
    def highest(self) -> dict[str, int]:
        """The highest number of each tag, which is the valid one."""
        found: dict[str, int] = {}
        for names in self.there.values():
            for name, used in names.items():
                found[name] = max(found.get(name, 0), used[-1])
        return dict(sorted(found.items()))


class TagFlaw(NamedTuple):
    """What is wrong with a tag: whether some tier has a legible object of it, and what was found."""

    legible: bool
    why: str


class Tags:
    """Reads and writes the tags of a run.

    Args:
        tier_runs: the run in each tier, nearest first; only persistent tiers store tags.
        clock: seconds since 1970. A new number is above all that are found, and at least the time in milliseconds, so
            that it is also above the numbers in tiers that cannot be reached.
    """

    def __init__(self, tier_runs: Sequence[TierRun], clock: Callable[[], float] = time.time) -> None:
        self._tier_runs, self._clock = tier_runs, clock
        self._run = tier_runs[0].run

    def current(self) -> dict[str, TagTarget]:
        """All tags and their versions; a tag whose object cannot be read is left out with a warning."""
        found, unread = self._all()
        for error in unread.values():
            log.warning("%s", error)
        return found

    def names(self) -> list[str]:
        """All tags, also those whose object cannot be read."""
        found, unread = self._all()
        return sorted({*found, *unread})

    def _all(self) -> tuple[dict[str, TagTarget], dict[str, TierstateError]]:
        """All tags with their versions, and those that cannot be read."""
        found: dict[str, TagTarget] = {}
        unread: dict[str, TierstateError] = {}
        look = self._look()
        self._tell(look.failed, "its tags cannot be listed, and may be newer")

        def read(name: str) -> None:
            try:
                tag = self._read(name, look)
            except TierstateError as error:
                unread[name] = error
            else:
                if tag is not None:
                    found[name] = tag

        run_concurrently(read, look.highest)
        return dict(sorted(found.items())), dict(sorted(unread.items()))

    def by_version(self) -> dict[tuple[int, str], tuple[str, ...]]:
        """The tags of each version, by its number and id."""
        found: dict[tuple[int, str], tuple[str, ...]] = {}
        for name, tag in self.current().items():
            found[tag] = (*found.get(tag, ()), name)
        return found

    def resolve(self, name: str) -> TaggedVersion:
        """The version that has a tag.

        Raises:
            NotFound: no version has it.
            FormatError: the tag exists, but no tier has a readable object of it.
            Unreadable: a tier that may have it, or a readable object of it, cannot be asked now.
        """
        name = as_text(name, "tag", "a tag is text, as in 'best'")
        look = self._look()
        tag = self._read(check_tag(name), look) if name in look.highest else None
        if tag is None:
            known = ", ".join(self.current()) or "there are none"
            lost = "".join(f"; {tier} cannot be asked: {error}" for tier, error in look.failed.items())
            kind = Unreadable if look.failed else NotFound
            raise kind(f"run {self._run!r} has no tag {name!r:.80}; known tags: {known}{lost}")
        self._tell(look.failed, f"its tags cannot be listed, and {name!r} may be another version's there")
        return TaggedVersion(name, *tag)

    def give(self, name: str, tag: TagTarget | None) -> None:
        """Set a tag to a version, also if another version has it; None removes it. Logs a warning for tiers that fail.

        Raises:
            AlreadyExists: other writers kept setting the same tag at the same time.
            TierError: no tier stored it.
        """
        name = check_tag(name)
        for _ in range(RACE_RETRIES):
            look = self._look()
            number = max(look.highest.get(name, 0) + 1, int(self._clock() * 1000))
            if self._write(name, number, tag, look):
                self._level(name, look)
                return
        raise AlreadyExists(f"tag {name!r} of run {self._run!r} is being given by others; try again")

    def give_to(self, name: str, entry: VersionCopies) -> None:
        """Set a tag, then check that the version still exists: retention may have started before the tag was set.

        Raises:
            NotFound: the version was dropped meanwhile; the tag is set back to what it was.
            TierstateError: as `give`.
        """
        name = check_tag(name)
        tag, before = TagTarget(entry.version.head.seq, entry.version.id), self._now(name)
        self.give(name, tag)
        if _is_there(entry):
            return
        if self._now(name) == tag:  # otherwise another process has set it meanwhile
            self.give(name, before)
        head = entry.version.head
        raise NotFound(
            f"version {head.seq} (step {head.step}) of run {self._run!r} was dropped while it was named {name!r}; "
            "it has no tag"
        )

    def flaws(self) -> dict[str, TagFlaw]:
        """Tags that not all persistent tiers have, or whose object in one of them cannot be read."""
        look = self._look()
        found = run_concurrently(lambda tag: (tag[0], self._flaw(*tag, look)), look.highest.items())
        return {name: flaw for name, flaw in found if flaw is not None}

    def _flaw(self, name: str, number: int, look: _Look) -> TagFlaw | None:
        wrong, target = [], False
        for tier_run in self._lasting():
            numbers = look.there.get(tier_run.name, {}).get(name, ())
            if tier_run.name in look.there and number not in numbers:
                wrong.append(f"{tier_run.name} lacks it")
            elif numbers:
                try:
                    read_tag(tier_run.tier, self._run, name, number)
                    target = True
                except FormatError as error:
                    wrong.append(str(error))
                except TierError as error:
                    log.warning("%s: tag %r cannot be read now: %s", tier_run.name, name, error)
        return TagFlaw(target, "; ".join(wrong)) if wrong else None

    def level(self) -> None:
        """Write each of the `flaws` again, to all persistent tiers.

        Raises: as `give`.
        """
        for name, flaw in self.flaws().items():
            if flaw.legible:
                self.give(name, self._read(name, self._look()))

    def renew(self, chosen: Callable[[Tier, str], bool]) -> tuple[int, list[str]]:
        """Write tags, and removals of tags, again under new numbers to all persistent tiers.

        Args:
            chosen: says of a tier and the key of a tag's object in it whether that tag is to be written again.

        Returns:
            How many were written, and why others could not be.
        """
        look = self._look()
        written, failed = 0, [str(error) for error in look.failed.values()]
        for name, number in look.highest.items():
            key = tag_key(self._run, name, number)
            here = [s.tier for s in self._lasting() if number in look.there.get(s.name, {}).get(name, ())]
            try:
                if any(chosen(tier, key) for tier in here):
                    self.give(name, self._read(name, look))
                    written += 1
            except TierstateError as error:
                failed.append(str(error))
        return written, failed

    def _now(self, name: str) -> TagTarget | None:
        """The version that has a tag; None if none has it or it cannot be read."""
        look = self._look()
        try:
            return self._read(name, look) if name in look.highest else None
        except TierstateError as error:
            log.warning("%s", error)
            return None

    def _write(self, name: str, number: int, tag: TagTarget | None, look: _Look) -> bool:
        """Write the tag to every tier that works; False if another writer has used the number."""
        taken = 0
        for tier_run in self._lasting():
            if tier_run.name not in look.there:
                continue
            try:
                tier_run.identity.ensure(create=False)  # not into the mount point of a file system that is not mounted
                if not self._replace(tier_run, name, number, tag, look.there[tier_run.name].get(name, ())):
                    return False
                taken += 1
            except TierstateError as error:
                look.failed[tier_run.name] = error
        if not taken:
            told = "; ".join(tier_text(*failed) for failed in look.failed.items()) or "none of the tiers lasts"
            raise TierError(f"no tier took the tag {name!r} of run {self._run!r}: {told}")
        self._tell(look.failed, f"tag {name!r} is not up to date there")
        return True

    def _replace(self, tier_run: TierRun, name: str, number: int, tag: TagTarget | None, before: Sequence[int]) -> bool:
        """Write the tag to a tier, and delete what it had before; False if another writer has used the number."""
        try:
            written = self._put(tier_run, name, number, tag)
        except TierFull:
            if tag is not None:
                raise
            self._drop(tier_run, name, before)  # it is to go in any case, and makes room
            return self._put(tier_run, name, number, tag)
        if written:
            self._drop(tier_run, name, before)
        return written

    def _drop(self, tier_run: TierRun, name: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            drop_tag(tier_run.tier, self._run, name, number)

    def _put(self, tier_run: TierRun, name: str, number: int, tag: TagTarget | None) -> bool:
        try:
            write_tag(tier_run.tier, self._run, name, number, tag)
        except AlreadyExists:
            # Equal also if the answer to our first try was lost and the retry found its object.
            return read_tag(tier_run.tier, self._run, name, number) == tag
        return True

    def _level(self, given: str, look: _Look) -> None:
        """Write the other tags to tiers that could not be reached when those were set."""
        for name, number in look.highest.items():
            behind = [s for s in self._lasting() if number > max(look.there.get(s.name, {}).get(name, [0]))]
            for tier_run in behind if name != given else ():
                if tier_run.name in look.failed:
                    continue
                try:
                    write_tag(tier_run.tier, self._run, name, number, self._read(name, look))
                    self._drop(tier_run, name, look.there[tier_run.name].get(name, ()))
                except TierstateError as error:
                    log.info("%s: tag %r is still to come there: %s", tier_run.name, name, error)

    def _read(self, name: str, look: _Look) -> TagTarget | None:
        """The version of the highest number of a tag, from the first tier that has a readable object."""
        number = look.highest[name]
        errors: dict[str, TierstateError] = {}
        for tier_run in self._lasting():
            if number in look.there.get(tier_run.name, {}).get(name, ()):
                try:
                    return read_tag(tier_run.tier, self._run, name, number)
                except NotFound:
                    return self._again(name, number)
                except TierstateError as error:
                    errors[tier_run.name] = error
        kind = Unreadable if any(map(cannot_be_asked, errors.values())) else FormatError
        raise kind(f"tag {name!r} of run {self._run!r} cannot be read: " + "; ".join(map(str, errors.values())))

    def _again(self, name: str, number: int) -> TagTarget | None:
        """List and read again: the tag has been set again since the listing."""
        look = self._look()
        if look.highest.get(name, 0) <= number:
            raise NotFound(f"tag {name!r} of run {self._run!r} has gone while it was read")
        return self._read(name, look)

    def _look(self) -> _Look:
        look = _Look()
        for tier_run in self._lasting():
            try:
                look.there[tier_run.name] = tag_numbers(tier_run.tier, self._run, partial(_ignored, tier_run.name))
            except TierstateError as error:
                look.failed[tier_run.name] = error
        return look

    def _lasting(self) -> list[TierRun]:
        return [tier_run for tier_run in self._tier_runs if tier_run.tier.traits.persistent]

    def _tell(self, failed: Mapping[str, TierstateError], what: str) -> None:
        for tier, error in failed.items():
            log.warning("%s: %s: %s", tier, what, error)


def _ignored(tier: str, key: str) -> None:
    log.warning("%s: %s: a tag's number is %d at most, so this is none; delete it", tier, key, MAX_TAG_NUMBER)


def _is_there(entry: VersionCopies) -> bool:
    """Whether a version is still in one of the persistent tiers that had it; True also if that cannot be checked."""
    copies = [(h.tier_run, r) for h, r in zip(entry.holdings, entry.records, strict=True)]
    told = True
    for tier_run, record in [c for c in copies if c[0].tier.traits.persistent] or copies:
        try:
            if tier_run.log.holds(record) or tier_run.log.read(entry.version.head.seq).version.id == entry.version.id:
                return True
        except NotFound:
            continue
        except TierstateError as error:
            log.warning("%s: whether it still has the version cannot be told: %s", tier_run.name, error)
            told = False
    return not told
