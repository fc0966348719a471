"""Simulated hosts of peer memory: each has a folder, a keeper (memory server) on the loopback interface, and tiers."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.peer.launch import KeeperSettings
from tierstate.tiers.peer.server import PeerServer, start_server
from tierstate.tiers.peer.tier import Peer

SECRET = JobSecret.random()
"""The secret of all jobs here, unless another is given."""


class Table:
    """Where ranks that are threads meet."""

    def __init__(self, hosts: Sequence[int], secret: JobSecret) -> None:
        self.hosts, self.secret = tuple(hosts), secret
        self.said: dict[tuple[str, int], dict[int, bytes]] = {}
        self.changed = threading.Condition()


class Seat:
    """One rank at a table; what a tier is told of a team."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.size, self.hosts, self.secret = rank, len(table.hosts), table.hosts, table.secret
        self._table, self._times = table, Counter[str]()

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    def gather(self, topic: str, data: bytes) -> list[bytes]:
        self._times[topic] += 1
        with self._table.changed:
            said = self._table.said.setdefault((topic, self._times[topic]), {})
            said[self.rank] = data
            self._table.changed.notify_all()
            assert self._table.changed.wait_for(lambda: len(said) == self.size, 60), f"{topic}: only {sorted(said)}"
            return [said[rank] for rank in range(self.size)]


def meet(
    tiers: Sequence[Peer], hosts: Sequence[int] | None = None, secret: JobSecret = SECRET
) -> list[BaseException | None]:
    """Let tiers meet as the ranks of one job, each on a host of its own unless said; what each raised."""
    table = Table(hosts or range(len(tiers)), secret)
    errors: list[BaseException | None] = [None] * len(tiers)

    def run(rank: int) -> None:
        try:
            tiers[rank].meet(Seat(table, rank))
        except BaseException as error:
            errors[rank] = error

    together([lambda rank=rank: run(rank) for rank in range(len(tiers))])  # type: ignore[misc]
    return errors


def together(calls: Sequence[Callable[[], Any]]) -> None:
    """Make calls at once, in threads."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Hosts:
    """Hosts whose keepers are threads of this process, which start at once.

    Args:
        place: a folder, on tmpfs if there is one.
        count: how many.
        keys: of every tier.
    """

    def __init__(self, place: Path, count: int, **keys: Any) -> None:
        self.place, self.keys = place, keys
        self.keepers: dict[int, PeerServer] = {}
        self.threads: dict[int, threading.Thread] = {}
        self._open: list[Peer] = []
        for number in range(count):
            self.start(number)
        self.tiers = [self.tier(number) for number in range(count)]
        assert meet(self.tiers) == [None] * count

    def path(self, number: int) -> Path:
        """The folder of a host's memory."""
        return self.place / f"host{number}"

    def start(self, number: int, idle: float = 3600.0) -> None:
        """Start a host's keeper."""
        keeper = start_server(self.path(number), KeeperSettings("127.0.0.1", 0, idle, None))
        self.keepers[number] = keeper
        thread = self.threads[number] = threading.Thread(target=keeper.run, daemon=True)
        thread.start()

    def die(self, number: int) -> None:
        """End a keeper as a kill would: its memory stays."""
        keeper = self.keepers.pop(number)
        for tier in self._open:
            tier._home._terms = None  # nobody of this process starts another
        keeper._give_back = lambda how: True  # type: ignore[method-assign]
        keeper.stop()
        self.threads.pop(number).join()
        for line in list(keeper._lines):
            with suppress(OSError):
                line.channel.wire.shutdown(socket.SHUT_RDWR)

    def tier(self, number: int, **keys: Any) -> Peer:
        """A handle of a process on a host; it knows the others once it has met them, or they have met before."""
        tier = Peer(path=self.path(number), **{"deadline": 20.0, **self.keys, **keys})
        tier.name = "peer"
        self._open.append(tier)
        return tier

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tier in self._open:
            tier.close()
        for number, keeper in self.keepers.items():
            keeper.stop()
            self.threads[number].join()
