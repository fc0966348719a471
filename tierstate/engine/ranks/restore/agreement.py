"""Agreement of all ranks on the version that they restore together.

Every step is an all-gather: each rank gives its answer and receives the answers of all ranks. Decisions are computed
from these answers alone, so all ranks decide the same.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tierstate.engine.ranks.team.team import Team, name_error
from tierstate.engine.restore.restore import RestoreSpec, check_missing, is_named, unreadable_now
from tierstate.engine.store.catalog import (
    LOOK_FURTHER,
    RunCatalog,
    SeqVersions,
    VersionCopies,
    VersionMoved,
)
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import (
    Damaged,
    FormatError,
    NotFound,
    RankFailed,
    TierstateError,
    Unauthentic,
    Unreadable,
    cannot_be_asked,
    format_ranks,
    tier_text,
)
from tierstate.manifest.format.record import Summary
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.tags import TaggedVersion

log = logging.getLogger("tierstate")


MAX_SAID = 64 << 20
"""Bytes of an uncompressed JSON answer of a rank, at most."""


FINE, FAILED, AGAIN = b"+", b"-", b"~"
"""First byte of an answer: it is given, it has failed, or the versions have changed meanwhile (`VersionMoved`)."""


class GroupQuery:
    """All-gathers with errors, of one operation: one rank that fails fails the step on all ranks.

    Args:
        team: the ranks.
        operation: its name, the same on all ranks; each of them makes the n-th query of a name together.
    """

    def __init__(self, team: Team, operation: str) -> None:
        self.team, self._series = team, team.series(operation)

    def ask(self, topic: str, answer: Callable[[], bytes]) -> list[bytes]:
        """The answers of all ranks, once all have answered.

        Raises:
            VersionMoved: a rank has raised it; raised on every rank, and all start the restore again.
            RankFailed: another rank raised another error, is dead, or is late.
            Exception: any error of this rank's own answer.
        """
        mine: Exception | None = None
        try:
            said = FINE + topic.encode() + b" " + answer()
        except Exception as error:
            mine, said = error, (AGAIN if isinstance(error, VersionMoved) else FAILED) + _told(error)
        except BaseException as error:  # an interrupt: it is told, and does not wait for the others
            self._series.miss(FAILED + _told(error), error)
            raise
        try:
            answers = self._series.gather(said)
        except RankFailed as error:
            raise (mine or error) from None
        failed = [rank for rank, one in enumerate(answers) if one[:1] == FAILED]
        again = [rank for rank, one in enumerate(answers) if one[:1] == AGAIN]
        if mine is not None and (not failed or self.team.rank in failed):
            raise mine
        if failed:
            raise RankFailed("; ".join(f"rank {r}: {answers[r][1:].decode(errors='replace')}" for r in failed), failed)
        if again:
            raise VersionMoved(f"rank {again[0]}: {answers[again[0]][1:].decode(errors='replace')}")
        parts = [one[1:].partition(b" ") for one in answers]
        if others := [rank for rank, (at, *_) in enumerate(parts) if at != topic.encode()]:
            at = parts[others[0]][0].decode(errors="replace")
            raise RankFailed(f"{format_ranks(others)} are at another step ({at!r:.40} in place of {topic!r})", others)
        return [found for *_, found in parts]

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one has left the operation; they get a `RankFailed` at their next step, or in
        this one. Nothing happens if they have left it too."""
        self._series.leave(FAILED + _told(error), error)

    def ask_json(self, topic: str, answer: Callable[[], Any]) -> list[Any]:
        """As `ask`, for answers of JSON types."""
        return [_read(said) for said in self.ask(topic, lambda: zlib.compress(json.dumps(answer()).encode(), 1))]


def _told(error: BaseException) -> bytes:
    return name_error(error).encode(errors="replace")[:4000]


def _read(data: bytes) -> Any:
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, MAX_SAID)
        return json.loads(text)
    except (zlib.error, ValueError) as error:
        raise FormatError(f"what another rank says cannot be read: {error}") from error


class VisibleVersions(NamedTuple):
    """The versions of a run that at least one rank sees.

    Attributes:
        seqs: their numbers, newest first, in any tier of any rank.
        named: number and id of the version that was asked for by step, id or tag; None for the newest.
    """

    seqs: list[int]
    named: tuple[int, str] | None


