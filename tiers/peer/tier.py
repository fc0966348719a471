"""The peer tier: the newest versions in the memory of this host, replicated to other hosts.

An object that a rank writes is kept in the memory (tmpfs) of its own host and of ``copies`` other hosts, in other
failure domains if there are any. It outlives the processes of the job. On each host a server process, the *keeper*
(`tierstate.tiers.peer.server`), serves the memory to the other hosts. Ranks read and write the memory of their own host
directly, as files.

What the contract of tiers means here:

* **whole or absent**: an object is first sent to all hosts that keep it, and then made visible on one host after the
  other. If this fails on one host, the object is removed from the hosts before it, and the writer's ``close`` raises; a
  reader may have seen the whole object meanwhile. If a host is lost in between, or the writer is killed, the whole
  object may remain on some hosts, as in any tier whose response is lost.
* **create-only**: before an object is made visible, all hosts are asked whether they have one of that name. Then each
  host that gets it creates it or refuses. Of two ranks of one host, or of hosts that share all copies, only one can
  create a name. Other ranks that create the same name at the same moment may both succeed
  (``traits.conditional_create`` is False then). Each record of a run is created by one rank only.
* **exact**: objects never change, so any copy is right. The copy of the own host is read first, then those of partners,
  then any other. Written bytes are sent with checksums; read bytes are verified by their chunk digests, as from any
  tier. If hosts do not answer, an object counts as absent, and a list as complete, only if so few hosts are away that
  every object still has a copy on a host that answers; else `TierUnavailable` is raised.
* **durable**: no. It survives the job and, with copies, the loss of some hosts, but not of all.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from tierstate.manifest.chunk import Buffer, view
from tierstate.manifest.errors import NotFound, TierError, TierUnavailable
from tierstate.tiers.address import own_address
from tierstate.tiers.base import MAX_KEY, ObjectWriter, Range, RankGroup, Tier, Traits, check_key
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.latch import Latch
from tierstate.tiers.units import Rate, Seconds, Size
from tierstate.tiers.wrappers.limit import BURST, TokenBucket

from .client import PeerHosts, RemoteMemory
from .host import HostMemory, agree_on_members, default_path, wait_gone
from .local import LocalMemory, remove_memory
from .members import Member, Membership
from .protocol import checked_capacity, checked_idle
from .writer import SENT, PeerWriter

log = logging.getLogger("tierstate")

STOPPING = 30.0
"""Seconds that a keeper may take to end and free its memory."""


WATCH = 5.0
"""Seconds between two looks whether this host's keeper still runs."""


