"""Threads as the ranks of a job: a team over one store, tiers seen as ranks of hosts see them, parts to commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from tierstate.engine.ranks.save.commit import GroupCommit
from tierstate.engine.ranks.save.leader import MergedVersions
from tierstate.engine.ranks.save.relay import VersionRelay
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.boxes import Box
from tierstate.manifest.chunk import as_buffer, empty_buffer, to_bytes
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import CommitUnknown, TierstateError, TierUnavailable
from tierstate.manifest.format.layout import ChunkPlace, Layout
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, ShardRow, Version
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.base import Range, Tier, Traits
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.memory.host import Memory

QUICK = Timeouts(timeout=20.0, silence=0.5)
CALM = Timeouts(timeout=20.0, silence=10.0)
"""Where no rank dies: a busy machine keeps threads from giving a sign of life for a while."""
PATIENCE = 60.0
Shared = Literal["process", "host", "site"]


def tcp() -> Any:
    """A store of torch that ranks reach over TCP, as in a job."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def keys_in(store: Any) -> int:
    """How many keys a store has."""
    return int(store.num_keys())


class Seen(Memory):
    """Memory that is seen as a test says, and whose puts and deletes fail as it says.

    Attributes:
        requests: what was asked of it: put, read or delete, and the key.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.name = shared
        self._shared = shared
        self.failing: Callable[[str], BaseException | None] = lambda key: None
        self.staying: Callable[[str], BaseException | None] = lambda key: None
        self.requests: list[tuple[str, str]] = []

    @property
    def traits(self) -> Traits:
        return replace(super().traits, shared=self._shared)

    def put(self, key: str, data: Any) -> None:
        self.requests.append(("put", key))
        if (error := self.failing(key)) is not None:
            raise error
        super().put(key, data)

    def read(self, key: str, ranges: Any) -> None:
        self.requests.append(("read", key))
        super().read(key, ranges)

    def delete(self, key: str) -> None:
        self.requests.append(("delete", key))
        if (error := self.staying(key)) is not None:
            raise error
        super().delete(key)


class Mortal:
    """A store that stops to answer one rank after so many calls, as if that rank had died there."""

    def __init__(self, store: Any, left: int | None = None) -> None:
        self.store, self.left = store, left
        self.calls = 0
        self.over = threading.Event()

    def clone(self) -> Mortal:
        return self

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            if self.left is not None and self.calls > self.left:
                self.over.wait()
                raise RuntimeError("the test is over")
            return call(*args)

        return counted


def together(
    size: int,
    function: Callable[[Team], Any],
    *,
    hosts: Sequence[int] | None = None,
    timeouts: Timeouts | None = None,
    store: Any = None,
    cut: Mapping[int, int] | None = None,
) -> list[Any]:
    """Call a function in a thread for each rank; what each returned, or raised.

    Args:
        timeouts: by default such as are met on a busy machine, unless ranks are cut.
        cut: for some ranks, after how many calls the store answers them no more.
    """
    secret = JobSecret.random()
    kept = timeouts or (QUICK if cut else CALM)
    shared = store if store is not None else dist.HashStore()
    mortals = {rank: Mortal(shared, left) for rank, left in (cut or {}).items()}
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        hosts_of = hosts or [0] * size
        team = Team(mortals.get(rank, shared), rank, size, hosts_of, timeouts=kept, secret=secret)
        try:
            found[rank] = function(team)
        except BaseException as error:
            found[rank] = error
        team.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    hanging = [thread.name for thread in threads if thread.is_alive()]
    for mortal in mortals.values():
        mortal.over.set()
    assert not hanging, f"{hanging} hang"
    return found


class World:
    """Tiers of one kind, as many as the ranks see different ones; and what each rank puts there.

    Args:
        shared: who sees the same.
        hosts: number of each rank's host.
        relay: whether leaders may pass versions on.
    """

    def __init__(self, shared: Shared, hosts: Sequence[int], relay: bool = False) -> None:
        self.shared, self.hosts, self.size = shared, list(hosts), len(hosts)
        places = {"site": [0] * self.size, "host": self.hosts, "process": list(range(self.size))}[shared]
        self.tiers = {place: Seen(shared) for place in places}
        self.tier_of = [self.tiers[place] for place in places]
        self.leaders = sorted(places.index(place) for place in self.tiers)
        self.merged = [MergedVersions() for _ in hosts]
        self.relay = relay

    def group_commit(self, team: Team) -> GroupCommit:
        """One rank's."""
        tier, merged = self.tier_of[team.rank], self.merged[team.rank]
        if self.relay:
            merged.relay = VersionRelay(team, merged.wait_for)
        return GroupCommit(team, "there", tier, Log(tier, "run"), merged)

    def close(self) -> None:
        """End the threads that pass versions on."""
        for merged in self.merged:
            if merged.relay is not None:
                merged.relay.close()

    def part(self, rank: int, seq: int) -> Record:
        """A rank's part, with its bytes in its tier."""
        return part(self.tier_of[rank], rank, self.size, seq)

    def records(self, seq: int) -> list[Record]:
        """Of one version, wherever there is one."""
        return [Log(tier, "run").read(seq) for tier in self.tiers.values() if seq in Log(tier, "run").seqs()]

    def is_whole(self, seq: int) -> bool:
        """Whether records of one version have all its chunks, and each is what it should be."""
        records = [(t, Log(t, "run").read(seq)) for t in self.tiers.values() if seq in Log(t, "run").seqs()]
        if not records or len({record.version.id for _, record in records}) != 1:
            return False
        version = records[0][1].version
        return version.nbytes == 40 * self.size + 16 and all(
            any(sound(tier, record, row) for tier, record in records) for row in range(len(version.digests))
        )

    def leftovers(self) -> list[str]:
        """Parts that lie in tiers."""
        return [key for tier in self.tiers.values() for key in tier.list("packs/") if "-part-" in key]


