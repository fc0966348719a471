"""The peer tier: the newest versions in the memory of this host and of others, where a lost host's are found again.

An object that a rank writes lies in the memory of its own host and of ``copies`` others, in other failure domains where
there are some. It outlives the processes of the job, which end together when one of them does: on each host a *keeper*
(`peer_server`) holds the memory, and lends it to the other hosts. Ranks read and write that of their own host straight.

What the contract of tiers means here:

* **whole or absent**: an object is sent to all hosts that are to have it first, and then made visible on one after
  another. If that fails on one, it is removed from those before, and the writer's close has failed; a reader may have
  seen it meanwhile, whole. Where a host is lost in between and cannot be asked any more, or the writer is killed, a
  whole object may be left on some of its hosts: as in any tier whose answer is lost.
* **create-only**: before an object is made visible all hosts are asked for one of that name, and then each host that
  gets it creates it or refuses. Two ranks of one host, or of hosts that share all copies, cannot both win; others that
  create one name at the very same moment may (``traits.conditional_create`` is False then). Records of a run have one
  rank that creates them.
* **exact**: any copy will do, since objects never change. The own host's is read first, then partners', then any. What
  is written is sent with checksums; what is read is checked by its reader's digests, as from any tier. Where hosts do
  not answer, an object counts as absent, and a list as whole, only if so few of them are away that each object still
  has a copy on one that is not; else `TierUnavailable`.
* **durable**: no. It survives the job and, with copies, the loss of hosts; not of all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import NotFound, TierUnavailable

from .base import MAX_KEY, Meeting, ObjectWriter, Range, Tier, Traits, check_key
from .limited import BURST, Pace
from .peer_client import Far
from .peer_home import Home, default_path, own_address, wait_gone
from .peer_meeting import meet
from .peer_members import Group, Member
from .peer_memory import Kept, remove
from .peer_peers import Peers
from .peer_writer import SENT, PeerWriter
from .units import Rate, Seconds, Size

STOPPING = 30.0
"""Seconds that a keeper may take to give its memory back."""


class Peer(Tier):
    """This host's memory and that of its peers. See the module for what it promises.

    Args:
        capacity: bytes that this host gives, for its own objects and others' copies; None for as many as tmpfs takes.
        copies: how many other hosts keep each object.
        domain: what is lost together with this host, as the name of its rack or switch; empty: nothing is.
        exchange: bytes per second that this process sends to other hosts at most; None for no limit.
        port: where this host's keeper listens; 0: anywhere.
        path: the folder of this host's memory, on tmpfs; None for one below ``/dev/shm`` of this user's. Jobs that run
            on the same hosts at the same time need one each.
        idle: seconds after which a keeper that nobody uses gives its memory back, and ends.
        deadline: seconds in which another host must take or send a piece of 4 MiB.
    """

    persistent: ClassVar[bool] = False

    def __init__(
        self,
        *,
        capacity: Size | None = None,
        copies: int = 1,
        domain: str = "",
        exchange: Rate | None = None,
        port: int = 0,
        path: Path | None = None,
        idle: Seconds = 3600.0,
        deadline: Seconds = 30.0,
    ) -> None:
        if copies < 0:
            raise ValueError(f"copies: {copies} is not a count; write 0 for none with other hosts, 1, 2, ...")
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port: {port} is not a port; write 0 for any, or 1 to 65535")
        self._copies, self._domain, self._port = copies, domain, port
        self._idle, self._deadline = idle, deadline
        self._kept = Kept(Path(path or default_path()).expanduser().absolute(), capacity)
        self._home = Home(self._kept)
        self._pacer = Pace(exchange) if exchange else None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._found: Peers | None = None

    @property
    def name(self) -> str:
        """The tier's name in the policy."""
        return self._kept.name

    @name.setter
    def name(self, name: str) -> None:
        self._kept.name = name

    @property
    def traits(self) -> Traits:
        peers = self._peers
        members = peers.group.members
        return Traits(
            persistent=False,
            shared="site" if members else "host",
            failure_domain=f"peers:{min(m.id for m in members)}" if members else self._kept.traits.failure_domain,
            capacity=self._kept.capacity,
            conditional_create=peers.certain,
            notes=peers.notes(),
        )

    # Who the others are

    def meet(self, team: Meeting) -> None:
        """Start this host's keeper where none runs, and agree with the other hosts who keeps what for whom.

        Raises:
            TierUnavailable: a host has no keeper; on every rank alike.
            RankFailed: a rank is dead or late.
        """
        group = meet(team, f"peer {self.name}", self._home, self._keeper)
        self._home.enter()
        with self._lock:
            before, self._found = self._found, self._circle(group)
        if before is not None:
            before.close()

    def _keeper(self) -> Member:
        found = self._home.keeper(own_address(), self._port, self._idle, self._deadline)
        return Member(found.id, found.address, found.port, found.token, self._domain)

    def _circle(self, group: Group) -> Peers:
        return Peers(group, self._home.card(), self._copies, self._deadline, lambda: self.name)

    @property
    def _peers(self) -> Peers:
        """The other hosts, as agreed with them, or else as this host remembers them."""
        with self._lock:
            if self._found is None:
                if not self._closed.is_set():
                    self._home.enter()
                self._found = self._circle(self._home.group())
            return self._found

    # Reading

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        try:
            self._kept.read(key, ranges)
        except NotFound:
            self._peers.first(key, lambda far: far.read(key, ranges))

    def list(self, prefix: str) -> Iterator[str]:
        peers = self._peers
        if not prefix.isascii() or len(prefix) > MAX_KEY:
            return iter(())
        mine = self._kept.list(prefix)
        return mine if peers.alone else iter(sorted(peers.list(prefix).union(mine)))

    def size(self, key: str) -> int:
        try:
            return self._kept.size(key)
        except NotFound:
            return self._peers.first(key, lambda far: far.size(key))

    def age(self, key: str) -> float | None:
        try:
            return self._kept.age(key)
        except NotFound:
            return self._peers.first(key, lambda far: far.age(key))

    def firm(self, key: str) -> bool:
        peers = self._peers
        try:
            self._kept.size(key)
        except NotFound:
            return peers.copies(key) > len(peers.partners)
        return peers.copies(key) >= len(peers.partners)

    # Writing

    def put(self, key: str, data: Buffer) -> None:
        with self.writer(key, data.numel()) as writer:
            writer.append(data)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        peers = self._peers
        self._home.watch()
        piece = max(1, int(self._pacer.rate * BURST)) if self._pacer else SENT
        return PeerWriter(self.name, key, self._kept.writer(key, size_hint), peers, self._pace, piece)

    def _pace(self, nbytes: int) -> None:
        if self._pacer and self._closed.wait(self._pacer.turn(nbytes)):
            raise TierUnavailable(f"{self.name}: was closed while an object waited to be sent on", tier=self.name)

    def delete(self, key: str) -> None:
        self.discard([key])

    def discard(self, keys: Iterable[str]) -> None:
        some = [check_key(key) for key in keys]
        peers = self._peers
        self._kept.discard(some)
        if some:
            peers.discard(some)

    def room(self) -> int | None:
        return self._kept.room()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            found = self._found
        if found is not None:
            found.close()
        self._home.leave()
        self._kept.close()

    # For people

    def members(self) -> Sequence[tuple[Member, dict[str, Any] | TierUnavailable]]:
        """Every host that this one knows of, itself among them, and what its keeper says, or why it says nothing."""
        card = self._home.card()
        members = self._peers.group.members or ((card,) if card else ())
        return [(member, self._status(member)) for member in members]

    def _status(self, member: Member) -> dict[str, Any] | TierUnavailable:
        with closing(Far(member, self._deadline, lambda: self.name)) as far:
            try:
                return far.status()
            except TierUnavailable as error:
                return error

    def stop(self) -> bool:
        """Give this host's memory back, with all that is in it, and end its keeper; whether there was any.

        Raises:
            TierUnavailable: the keeper does not end.
        """
        card, root = self._home.card(), self._kept.root
        if not root.exists():
            return False
        self._home.leave()
        if card is not None and self._asked_to_stop(card):
            if not wait_gone(root, STOPPING):
                raise TierUnavailable(f"{self.name}: the keeper of {root} has not ended in {STOPPING:g} s")
        else:
            remove(root)
        return True

    def _asked_to_stop(self, member: Member) -> bool:
        with closing(Far(member, self._deadline, lambda: self.name)) as far:
            try:
                far.stop()
            except TierUnavailable:
                return False
        return True