class Peer(Tier):
    """The memory of this host and of its peers, as one tier. The module's text has the guarantees.

    Args:
        capacity: memory of this host, for its own objects and for copies of others', over all processes, as in
            ``64GiB``; without it, what tmpfs takes.
        copies: how many other hosts keep each object, as in ``2``; 0 for none.
        domain: the failure domain, what is lost together with this host, such as the name of its rack, as in
            ``"${RACK}"``: copies go to hosts of other domains first. Empty if it shares none.
        exchange: bytes per second that this process sends to other hosts at most, as in ``500MiB/s``; without it, no
            limit.
        port: where this host's keeper listens, as in ``7777``; 0 for any port that is free.
        path: folder of this host's memory, on tmpfs, as in ``/dev/shm/second-job``; without it, one of this user below
            ``/dev/shm``. Jobs that run on one host at the same time need one each.
        idle: a keeper (the server process of this host's memory) that has not been used for so long gives its memory
            back and ends, as in ``4h``; 400 days at most.
        deadline: another host that does not take or send 4 MiB in so long counts as unavailable, as in ``1min``.
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
        try:
            checked_capacity(capacity)
            checked_idle(idle)
        except TierError as error:
            raise ValueError(str(error)) from error
        self._idle, self._deadline = idle, deadline
        self._kept = LocalMemory(Path(path or default_path()).expanduser().absolute(), capacity)
        self._home = HostMemory(self._kept)
        self._pacer = TokenBucket(exchange) if exchange else None
        self._closed = Latch()
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None
        self._found: PeerHosts | None = None

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
            failure_domain=f"peers:{min(m.id for m in members)}" if members else f"host:{socket.gethostname()}",
            capacity=self._kept.capacity,
            conditional_create=peers.certain,
            notes=peers.notes() + self._home.notes(),
        )

    # Membership

    def meet(self, team: RankGroup) -> None:
        """Start this host's keeper if none runs, and agree with the other hosts on the members. All ranks call it.

        Raises:
            TierUnavailable: a host has no keeper; raised on every rank.
            RankFailed: a rank is dead or late.
        """
        self._home.met = team.secret.child("peer memory")
        group = agree_on_members(team, f"peer {self.name}", self._home, self._keeper)
        self._home.enter()
        with self._lock:
            before, self._found = self._found, self._circle(group)
        if before is not None:
            before.close()
        if self._watch is None and self._home.starts_keeper:
            self._begin_watch()

    def _begin_watch(self) -> None:
        watch = threading.Thread(target=self._watch_keeper, name="tierstate-peer-watch", daemon=True)
        try:
            start_thread(watch)
        except RuntimeError as error:  # `ulimit -u`
            log.warning("%s: if the keeper of this host dies, it is not started again: %s", self.name, error)
        else:
            self._watch = watch

    def _watch_keeper(self) -> None:
        """Start this host's keeper again whenever it has died.

        A thread does that, since the ranks of a host may have nothing to write while other hosts send it copies.
        """
        while not self._closed.wait(WATCH):
            try:
                self._home.watch()
            except Exception as error:  # of any type: the next time it may be possible
                log.warning("%s: the keeper of this host has died and cannot be started again: %s", self.name, error)

    def _keeper(self) -> Member:
        found = self._home.keeper(own_address(), self._port, self._idle, self._deadline)
        return Member(found.id, found.address, found.port, self._domain)

    def _circle(self, group: Membership) -> PeerHosts:
        return PeerHosts(group, self._home.card, self._home.secret, self._copies, self._deadline, lambda: self.name)

    @property
    def _peers(self) -> PeerHosts:
        """The other hosts: as agreed in `meet`, or else as this host's file of the membership has them."""
        with self._lock:
            if self._found is None:
                if not self._closed.is_set():
                    self._home.enter()
                self._found = self._circle(self._home.group())
            return self._found

    # Reading

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        try:
            self._kept.read(key, [(offset, view(out)) for offset, out in ranges])
        except NotFound:
            self._peers.first(key, lambda far: far.read(key, ranges))

    def list(self, prefix: str) -> Iterator[str]:
        peers = self._peers
        if not prefix.isascii() or len(prefix) > MAX_KEY:
            return iter(())
        mine = self._kept.list(prefix)
        if peers.alone:
            return mine
        return iter(sorted(peers.list(prefix).union(mine)))

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
        local = self._kept.writer(key)
        self._home.enter()
        piece = max(1, int(self._pacer.rate * BURST)) if self._pacer else SENT
        return PeerWriter(self.name, key, local, peers, self._pace, piece)

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
        if self._watch is not None:
            self._watch.join()
        with self._lock:
            found = self._found
        if found is not None:
            found.close()
        self._home.leave()

    # For the command line

    def members(self) -> Sequence[tuple[Member, dict[str, Any] | TierUnavailable]]:
        """Every member, this host included, with the status of its keeper, or the error if it does not answer."""
        card = self._home.card()
        members = self._peers.group.members or ((card,) if card else ())
        return [(member, self._status(member)) for member in members]

    def _memory_of(self, member: Member) -> RemoteMemory:
        return RemoteMemory(member, self._home.secret, self._deadline, lambda: self.name)

    def _status(self, member: Member) -> dict[str, Any] | TierUnavailable:
        with closing(self._memory_of(member)) as far:
            try:
                return far.status()
            except TierUnavailable as error:
                return error

    def stop(self) -> bool:
        """End this host's keeper, and free its memory with all objects in it; returns whether there was any.

        Raises:
            TierUnavailable: the keeper does not end within `STOPPING` seconds.
        """
        card, root = self._home.card(), self._kept.root
        if not root.exists():
            return False
        self._home.release()
        if card is not None and self._asked_to_stop(card):
            if not wait_gone(root, STOPPING):
                raise TierUnavailable(f"{self.name}: the keeper of {root} has not ended in {STOPPING:g} s")
        else:
            remove_memory(root)
        return True

    def _asked_to_stop(self, member: Member) -> bool:
        with closing(self._memory_of(member)) as far:
            try:
                far.stop()
            except TierUnavailable:
                return False
        return True
