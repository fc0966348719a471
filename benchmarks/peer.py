"""A lost node: how soon its state is back from the memory of another, and from a shared tier of bounded bandwidth.

python -m benchmarks peer [--size 1GiB] [--rounds 3] [--bandwidth 200MiB/s]

Two hosts of peer memory on this machine, each with a folder on tmpfs and a keeper of its own, joined by the loopback.
The second one saves; then all that its memory kept is given back and its keeper ended, a new one is started in its
place, and the version is loaded there: from the first host's memory, and from a folder that is read at so many bytes
per second, a node's share of a busy file system. Exit status 1 where peer memory is not three times as fast.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

import tierstate as ts
from tierstate.tiers.peer import Peer
from tierstate.tiers.peer_home import wait_gone
from tierstate.tiers.units import parse_size, rough_size

from .rounds import say
from .tables import table

TARGET = 3.0
LEAVES = 16

POLICY = """
arena: {{size: 256MiB}}
tiers:
  {tiers}
  unused: {{type: nvme, path: {place}/unused}}
durable: {durable}
rules:
  - {{match: "**", tiers: [{names}]}}
"""


class Seat:
    """One of two ranks that meet, each on a host of its own."""

    size, hosts = 2, (0, 1)

    def __init__(self, rank: int, said: list[dict[str, bytes]], both: threading.Barrier) -> None:
        self.rank, self._said, self._both = rank, said, both

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        """Whether this rank is the first of its host, as it is."""
        return True

    def gather(self, topic: str, data: bytes) -> list[bytes]:
        """What both have said."""
        self._said[self.rank][topic] = data
        self._both.wait(120)
        return [said[topic] for said in self._said]


def meet(paths: Sequence[Path]) -> list[Peer]:
    """Two hosts that keep objects for each other."""
    said: list[dict[str, bytes]] = [{}, {}]
    both = threading.Barrier(2)
    tiers = [Peer(path=path) for path in paths]
    threads = [threading.Thread(target=tier.meet, args=(Seat(n, said, both),)) for n, tier in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tiers


class Site:
    """Two hosts and what they share."""

    def __init__(self, place: Path, bandwidth: str) -> None:
        self.place, self.bandwidth = place, bandwidth
        memory = Path(tempfile.mkdtemp(prefix="tierstate-bench-", dir="/dev/shm"))
        self.memory, self.paths = memory, [memory / "host0", memory / "host1"]

    def policy(self, host: int, *names: str) -> ts.Policy:
        """The policy of a host, by which all goes to and comes from these tiers."""
        lines = {
            "peer": f"peer: {{type: peer, path: {self.paths[host]}, copies: 1}}",
            "shared": f"shared: {{type: nvme, path: {self.place}/shared, bandwidth: {self.bandwidth}}}",
        }
        tiers = "\n  ".join(lines[name] for name in names)
        durable = "shared" if "shared" in names else "unused"
        return ts.Policy.parse(POLICY.format(tiers=tiers, place=self.place, durable=durable, names=", ".join(names)))

    def lose(self, host: int) -> None:
        """A host is gone, and another in its place, with nothing."""
        with_nothing = Peer(path=self.paths[host])
        with_nothing.stop()
        with_nothing.close()
        for tier in meet(self.paths):
            tier.close()

    def close(self) -> None:
        """Give everything back."""
        for path in self.paths:
            tier = Peer(path=path)
            tier.stop()
            tier.close()
            wait_gone(path, 30)
        shutil.rmtree(self.memory, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table; 1 where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes of state of the lost node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bandwidth", default="200MiB/s", help="of the shared tier, for one node")
    parser.add_argument("--path", help="where the shared folder is made; it is removed afterwards")
    args = parser.parse_args(argv)
    os.environ.setdefault("TIERSTATE_ADDRESS", "127.0.0.1")
    ts.register_tier("peer", Peer)
    place = Path(tempfile.mkdtemp(prefix="tierstate-peer-", dir=args.path))
    site = Site(place, args.bandwidth)
    try:
        for tier in meet(site.paths):
            tier.close()
        found = measure(site, args.size, args.rounds)
    finally:
        site.close()
        shutil.rmtree(place, ignore_errors=True)
    return report(found, args.size, args.bandwidth)


def measure(site: Site, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to have the state back, from each of the two, in turns."""
    truth = {f"w{i}": torch.randn(nbytes // LEAVES // 4) for i in range(LEAVES)}
    with ts.Checkpointer(site.policy(1, "peer", "shared"), "run") as ckpt:
        ckpt.save(truth, step=1).wait("shared")
    found: dict[str, list[float]] = {"peer": [], "shared": []}
    for number in range(rounds):
        for source, seconds in found.items():
            site.lose(1)
            into = {name: torch.zeros_like(leaf) for name, leaf in truth.items()}
            with ts.Checkpointer(site.policy(1, source), "run") as ckpt:
                start = time.monotonic()
                ckpt.restore(into=into)
                seconds.append(time.monotonic() - start)
            if not all(leaf.equal(into[name]) for name, leaf in truth.items()):
                raise ValueError(f"{source}: other bytes came back than were saved")
            say(f"round {number + 1}: from {source}: {seconds[-1]:.2f} s")
    return found


def report(found: dict[str, list[float]], nbytes: int, bandwidth: str) -> int:
    """Print medians; 1 where the target is missed."""
    medians = {source: statistics.median(seconds) for source, seconds in found.items()}
    ratio = medians["shared"] / medians["peer"]
    rows = [[source, f"{m:.2f}", f"{nbytes / m / 1e9:.2f}"] for source, m in medians.items()]
    print(f"{rough_size(nbytes)} of one lost node of two; the shared tier gives {bandwidth}")
    print(table("from | seconds | GB/s", rows))
    print(f"peer memory is {ratio:.1f} times as fast (target: {TARGET:.0f})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
