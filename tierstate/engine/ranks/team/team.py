"""A team: the ranks of one job that save and restore together, and their messages: post, receive, all-gather.

Messages are values in the job's key-value store (`torch.distributed.Store`). Collectives are never used: they belong to
the training. Every wait is bounded: by a timeout, by a callback that may cancel it, and by the heartbeats of the ranks
that are waited for.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, RankFailed, TierstateError, format_ranks
from tierstate.manifest.format.record import MAX_RECORD
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.policy.models import SecretPlace

from .heartbeat import HeartbeatMonitor, LifeCheck, Timeouts, has_dead, heartbeat_key
from .rendezvous import rendezvous
from .secret import agree_on_secret
from .store import BROKEN_OFF, NOTHING, Store, StoreClient

log = logging.getLogger("tierstate")


SOONEST, BUSY, POLLS = 0.0005, 4000.0, 1000.0
"""How a message is polled for: seconds between two polls at first; polls per second of all ranks together, at most, at
first and in a long wait."""


Stop: TypeAlias = Callable[[], bool]
"""Called again and again during a wait; true cancels the wait."""


__all__ = ["GatherSeries", "Stop", "Team", "name_error", "never"]


MESSAGE_PART = 2 << 20
"""Bytes of a message in one value of the store, at most. Longer messages are split: the TCP store takes 8 MiB at
most."""


PRESSED_FROM = 4096
"""Bytes of what all ranks have said together, from which on it is compressed."""


MESSAGES_AT_ONCE = 64
"""Messages that are read in one request to the store."""


MAX_TOPICS = 4096
"""Topics whose turns are counted (see `Team.turn`), at most. The topic that was used longest ago is dropped first."""


def never() -> bool:
    """Never cancels a wait."""
    return False


class MessageWait:
    """One wait for messages.

    Args:
        rank, size: of the waiting rank and its team.
        timeout: seconds; None for those of ``timeouts``.
        stop: called again and again; true cancels the wait.
        alone: no other rank waits for the same messages.
    """

    def __init__(
        self,
        client: StoreClient,
        timeouts: Timeouts,
        rank: int,
        size: int,
        timeout: float | None,
        stop: Stop,
        *,
        alone: bool,
    ) -> None:
        self._client, self._rank, self._stop = client, rank, stop
        self._timeout = timeouts.timeout if timeout is None else timeout
        self._began = time.monotonic()
        self._monitor = HeartbeatMonitor(client, timeouts, size)
        # Where one rank waits for many, it polls alone. Where all ranks wait for one, the polls of all add up.
        asking = 1 if alone else size
        self._soonest, self._latest = max(SOONEST, asking / BUSY), max(0.05, asking / POLLS)

    def idle(self, keys: Mapping[int, str]) -> None:
        """Sleep until the next poll, unless there is a reason to give up.

        Args:
            keys: by rank, the key that this rank is to set.

        Raises:
            RankFailed: the timeout is over, a rank that is waited for is dead, or ``stop`` returned true.
        """
        waited = time.monotonic() - self._began
        if waited >= self._timeout:
            if lacking := self._lacking(keys):
                raise RankFailed(f"{format_ranks(lacking)} did not answer within {self._timeout:.3g} s", lacking)
            return
        dead = self._monitor.look(keys.keys())
        lacking = self._lacking({rank: keys[rank] for rank in dead})  # what it posted before it died counts
        if lacking:
            why = "; ".join(f"rank {rank} {dead[rank]}" for rank in lacking[:4])
            more = f"; so did {format_ranks(lacking[4:])}" if lacking[4:] else ""
            raise RankFailed(why + more, lacking)
        # The pause is a tenth of the time waited so far, so polling adds a tenth at most, and long waits poll rarely.
        self._pause(min(max(waited / 10, self._soonest), self._latest, self._timeout - waited))

    def _lacking(self, keys: Mapping[int, str]) -> list[int]:
        """The ranks whose key is not in the store; rising."""
        ranks = {key: rank for rank, key in keys.items()}
        return sorted(ranks[key] for key in self._client.missing(list(ranks)))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            if self._stop():
                raise RankFailed(f"rank {self._rank} gave up waiting for others, as it was told to stop", (self._rank,))
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))


class Team:
    """The ranks of one job, as one of them.

    Args:
        store: the key-value store of this team; no other team uses its keys.
        rank, size: the rank of this process, and the number of ranks.
        hosts: by rank, the number of its host.
        timeouts: how long ranks wait for one another.
        secret: the secret of the job; None: this team makes no connections of its own.

    Attributes:
        coordinator: whether this is the rank that commits for all.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        hosts: Sequence[int],
        *,
        timeouts: Timeouts | None = None,
        secret: JobSecret | None = None,
    ) -> None:
        if not 0 <= rank < size == len(hosts):
            raise ValueError(
                f"rank {rank} of {size}, hosts of {len(hosts)}: right are a rank below the size, and its host for each"
            )
        self.rank, self.size, self.hosts = rank, size, tuple(hosts)
        self.timeouts = timeouts or Timeouts()
        self.coordinator = rank == 0
        self._secret = secret
        self._client = StoreClient(store, self.timeouts.quiet(size), heartbeat_key(rank), self.timeouts.interval(size))
        weakref.finalize(self, self._client.end).atexit = False  # if the team is dropped without `close`
        self._long: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._gathered: dict[str, int] = {}
        self._series: dict[str, GatherSeries] = {}
        self._lock = threading.Lock()

    def on_silence(self, call: Callable[[str], None]) -> None:
        """Have a function called, once, when a rank is found dead: with words that say which."""
        self._client.when_silent = call

    @classmethod
    def of(
        cls,
        process_group: Any,
        run: str,
        *,
        timeouts: Timeouts | None = None,
        trust: str | SecretPlace = "auto",
    ) -> Self:
        """The team of a process group. Every rank of the group calls this, and waits for all.

        Args:
            process_group: of any backend; None for the default one.
            run: name of the run, part of the keys: teams of different runs do not share messages.
            trust: where the secret of the job is from, as the policy's ``ranks.trust``.

        Raises:
            RankFailed: not all ranks came in time, or the store is lost.
            PolicyError: there is no secret that all ranks have.
            ValueError: this process is not in the group.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        group = process_group if process_group is not None else dist.group.WORLD
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0 or group is None:
            raise ValueError("this process is not in the process group; only its members can save with it")
        found = timeouts or Timeouts()
        store, hosts = rendezvous(_get_process_group_store(group), run, rank, size, found)
        team = cls(store, rank, size, hosts, timeouts=found)
        try:
            team._secret = agree_on_secret(team, trust)
        except BaseException:
            team.close()
            raise
        return team

    @property
    def secret(self) -> JobSecret:
        """The secret of the job, from which the keys of all connections between its processes are derived.

        Raises:
            ValueError: this team was made without one.
        """
        if self._secret is None:
            raise ValueError("this team was made without a secret, so its ranks make no connections to each other")
        return self._secret

    @property
    def has_secret(self) -> bool:
        """Whether this team was made with one."""
        return self._secret is not None

    def ranks_sharing(self, shared: Literal["process", "host", "site"]) -> tuple[int, ...]:
        """The ranks that see the same objects of a tier as this one does, by the tier's traits; rising."""
        if shared == "site":
            return tuple(range(self.size))
        if shared == "process":
            return (self.rank,)
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    def leaders(self, shared: Literal["process", "host", "site"]) -> tuple[int, ...]:
        """The lowest rank of each set of ranks that see the same objects; rising."""
        if shared == "process":
            return tuple(range(self.size))
        lowest: dict[int, int] = {}
        for rank, host in enumerate(self.hosts):
            lowest.setdefault(0 if shared == "site" else host, rank)
        return tuple(lowest.values())

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        """Whether this is the lowest of the ranks that see the same objects."""
        return self.ranks_sharing(shared)[0] == self.rank

    # Messages

    def post(self, key: str, data: bytes) -> None:
        """Post a message of this rank under a key. It stays in the store until `forget`.

        Raises:
            RankFailed: the store is lost.
        """
        name, pieces = _key(self.rank, key), -(-len(data) // MESSAGE_PART)
        if pieces <= 1:
            self._client.set({name: b"\0" + data})
            return
        with self._lock:
            self._long[key] = max(pieces, self._long.get(key, 0))
        for i in range(pieces):
            self._client.set({f"{name}#{i}": data[i * MESSAGE_PART : (i + 1) * MESSAGE_PART]})
        head = {"bytes": len(data), "sum": checksum(data).hex()}
        self._client.set({name: b"\1" + json.dumps(head).encode()})

    def has_posted(self, rank: int, key: str) -> bool:
        """Whether a rank has posted a message; does not wait.

        Raises:
            RankFailed: the store is lost.
        """
        return self._client.has([_key(rank, key)])

    def announce(self, topic: str) -> None:
        """Tell all ranks that something has happened; whichever of them does it first.

        Raises:
            RankFailed: the store is lost.
        """
        self._client.set({f"announced/{topic}": b"1"})

    def announced(self, topic: str) -> bool:
        """Whether any rank has announced this; does not wait.

        Raises:
            RankFailed: the store is lost.
        """
        return self._client.has([f"announced/{topic}"])

    def forget(self, keys: Sequence[str]) -> None:
        """Delete messages of this rank that no rank needs any more.

        Raises:
            RankFailed: the store is lost.
        """
        for key in keys:
            with self._lock:
                pieces = self._long.pop(key, 0)
            name = _key(self.rank, key)
            self._client.delete([name, *(f"{name}#{i}" for i in range(pieces))])

    def receive(self, rank: int, key: str, *, timeout: float | None = None, stop: Stop = never) -> bytes:
        """Wait for a message of another rank.

        Args:
            timeout: seconds; by default those of the team's `Timeouts`.
            stop: called again and again; true cancels the wait.

        Raises:
            RankFailed: that rank is dead, has closed, or posted nothing in time. With this rank in ``ranks``:
                ``stop`` returned true. With no ranks: the store is lost.
            FormatError: the message is damaged.
        """
        return self.receive_all({rank: key}, timeout=timeout, stop=stop)[rank]

    def receive_all(
        self, keys: Mapping[int, str], *, timeout: float | None = None, stop: Stop = never
    ) -> dict[int, bytes]:
        """Wait for one message of each of these ranks. None may be deleted before all are received.

        Raises: as `receive`.
        """
        return dict(self.receive_each(keys, timeout=timeout, stop=stop))

    def receive_each(
        self, keys: Mapping[int, str], *, timeout: float | None = None, stop: Stop = never
    ) -> Iterator[tuple[int, bytes]]:
        """As `receive_all`, one by one in the order of ``keys``, so that not all messages are in memory at once.

        Raises: as `receive`.
        """
        left = list(keys)
        heads = self._heads if len(left) > 1 else self._head
        wait = MessageWait(self._client, self.timeouts, self.rank, self.size, timeout, stop, alone=len(keys) > 1)
        while left:
            names = [_key(rank, keys[rank]) for rank in left[:MESSAGES_AT_ONCE]]
            found = heads(names)
            if not found:
                wait.idle({rank: _key(rank, keys[rank]) for rank in left})
            for rank, name, head in zip(left, names, found, strict=False):
                yield rank, head[1:] if head[:1] == b"\0" else self._pieces(rank, name, head)
            left = left[len(found) :]

    def _head(self, names: Sequence[str]) -> list[bytes]:
        """The value under the only name, if there is one. Its rank may delete it at any moment."""
        found = self._client.look(names[0])
        return [] if found == NOTHING else [found]

    def _heads(self, names: Sequence[str]) -> list[bytes]:
        """The values under the first of these names, as many as are set. They stay until all are received."""
        if not self._client.has(names[:1]):
            return []
        count = len(names)
        while not self._client.has(names[:count]):
            count //= 2
        return self._client.get(names[:count])

    def _pieces(self, rank: int, name: str, head: bytes) -> bytes:
        try:
            said = json.loads(head[1:])
            nbytes = int(said["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"a message of rank {rank} is not one of ours: {head[:40]!r}") from error
        if not 0 <= nbytes <= MAX_RECORD + (1 << 20):
            raise FormatError(f"rank {rank} says a message of {nbytes} bytes; at most {MAX_RECORD} are right")
        data = b"".join(self._client.look(f"{name}#{i}") for i in range(-(-nbytes // MESSAGE_PART)))
        if checksum(data).hex() != said.get("sum"):
            raise FormatError(f"a message of rank {rank} is not what was said: its checksum differs")
        return data

    # Together

    def turn(self, topic: str) -> int:
        """Count one more turn of this rank at a topic, such as the commits of one version; returns the count.

        Every rank takes every turn, so the n-th turns of all ranks belong together. The count of a topic is dropped
        after `MAX_TOPICS` other topics, so this is only for topics that do not come back later.
        """
        with self._lock:
            count = self._turns[topic] = self._turns.pop(topic, 0) + 1
            if len(self._turns) > MAX_TOPICS:
                del self._turns[next(iter(self._turns))]
        return count

    def gather(self, topic: str, data: bytes, timeout: float | None = None, *, stop: Stop = never) -> list[bytes]:
        """All-gather: what every rank gives under a topic, by rank. The n-th calls of all ranks belong together.

        The coordinator collects the data of all ranks and posts them as one message.

        Raises:
            RankFailed: as `receive`; on every rank.
        """
        with self._lock:  # these counts are never dropped: a rank that starts again at 1 would receive old messages
            count = self._gathered[topic] = self._gathered.get(topic, 0) + 1
        found = self._gather(f"{topic}/{count}", data, timeout, stop)
        if self.coordinator:  # all ranks are in this call, so all have received the last result
            self.forget([_result_key(f"{topic}/{count - 1}")])
        return found

    def _gather(self, name: str, data: bytes, timeout: float | None = None, stop: Stop = never) -> list[bytes]:
        """The all-gather with this name. The coordinator's result stays in the store."""
        mine, result = _given_key(name), _result_key(name)
        if not self.coordinator:
            self.post(mine, data)
            longer = self.timeouts.decision if timeout is None else 2 * timeout + self.timeouts.silence
            found = self.receive(0, result, timeout=longer, stop=stop)
            self.forget([mine])
            return unpack_answers(found)
        try:
            others = self.receive_all({r: mine for r in range(1, self.size)}, timeout=timeout, stop=stop)
            every = [data, *(others[rank] for rank in range(1, self.size))]
            self.post(result, pack_answers(every))
        except BaseException as error:  # also of a damaged message, or an interrupt: the others wait for an answer
            self.post(result, _failed(error))
            raise
        return every

    def series(self, topic: str) -> GatherSeries:
        """Begin an operation of all ranks that consists of several all-gathers. The n-th of a topic on all ranks
        belong together."""
        with self._lock:  # as for `gather`, never dropped
            before = self._series.get(topic)
            number, left = (1, []) if before is None else (before.number + 1, before.left)
            found = self._series[topic] = GatherSeries(self, topic, number, left)
        return found

    def has_dead(self) -> bool:
        """Whether the store is lost, or a rank that was found dead has given no sign of life since."""
        return has_dead(self._client)

    def life_check(self) -> LifeCheck:
        """Begin to find out whether all other ranks live now, or have closed."""
        return LifeCheck(self._client, self.timeouts, self.rank, self.size)

    def close(self) -> None:
        """Leave the team. Nothing is posted or received afterwards."""
        self._client.close()

    def break_off(self) -> None:
        """As `close`, of a rank whose part in what is under way another process takes over."""
        self._client.close(BROKEN_OFF)

    def __repr__(self) -> str:
        return f"<Team rank {self.rank} of {self.size}, {len(set(self.hosts))} hosts>"


class GatherSeries:
    """The all-gathers of one operation of all ranks, such as a restore, numbered in their order.

    By its number a rank that leaves the operation early knows the all-gather in which the others wait for it, and
    fails that; and it is in step with them again when the next operation begins.

    Args:
        team: the ranks.
        topic, number: which series it is; see `Team.series`.
        left: what the series before it has left in the store.

    Attributes:
        number: as given.
        left: keys of messages that this rank has yet to delete.
    """

    def __init__(self, team: Team, topic: str, number: int, left: Sequence[str]) -> None:
        self._team, self._name = team, f"{topic}/{number}"
        self.number, self.left = number, list(left)
        self._at = (0, False)
        """Number of the last all-gather, and whether it is under way. One value: an interrupt comes between two."""

    def gather(self, data: bytes) -> list[bytes]:
        """As `Team.gather`."""
        count, before = self._at[0] + 1, self.left
        self._at = count, True
        self.left = [*before, self._posted(count)]
        found = self._team._gather(f"{self._name}/{count}", data)
        self._at = count, False
        self._team.forget(before)  # all ranks are in this call, so all have received what was posted before it
        self.left = self.left[len(before) :] if self._team.coordinator else []
        return found

    def miss(self, data: bytes, error: BaseException) -> None:
        """Fail the next all-gather, without waiting for the others.

        Args:
            data: by which the others know of it, if this is not the coordinator.
            error: which they get from the coordinator.
        """
        count = self._at[0] + 1
        self._at = count, False
        self._fail(count, data, error)

    def leave(self, data: bytes, error: BaseException) -> None:
        """Leave the operation: fail the all-gather that is under way, and the next one.

        Of one that is under way this rank does not know whether it is over for the others.

        Args: as those of `miss`.
        """
        count, under_way = self._at
        if under_way:
            self._fail(count, data, error)
        self._fail(count + 1, data, error)

    def _fail(self, count: int, data: bytes, error: BaseException) -> None:
        key = self._posted(count)
        self.left = [*self.left, key]
        try:
            self._team.post(key, _failed(error) if self._team.coordinator else data)
        except RankFailed as lost:
            log.debug("the others could not be told of %r: %s", error, lost)

    def _posted(self, count: int) -> str:
        """What this rank posts in an all-gather."""
        key = _result_key if self._team.coordinator else _given_key
        return key(f"{self._name}/{count}")


def _key(rank: int, key: str) -> str:
    return f"said/{rank}/{key}"


def _given_key(name: str) -> str:
    """Under which a rank posts what it gives to an all-gather."""
    return f"gather/{name}"


def _result_key(name: str) -> str:
    """Under which the coordinator posts what all have given."""
    return f"gathered/{name}"


def pack_answers(parts: Sequence[bytes]) -> bytes:
    """What all ranks have given to an all-gather, as one message."""
    head = json.dumps([len(part) for part in parts]).encode()
    body = b"".join(parts)
    # All ranks receive it, and mostly they have said much the same.
    pressed = zlib.compress(body, 1) if len(body) > PRESSED_FROM else body
    kind = b"\0" if len(pressed) >= len(body) else b"\2"
    return kind + len(head).to_bytes(4, "little") + head + (body if kind == b"\0" else pressed)


def name_error(error: BaseException) -> str:
    """An error in words for another rank: its class and its text, if it has one."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _failed(error: BaseException) -> bytes:
    # One that is none of ours has happened on rank 0, and may say nothing without its kind.
    text, ranks = (str(error), ()) if isinstance(error, TierstateError) else (name_error(error), (0,))
    return b"\1" + json.dumps({"text": text[:4096], "ranks": getattr(error, "ranks", ranks)}).encode()


def unpack_answers(data: bytes) -> list[bytes]:
    """What all ranks have given, by rank.

    Raises:
        RankFailed: the all-gather has failed.
        FormatError: the message was changed.
    """
    if data[:1] == b"\1":
        text, ranks = _failure(data[1:])
        raise RankFailed(f"rank 0 could not gather what all have: {text}", ranks)
    at = 5 + int.from_bytes(data[1:5], "little")
    lengths = _json(data[5:at])
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise FormatError("what all ranks have said is of no length")
    body, at, found = data[at:] if data[:1] == b"\0" else _unpressed(data[at:], sum(lengths)), 0, []
    if len(body) != sum(lengths):
        raise FormatError(f"what all ranks have said is {len(body)} bytes long, of {sum(lengths)}")
    for length in lengths:
        found.append(body[at : at + length])
        at += length
    return found


def _failure(data: bytes) -> tuple[str, list[int]]:
    """The text of an error, and the ranks that it names."""
    said = _json(data)
    ranks = said.get("ranks") if isinstance(said, dict) else None
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise FormatError("why not all ranks could be heard is told by something else than this program")
    return str(said.get("text")), ranks


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"what all ranks have said cannot be read: {error}") from error


def _unpressed(data: bytes, nbytes: int) -> bytes:
    if nbytes > MAX_RECORD:
        raise FormatError(f"what all ranks have said takes {nbytes} bytes; at most {MAX_RECORD} are right")
    try:
        return zlib.decompressobj().decompress(data, nbytes + 1)
    except zlib.error as error:
        raise FormatError(f"what all ranks have said cannot be read: {error}") from error
