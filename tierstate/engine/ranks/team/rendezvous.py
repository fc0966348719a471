"""Rendezvous: the ranks of a group find each other in a store that may hold keys of other teams and earlier jobs.

The coordinator (rank 0) writes a new unique name under the key ``call``. The other ranks answer with a key under that
name, and watch ``call`` in case the name changes. All start once every rank has answered. While no rendezvous is open
``call`` is ``-``, so the open call of a job that died is not taken for a finished one.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

from tierstate.manifest.errors import RankFailed, format_ranks
from tierstate.manifest.history.leases import this_process

from .heartbeat import Timeouts, heartbeat_key
from .store import CLOSED, NOTHING, Store, StoreClient

NO_CALL = b"-"
"""The value of the key ``call`` while no rendezvous is open."""


PAUSE = 0.002
"""Seconds between two looks into the store, at least."""


def rendezvous(store: Store, prefix: str, rank: int, size: int, timeouts: Timeouts) -> tuple[Store, list[int]]:
    """Wait until all ranks have come.

    Returns:
        A store with a key prefix that no other team uses, and by rank the number of its host.

    Raises:
        RankFailed: some ranks did not come in time, or the store is lost.
    """
    from torch.distributed import distributed_c10d as c10d

    client = StoreClient(c10d.PrefixStore(prefix, store), timeouts.quiet(size))
    try:
        end = time.monotonic() + timeouts.timeout
        name, told = _call(client, size, end) if rank == 0 else _answer(client, rank, size, end)
        _clean(client, rank, name, str(told["last"]))
    finally:
        client.end()
    return c10d.PrefixStore(f"{prefix}/{name}", store), [int(host) for host in told["hosts"]]


def this_host() -> str:
    """A name of this host: the variable ``TIERSTATE_HOST``, or else its host name and boot id."""
    return os.environ.get("TIERSTATE_HOST") or f"{socket.gethostname()}/{this_process()['boot']}"


def _call(client: StoreClient, size: int, end: float) -> tuple[str, Mapping[str, Any]]:
    name = uuid.uuid4().hex
    client.set({"call": name.encode()})
    keys = [f"{name}/here/{rank}" for rank in range(1, size)]
    came = 0
    while came < len(keys):
        if client.has(keys[came : came + 1]):
            came += 1
            came = len(keys) if client.has(keys[came:] or keys) else came
            continue
        if time.monotonic() >= end:
            absent = [int(key.rpartition("/")[2]) for key in client.missing(keys)]
            raise RankFailed(f"{format_ranks(absent)} did not come to save together", absent)
        time.sleep(PAUSE)
    names = [this_host(), *(host.decode(errors="replace") for host in (client.get(keys) if keys else []))]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(names))}
    told = {"hosts": [numbers[host] for host in names], "last": client.look("last").decode()}
    client.set({"call": NO_CALL, "last": name.encode(), f"{name}/go": json.dumps(told).encode()})
    if told["last"] != NOTHING.decode():
        client.delete([f"{told['last']}/go"])
    return name, told


def _answer(client: StoreClient, rank: int, size: int, end: float) -> tuple[str, Mapping[str, Any]]:
    name, began = "", time.monotonic()
    while True:
        called = client.look("call").decode()
        if called not in (name, NO_CALL.decode(), NOTHING.decode()):
            name = called
            client.set({f"{name}/here/{rank}": this_host().encode()})
        if name and client.has([f"{name}/go"]):
            return name, json.loads(client.get([f"{name}/go"])[0])
        now = time.monotonic()
        if now >= end:
            raise RankFailed("rank 0 did not call the others together to save", (0,))
        time.sleep(max(PAUSE, min((now - began) / 10, 0.05), size / 2000))


def _clean(client: StoreClient, rank: int, name: str, last: str) -> None:
    """Delete this rank's answer, and its last heartbeat in the team before this one, if it has closed that team."""
    client.delete([f"{name}/here/{rank}"])
    beat = f"{last}/{heartbeat_key(rank)}"
    if client.look(beat) == CLOSED:
        client.delete([beat])
