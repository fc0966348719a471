"""Send the tables of a commit from rank to rank, over connections: merged versions, and parts that are long.

A merged version goes from host to host, as a tree: where many hosts have records of their own, rank 0 would have to
send the whole version to each of them.

The leaders of the hosts are a tree: each has up to `FANOUT` others below it, and rank 0 is its root. A leader asks the
one above it, over a connection of its own that is authenticated by the job's secret; if that one does not have the
version in time, it asks the next one above; and at last it takes the version from the job's store, as where few hosts
are. So a leader that hangs or cannot be reached costs time, and no version. (As in the broadcasts of MPI: Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)

A part that is too long for the store stays with its rank, which *offers* it, and the coordinator *fetches* it when it
comes to that rank: so many at a time as it has room for. A part that it cannot fetch goes through the tier.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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


FAILURES = (OSError, OverflowError, RankFailed, ValueError)
"""What a connection to a rank ends with that cannot be reached, or an address that is none (a port above 65535)."""


ADDRESS = "relay"
"""The message by which a leader says where it listens."""


REQUEST = struct.Struct("<q32s")
"""Number and id of the version that is asked for; or that of the version, and the checksum of a part of it. Both are
checksums of the bytes that are to come."""


LENGTH = struct.Struct("<Q")
"""Bytes of the version, or of the part, that follow."""


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
    """One rank's place in the tree of the leaders, and where it keeps its parts for the coordinator.

    Args:
        team: the ranks; they have a secret.
        find: waits so many seconds for the version with a number and an id; returns None if it does not come.

    Attributes:
        sent: bytes of versions and parts that this rank has sent.
        reachable: whether a part may be offered: false once the coordinator could not fetch one.
    """

    def __init__(self, team: Team, find: Callable[[int, str, float], Version | None]) -> None:
        self._team, self._find = team, find
        self._listener: PeerListener | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._beginning = threading.Lock(), threading.Lock()
        self._offered: dict[str, bytes] = {}
        self.sent, self.reachable = 0, True
        self._closed = False

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
        try:
            self._listening()
        except (OSError, RuntimeError) as error:
            log.warning("this rank passes no versions on, so others get them from rank 0: %s", error)

    def _listening(self) -> PeerListener:
        """The socket of this rank, which begins to listen with the first call."""
        with self._beginning:  # versions are committed to several tiers at the same time
            if self._closed:  # a commit may be later than `close`, which did not wait for it
                raise OSError("this process has left the job")
            if self._listener is None:
                self._listener = self._listen()
                self._team.post(ADDRESS, self._listener.address.encode())
            return self._listener

    def _listen(self) -> PeerListener:
        listener = PeerListener(len(set(self._team.hosts)), self._team.secret)
        thread = threading.Thread(target=self._run, args=(listener,), name="tierstate-relay", daemon=True)
        try:
            start_thread(thread)
        except BaseException:
            listener.close()
            raise
        self._thread = thread
        return listener

    # Parts

    def offer(self, part: bytes) -> Mapping[str, Any] | None:
        """Keep a part until it is released, so that the coordinator can fetch it.

        Returns:
            What the coordinator has to know: address, length and checksum. None if it cannot reach this rank.

        Raises:
            RankFailed: the store is lost.
        """
        if not self.reachable:
            return None
        try:
            address = self._listening().address
        except (OSError, RuntimeError) as error:
            log.warning("this rank cannot be connected to, so its parts of versions go through the tier: %s", error)
            self.reachable = False
            return None
        name = checksum(part).hex()
        self._offered[name] = part
        return {"at": address, "bytes": len(part), "sum": name}

    def release(self, held: Mapping[str, Any] | None) -> None:
        """Keep a part no longer that was offered; None for one that was not. Safe to call twice."""
        if held is not None:
            self._offered.pop(held["sum"], None)

    def fetch_part(self, held: Mapping[str, Any], seq: int, stop: Stop) -> memoryview | None:
        """The part that another rank keeps; None if it cannot be fetched.

        Args:
            held: what `offer` has returned there.
            seq: number of the version.
            stop: called again and again; true cancels the wait.
        """
        try:
            return self._ask(held["at"], seq, held["sum"], stop, held["bytes"])
        except FAILURES as error:
            log.info("a part of version %d cannot be fetched: %s", seq, error)
            return None

    # Versions

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
                found = self._ask_leader(leaders[place], seq, version, stop)
            except FAILURES as error:
                log.info("version %d does not come from rank %d: %s", seq, leaders[place], error)
                continue
            if found is not None or stop():
                return found
            log.warning("rank %d does not pass version %d on; another one is asked", leaders[place], seq)
        return None

    def _ask_leader(self, rank: int, seq: int, version: str, stop: Stop) -> memoryview | None:
        if not self._team.has_posted(rank, ADDRESS):
            return None
        return self._ask(self._team.receive(rank, ADDRESS).decode(), seq, version, stop)

    def _ask(self, address: str, seq: int, name: str, stop: Stop, expected: int | None = None) -> memoryview | None:
        """The bytes with a checksum from a rank; None if they do not come.

        Args:
            expected: how many they are; None for a version, of which that is not known, and which may come later.
        """
        host, port, service = address.split(" ")
        claim = CLAIM.pack(self._team.rank)
        with connect(host, int(port), self._team.secret, service, seconds=HANDSHAKE_TIMEOUT, claim=claim) as channel:
            channel.send(REQUEST.pack(seq, name.encode()))
            end, nbytes = time.monotonic() + PATIENCE, NOT_YET
            while nbytes == NOT_YET:
                if channel.wait(0.1):
                    (nbytes,) = LENGTH.unpack(channel.receive_exactly(LENGTH.size))
                    end = time.monotonic() + PATIENCE
                    if expected is not None and nbytes != expected:
                        return None  # also where it is not there: nobody brings it
                elif channel.ended or time.monotonic() > end:
                    return None
                if stop():
                    return None
            if nbytes > MAX_RECORD:
                return None
            found = memoryview(bytearray(nbytes))
            channel.receive_long(found)
            return found.toreadonly() if checksum(found).hex() == name else None

    def _run(self, listener: PeerListener) -> None:
        while (channel := listener.accept()) is not None:
            thread = threading.Thread(target=self._answer, args=(channel,), name="tierstate-relay", daemon=True)
            try:
                start_thread(thread)
            except RuntimeError as error:
                log.warning("what another rank asks for is not sent: %s", error)
                channel.close()

    def _answer(self, channel: Channel) -> None:
        with channel:
            try:
                seq, name = REQUEST.unpack(channel.receive_exactly(REQUEST.size))
                while (data := self._look(seq, name.decode("ascii", "replace"))) is None:
                    channel.send(LENGTH.pack(NOT_YET))  # raises if nobody waits for it any more
                channel.send(LENGTH.pack(len(data)))
                channel.send_long(memoryview(data))
                with self._lock:
                    self.sent += len(data)
            except OSError as error:
                log.info("what another rank asked for could not be sent: %s", error)

    def _look(self, seq: int, name: str) -> bytes | None:
        """A part that is offered, or a version, which is waited for."""
        if (part := self._offered.get(name)) is not None:
            return part
        found = self._find(seq, name, PATIENCE / SIGNS)
        return None if found is None else found.data

    def close(self) -> None:
        """Accept no more requests; those that are being answered are answered to their end. Safe to call twice."""
        with self._beginning:
            self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._thread is not None:
            self._thread.join()
