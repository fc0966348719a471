"""The meeting: how the ranks of a group find each other in a store in which others, and earlier ones, left their keys.

The coordinator calls under a name that nobody had before. The others answer under that name, look again whether it is
still the one that is called, and go once all have answered. While nobody calls, the call is ``-``: so a call that is
left of a job that died is never taken for one that has come to its end.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

from tierstate.manifest.errors import RankFailed
from tierstate.manifest.holder import this_process

from .heartbeat import Terms, beat_of, named
from .line import CLOSED, NOTHING, Line, Store

NOBODY = b"-"
PAUSE = 0.002


def meet(store: Store, prefix: str, rank: int, size: int, terms: Terms) -> tuple[Store, list[int]]:
    """Wait until all ranks are there.

    Returns:
        A store whose keys nobody else has, and the number of each rank's host.

    Raises:
        RankFailed: some did not come in time, or the store is lost.
    """
    from torch.distributed import distributed_c10d as c10d

    line = Line(c10d.PrefixStore(prefix, store), terms.quiet(size))
    try:
        end = time.monotonic() + terms.timeout
        name, told = _call(line, size, end) if rank == 0 else _answer(line, rank, size, end)
        _clean(line, rank, name, str(told["last"]))
    finally:
        line.end()
    return c10d.PrefixStore(f"{prefix}/{name}", store), [int(host) for host in told["hosts"]]


def this_host() -> str:
    """What names this host: the variable ``TIERSTATE_HOST``, or else its name, and what names it since its start."""
    return os.environ.get("TIERSTATE_HOST") or f"{socket.gethostname()}/{this_process()['boot']}"


def _call(line: Line, size: int, end: float) -> tuple[str, Mapping[str, Any]]:
    name = uuid.uuid4().hex
    line.set({"call": name.encode()})
    keys = [f"{name}/here/{rank}" for rank in range(1, size)]
    came = 0
    while came < len(keys):
        if line.has(keys[came : came + 1]):
            came += 1
            came = len(keys) if line.has(keys[came:] or keys) else came
            continue
        if time.monotonic() >= end:
            absent = [int(key.rpartition("/")[2]) for key in line.missing(keys)]
            raise RankFailed(f"{named(absent)} did not come to save together", absent)
        time.sleep(PAUSE)
    names = [this_host(), *(host.decode(errors="replace") for host in (line.get(keys) if keys else []))]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(names))}
    told = {"hosts": [numbers[host] for host in names], "last": line.look("last").decode()}
    line.set({"call": NOBODY, "last": name.encode(), f"{name}/go": json.dumps(told).encode()})
    if told["last"] != NOTHING.decode():
        line.delete([f"{told['last']}/go"])
    return name, told


def _answer(line: Line, rank: int, size: int, end: float) -> tuple[str, Mapping[str, Any]]:
    name, began = "", time.monotonic()
    while True:
        called = line.look("call").decode()
        if called not in (name, NOBODY.decode(), NOTHING.decode()):
            name = called
            line.set({f"{name}/here/{rank}": this_host().encode()})
        if name and line.has([f"{name}/go"]):
            return name, json.loads(line.get([f"{name}/go"])[0])
        now = time.monotonic()
        if now >= end:
            raise RankFailed("rank 0 did not call the others together to save", (0,))
        time.sleep(max(PAUSE, min((now - began) / 10, 0.05), size / 2000))


def _clean(line: Line, rank: int, name: str, last: str) -> None:
    """Remove what this rank has left of this meeting, and of the team before, if it has closed that."""
    line.delete([f"{name}/here/{rank}"])
    beat = f"{last}/{beat_of(rank)}"
    if line.look(beat) == CLOSED:
        line.delete([beat])
