"""The ranks of a job in their agents: the store by which they speak there, which outlives the trainers.

The agent of rank 0 has the store. Where all ranks are on one host, they all have one agent, and the store is an object
of it; else it is served on a port, as torchrun serves the store of a job.
"""

from __future__ import annotations

import base64
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch.distributed

from tierstate.engine.ranks.team.heartbeat import LifeCheck, Timeouts
from tierstate.engine.ranks.team.store import Store
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.address import own_address
from tierstate.tiers.connections.secret import JobSecret

dist: Any = torch.distributed  # its stores are not in its type hints


CONNECTING = 30.0
"""Seconds until the store of another host's agent must answer."""


class Place(NamedTuple):
    """Where a team's store is.

    Attributes:
        name: of the store, and the prefix of its keys.
        host, port: its address; port 0: only in the agent that has it.
    """

    name: str
    host: str = ""
    port: int = 0

    @classmethod
    def decode(cls, encoded: Sequence[Any]) -> Self:
        """The one of a message, with its types checked."""
        name, host, port = encoded
        return cls(str(name), str(host), int(port))


class TeamGreeting(NamedTuple):
    """What a trainer tells its agent of its team.

    Attributes:
        rank, hosts, timeouts: as of `Team`.
        place: where the store is.
        secret: of the job, in base64; None if the team has none.
        authenticated: as of `JobSecret`.
    """

    rank: int
    hosts: Sequence[int]
    timeouts: Sequence[float]
    place: Place
    secret: str | None = None
    authenticated: bool = True

    @classmethod
    def of(cls, team: Team, place: Place) -> Self:
        """That of a team of trainers."""
        timeouts = team.timeouts.timeout, team.timeouts.silence
        if not team.has_secret:
            return cls(team.rank, team.hosts, timeouts, place)
        key = base64.b64encode(team.secret.reveal()).decode()
        return cls(team.rank, team.hosts, timeouts, place, key, team.secret.authenticated)

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> Self:
        """The one of a message, with its types checked."""
        return cls(
            int(encoded["rank"]),
            [int(host) for host in encoded["hosts"]],
            [float(seconds) for seconds in encoded["timeouts"]],
            Place.decode(encoded["place"]),
            encoded.get("secret"),
            bool(encoded.get("authenticated")),
        )


class DoubtedFailures:
    """Failures of one rank's saves that are not told yet, as they may come of the loss of another rank's agent.

    Such a loss shows in many ways, as in a tier that the agent served, and at once; that the agent is lost shows only
    after a while. So a failure counts once all agents have given a sign of life after it.

    Args:
        team: the ranks in their agents.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._lock = threading.Lock()
        self._waiting: list[Mapping[str, Any]] = []
        self._checked: list[Mapping[str, Any]] = []
        self._check: LifeCheck | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """A save has failed in a tier."""
        with self._lock:
            self._waiting.append(event)

    def take(self, seq: int, tier: str) -> list[Mapping[str, Any]]:
        """The failures of a version in a tier, which are doubted no more."""
        with self._lock:
            found = [one for one in (*self._checked, *self._waiting) if (one["seq"], one["tier"]) == (seq, tier)]
            self._checked = [one for one in self._checked if one not in found]
            self._waiting = [one for one in self._waiting if one not in found]
        return found

    def look(self) -> tuple[list[Mapping[str, Any]], bool]:
        """The failures of which it is known by now whether they count, and whether they do; called again and again."""
        with self._lock:
            if self._check is None and self._waiting:
                self._checked, self._waiting, self._check = self._waiting, [], self._team.life_check()
            check = self._check
        alive = None if check is None else check.look()
        if alive is None:
            return [], True
        with self._lock:
            found, self._checked, self._check = self._checked, [], None
        return found, alive


class TeamStores:
    """The stores of the teams whose rank 0 has this agent."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def made(self, hosts: int) -> Iterator[Place]:
        """A new store for ranks of so many hosts. It is there until the block ends, and for all who use it."""
        name = uuid.uuid4().hex
        store, place = self._serve(name, hosts) if hosts > 1 else (dist.HashStore(), Place(name))
        with self._lock:
            self._stores[name] = store
        with self.used(place):
            yield place

    @contextmanager
    def remade(self, place: Place) -> Iterator[None]:
        """A store of this agent that was lost with the process before, until the block ends, and for all who use it."""
        with self._lock:
            self._stores.setdefault(place.name, dist.HashStore())
        with self.used(place):
            yield

    @contextmanager
    def used(self, place: Place) -> Iterator[None]:
        """A store of this agent stays until the block ends."""
        with self._lock:
            self._users[place.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._users[place.name] -= 1
                if not self._users[place.name]:
                    del self._users[place.name]
                    self._stores.pop(place.name, None)

    @staticmethod
    def _serve(name: str, hosts: int) -> tuple[Store, Place]:
        address = own_address(hosts, strict=False)
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return store, Place(name, address, port)

    def connect(self, place: Place) -> Store:
        """The store at a place.

        Raises:
            TierstateError: it is in another agent, and cannot be reached.
        """
        with self._lock:
            store = self._stores.get(place.name)
        if store is None and not place.port:
            raise TierstateError("the ranks of this host have different agents, since their environments differ")
        try:
            timeout = timedelta(seconds=CONNECTING)
            found = store or dist.TCPStore(place.host, place.port, timeout=timeout, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            raise TierstateError(
                f"the agent of rank 0 cannot be reached at {place.host}:{place.port}: {error}"
            ) from None
        return dist.PrefixStore(place.name, found)

    def join(self, told: TeamGreeting) -> Team:
        """The team of a session."""
        secret = None
        if told.secret is not None:
            secret = JobSecret(base64.b64decode(told.secret), authenticated=told.authenticated)
        size, timeouts = len(told.hosts), Timeouts(*told.timeouts)
        return Team(self.connect(told.place), told.rank, size, told.hosts, timeouts=timeouts, secret=secret)
