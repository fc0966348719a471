"""Rendezvous: the ranks of a group find each other in a store that may hold keys of other teams and earlier jobs.

The coordinator (rank 0) writes a new unique name under the key ``call``. The other ranks answer with a key under that
name, and watch ``call`` in case the name changes. All start once every rank has answered, or fail if rank 0 gives up.
While no rendezvous is open ``call`` is ``-``, so the open call of a job that died is not taken for a finished one.

Teams of different runs do not see each other. So ranks that give different names to one run, as where each takes the
time of day for it, would wait for each other until all time is over. A rank that has waited for long tells under which
name it waits, in keys that all runs share, and looks what those for whom it waits say.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tierstate.manifest.arguments import short_repr
from tierstate.manifest.errors import RankFailed, error_text, format_ranks
from tierstate.manifest.history.leases import this_process

from .heartbeat import Timeouts, heartbeat_key
from .store import CLOSED, NOTHING, Store, StoreClient

log = logging.getLogger("tierstate")


NO_CALL = b"-"
"""The value of the key ``call`` while no rendezvous is open."""


PAUSE = 0.002
"""Seconds between two looks into the store, at least."""


LONG, LOOK_EVERY = 15.0, 1.0
"""Seconds after which a rank tells for whom it waits, and between two looks what these wait for."""


LOOKS_MORE = 4
"""Looks of a rank after it has found that others wait to save another run, so that they find it, too."""


ABSENT_ASKED = 16
"""Of how many ranks that have not come rank 0 looks what they wait for."""


def rendezvous(store: Store, run: str, rank: int, size: int, timeouts: Timeouts) -> tuple[Store, list[int]]:
    """Wait until all ranks have come.

    Args:
        run: name of the run, the same on all ranks.

    Returns:
        A store with a key prefix that no other team uses, and by rank the number of its host.

    Raises:
        RankFailed: some ranks did not come in time, or wait for others to save another run; or the store is lost.
    """
    from torch.distributed import distributed_c10d as c10d

    prefix = f"tierstate/{run}"
    client = StoreClient(c10d.PrefixStore(prefix, store), timeouts.quiet(size))
    wait = _Wait(c10d.PrefixStore("tierstate-waiting", store), run, rank, size, timeouts)
    try:
        name, told = _call(client, size, wait) if rank == 0 else _answer(client, rank, size, wait)
        wait.over()
        _clean(client, rank, name, str(told["last"]))
    finally:
        wait.end()
        client.end()
    return c10d.PrefixStore(f"{prefix}/{name}", store), [int(host) for host in told["hosts"]]


class _Wait:
    """A rank's wait for the others.

    Args:
        store: has keys that all runs share: by rank, for which run it waits, with a number that rises meanwhile.
        run: for which this rank waits.
    """

    def __init__(self, store: Store, run: str, rank: int, size: int, timeouts: Timeouts) -> None:
        self._store, self._patience = store, timeouts.quiet(size)
        self._run, self._rank = run, rank
        now = time.monotonic()
        self._end, self._look_at = now + timeouts.timeout, now + LONG
        self._client: StoreClient | None = None  # a connection more, which few need
        self._looks = self._last_look = 0
        self._error: RankFailed | None = None
        self._seen: Mapping[int, bytes] = {}

    def is_over(self) -> bool:
        """Whether nobody is waited for any more."""
        return time.monotonic() >= self._end

    def is_long(self) -> bool:
        """Whether to look now what the others do."""
        return time.monotonic() >= self._look_at

    def look(self, absent: Sequence[int]) -> None:
        """Look whether those that have not come wait for others, too.

        Raises:
            RankFailed: one of them does, to save another run.
        """
        if self._client is None:
            log.warning("run %s: rank %d waits for %s to save together", self._run, self._rank, format_ranks(absent))
            self._client = StoreClient(self._store, self._patience)
        self._look_at = time.monotonic() + LOOK_EVERY
        self._looks += 1
        self._client.set({str(self._rank): json.dumps([self._looks, self._run]).encode()})
        if self._error is None:
            self._compare({rank: self._client.look(str(rank)) for rank in absent})
        elif self._looks == self._last_look:
            raise self._error

    def _compare(self, every: Mapping[int, bytes]) -> None:
        """Find who waits to save another run, of what ranks have said at this look and at the one before."""
        before, self._seen = self._seen, every
        for rank, said in every.items():
            if said == NOTHING or before.get(rank, NOTHING) in (NOTHING, said):
                continue  # what does not change may be left of a process that has ended
            if self._run != (theirs := json.loads(said)[1]):
                text = (
                    f"rank {rank} waits for the others to save run {short_repr(theirs)}, and rank {self._rank} to save "
                    f"run {short_repr(self._run)}; right is one name for all ranks"
                )
                self._error, self._last_look = RankFailed(text, (rank,)), self._looks + LOOKS_MORE
                return

    def over(self) -> None:
        """All have come."""
        if self._client is not None:
            self._client.delete([str(self._rank)])

    def end(self) -> None:
        """Leave the store."""
        if self._client is not None:
            self._client.end()


def this_host() -> str:
    """A name of this host: the variable ``TIERSTATE_HOST``, or else its host name and boot id."""
    return os.environ.get("TIERSTATE_HOST") or f"{socket.gethostname()}/{this_process()['boot']}"


def _call(client: StoreClient, size: int, wait: _Wait) -> tuple[str, Mapping[str, Any]]:
    name = uuid.uuid4().hex
    keys = [f"{name}/here/{rank}" for rank in range(1, size)]
    try:
        client.set({"call": name.encode()})
        _wait_for_all(client, keys, wait)
    except BaseException as error:  # those that have answered would wait until all their time is over
        text, ranks = (str(error), error.ranks) if isinstance(error, RankFailed) else (error_text(error), (0,))
        failed = {"failed": text, "ranks": ranks}
        with suppress(RankFailed):  # the store is lost, which they find out themselves
            client.set({"call": NO_CALL, f"{name}/go": json.dumps(failed).encode()})
        raise
    names = [this_host(), *(host.decode(errors="replace") for host in (client.get(keys) if keys else []))]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(names))}
    told = {"hosts": [numbers[host] for host in names], "last": client.look("last").decode()}
    client.set({"call": NO_CALL, "last": name.encode(), f"{name}/go": json.dumps(told).encode()})
    if told["last"] != NOTHING.decode():
        client.delete([f"{told['last']}/go"])
    return name, told


def _wait_for_all(client: StoreClient, keys: Sequence[str], wait: _Wait) -> None:
    """Wait for these keys, one for each rank."""
    came = 0
    while came < len(keys):
        if client.has(keys[came : came + 1]):
            came += 1
            came = len(keys) if client.has(keys[came:] or keys) else came
            continue
        if wait.is_long():
            wait.look(_ranks(client.missing(keys[came : came + ABSENT_ASKED])))
        if wait.is_over():
            absent = _ranks(client.missing(keys))
            raise RankFailed(f"{format_ranks(absent)} did not come to save together", absent)
        time.sleep(PAUSE)


def _ranks(keys: Sequence[str]) -> list[int]:
    return [int(key.rpartition("/")[2]) for key in keys]


def _answer(client: StoreClient, rank: int, size: int, wait: _Wait) -> tuple[str, Mapping[str, Any]]:
    name, began = "", time.monotonic()
    while True:
        called = client.look("call").decode()
        if called not in (name, NO_CALL.decode(), NOTHING.decode()):
            name = called
            client.set({f"{name}/here/{rank}": this_host().encode()})
        if name and client.has([f"{name}/go"]):
            told = json.loads(client.get([f"{name}/go"])[0])
            if "failed" in told:
                client.delete([f"{name}/here/{rank}"])
                raise RankFailed(f"rank 0 has given up the wait for all ranks: {told['failed']}", told["ranks"])
            return name, told
        if wait.is_long() and not name:
            wait.look([0])
        if wait.is_over():
            raise RankFailed("rank 0 did not call the others together to save", (0,))
        time.sleep(max(PAUSE, min((time.monotonic() - began) / 10, 0.05), size / 2000))


def _clean(client: StoreClient, rank: int, name: str, last: str) -> None:
    """Delete this rank's answer, and its last heartbeat in the team before this one, if it has closed that team."""
    client.delete([f"{name}/here/{rank}"])
    beat = f"{last}/{heartbeat_key(rank)}"
    if client.look(beat) == CLOSED:
        client.delete([beat])
