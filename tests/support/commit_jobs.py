"""A job whose ranks commit one version after the other; each rank can be stopped at any point of a commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.thread_teams import part

from tierstate.engine.ranks.save import commit as commits
from tierstate.engine.ranks.save.commit import GroupCommit
from tierstate.engine.ranks.save.leader import MergedVersions
from tierstate.engine.ranks.save.relay import VersionRelay
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import RankFailed, TierstateError
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.posix.lustre import Lustre

HELD = 2
"""The number of the version during whose commit one rank is held."""


class Holding:
    """Prints where this rank is, and stays there, at the point that was asked for."""

    def __init__(self, point: str) -> None:
        self.point, self.seq = point, 0

    def at(self, point: str) -> None:
        """This rank is at a point."""
        if (point, self.seq) == (self.point, HELD):
            print("held", flush=True)
            time.sleep(600)


class HeldTeam(Team):
    """Held before and after each thing that it says."""

    holding = Holding("")

    def post(self, key: str, data: bytes) -> None:
        what = key.rpartition("/")[2]
        self.holding.at(f"before {what}")
        super().post(key, data)
        self.holding.at(f"after {what}")


class HeldMerge(MergedVersions):
    """Held before and after the merge."""

    def __init__(self, holding: Holding) -> None:
        super().__init__()
        self._holding = holding

    def merge(self, seq: int, parts: Any) -> Any:
        self._holding.at("before merge")
        found = super().merge(seq, parts)
        self._holding.at("after merge")
        return found


class HeldLog(Log):
    """Held before and after the record is there."""

    def __init__(self, tier: Tier, holding: Holding) -> None:
        super().__init__(tier, "run")
        self._holding = holding

    def commit(self, record: Record, generation: int = 0) -> None:
        self._holding.at("before record")
        super().commit(record, generation)
        self._holding.at("after record")


def tier_of(shared: str, folder: Path, rank: int) -> Tier:
    """The tier that a rank sees."""
    found: Tier = Nvme(path=folder / f"host-{rank}") if shared == "host" else Lustre(path=folder / "site")
    found.name = shared
    return found


class Unreached(VersionRelay):
    """No other rank can connect to it, which each commit finds out anew."""

    def offer(self, part: bytes) -> Mapping[str, Any] | None:
        self.reachable = True
        held = super().offer(part)
        return None if held is None else {**held, "at": "127.0.0.1 9 of/nobody"}


def ranks(folder: str, shared: str, point: str, saves: str, silence: str, port: str = "") -> None:
    """One rank. It says what became of each save, and with which error.

    Args:
        shared: who sees the same tier, host or site; or what becomes of parts that are too long for the store, in a
            tier that all see: ``long``, or ``unreached``: they cannot be fetched.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False) if port else None
    dist.init_process_group("gloo", store=store, rank=rank if port else -1, world_size=size if port else -1)
    group = dist.new_group(range(size))
    victim, _, point = point.partition(":")
    holding = Holding(point if victim == str(rank) else "")
    team = HeldTeam.of(group, "run", timeouts=Timeouts(120.0, float(silence)))
    team.holding = holding
    tier, merged = tier_of(shared, Path(folder), rank), HeldMerge(holding)
    if shared in ("long", "unreached"):
        commits.PARTS_IN_STORE = 0
        merged.relay = (VersionRelay if shared == "long" else Unreached)(team, merged.wait_for)
    group_commit = GroupCommit(team, shared, tier, HeldLog(tier, holding), merged)
    for seq in range(1, int(saves) + 1):
        holding.seq = seq
        if seq == HELD:
            print("began", flush=True)
        tell(seq, lambda seq=seq: group_commit.commit(part(tier, rank, size, seq)))  # type: ignore[misc]
    if merged.relay is not None:
        merged.relay.close()
    team.close()
    print("closed", flush=True)
    if point:
        os._exit(0)  # a process group of which ranks are dead does not end well
    dist.destroy_process_group()


def tell(seq: int, commit: Callable[[], Record]) -> None:
    """Say what became of a commit."""
    try:
        record = commit()
    except TierstateError as error:
        name = "RankFailed" if isinstance(error, RankFailed) else type(error).__name__
        print(f"{seq}: {name} {getattr(error, 'ranks', ())} {error}", flush=True)
    else:
        print(f"{seq}: committed {record.version.id if _is_whole(record.version) else 'part'}", flush=True)


def _is_whole(version: Version) -> bool:
    return len(version.boxes) > 2