def part(tier: Tier, rank: int, size: int, seq: int) -> Record:
    """A rank's part of a version: 40 bytes of one leaf, and a copy of another one that all have."""
    leaves = [Leaf(("w",), Spec("tensor", "uint8", 1, (40 * size,))), Leaf(("all",), Spec("tensor", "uint8", 1, (16,)))]
    own = np.random.default_rng([seq, rank]).bytes(40) + np.random.default_rng(seq).bytes(16)
    chunks = [own[0:16], own[16:32], own[32:40], own[40:56]]
    digests = np.frombuffer(b"".join(map(checksum, chunks)), "<u8").reshape(-1, 2)
    shards = [ShardRow(0, rank, Box((40 * rank,), (40,))), ShardRow(1, rank, Box.whole((16,)))]
    head = Head("run", seq, seq * 10, 1000.0 + rank, chunk=16, world=size, metadata={"rank": rank})
    key = f"packs/run/{seq:012d}-{rank}-0-{commit_id()[:12]}"
    tier.put(key, as_buffer(own))
    places = [ChunkPlace(key, at, len(chunk), "raw") for at, chunk in zip((0, 16, 32, 40), chunks, strict=True)]
    return Record(Version.build(head, leaves, shards, digests), Layout.build(places, {key: 56}), {"id": commit_id()})


def sound(tier: Tier, record: Record, row: int) -> bool:
    """Whether a chunk lies where its record says."""
    place = record.layout.place(row)
    if place is None:
        return False
    out = empty_buffer(place.stored)
    tier.read(place.object, [Range(place.offset, out)])
    return checksum(to_bytes(out)) == record.version.digests[row].tobytes()


def check_commit(world: World, found: list[Any], seq: int) -> None:
    """What holds of every commit, whatever happened."""
    assert all(isinstance(one, (Record, TierstateError)) for one in found), found
    committed = [rank for rank, one in enumerate(found) if isinstance(one, Record)]
    unknown = [rank for rank, one in enumerate(found) if isinstance(one, CommitUnknown)]
    if committed:
        assert not set(range(world.size)) - {*committed, *unknown, 0}, found
        assert world.is_whole(seq)
        assert len({r.version.id for r in world.records(seq)}) == 1
    elif not unknown:
        assert not world.is_whole(seq), found
        if not any(isinstance(one, TierUnavailable) for one in found):
            assert not world.records(seq)
    if not unknown:
        assert world.leftovers() == []


def each(world: World, rank: Callable[[Team, GroupCommit], Any], **more: Any) -> list[Any]:
    """Call this in every rank, with its group_commit."""
    return together(world.size, lambda team: rank(team, world.group_commit(team)), hosts=world.hosts, **more)
