"""The client of peer memory: requests to the keepers (server processes) of other hosts, to one or to all at once.

`RemoteMemory` is the memory of one other host. `PeerHosts` are all other hosts; some of them are the partners, which
keep the copies of this host's objects.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import Any, TypeVar

from tierstate.manifest.chunk import view
from tierstate.manifest.errors import Damaged, NotFound, TierstateError, TierUnavailable
from tierstate.tiers.base import Range, is_key
from tierstate.tiers.concurrency import run_concurrently
from tierstate.tiers.connections.channel import ChannelError, connect
from tierstate.tiers.connections.secret import JobSecret, SecretError
from tierstate.tiers.wrappers.limit import batches

from .members import Member, Membership, partners
from .protocol import (
    LENGTH,
    MAX_BODY,
    MAX_READ,
    NO_LIMIT,
    SECONDS,
    SETTINGS,
    SPAN,
    Connection,
    ProtocolError,
    RequestKind,
)

SPARE = 8
"""Idle connections to one host that are kept for later requests, at most."""


CONNECT = 5.0
"""Timeout in seconds for making a connection, handshake included."""


AGAIN = 10.0
"""Seconds for which a host is not asked again after a timeout. A host that refuses the connection is asked each
time."""


AHEAD = 3
"""Pieces of an object that may be sent without a response yet (pipelining)."""


SPANS = 4096
"""Ranges in one read request, at most."""


KNOWN = 4096
"""Objects for which the host that has them is kept in memory, at most."""


T = TypeVar("T")


class RemoteMemory:
    """The memory of one other host, through its keeper. May be used by many threads at once.

    All methods raise TierUnavailable if the keeper does not answer, and the errors with which it responds.

    Args:
        member: the host.
        secret: returns the secret by which the keepers of the job know each other; None if there is none.
        seconds: timeout for one whole message.
        name: returns the tier's name, for error messages.
    """

    def __init__(
        self, member: Member, secret: Callable[[], JobSecret | None], seconds: float, name: Callable[[], str]
    ) -> None:
        self.member, self._secret, self._seconds, self._name = member, secret, seconds, name
        self._spare: list[Connection] = []
        self._lock = threading.Lock()
        self._away = float("-inf")
        self._closed = False

    def connect(self) -> Connection:
        """Make a new connection, with the handshake.

        Raises:
            TierUnavailable: no keeper listens, it is too slow, or it has another secret.
        """
        member = self.member
        with self._explained():
            if time.monotonic() - self._away < AGAIN:
                raise OSError("it did not answer a moment ago")
            if (secret := self._secret()) is None:
                raise SecretError("this host has no secret of the job, which its keeper would have")
            seconds = min(CONNECT, self._seconds)
            try:
                channel = connect(member.address, member.port, secret, member.service, seconds=seconds)
            except ConnectionResetError:  # again and again: no keeper, or one that strangers keep busy
                self._away = time.monotonic()
                raise
            channel.seconds = self._seconds
            return Connection(channel)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ProtocolError, SecretError) as error:
            if isinstance(error, TimeoutError):
                self._away = time.monotonic()
                self._drop_spare()  # each of them would be waited for as long
            raise TierUnavailable(
                f"{self._name()}: the keeper of peer memory at {self.member.place} does not answer: {error}",
                tier=self._name(),
            ) from error

    def _ask(self, talk: Callable[[Connection], Any]) -> Any:
        """Make a request over an idle connection or a new one. It may be sent twice, so it must be idempotent."""
        with self._lock:
            line = self._spare.pop() if self._spare else None
        with self._explained():
            if line is not None:
                # The keeper may have closed an idle connection: it was started again, or the idle time was over.
                with suppress(ConnectionError):
                    return self._over(line, talk)
            return self._over(self.connect(), talk)

    def _over(self, line: Connection, talk: Callable[[Connection], Any]) -> Any:
        good = False
        try:
            found = talk(line)
            good = True
            return found
        except TierstateError as error:
            good = True
            raise self._told(error) from None
        finally:
            with self._lock:
                good = good and len(self._spare) < SPARE and not self._closed
                if good:
                    self._spare.append(line)
            if not good:
                line.close()

    def _told(self, error: TierstateError) -> TierstateError:
        """The keeper's error with the tier's name and the host's address in its text."""
        text = f"{self._name()}: at {self.member.place}: {error}"
        return Damaged(text) if isinstance(error, Damaged) else type(error)(text, tier=self._name())  # type: ignore[call-arg]

    # Requests

    def size(self, key: str) -> int:
        """Length of an object in bytes. Raises NotFound if there is none."""
        (size,) = LENGTH.unpack(self._ask(lambda line: line.ask(RequestKind.SIZE, key)))
        return int(size)

    def age(self, key: str) -> float | None:
        """Seconds since an object was created, by that host's clock; None if it does not know. Raises as `size`."""
        (age,) = SECONDS.unpack(self._ask(lambda line: line.ask(RequestKind.AGE, key)))
        return None if age < 0 else float(age)

    def list(self, prefix: str) -> list[str]:
        """The keys of all objects with a prefix, page by page."""
        found: list[str] = []
        while True:
            after = found[-1].encode() if found else b""
            page = self._ask(methodcaller("ask", RequestKind.LIST, prefix, after))
            keys = page[1:].decode("ascii", "replace").split("\n") if len(page) > 1 else []
            found += (key for key in keys if is_key(key))
            if page[:1] != b"+" or not keys:
                return found

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        """Fill every range, directly into its memory. Raises NotFound if there is no such object."""
        for batch in batches(ranges, MAX_READ):
            for at in range(0, max(1, len(batch)), SPANS):
                some = batch[at : at + SPANS]
                spans = b"".join(SPAN.pack(offset, out.numel()) for offset, out in some)
                outs = [view(out) for _, out in some]
                self._ask(methodcaller("ask_into", RequestKind.READ, key, spans, outs))

    def discard(self, keys: Sequence[str]) -> None:
        """Delete objects; keys without an object are ignored."""
        per = MAX_BODY // 1024
        for at in range(0, len(keys), per):
            self._ask(methodcaller("ask", RequestKind.DELETE, "", "\n".join(keys[at : at + per]).encode()))

    def status(self) -> dict[str, Any]:
        """The keeper's status: process id, path, capacity, bytes in use, and other numbers, for people."""
        found: dict[str, Any] = json.loads(self._ask(lambda line: line.ask(RequestKind.STATUS)))
        return found

    def terms(self, capacity: int | None, idle: float) -> None:
        """Send the keeper the policy's settings: capacity in bytes, and seconds without use after which it ends."""
        self._ask(
            lambda line: line.ask(
                RequestKind.TERMS, "", SETTINGS.pack(NO_LIMIT if capacity is None else capacity, idle)
            )
        )

    def runs(self, capacity: int | None, idle: float) -> bool:
        """Whether the keeper answers; it gets the policy's settings (`terms`), unless it serves another job now."""
        try:
            self.terms(capacity, idle)
        except TierUnavailable as error:
            return isinstance(error.__cause__, ChannelError)
        return True

    def stop(self) -> None:
        """Make the keeper free its memory and end."""
        self._ask(lambda line: line.ask(RequestKind.STOP))

    def hand_over(self) -> None:
        """Make the keeper end and leave its memory to another one. Raises TierError if it lives in an agent."""
        self._ask(lambda line: line.ask(RequestKind.HAND_OVER))

    def stage(self, key: str, nbytes: int) -> RemoteStaging:
        """Begin to write an object of known length on that host."""
        return RemoteStaging(self, self.connect(), key, nbytes)

    def close(self) -> None:
        """Close the idle connections; those in use are closed when their request is done."""
        self._closed = True
        self._drop_spare()

    def _drop_spare(self) -> None:
        with self._lock:
            lines, self._spare = self._spare, []
        for line in lines:
            line.close()


