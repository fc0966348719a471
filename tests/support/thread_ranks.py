"""Threads as the ranks of a job, each with its own Checkpointer, on hosts with a folder each and a folder for all."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support import checkpointer_worlds as worlds

import tierstate as ts
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.format.layout import ABSENT, Layout
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers.connections.secret import JobSecret

PATIENCE = 120.0
QUICK = Timeouts(timeout=30.0, silence=5.0)


def as_ranks(hosts: Sequence[int], function: Callable[[Team], Any], *, timeouts: Timeouts = QUICK) -> list[Any]:
    """Call a function in a thread for each rank; what each returned, or raised."""
    store, found, secret = dist.HashStore(), [None] * len(hosts), JobSecret.random()

    def run(rank: int) -> None:
        try:
            team = Team(store, rank, len(hosts), hosts, timeouts=timeouts, secret=secret)
            try:
                found[rank] = function(team)
            finally:
                team.close()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    return found


class Cluster:
    """Hosts with a folder each, tier ``local``, and one for all of them, tier ``site``.

    Args:
        place: where they lie.
        hosts: number of each rank's host.
        site: more keys of the site's tier; None for no such tier.
        keys: more of the policy.
    """

    def __init__(self, place: Path, hosts: Sequence[int], site: dict[str, Any] | None = None, **keys: Any) -> None:
        self.place, self.hosts, self.site, self.keys = place, list(hosts), site, keys

    def policy(self, host: int) -> ts.Policy:
        """That of the ranks of one host."""
        tiers = {"local": worlds.tier("nvme", self.place / f"host-{host}")}
        if self.site is not None:
            tiers["site"] = worlds.tier("lustre", self.place, **self.site)
        return worlds.policy(tiers, **self.keys)

    def save(self, *states: dict[str, Any]) -> None:
        """Save these with the steps 1, 2, ... so that every host and the site have all of them whole."""
        first = self.hosts[0]
        with ts.Checkpointer(self.policy(first), "run") as ckpt:
            for step, state in enumerate(states, 1):
                ckpt.save(state, step)
        for host in set(self.hosts) - {first}:
            shutil.copytree(self.folder(first), self.folder(host))

    def folder(self, host: int) -> Path:
        """What one host has."""
        return self.place / f"host-{host}"

    def log(self, host: int | None) -> Log:
        """The log of a host's tier, or of the site's."""
        name = "site" if host is None else "local"
        return Log(worlds.opened(self.policy(self.hosts[0] if host is None else host), name), "run")

    def keep(self, host: int | None, seq: int, rows: np.ndarray) -> None:
        """Let a tier's record of a version have these chunks only."""
        log = self.log(host)
        record = log.read(seq)
        layout = record.layout
        kept = np.where(rows & layout.present, layout.object, ABSENT).astype("<u4")
        columns = (kept, layout.offset, layout.stored, layout.codec)
        log.forget(seq, log.generations()[seq])
        log.commit(
            Record(
                record.version,
                Layout(layout.objects, layout.object_sizes, layout.codecs, *columns),
                {"id": commit_id()},
            )
        )

    def spoil(self, host: int | None, seq: int, rows: Sequence[int]) -> None:
        """Flip a byte of these chunks where they lie in a tier."""
        log = self.log(host)
        layout = log.read(seq).layout
        root = self.place / "lustre" if host is None else self.folder(host) / "nvme"
        for row in rows:
            where = layout.place(row)
            assert where is not None
            file = root / where.object
            data = bytearray(file.read_bytes())
            data[where.offset] ^= 1
            file.write_bytes(data)

    def together(self, function: Callable[[ts.Checkpointer, int], Any], **how: Any) -> list[Any]:
        """Call a function with the Checkpointer and the number of each rank; what each returned, or raised."""

        def run(team: Team) -> Any:
            with ts.Checkpointer(self.policy(self.hosts[team.rank]), "run", team) as ckpt:
                return function(ckpt, team.rank)

        return as_ranks(self.hosts, run, **how)


def bytes_read(ckpt: ts.Checkpointer, tier: str) -> int:
    """What this Checkpointer has read there, records included."""
    return sum(s.nbytes for name, s in ckpt.stats().tiers[tier].operations.items() if name == "read")


def restore_in_gang(place: str, hosts: str, site: str, size: str, how: str) -> None:
    """One rank of a gang: restore, and print how that went.

    Args:
        place, hosts, site: of the `Cluster`, as JSON but for the place.
        size: bytes of the state.
        how: ``load`` or ``restore``.
    """
    dist.init_process_group("gloo")
    cluster = Cluster(Path(place), json.loads(hosts), json.loads(site), chunk="256KiB", arena={"size": "4MiB"})
    rank = dist.get_rank()
    team = Team.of(None, "run", timeouts=Timeouts(timeout=60.0, silence=2.0))
    with ts.Checkpointer(cluster.policy(cluster.hosts[rank]), "run", team) as ckpt:
        into = {"w": torch.zeros(int(size) // 4)}
        print("begin", flush=True)
        began = time.monotonic()
        try:
            got = ckpt.load() if how == "load" else ckpt.restore(into)
        except ts.TierstateError as error:
            print("failed", json.dumps([type(error).__name__, getattr(error, "ranks", None), str(error)]), flush=True)
        else:
            seconds = time.monotonic() - began
            right = torch.equal(got["w"], _ramp(int(size)))
            read = {name: bytes_read(ckpt, name) for name in ckpt.stats().tiers}
            print("restored", json.dumps([right, seconds, read]), flush=True)
    team.close()


def save_for_gang(cluster: Cluster, nbytes: int) -> None:
    """What `restore_in_gang` restores."""
    cluster.save({"w": _ramp(nbytes)})


def _ramp(nbytes: int) -> torch.Tensor:
    """Of which no two chunks are the same."""
    return torch.arange(nbytes // 4, dtype=torch.float32)
