"""Many hosts, each with a tier of its own: how long the commit of a version takes, and what rank 0's host has to send.

python -m benchmarks.hosts [--hosts 16,64,128] [--leaves 1000] [--rate 100mbit] [--rounds 3]

Each host is a network namespace of this machine with one rank, whose way out is limited to the given rate. All commit
the same versions by the two-phase commit of a save (`GroupCommit`), in turn with rank 0 sending the merged version to
each host, and with hosts passing it on to each other. Only packs are missing: what is committed names some that are
not there. Needs root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed

from benchmarks.machine import facts_line
from benchmarks.ranks import held, record_of
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.engine.ranks.save.commit import GroupCommit
from tierstate.engine.ranks.save.leader import MergedVersions
from tierstate.engine.ranks.save.relay import VersionRelay
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Traits
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.libc import libc
from tierstate.tiers.memory.host import Memory

dist: Any = torch.distributed  # its stores are not in its type hints
WAYS = ("by rank 0", "by each other")
BRIDGE, PORT, NEW_NETWORK = "tsbridge", 29571, 0x40000000


class OfHost(Memory):
    """Memory that the ranks of one host see."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, shared="host")


def address(host: int) -> str:
    """Of a host in the network of this benchmark."""
    return f"10.78.{host // 250}.{host % 250 + 1}"


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def network(hosts: int, rate: str) -> Iterator[None]:
    """Namespaces ``tshost-0`` and so on, each with one interface that sends so much at most, all on one bridge."""
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")
        for host in range(hosts):
            space, inside, outside = f"tshost-{host}", f"tsi{host}", f"tso{host}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            run("ip", "link", "set", outside, "master", BRIDGE, "up")
            run("ip", "link", "set", inside, "netns", space)
            run("ip", "-n", space, "addr", "add", f"{address(host)}/16", "dev", inside)
            run("ip", "-n", space, "link", "set", inside, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "1s")
            run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", inside, "root", *limit)
        yield
    finally:
        for host in range(hosts):
            subprocess.run(["ip", "netns", "delete", f"tshost-{host}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def enter(host: int) -> None:
    """This process is on a host from now on."""
    descriptor = os.open(f"/run/netns/tshost-{host}", os.O_RDONLY)
    if libc().setns(descriptor, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"host {host} cannot be entered")
    os.close(descriptor)
    os.environ["TIERSTATE_ADDRESS"] = address(host)


def bytes_sent(host: int) -> int:
    """Bytes that this host has sent so far."""
    with open("/proc/self/net/dev", encoding="utf-8") as file:
        line = next(line for line in file if line.strip().startswith(f"tsi{host}:"))
    return int(line.partition(":")[2].split()[8])


def rank(host: int, hosts: int, leaves: int, rounds: int, secret: JobSecret) -> list[dict[str, float]]:
    """Commit versions, in turn in both ways; what each has taken and sent, as this rank sees it."""
    enter(host)
    store = dist.TCPStore(address(0), PORT, is_master=not host, wait_for_workers=False, timeout=timedelta(seconds=300))
    team = Team(store, host, hosts, range(hosts), secret=secret)
    merged, tier = MergedVersions(), OfHost()
    relay = VersionRelay(team, merged.wait_for)
    commit = GroupCommit(team, "hosts", tier, Log(tier, "run"), merged)
    mine = next(islice(held("fsdp", hosts, leaves), host, None))
    first, found = record_of(host, mine, np.ones(leaves, bool)), []
    for seq in range(1, len(WAYS) * rounds + 1):
        merged.relay = relay if seq % 2 == 0 else None
        head = replace(first.version.head, seq=seq)
        part = Record(first.version.again(head, first.version.digests + seq), first.layout, first.commit)
        team.gather("ready", b"")
        began, before = time.perf_counter(), bytes_sent(host)
        commit.commit(part)
        seconds, sent = time.perf_counter() - began, bytes_sent(host) - before
        found.append({"seconds": seconds, "sent": sent, "version": len((merged.known(seq) or part.version).data)})
    if host:
        team.post("done", b"")
    else:  # it has the store, and ends last
        team.receive_all(dict.fromkeys(range(1, hosts), "done"))
    relay.close()
    team.close()
    return found


def forked(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """What this returns for each rank, in a process of its own.

    Raises:
        ChildProcessError: a rank has failed.
    """
    pipes, children = [], []
    for rank in range(ranks):
        reads, writes = os.pipe()
        # Forked, as so many processes that each import torch would take minutes.
        if not (child := os.fork()):
            try:
                os.close(reads)
                os.write(writes, json.dumps(work(rank)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writes)
        pipes.append(reads)
        children.append(child)
    told = []
    for pipe in pipes:
        with os.fdopen(pipe, "rb") as file:
            told.append(file.read())
    for child in children:
        os.waitpid(child, 0)
    if not all(told):
        raise ChildProcessError("a rank has failed")
    return [json.loads(one) for one in told]


def measured(hosts: int, leaves: int, rate: str, rounds: int) -> list[list[dict[str, float]]]:
    """What each rank has found."""
    secret = JobSecret.random()
    with network(hosts, rate):
        return forked(hosts, lambda host: rank(host, hosts, leaves, rounds, secret))


def draw(rows: list[list[str]], path: Path) -> None:
    """Write a PNG of how both ways grow."""
    from benchmarks.plot import draw_groups  # only a plot needs matplotlib

    panels: dict[str, dict[str, dict[str, float]]] = {}
    for name, columns in (("commit, seconds", (2, 5)), ("sent by rank 0, MiB", (3, 6))):
        titles = ("by rank 0", "tierstate: passed on")
        panels[name] = {
            f"{row[0]} hosts\n{row[1]} MiB": {
                title: float(row[column]) for title, column in zip(titles, columns, strict=True)
            }
            for row in rows
        }
    draw_groups(path, "The merged version goes to every host: less is better", panels)


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="16,64,128")
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    args = parser.parse_args()
    print(facts_line(Path(tempfile.gettempdir())) + "\n")
    rows = []
    for hosts in map(int, args.hosts.split(",")):
        found = measured(hosts, args.leaves, args.rate, args.rounds)
        row = [f"{hosts}", f"{found[0][0]['version'] / 2**20:.1f}"]
        for way in range(len(WAYS)):
            mine = found[0][way :: len(WAYS)]
            most = max(statistics.median(one["sent"] for one in each[way :: len(WAYS)]) for each in found)
            row += [f"{statistics.median(one['seconds'] for one in mine):.2f}"]
            row += [f"{statistics.median(one['sent'] for one in mine) / 2**20:.1f}", f"{most / 2**20:.1f}"]
        rows.append(row)
        say(f"{hosts} hosts: {row}")
    columns = [f"{what}, {way}" for way in WAYS for what in ("seconds", "rank 0 sends, MiB", "most of one host, MiB")]
    print(table(" | ".join(["hosts", "version, MiB", *columns]), rows))
    if args.plot:
        draw(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
