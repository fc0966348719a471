"""A team: the ranks of one job that save together, and how they speak to one another.

They speak through the job's own store (`torch.distributed.Store`), never by collectives, which belong to the training.
No wait is without a bound: each looks at a deadline, at whoever may end it, and at the heartbeat of those it is for.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import FormatError, RankFailed
from tierstate.manifest.record import MAX_RECORD

from .heartbeat import Terms, beat_of
from .line import NOTHING, Line, Store
from .meeting import meet
from .waiting import Stop, Wait, never

__all__ = ["Stop", "Team", "never"]

PIECE = 2 << 20
"""Bytes of a message that go into one value of the store; the TCP store takes no more than 8 MiB."""

AT_ONCE = 64
"""Messages that are read in one request."""

TOPICS = 4096
"""Topics that come but a few times, as the commits of one version, of which it is known how many turns there were."""


class Team:
    """The ranks of one job.

    Args:
        store: keys of this team alone; every rank has one that leads to the same.
        rank, size: of this process, and how many there are.
        hosts: number of each rank's host.
        terms: how long ranks wait for one another.

    Attributes:
        coordinator: whether this is the rank that commits for all.
    """

    def __init__(self, store: Store, rank: int, size: int, hosts: Sequence[int], *, terms: Terms | None = None) -> None:
        if not 0 <= rank < size == len(hosts):
            raise ValueError(
                f"rank {rank} of {size}, hosts of {len(hosts)}: right are a rank below the size, and its host for each"
            )
        self.rank, self.size, self.hosts = rank, size, tuple(hosts)
        self.terms = terms or Terms()
        self.coordinator = rank == 0
        self._line = Line(store, self.terms.quiet(size), beat_of(rank), self.terms.interval(size))
        weakref.finalize(self, self._line.end).atexit = False  # for whoever drops a team without closing it
        self._long: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._gathered: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, process_group: Any, run: str, *, terms: Terms | None = None) -> Self:
        """The team of a process group; every rank of it calls this, and waits for the others.

        Args:
            process_group: of any backend; None: the default one.
            run: teams of other runs have other keys.

        Raises:
            RankFailed: not all came in time, or the store is lost.
            ValueError: this process is not in the group.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        group = process_group if process_group is not None else dist.group.WORLD
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0 or group is None:
            raise ValueError("this process is not in the process group; only its members can save with it")
        found = terms or Terms()
        store, hosts = meet(_get_process_group_store(group), f"tierstate/{run}", rank, size, found)
        return cls(store, rank, size, hosts, terms=found)

    def sight(self, shared: Literal["process", "host", "site"]) -> tuple[int, ...]:
        """The ranks that see the same objects of a tier as this one does, by the tier's traits; rising."""
        if shared == "site":
            return tuple(range(self.size))
        if shared == "process":
            return (self.rank,)
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    def leaders(self, shared: Literal["process", "host", "site"]) -> tuple[int, ...]:
        """The lowest rank of each sight; rising."""
        if shared == "process":
            return tuple(range(self.size))
        lowest: dict[int, int] = {}
        for rank, host in enumerate(self.hosts):
            lowest.setdefault(0 if shared == "site" else host, rank)
        return tuple(lowest.values())

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        """Whether this is the lowest of the ranks that see the same objects."""
        return self.sight(shared)[0] == self.rank

    # Messages

    def say(self, key: str, data: bytes) -> None:
        """Leave a message of this rank under a key, until it is forgotten.

        Raises:
            RankFailed: the store is lost.
        """
        name, pieces = _key(self.rank, key), -(-len(data) // PIECE)
        if pieces <= 1:
            self._line.set({name: b"\0" + data})
            return
        with self._lock:
            self._long[key] = max(pieces, self._long.get(key, 0))
        for i in range(pieces):
            self._line.set({f"{name}#{i}": data[i * PIECE : (i + 1) * PIECE]})
        head = {"bytes": len(data), "sum": checksum(data).hex()}
        self._line.set({name: b"\1" + json.dumps(head).encode()})

    def has_said(self, rank: int, key: str) -> bool:
        """Whether a rank's message is there, without waiting.

        Raises:
            RankFailed: the store is lost.
        """
        return self._line.has([_key(rank, key)])

    def forget(self, keys: Sequence[str]) -> None:
        """Remove messages of this rank, which nobody is to hear any more.

        Raises:
            RankFailed: the store is lost.
        """
        for key in keys:
            with self._lock:
                pieces = self._long.pop(key, 0)
            name = _key(self.rank, key)
            self._line.delete([name, *(f"{name}#{i}" for i in range(pieces))])

    def hear(self, rank: int, key: str, *, timeout: float | None = None, stop: Stop = never) -> bytes:
        """Wait for a message of another rank.

        Args:
            timeout: seconds; by default those of the terms.
            stop: asked all the time: whether to give up.

        Raises:
            RankFailed: that rank is dead, has closed, or said nothing in time; this one: ``stop`` said
                so; without ranks: the store is lost.
            FormatError: what was heard is not what was said.
        """
        return self.hear_all({rank: key}, timeout=timeout, stop=stop)[rank]

    def hear_all(
        self, keys: Mapping[int, str], *, timeout: float | None = None, stop: Stop = never
    ) -> dict[int, bytes]:
        """Wait for a message of each of some ranks, none of which may be forgotten before. Raises: as `hear`."""
        return dict(self.hearing(keys, timeout=timeout, stop=stop))

    def hearing(
        self, keys: Mapping[int, str], *, timeout: float | None = None, stop: Stop = never
    ) -> Iterator[tuple[int, bytes]]:
        """The same, one by one in the order of ``keys``, so that not all lie in memory at once.

        Where there are several, none of them may be forgotten before all were heard. Raises: as `hear`.
        """
        left = list(keys)
        heads = self._heads if len(left) > 1 else self._head
        wait = Wait(self._line, self.terms, self.rank, self.size, timeout, stop, alone=len(keys) > 1)
        while left:
            names = [_key(rank, keys[rank]) for rank in left[:AT_ONCE]]
            found = heads(names)
            if not found:
                wait.idle({rank: _key(rank, keys[rank]) for rank in left})
            for rank, name, head in zip(left, names, found, strict=False):
                yield rank, head[1:] if head[:1] == b"\0" else self._pieces(rank, name, head)
            left = left[len(found) :]

    def _head(self, names: Sequence[str]) -> list[bytes]:
        """What is there under the only name. It may be forgotten at any moment."""
        found = self._line.look(names[0])
        return [] if found == NOTHING else [found]

    def _heads(self, names: Sequence[str]) -> list[bytes]:
        """What is there under the first of these names. It stays until all was heard."""
        if not self._line.has(names[:1]):
            return []
        count = len(names)
        while not self._line.has(names[:count]):
            count //= 2
        return self._line.get(names[:count])

    def _pieces(self, rank: int, name: str, head: bytes) -> bytes:
        try:
            said = json.loads(head[1:])
            nbytes = int(said["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"a message of rank {rank} is not one of ours: {head[:40]!r}") from error
        if not 0 <= nbytes <= MAX_RECORD + (1 << 20):
            raise FormatError(f"rank {rank} says a message of {nbytes} bytes; at most {MAX_RECORD} are right")
        data = b"".join(self._line.look(f"{name}#{i}") for i in range(-(-nbytes // PIECE)))
        if checksum(data).hex() != said.get("sum"):
            raise FormatError(f"a message of rank {rank} is not what was said: its checksum differs")
        return data

    # Together

    def turn(self, topic: str) -> int:
        """How many times this rank has had a turn at a topic, this one counted; those of all ranks belong together.

        It is forgotten once there were turns at many others: for topics that do not come again.
        """
        with self._lock:
            count = self._turns[topic] = self._turns.pop(topic, 0) + 1
            if len(self._turns) > TOPICS:
                del self._turns[next(iter(self._turns))]
        return count

    def gather(self, topic: str, data: bytes, timeout: float | None = None, *, stop: Stop = never) -> list[bytes]:
        """What every rank gives under a topic, by rank; waits for all. The n-th calls of all ranks belong together.

        Raises:
            RankFailed: as `hear`; on every rank.
        """
        with self._lock:  # topics are few, and never forgotten: who counted anew would hear what was said long ago
            count = self._gathered[topic] = self._gathered.get(topic, 0) + 1
        mine, result = f"gather/{topic}/{count}", f"gathered/{topic}/{count}"
        if not self.coordinator:
            self.say(mine, data)
            longer = self.terms.verdict if timeout is None else 2 * timeout + self.terms.silence
            found = self.hear(0, result, timeout=longer, stop=stop)
            self.forget([mine])
            return _unpack(found)
        try:
            others = self.hear_all({r: mine for r in range(1, self.size)}, timeout=timeout, stop=stop)
        except RankFailed as error:
            self.say(result, _failed(error))
            raise
        every = [data, *(others[rank] for rank in range(1, self.size))]
        self.say(result, _pack(every))
        self.forget([f"gathered/{topic}/{count - 1}"])  # since all have come again, all have heard it
        return every

    def close(self) -> None:
        """Say that this rank leaves. Nothing is said or heard afterwards."""
        self._line.close()

    def __repr__(self) -> str:
        return f"<Team rank {self.rank} of {self.size}, {len(set(self.hosts))} hosts>"


def _key(rank: int, key: str) -> str:
    return f"said/{rank}/{key}"


def _pack(parts: Sequence[bytes]) -> bytes:
    head = json.dumps([len(part) for part in parts]).encode()
    return b"\0" + len(head).to_bytes(4, "little") + head + b"".join(parts)


def _failed(error: RankFailed) -> bytes:
    return b"\1" + json.dumps({"text": str(error)[:4096], "ranks": error.ranks}).encode()


def _unpack(data: bytes) -> list[bytes]:
    if data[:1] == b"\1":
        said = json.loads(data[1:])
        raise RankFailed(f"rank 0 could not gather what all have: {said['text']}", said["ranks"])
    at = 5 + int.from_bytes(data[1:5], "little")
    found = []
    for length in json.loads(data[5:at]):
        found.append(data[at : at + length])
        at += length
    return found