class RemoteStaging:
    """An object that is being written to one other host: visible after `commit`, discarded without one.

    Args:
        far: that host's memory.
        line: a connection for this object alone; `close` closes it.
        key: the object's key.
        nbytes: its length.

    Raises:
        AlreadyExists, TierFull, TierUnavailable: the object cannot be written there.
    """

    def __init__(self, far: RemoteMemory, line: Connection, key: str, nbytes: int) -> None:
        self.far, self._line, self._key = far, line, key
        self._unanswered = 0
        self._ask(RequestKind.STAGE, LENGTH.pack(nbytes))

    def _ask(self, ask: RequestKind, body: bytes = b"") -> None:
        with self._talking():
            self._hear(0)
            self._line.ask(ask, self._key, body)

    def _hear(self, left: int) -> None:
        """Receive responses until at most ``left`` pieces have none."""
        while self._unanswered > left:
            self._unanswered -= 1
            self._line.reply()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            with self.far._explained():
                yield
        except BaseException as error:
            self._line.close()
            if isinstance(error, TierstateError) and not isinstance(error, TierUnavailable):
                raise self.far._told(error) from None
            raise

    def send(self, piece: memoryview) -> None:
        """Send the next bytes, `MAX_BODY` at most. Waits only if more than `AHEAD` pieces have no response yet."""
        with self._talking():
            self._line.post(RequestKind.PIECE, self._key, piece)
            self._unanswered += 1
            self._hear(AHEAD)

    def commit(self) -> None:
        """Make the object visible on that host."""
        self._ask(RequestKind.COMMIT)

    def undo(self) -> None:
        """Remove the object again.

        Raises:
            TierUnavailable: it is not known whether it was removed.
        """
        self._ask(RequestKind.UNDO)

    def close(self) -> None:
        """Close the connection; the keeper discards an object that was not committed."""
        self._line.close()