class VersionAgreement:
    """Agrees with all ranks on the versions that they try to restore, one after the other.

    Args:
        query: the all-gather.
        catalog: the versions that this rank sees.
        wanted: the arguments of the restore on this rank, without the tag.
        tag: the tag that was asked for; None if none was.
        resolve: finds the version that has a tag.

    Attributes:
        passed: by version that was not taken, its name and the reason.
    """

    def __init__(
        self,
        query: GroupQuery,
        catalog: RunCatalog,
        wanted: RestoreSpec,
        tag: str | None,
        resolve: Callable[[str], TaggedVersion | None],
    ) -> None:
        self._query, self.catalog, self.wanted = query, catalog, wanted
        self._tag, self._resolve = tag, resolve
        self._seen = catalog.seqs()
        self.passed: list[str] = []

    def compare_arguments(self) -> None:
        """Check that all ranks ask for the same version.

        Raises:
            ValueError: they do not; raised on every rank.
        """
        wanted = self.wanted
        asked = {"step": wanted.step, "version": wanted.version, "tag": self._tag, "on_damage": wanted.on_damage}
        every = self._query.ask_json("restore", lambda: asked)
        if any(one != every[0] for one in every):
            names = [name for name in asked if any(one.get(name) != every[0].get(name) for one in every)]
            told = "; ".join(f"{name}: {_by_value([one.get(name) for one in every])}" for name in names)
            raise ValueError(f"all ranks restore the same version together, and they ask for different ones: {told}")

    def look(self) -> VisibleVersions:
        """Gather which versions the ranks see.

        Raises:
            NotFound: no rank finds the version that was asked for.
            Unreadable: nor does any; and a tier that may have it cannot be asked now.
            ValueError: the tag names different versions on different ranks.
        """
        every = self._query.ask_json("visible", lambda: {"seqs": _steps(self._seen), **self._found()})
        seqs = sorted({seq for one in every for seq in np.cumsum(one["seqs"]).tolist()}, reverse=True)
        if self.newest:
            return VisibleVersions(seqs, None)
        named = [(rank, tuple(one["named"])) for rank, one in enumerate(every) if one["named"]]
        if self._tag is not None and len({name for _, name in named}) > 1:
            told = _by_value([f"version {seq} ({id[:12]})" for _, (seq, id) in named], [rank for rank, _ in named])
            raise ValueError(f"tag {self._tag!r} is not the same version for all ranks: {told}")
        if not named:
            kind = Unreadable if any(one["away"] for one in every) else NotFound
            raise kind(f"no rank has it: {'; '.join(sorted({one['none'] for one in every}))}")
        return VisibleVersions(seqs, max(name for _, name in named))

    def _found(self) -> dict[str, Any]:
        """The version that was asked for, as this rank sees it: its number and id, or why it finds none, and whether a
        tier that may have it cannot be asked now."""
        what = f"step {self.wanted.step}" if self.wanted.step is not None else f"id {self.wanted.version}"
        if self._tag is not None:
            try:
                tagged = self._resolve(self._tag)
            except TierstateError as error:
                return {"named": None, "none": str(error), "away": cannot_be_asked(error)}
            assert tagged is not None
            return {"named": [tagged.seq, tagged.id], "none": "", "away": False}
        if self.wanted.version is not None:
            self.catalog.check_unique(self.wanted.version)
        away = list(self.catalog.unlisted)
        for place in () if self.wanted.newest else self.catalog.newest_first(fits=self._may_be, listed=self._seen):
            for entry in place.entries:
                if is_named(entry.version.id, entry.version.head.step, self.wanted):
                    return {"named": [place.seq, entry.version.id], "none": "", "away": False}
            away += () if place.entries else place.away
        where = ", ".join(tier_run.name for tier_run in self.catalog.tier_runs)
        lost = "".join(f"; it may be where nothing can be read now: {why}" for why in dict.fromkeys(away))
        return {"named": None, "none": f"there is no version with {what} in {where}{lost}", "away": bool(away)}

    def _may_be(self, found: Summary) -> bool:
        return is_named(found.id, found.step, self.wanted)

    def candidates(self, visible: VisibleVersions) -> Iterator[VersionCopies]:
        """The versions to try, newest first, the same on all ranks; each with this rank's copies, if it has any.

        Raises:
            Damaged: the record of the newest version is damaged for all ranks, and ``on_damage`` is not ``older``.
            Unreadable: a record cannot be read now by any rank.
        """
        for seq in visible.seqs:
            if visible.named is not None and (seq > visible.named[0] or (seq < visible.named[0] and not self._older)):
                continue
            place = self.catalog.look(seq, self._seen.get(seq, []), self.catalog.unlisted)
            self.catalog.note(place)
            every = self._query.ask_json("look", partial(self._said, place))
            there = sorted({(-time, id) for one in every for id, time in one["there"]})
            if not there:
                self._unreadable(seq, every, visible)
            for _, id in there:
                if visible.named is None or seq != visible.named[0] or id == visible.named[1]:
                    yield self._shared(place, id, [any(id == name for name, _ in one["there"]) for one in every])

    def _said(self, place: SeqVersions) -> dict[str, Any]:
        if self.newest and place.entries:
            self.catalog.check_tiers()
            self.catalog.check_not_turned_back()
        problems = [
            [tier_text(name, error), cannot_be_asked(error), isinstance(error, Unauthentic)]
            for name, error in place.problems
        ]
        there = [[e.version.id, e.version.head.time] for e in place.entries]
        return {"there": there, "problems": problems, "unlisted": self.catalog.unlisted}

    def check_missing(self) -> None:
        """Check on all ranks that no tier is missing in which the wanted version may be; all agree on the answer.

        Raises:
            WrongTier, Unreadable: as `tierstate.engine.restore.restore.check_missing`.
            RankFailed: another rank has found that.
        """

        def check() -> bytes:
            check_missing(self.catalog, self.wanted._replace(tag=None), [*self.passed, *filter(None, [self._tag])])
            return b""

        self._query.ask("missing", check)

    @property
    def newest(self) -> bool:
        """Whether the newest version was asked for: no step, id or tag."""
        return self.wanted.newest and self._tag is None

    def pass_over(self, name: str, why: object) -> None:
        """Note and log a version that is not taken, with the reason."""
        self.passed.append(f"{name}: {why}")
        log.warning("%s is passed over: %s", name, why)

    @property
    def _older(self) -> bool:
        return self.wanted.on_damage == "older"

    def _unreadable(self, seq: int, every: Sequence[Any], visible: VisibleVersions) -> None:
        problems = sorted({tuple(problem) for one in every for problem in one["problems"]})
        if problems:  # a tier that is not listed may have what the others cannot read
            problems += sorted({(text, True, False) for one in every for text in one["unlisted"]})
        told = "; ".join(text for text, *_ in problems)
        if any(away for _, away, _ in problems) and (visible.named is None or visible.named[0] == seq):
            raise unreadable_now(seq, told, newest=visible.named is None)
        if problems and visible.named is None and not self._older:
            raise (Unauthentic if any(refused for *_, refused in problems) else Damaged)(
                f"version {seq} is the newest, and its record can be read by no rank ({told}); "
                "name a step, or say on_damage='older' to go back to the newest version that is whole; "
                f"{LOOK_FURTHER}"
            )
        if problems:
            self.pass_over(f"version {seq}", told)

    def _shared(self, place: SeqVersions, id: str, have: Sequence[bool]) -> VersionCopies:
        """This rank's entry of a version. Ranks without a record of it get its tables from the lowest rank that has
        one."""
        mine = next((entry for entry in place.entries if entry.version.id == id), None)
        if all(have):
            assert mine is not None
            return mine
        giver = have.index(True)
        gives = mine is not None and self._query.team.rank == giver
        said = self._query.ask("version", lambda: zlib.compress(mine.version.data, 1) if mine and gives else b"")
        return mine or VersionCopies(_version(said[giver], id), (), (), place.away)


def _version(data: bytes, id: str) -> Version:
    """Decode a version that another rank sent, and compare its digest with the id."""
    reader = zlib.decompressobj()
    try:
        section = reader.decompress(data, 4 << 30)
    except zlib.error as error:
        raise FormatError(f"version {id[:12]} came damaged from another rank: {error}") from error
    if checksum(section).hex() != id:
        raise FormatError(f"version {id[:12]} came damaged from another rank")
    return Version.decode(memoryview(section))


def _steps(seqs: Iterable[int]) -> list[int]:
    """The numbers, rising, as differences: the first number, then each step to the next."""
    found: list[int] = np.diff(np.array(sorted(seqs), "i8"), prepend=0).tolist()
    return found


def _by_value(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """The values in words for a message, each with the ranks that gave it."""
    by: dict[str, list[int]] = {}
    for rank, value in zip(ranks if ranks is not None else range(len(values)), values, strict=True):
        by.setdefault(repr(value) if not isinstance(value, str) else value, []).append(rank)
    return ", ".join(f"{value} on {format_ranks(found)}" for value, found in by.items())
