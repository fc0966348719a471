"""The agreement: which version all ranks restore together, and that all of them could.

Everything goes by questions that each rank answers for itself and hears all answers to; what follows from the answers
is computed by all alike. So no rank ever decides something that another one decides otherwise.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import Damaged, FormatError, NotFound, RankFailed, TierstateError
from tierstate.manifest.version import Version
from tierstate.tiers.catalog import Catalog, Entry, Place
from tierstate.tiers.leasing import Moved
from tierstate.tiers.team import Team

from .finding import Wanted
from .tagging import Tagged

log = logging.getLogger("tierstate")

MAX_SAID = 64 << 20
"""Bytes at most of what a rank tells the others of versions that it sees."""

FINE, FAILED, AGAIN = b"+", b"-", b"~"


class Accord:
    """Questions to all ranks of a team.

    Args:
        team: the ranks.
    """

    def __init__(self, team: Team) -> None:
        self.team = team

    def ask(self, topic: str, answer: Callable[[], bytes]) -> list[bytes]:
        """The answers of all ranks, once all have answered.

        Raises:
            Moved: on every rank, where one has raised it: all begin anew.
            RankFailed: another rank raised something else, is dead, or is late.
            Exception: whatever this rank's own answer raised.
        """
        mine: Exception | None = None
        try:
            said = FINE + answer()
        except Exception as error:
            mine, said = error, (AGAIN if isinstance(error, Moved) else FAILED) + _told(error)
        try:
            heard = self.team.gather(topic, said)
        except RankFailed as error:
            raise (mine or error) from None
        failed = [rank for rank, one in enumerate(heard) if one[:1] == FAILED]
        again = [rank for rank, one in enumerate(heard) if one[:1] == AGAIN]
        if mine is not None and (not failed or self.team.rank in failed):
            raise mine
        if failed:
            raise RankFailed("; ".join(f"rank {r}: {heard[r][1:].decode(errors='replace')}" for r in failed), failed)
        if again:
            raise Moved(f"rank {again[0]}: {heard[again[0]][1:].decode(errors='replace')}")
        return [one[1:] for one in heard]

    def ask_json(self, topic: str, answer: Callable[[], Any]) -> list[Any]:
        """The same for answers of JSON types."""
        return [_read(said) for said in self.ask(topic, lambda: zlib.compress(json.dumps(answer()).encode(), 1))]


def _told(error: Exception) -> bytes:
    return f"{type(error).__name__}: {error}".encode(errors="replace")[:4000]


def _read(data: bytes) -> Any:
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, MAX_SAID)
        return json.loads(text)
    except (zlib.error, ValueError) as error:
        raise FormatError(f"what another rank says cannot be read: {error}") from error


class Sight(NamedTuple):
    """What all ranks see of a run.

    Attributes:
        seqs: numbers of versions, falling, in any tier of any rank.
        named: number and id of the one that is asked for; None for the newest.
    """

    seqs: list[int]
    named: tuple[int, str] | None


class Agreement:
    """Which versions all ranks try, one after the other.

    Args:
        accord: asks them.
        catalog: what this rank sees.
        wanted: what is asked for, but for a tag.
        tag: the name that is asked for.
        resolve: finds the version that has it.

    Attributes:
        passed: why versions were passed over.
    """

    def __init__(
        self, accord: Accord, catalog: Catalog, wanted: Wanted, tag: str | None, resolve: Callable[[str], Tagged | None]
    ) -> None:
        self._accord, self.catalog, self.wanted = accord, catalog, wanted
        self._tag, self._resolve = tag, resolve
        self._seen = catalog.seqs()
        self.passed: list[str] = []

    def compare_arguments(self) -> None:
        """See that all ranks ask for the same.

        Raises:
            ValueError: they do not; on every rank.
        """
        wanted = self.wanted
        asked = {"step": wanted.step, "version": wanted.version, "tag": self._tag, "on_damage": wanted.on_damage}
        every = self._accord.ask_json("restore", lambda: asked)
        if any(one != every[0] for one in every):
            names = [name for name in asked if any(one.get(name) != every[0].get(name) for one in every)]
            told = "; ".join(f"{name}: {_by_value([one.get(name) for one in every])}" for name in names)
            raise ValueError(f"all ranks restore the same version together, and they ask for different ones: {told}")

    def look(self) -> Sight:
        """What all ranks see.

        Raises:
            NotFound: no rank knows the version that is asked for.
            ValueError: the same tag is another version's for some ranks.
        """
        every = self._accord.ask_json("sight", lambda: {"seqs": _steps(self._seen), **self._found()})
        seqs = sorted({seq for one in every for seq in np.cumsum(one["seqs"]).tolist()}, reverse=True)
        if self.newest:
            return Sight(seqs, None)
        named = [(rank, tuple(one["named"])) for rank, one in enumerate(every) if one["named"]]
        if self._tag is not None and len({name for _, name in named}) > 1:
            told = _by_value([f"version {seq} ({id[:12]})" for _, (seq, id) in named], [rank for rank, _ in named])
            raise ValueError(f"tag {self._tag!r} is not the same version for all ranks: {told}")
        if not named:
            raise NotFound(f"no rank has it: {'; '.join(sorted({one['none'] for one in every}))}")
        return Sight(seqs, max(name for _, name in named))

    def _found(self) -> dict[str, Any]:
        """The version that is asked for, as far as this rank can tell."""
        what = f"step {self.wanted.step}" if self.wanted.step is not None else f"id {self.wanted.version}"
        if self._tag is not None:
            try:
                tagged = self._resolve(self._tag)
            except TierstateError as error:
                return {"named": None, "none": str(error)}
            assert tagged is not None
            return {"named": [tagged.seq, tagged.id], "none": ""}
        if not self.wanted.newest:
            for seq in reversed(self._seen):
                for entry in self.catalog.look(seq, self._seen[seq]).entries:
                    if self._fits(entry):
                        return {"named": [seq, entry.version.id], "none": ""}
        where = ", ".join(shelf.name for shelf in self.catalog.shelves)
        return {"named": None, "none": f"there is no version with {what} in {where}"}

    def _fits(self, entry: Entry) -> bool:
        if self.wanted.version is not None:
            if not self.wanted.version:
                raise ValueError("version='' names none; give the beginning of an id")
            return entry.version.id.startswith(self.wanted.version)
        return entry.version.head.step == self.wanted.step

    def candidates(self, sight: Sight) -> Iterator[Entry]:
        """The versions to try, the same for all ranks: with what this rank has of each, which may be nothing.

        Raises:
            Damaged: the newest one's record can be read by no rank, and going back was not asked for.
        """
        for seq in sight.seqs:
            if sight.named is not None and (seq > sight.named[0] or (seq < sight.named[0] and not self._older)):
                continue
            place = self.catalog.look(seq, self._seen.get(seq, []))
            every = self._accord.ask_json("look", partial(_said, place))
            there = sorted({(-time, id) for one in every for id, time in one["there"]})
            if not there:
                self._unreadable(seq, every, sight)
            for _, id in there:
                if sight.named is None or seq != sight.named[0] or id == sight.named[1]:
                    yield self._shared(place, id, [any(id == name for name, _ in one["there"]) for one in every])

    @property
    def newest(self) -> bool:
        """Whether no version is named."""
        return self.wanted.newest and self._tag is None

    def pass_over(self, name: str, why: object) -> None:
        """Note a version that is not taken."""
        self.passed.append(f"{name}: {why}")
        log.warning("%s is passed over: %s", name, why)

    @property
    def _older(self) -> bool:
        return self.wanted.on_damage == "older"

    def _unreadable(self, seq: int, every: Sequence[Any], sight: Sight) -> None:
        problems = sorted({tuple(problem) for one in every for problem in one["problems"]})
        told = "; ".join(text for text, _ in problems)
        if problems and sight.named is None and not self._older and not all(transient for _, transient in problems):
            raise Damaged(
                f"version {seq} is the newest, and its record can be read by no rank ({told}); "
                "name a step, or say on_damage='older' to go back to the newest version that is whole"
            )
        if problems:
            self.pass_over(f"version {seq}", told)

    def _shared(self, place: Place, id: str, have: Sequence[bool]) -> Entry:
        """This rank's entry of a version; ranks that see no record of it get its tables from the lowest one that
        does."""
        mine = next((entry for entry in place.entries if entry.version.id == id), None)
        if all(have):
            assert mine is not None
            return mine
        giver = have.index(True)
        gives = mine is not None and self._accord.team.rank == giver
        said = self._accord.ask("version", lambda: zlib.compress(mine.version.data, 1) if mine and gives else b"")
        return mine or Entry(_version(said[giver], id), (), ())


def _version(data: bytes, id: str) -> Version:
    """A version's tables from another rank."""
    reader = zlib.decompressobj()
    try:
        section = reader.decompress(data, 4 << 30)
    except zlib.error as error:
        raise FormatError(f"version {id[:12]} came damaged from another rank: {error}") from error
    if checksum(section).hex() != id:
        raise FormatError(f"version {id[:12]} came damaged from another rank")
    return Version.decode(memoryview(section))


def _said(place: Place) -> dict[str, Any]:
    problems = [[f"{name}: {error}", error.transient] for name, error in place.problems]
    return {"there": [[e.version.id, e.version.head.time] for e in place.entries], "problems": problems}


def _steps(seqs: Iterable[int]) -> list[int]:
    """Rising numbers as the first and the steps between them."""
    found: list[int] = np.diff(np.array(sorted(seqs), "i8"), prepend=0).tolist()
    return found


def _by_value(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Who says what, in words: ranks that say the same together."""
    by: dict[str, list[int]] = {}
    for rank, value in zip(ranks if ranks is not None else range(len(values)), values, strict=True):
        by.setdefault(repr(value) if not isinstance(value, str) else value, []).append(rank)
    return ", ".join(f"{value} on {named_ranks(found)}" for value, found in by.items())


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, a few of them by number."""
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {few}{more}"