class PeerHosts:
    """All other hosts of a membership, and requests to them.

    Args:
        group: the membership; this host is in it if it is a member.
        card: returns this host, as its memory has it now; None if it is not a member, or its memory was freed.
        secret: returns the secret by which keepers know each other; None if there is none.
        copies: number of other hosts that should keep each object of this host.
        seconds: timeout for one whole message.
        name: returns the tier's name, for error messages.

    Attributes:
        partners: the hosts that keep the copies of this host's objects.
        all: all other hosts, the partners first.
    """

    def __init__(
        self,
        group: Membership,
        card: Callable[[], Member | None],
        secret: Callable[[], JobSecret | None],
        copies: int,
        seconds: float,
        name: Callable[[], str],
    ) -> None:
        self.group, self._name, self._wanted = group, name, copies
        self._card, me = card, card()
        ids = [member.id for member in group.members]
        self._me = ids.index(me.id) if me is not None and me.id in ids else None
        far = {n: RemoteMemory(m, secret, seconds, name) for n, m in enumerate(group.members) if n != self._me}
        self._number = {id(one): n for n, one in far.items()}
        domains = [member.fails_with for member in group.members]
        chosen = () if self._me is None else partners(domains, self._me, copies)
        self.partners = [far[n] for n in chosen]
        self.all = self.partners + [far[n] for n in far if n not in chosen]
        self._known: OrderedDict[str, RemoteMemory] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Whether the membership has no other host."""
        return not self.all

    @property
    def certain(self) -> bool:
        """Whether only one of two hosts that race for a name can win: if every host is a partner of every other."""
        return len(self.all) == len(self.partners)

    @property
    def covered(self) -> int:
        """Number of other hosts that may be away while every object still has a copy on one that answers."""
        return 0 if self.group.thin or self._was_freed() else min(self._wanted, len(self.all))

    def _was_freed(self) -> bool:
        """Whether this host has lost what it kept since the hosts met (`tierstate peer stop`)."""
        if self._me is None:
            return False
        card = self._card()
        return card is None or card.id != self.group.members[self._me].id

    def notes(self) -> tuple[str, ...]:
        """Remarks about the members, for `Traits.notes`."""
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

    def order(self, far: RemoteMemory | None) -> int:
        """The number of another host, or of this one (None). All writers make objects visible in this order."""
        return self._number[id(far)] if far is not None else -1 if self._me is None else self._me

    # Requests to several hosts

    def _all(
        self, call: Callable[[RemoteMemory], T], asked: Sequence[RemoteMemory]
    ) -> tuple[dict[int, T], list[TierUnavailable]]:
        """Call all these hosts in parallel.

        Returns:
            The results by the hosts' numbers, and the errors of hosts that do not answer. Hosts that raise `NotFound`
            are in neither.
        """
        found: dict[int, T] = {}
        away: list[TierUnavailable] = []

        def ask(far: RemoteMemory) -> None:
            try:
                found[self.order(far)] = call(far)
            except NotFound:
                return
            except TierUnavailable as error:
                away.append(error)

        run_concurrently(ask, asked)
        return found, away

    def _check_covered(self, away: Sequence[TierUnavailable], what: str) -> None:
        if len(away) > self.covered:
            raise TierUnavailable(
                f"{self._name()}: {len(away)} of {len(self.group.members)} hosts do not answer, and may have the only "
                f"copy {what}: {away[0]}",
                tier=self._name(),
            ) from away[0]

    def first(self, key: str, call: Callable[[RemoteMemory], T]) -> T:
        """The result of a call to the first host that has an object.

        The host that had it last is asked first, then the partners, then all other hosts in parallel.

        Raises:
            NotFound: no host has it.
            TierUnavailable: no host that answers has it, and one that does not answer may have it.
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

    def _remembering(self, key: str, far: RemoteMemory, call: Callable[[RemoteMemory], T]) -> T:
        found = call(far)
        with self._lock:
            self._known[key] = far
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return found

    def list(self, prefix: str) -> set[str]:
        """The keys with a prefix on all other hosts.

        Raises:
            TierUnavailable: so many hosts do not answer that they may have objects which no other host has.
        """
        found, away = self._all(lambda far: far.list(prefix), self.all)
        self._check_covered(away, f"of objects below {prefix!r}")
        return set().union(*found.values())

    def copies(self, key: str) -> int:
        """The number of other hosts that answer and have an object."""
        found, _ = self._all(lambda far: far.size(key), self.all)
        return len(found)

    def taken_elsewhere(self, key: str) -> bool:
        """Whether a host that is not a partner has an object of that name.

        Raises:
            TierUnavailable: no host that answers has it, and so many do not answer that one of them may have it.
        """
        found, away = self._all(lambda far: far.size(key), [far for far in self.all if far not in self.partners])
        if not found:
            self._check_covered(away, f"of {key}")
        return bool(found)

    def discard(self, keys: Sequence[str]) -> None:
        """Delete objects on every other host.

        Raises:
            TierUnavailable: a host does not answer; on all others the objects are deleted.
        """
        _, away = self._all(lambda far: far.discard(keys), self.all)
        if away:
            raise away[0]

    def close(self) -> None:
        """Close the idle connections to all hosts."""
        for far in self.all:
            far.close()
