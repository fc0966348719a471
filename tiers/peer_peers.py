"""The other hosts of peer memory, asked one by one or all at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from tierstate.manifest.errors import NotFound, TierstateError, TierUnavailable

from .abreast import abreast
from .peer_client import Far
from .peer_members import Group, Member
from .peer_ring import partners

KNOWN = 4096
"""Objects of which is remembered which other host has them."""

T = TypeVar("T")


class Peers:
    """Who keeps what with us.

    Args:
        group: the members, this host among them if it is one.
        me: this host's own member; None where it is none.
        copies: how many others should keep what this host writes.
        seconds: in which a message must come.
        name: the tier's, for messages.
    """

    def __init__(self, group: Group, me: Member | None, copies: int, seconds: float, name: Callable[[], str]) -> None:
        self.group, self._name, self._wanted = group, name, copies
        ids = [member.id for member in group.members]
        self._me = ids.index(me.id) if me is not None and me.id in ids else None
        far = {n: Far(m, seconds, name) for n, m in enumerate(group.members) if n != self._me}
        self._number = {id(one): n for n, one in far.items()}
        domains = [member.fails_with for member in group.members]
        chosen = () if self._me is None else partners(domains, self._me, copies)
        self.partners = [far[n] for n in chosen]
        self.all = self.partners + [far[n] for n in far if n not in chosen]
        self._known: OrderedDict[str, Far] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Whether there is no other host."""
        return not self.all

    @property
    def certain(self) -> bool:
        """Whether of two hosts that race for a name one always wins: only where all share all."""
        return len(self.all) == len(self.partners)

    @property
    def covered(self) -> int:
        """So many hosts may be away, and each object is still with one that is not."""
        return 0 if self.group.thin else min(self._wanted, len(self.all))

    def notes(self) -> tuple[str, ...]:
        """What there is to say about the members."""
        members = self.group.members
        if not members:
            return ("this host has met no other yet: what it keeps is lost with it",)
        domains = {member.fails_with for member in members}
        told = [f"{len(members)} hosts in {len(domains)} failure domains, {len(self.partners)} copies with others"]
        if len(self.partners) < self._wanted:
            told.append(f"{self._wanted} copies are wanted, and there are {len(self.all)} other hosts to keep them")
        if self.partners and len(domains) == 1:
            told.append("all hosts are of one failure domain, and so are all copies of an object")
        if self.group.thin:
            told.append("a host has left: what was saved before may have fewer copies than it should")
        return tuple(told)

    def order(self, far: Far | None) -> int:
        """The number of another host, or of this one: the order in which all do what is done on several."""
        return self._number[id(far)] if far is not None else -1 if self._me is None else self._me

    # Asking

    def _all(self, call: Callable[[Far], T], asked: Sequence[Far]) -> tuple[dict[int, T], list[TierUnavailable]]:
        """What hosts answer, by their numbers, and the errors of those that do not. `NotFound` is no answer."""
        found: dict[int, T] = {}
        away: list[TierUnavailable] = []

        def ask(far: Far) -> None:
            try:
                found[self.order(far)] = call(far)
            except NotFound:
                return
            except TierUnavailable as error:
                away.append(error)

        abreast(ask, asked)
        return found, away

    def _check_covered(self, away: Sequence[TierUnavailable], what: str) -> None:
        if len(away) > self.covered:
            raise TierUnavailable(
                f"{self._name()}: {len(away)} of {len(self.group.members)} hosts do not answer, and may have the only "
                f"copy {what}: {away[0]}",
                tier=self._name(),
            ) from away[0]

    def first(self, key: str, call: Callable[[Far], T]) -> T:
        """What the first host says that has an object; partners are asked first, then whoever has it.

        Raises:
            NotFound: no host has it.
            TierUnavailable: none has it of those that answer, and one that does not may have it.
        """
        with self._lock:
            known = self._known.get(key)
        away: list[TierUnavailable] = []
        rest = [far for far in self.all if far is not known and far not in self.partners]
        for far in [*([known] if known else []), *(far for far in self.partners if far is not known)]:
            try:
                return self._remembering(key, far, call)
            except NotFound:
                continue
            except TierUnavailable as error:
                away.append(error)
        holders, more = self._all(lambda far: (far.size(key), far)[1], rest)
        for _, far in sorted(holders.items(), key=lambda item: item[0]):
            try:
                return self._remembering(key, far, call)
            except NotFound:
                continue
            except TierUnavailable as error:
                more.append(error)
        self._check_covered([*away, *more], f"of {key}")
        raise NotFound(f"{self._name()}: {key}: there is no such object", tier=self._name(), key=key)

    def _remembering(self, key: str, far: Far, call: Callable[[Far], T]) -> T:
        found = call(far)
        with self._lock:
            self._known[key] = far
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return found

    def list(self, prefix: str) -> set[str]:
        """The keys of all other hosts.

        Raises:
            TierUnavailable: so many do not answer that they may have objects which nobody else has.
        """
        found, away = self._all(lambda far: far.list(prefix), self.all)
        self._check_covered(away, f"of objects below {prefix!r}")
        return set().union(*found.values())

    def copies(self, key: str) -> int:
        """How many of the other hosts have an object, of those that answer."""
        found, _ = self._all(lambda far: far.size(key), self.all)
        return len(found)

    def taken_elsewhere(self, key: str) -> bool:
        """Whether a host that is no partner has an object of that name.

        Raises:
            TierUnavailable: so many do not answer that one may have it.
        """
        found, away = self._all(lambda far: far.size(key), [far for far in self.all if far not in self.partners])
        if not found:
            self._check_covered(away, f"of {key}")
        return bool(found)

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects from every other host.

        Raises:
            TierUnavailable: from some they could not be removed; from all others they are.
        """
        _, away = self._all(lambda far: far.discard(keys), self.all)
        if away:
            raise away[0]

    def close(self) -> None:
        """Close all connections."""
        for far in self.all:
            far.close()


def trouble_of(call: Callable[[], T]) -> T | str:
    """What a call gives, or why it does not."""
    try:
        return call()
    except TierstateError as error:
        return str(error)
