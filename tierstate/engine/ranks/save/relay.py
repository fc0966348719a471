"""Pass a merged version on from host to host, as a tree: where many hosts have records of their own, rank 0 would have
to send the whole version to each of them.

The leaders of the hosts are a tree: each has up to `FANOUT` others below it, and rank 0 is its root. A leader asks the
one above it, over a connection of its own that is authenticated by the job's secret; if that one does not have the
version in time, it asks the next one above; and at last it takes the version from the job's store, as where few hosts
are. So a leader that hangs or cannot be reached costs time, and no version. (As in the broadcasts of MPI: Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tierstate.engine.ranks.restore.exchange import CLAIM, HANDSHAKE_TIMEOUT, PeerListener
from tierstate.engine.ranks.team.team import Stop, Team
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import RankFailed
from tierstate.manifest.format.record import MAX_RECORD
from tierstate.manifest.format.version import Version
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.connections.channel import Channel, connect

log = logging.getLogger("tierstate")


FANOUT = 8
"""Leaders below each one. Where no more than so many are below rank 0 in all, each gets the version by the store."""


PATIENCE = 5.0
"""Seconds without a sign of life of the leader above, after which another one is asked."""


SIGNS = 4
"""Signs of life in that time, while a leader waits for the version itself."""


ADDRESS = "relay"
"""The message by which a leader says where it listens."""


REQUEST = struct.Struct("<q32s")
"""Number and id of the version that is asked for."""


LENGTH = struct.Struct("<Q")
"""Bytes of the version that follow."""


NOT_YET = 0
"""Instead of a length: a sign of life of a leader that waits for the version itself."""


def above(place: int) -> Iterator[int]:
    """The places in the tree that are above one, from the nearest on."""
    while place:
        place = (place - 1) // FANOUT
        yield place


def has_levels(leaders: Sequence[int]) -> bool:
    """Whether there are so many leaders that some are not directly below rank 0; else all use the store."""
    return len(leaders) > FANOUT + 1


class VersionRelay:
    """One rank's place in the tree of the leaders.

    Args:
        team: the ranks; they have a secret.
        find: waits so many seconds for the version with a number and an id; returns None if it does not come.

    Attributes:
        sent: bytes of versions that this rank has sent.
    """

    def __init__(self, team: Team, find: Callable[[int, str, float], Version | None]) -> None:
        self._team, self._find = team, find
        self._listener: PeerListener | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._beginning = threading.Lock(), threading.Lock()
        self.sent = 0

    def serve(self, leaders: Sequence[int]) -> None:
        """Begin to listen, if others are below this rank. Does nothing where all get the version by the store.

        Args:
            leaders: all of them, rising.

        Raises:
            RankFailed: the store is lost.
        """
        place = leaders.index(self._team.rank)
        is_last = place * FANOUT + 1 >= len(leaders)
        if not has_levels(leaders) or is_last:
            return
        with self._beginning:  # versions are committed to several tiers at the same time
            if self._listener is None:
                self._begin()

    def _begin(self) -> None:
        try:
            self._listener = PeerListener(len(set(self._team.hosts)), self._team.secret)
            thread = threading.Thread(target=self._run, args=(self._listener,), name="tierstate-relay", daemon=True)
            start_thread(thread)
            self._thread = thread
        except (OSError, RuntimeError) as error:
            log.warning("this rank passes no versions on, so others get them from rank 0: %s", error)
        else:
            self._team.post(ADDRESS, self._listener.address.encode())

    def fetch(self, leaders: Sequence[int], seq: int, version: str, stop: Stop) -> memoryview | None:
        """The bytes of a version from a leader above; None where it has to come by the store.

        Args:
            leaders: as for `serve`.
            seq, version: number and id.
            stop: called again and again; true cancels the wait.
        """
        if not has_levels(leaders):
            return None
        for place in above(leaders.index(self._team.rank)):
            try:
                found = self._ask(leaders[place], seq, version, stop)
            except (OSError, RankFailed, ValueError) as error:
                log.info("version %d does not come from rank %d: %s", seq, leaders[place], error)
                continue
            if found is not None or stop():
                return found
            log.warning("rank %d does not pass version %d on; another one is asked", leaders[place], seq)
        return None

    def _ask(self, rank: int, seq: int, version: str, stop: Stop) -> memoryview | None:
        if not self._team.has_posted(rank, ADDRESS):
            return None
        host, port, service = self._team.receive(rank, ADDRESS).decode().split(" ")
        claim = CLAIM.pack(self._team.rank)
        with connect(host, int(port), self._team.secret, service, seconds=HANDSHAKE_TIMEOUT, claim=claim) as channel:
            channel.send(REQUEST.pack(seq, version.encode()))
            end, nbytes = time.monotonic() + PATIENCE, NOT_YET
            while nbytes == NOT_YET:
                if channel.wait(0.1):
                    (nbytes,) = LENGTH.unpack(channel.receive_exactly(LENGTH.size))
                    end = time.monotonic() + PATIENCE
                elif channel.ended or time.monotonic() > end:
                    return None
                if stop():
                    return None
            if nbytes > MAX_RECORD:
                return None
            found = memoryview(bytearray(nbytes))
            channel.receive_long(found)
            return found if checksum(found).hex() == version else None

    def _run(self, listener: PeerListener) -> None:
        while (channel := listener.accept()) is not None:
            thread = threading.Thread(target=self._answer, args=(channel,), name="tierstate-relay", daemon=True)
            try:
                start_thread(thread)
            except RuntimeError as error:
                log.warning("a version is not passed on: %s", error)
                channel.close()

    def _answer(self, channel: Channel) -> None:
        with channel:
            try:
                seq, version = REQUEST.unpack(channel.receive_exactly(REQUEST.size))
                name = version.decode("ascii", "replace")
                while (found := self._find(seq, name, PATIENCE / SIGNS)) is None:
                    channel.send(LENGTH.pack(NOT_YET))  # raises if nobody waits for it any more
                data = found.data
                channel.send(LENGTH.pack(len(data)))
                channel.send_long(memoryview(data))
                with self._lock:
                    self.sent += len(data)
            except OSError as error:
                log.info("a version could not be passed on: %s", error)

    def close(self) -> None:
        """Accept no more requests; those that are being answered are answered to their end. Safe to call twice."""
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None:
            self._thread.join()
