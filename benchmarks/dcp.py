"""torch.distributed.checkpoint through our tiers beside its own file system: the same plans of two ranks.

python -m benchmarks dcp [--size 1GiB] [--rounds 5] [--ranks 2] [--path DIR]

Each round saves and restores once with either, in turn. A save counts until it is synced: `FileSystemWriter` syncs
its files by default; so do we, and the folders too. A restore reads cold files into the state where it lies. Seconds
are of the slowest rank, ratios those of medians. The bare disk is as many bytes in one file, written and read once in
each round by direct I/O of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.field.disk import Direct
from benchmarks.files import make_cold
from benchmarks.machine import facts_line
from benchmarks.rounds import HOUSE, say
from benchmarks.tables import table
from tierstate.tiers.units import parse_size

WHO = ("FileSystem", "tierstate")
DISK = "O_DIRECT, bare"
LAYERS = 24


def state_of(nbytes: int, seed: int) -> dict[str, Any]:
    """What FSDP2 and AdamW hold of a transformer: float32 weights and two moments, sharded by rows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    # Four matrices of width x width, one of them four times as wide twice over: 12 width^2 elements, three times.
    width = max(64, int((nbytes / (LAYERS * 12 * 3 * 4)) ** 0.5) // 16 * 16)
    shapes = {"q": width, "k": width, "v": width, "o": width, "up": 4 * width, "down": 4 * width}
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed * size + rank))
    at = 0

    def tensor(rows: int, columns: int) -> DTensor:
        nonlocal at
        local = torch.empty(rows // size, columns)
        flat = local.view(-1)
        for start in range(0, flat.numel(), len(noise) // 2):
            part = flat[start : start + len(noise) // 2]
            at = (at + 1_000_003) % (len(noise) // 2)
            part.copy_(noise[at : at + len(part)])
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    names = {f"layers.{i}.{name}.weight": rows for i in range(LAYERS) for name, rows in shapes.items()}
    state = {name: {"exp_avg": tensor(rows, width), "exp_avg_sq": tensor(rows, width)} for name, rows in names.items()}
    return {
        "model": {name: tensor(rows, width) for name, rows in names.items()},
        "optim": {"state": state, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": list(names)}]},
        "step": torch.tensor(seed),
    }


def locals_of(state: Any) -> list[torch.Tensor]:
    """All local tensors, in order."""
    if isinstance(state, DTensor):
        return [state.to_local()]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for item in items for tensor in locals_of(item)]


def timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def rank_of(nbytes: int, rounds: int, root: Path) -> None:
    """One rank: every round saves and restores once with either."""
    from tierstate.dcp import TierReader, TierWriter, close

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state, into = state_of(nbytes, 1), state_of(nbytes, 2)
    text = f"version: 1\narena: {{size: 1GiB}}\ntiers:\n  nvme: {{type: nvme, path: {root}/tiers, keep: {{last: 1}}}}\n"
    found: dict[str, dict[str, list[float]]] = {who: {"save": [], "restore": []} for who in (*WHO, DISK)}
    nbytes = sum(tensor.nbytes for tensor in locals_of(state)) * dist.get_world_size()
    for number in range(rounds + 1):  # the first warms up
        for who in WHO if number % 2 else WHO[::-1]:
            for tensor in locals_of(state):
                tensor.view(torch.int32).bitwise_xor_(1)  # nothing of a save before can be used again
            path = root / "peer" / f"step-{number}"
            ours = who == "tierstate"
            writer = TierWriter(text, "bench") if ours else dcp.FileSystemWriter(path)
            _quiet(rank)
            save = timed(lambda w=writer, p=path: dcp.save(state, storage_writer=w, checkpoint_id=p))
            cold = make_cold(root) if rank == 0 else ""
            reader = TierReader(text, "bench") if ours else dcp.FileSystemReader(path)
            restore = timed(lambda r=reader, p=path: dcp.load(into, storage_reader=r, checkpoint_id=p))
            _compare(who, state, into)
            if rank == 0 and number:
                found[who]["save"].append(save)
                found[who]["restore"].append(restore)
                say(f"round {number}: {who}: save {save:.2f} s, restore {restore:.2f} s ({cold})")
            if not ours and rank == 0:
                shutil.rmtree(path)
        dist.barrier()
        if rank == 0 and number:
            _bare(root / "bare", nbytes, found[DISK])
        dist.barrier()
    close()
    dist.destroy_process_group()
    if rank == 0:
        (root / "found.json").write_text(json.dumps({"nbytes": nbytes, "seconds": found}))


def _bare(path: Path, nbytes: int, found: dict[str, list[float]]) -> None:
    """What the disk takes for as many bytes."""
    disk = Direct(path.parent)
    try:
        os.sync()
        for what, work in (("save", partial(disk.write, path, nbytes)), ("restore", partial(disk.read, path))):
            start = time.perf_counter()
            work()
            found[what].append(time.perf_counter() - start)
    finally:
        disk.close()
        path.unlink()


def _compare(who: str, state: Any, into: Any) -> None:
    for one, other in zip(locals_of(state), locals_of(into), strict=True):
        if not torch.equal(one.view(torch.int32), other.view(torch.int32)):
            raise ValueError(f"{who} gave back other bytes than were saved")


def _quiet(rank: int) -> None:
    """What is left to write from before is none of this save's business."""
    if rank == 0:
        os.sync()
    dist.barrier()


def ranks(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run all ranks as processes of their own; what was found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(args.ranks)}
    command = [sys.executable, "-m", "benchmarks.dcp", "--size", str(args.size), "--rounds", str(args.rounds)]
    started = [
        subprocess.Popen(
            [*command, "--rank-in", str(root)],
            env=os.environ | own | {"RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            cwd=HOUSE,
        )
        for rank in range(args.ranks)
    ]
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    found: dict[str, Any] = json.loads((root / "found.json").read_text())
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks dcp", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes of the state, over all ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--rank-in", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank_in:
        rank_of(args.size, args.rounds, Path(args.rank_in))
        return 0
    root = Path(tempfile.mkdtemp(prefix="tierstate-dcp-", dir=args.path))
    try:
        print(facts_line(root), "", sep="\n")
        found = ranks(args, root)
    finally:
        shutil.rmtree(root)
    rows = []
    for what, aim in (("save", "2.5"), ("restore", "2.0")):
        theirs, ours, disk = (statistics.median(found["seconds"][who][what]) for who in (*WHO, DISK))
        rows.append([f"durable {what}" if what == "save" else "cold restore", f"{theirs:.2f}", f"{ours:.2f}",
                     f"{theirs / ours:.2f}x", f"{aim}x", f"{disk:.2f}", f"{disk / ours:.2f}"])  # fmt: skip
    print(f"{args.ranks} ranks, {found['nbytes'] / 2**30:.2f} GiB, medians of {args.rounds}:")
    print(
        table(
            "what | FileSystemWriter/Reader, s | TierWriter/Reader, s | ratio | aimed at | bare disk, s | of the disk",
            rows,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
