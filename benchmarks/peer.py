"""A lost node: how soon a job has its state back from the memory of other nodes, and from a shared tier.

python -m benchmarks peer [--size 1GiB] [--rounds 3] [--bandwidth 200MiB/s] [--path DIR]

Two ranks on this machine, each a host of its own with a folder on tmpfs and a keeper, joined by the loopback. They hold
a state as FSDP cuts it, each rank half of every tensor, and save it to peer memory and to a shared tier, of which each
host gets so many bytes per second: its share of a busy file system. Then one host is lost, its memory and its keeper,
and another takes its place with nothing. What is measured is the time until both ranks have restored: from peer memory,
and from the shared tier alone. The job is there by then, and its tiers are open. Exit status 1 where peer memory is not
three times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tierstate as ts
from benchmarks.tables import table
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.units import parse_size, rough_size

TARGET = 3.0
LEAVES = 16
PATIENCE = 600.0
"""Seconds that all of it may take."""

LOST = 1
"""The host that is lost."""

POLICY = """
tiers:
  peer: {type: peer, path: MEMORY/hostRANK, copies: 1, idle: 10min}
  shared: {type: lustre, path: PLACE/shared, bandwidth: BANDWIDTH}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table; 1 where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes of the state, all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bandwidth", default="200MiB/s", help="of the shared tier, for each node")
    parser.add_argument("--path", help="where the shared folder is made; it is removed afterwards")
    args = parser.parse_args(argv)
    place = Path(tempfile.mkdtemp(prefix="tierstate-peer-", dir=args.path))
    memory = Path(tempfile.mkdtemp(prefix="tierstate-bench-", dir="/dev/shm"))
    policy = POLICY.replace("MEMORY", str(memory)).replace("PLACE", str(place)).replace("BANDWIDTH", args.bandwidth)
    try:
        run_ranks([str(place / "found"), policy, str(args.size), str(args.rounds)])
        found = json.loads((place / "found").read_text())
    finally:
        for host in range(2):
            give_back(memory / f"host{host}")
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
    return report(found, args.size, args.bandwidth)


def run_ranks(args: Sequence[str]) -> None:
    """Run both ranks to their end.

    Raises:
        RuntimeError: one has failed; the other one is ended then.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "TIERSTATE_ADDRESS": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common["TIERSTATE_JOB_SECRET"] = secrets.token_hex(32)  # as the launcher of a job on several hosts gives it
    command = [sys.executable, "-m", "benchmarks.peer", *args]
    ranks = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank), "TIERSTATE_HOST": f"host{rank}"})
        for rank in range(2)
    ]
    end = time.monotonic() + PATIENCE
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                raise RuntimeError(f"the ranks have not ended within {PATIENCE:g} s")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if codes := [rank.returncode for rank in ranks if rank.returncode]:
        raise RuntimeError(f"a rank has ended with status {codes[0]}")


def give_back(path: Path) -> None:
    """Have a host's memory and its keeper gone."""
    tier = Peer(path=path)
    tier.stop()
    tier.close()


# What a rank does


def rank_main(out: str, policy: str, nbytes: str, rounds: str) -> None:
    """One of the two ranks: save, then restore again and again."""
    dist.init_process_group("gloo")
    ts.register_tier("peer", Peer)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    both = ts.Policy.parse(policy.replace("RANK", str(rank)))
    alone = ts.Policy.parse("\n".join(line for line in policy.splitlines() if "type: peer" not in line))
    truth = state(mesh, int(nbytes), seed=rank + 1)
    with ts.Checkpointer(both, "run", dist.group.WORLD) as ckpt:
        ckpt.save(truth, step=1)
    found: dict[str, list[float]] = {"peer": [], "shared": []}
    for number in range(int(rounds)):
        for source, spec in (("peer", both), ("shared", alone)):
            if rank == LOST and source == "peer":
                give_back(both.tier("peer").options["path"])
            dist.barrier()
            found[source].append(restored(spec, truth, state(mesh, int(nbytes))))
            if rank == 0:
                print(f"round {number + 1}: from {source}: {found[source][-1]:.2f} s", file=sys.stderr, flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def state(mesh: DeviceMesh, nbytes: int, seed: int = 0) -> dict[str, DTensor]:
    """Tensors of which each rank has half; ones unless there is a seed, as of a model that was just made."""
    torch.manual_seed(seed)
    make = torch.randn if seed else torch.ones
    half = (nbytes // LEAVES // 2 // 4096, 1024)
    return {f"w{i}": DTensor.from_local(make(half), mesh, [Shard(0)], run_check=False) for i in range(LEAVES)}


def restored(spec: ts.Policy, truth: dict[str, DTensor], into: dict[str, DTensor]) -> float:
    """Seconds until both ranks have their state."""
    with ts.Checkpointer(spec, "run", dist.group.WORLD) as ckpt:
        dist.barrier()
        start = time.monotonic()
        ckpt.restore(into=into)
        dist.barrier()
        seconds = time.monotonic() - start
    if not all(leaf.to_local().equal(into[name].to_local()) for name, leaf in truth.items()):
        raise ValueError("other bytes came back than were saved")
    return seconds


def report(found: dict[str, list[float]], nbytes: int, bandwidth: str) -> int:
    """Print medians; 1 where the target is missed."""
    medians = {source: statistics.median(seconds) for source, seconds in found.items()}
    ratio = medians["shared"] / medians["peer"]
    rows = [[source, f"{m:.2f}", f"{nbytes / m / 1e9:.2f}"] for source, m in medians.items()]
    print(f"{rough_size(nbytes)} on two nodes, one of which was lost; the shared tier gives each {bandwidth}")
    print(table("from | seconds | GB/s", rows))
    print(f"peer memory is {ratio:.1f} times as fast (target: {TARGET:.0f})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
