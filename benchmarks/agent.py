"""Saves by an agent beside saves in the trainer's process, and restores from its memory beside those from the disk.

python -m benchmarks.agent [--size 1GiB] [--rounds 5] [--codec raw] [--path DIR]

Each save and each restore is made by a process of its own, both ways in turn. All of the state changes between the
saves of a process, of which the last counts: by then every way has touched the memory that it uses again and again. CPU
is the trainer's own during that save, until it is durable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import tierstate as ts
from benchmarks.files import make_cold
from benchmarks.machine import facts_line
from benchmarks.rounds import HOUSE, say
from benchmarks.state import fingerprint
from benchmarks.tables import table
from tierstate.tiers.units import parse_size

TENSOR = 16 << 20
SAVES = 4
WAYS = ("in process", "by an agent")
FIGURES = ("blocked", "durable", "cpu", "restore", "imports")


def policy(place: Path, way: str, codec: str) -> ts.Policy:
    """One directory, and an agent or none."""
    agent = "agent: {mode: required, idle: 60s, memory: 16GiB}\n" if way == WAYS[1] else ""
    return ts.Policy.parse(
        f"version: 1\narena: {{size: 2GiB}}\n{agent}"
        f"tiers: {{nvme: {{type: nvme, path: '{place}/tier', codec: {codec}, keep: {{last: 2}}}}}}\n"
    )


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of random bits that were written to once."""
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(TENSOR // 4, generator=generator) for i in range(max(1, nbytes // TENSOR))}


def cpu_seconds() -> float:
    """Of this process so far."""
    times = os.times()
    return times.user + times.system


def save(place: Path, way: str, nbytes: int, codec: str) -> dict[str, float | str]:
    """Some saves, of which the last one is timed."""
    state = state_of(nbytes)
    with ts.Checkpointer(policy(place, way, codec), "run") as ckpt:
        for step in range(1, SAVES):
            ckpt.save(state, step=step).wait()
            for tensor in state.values():
                tensor.add_(1)
        cpu, start = cpu_seconds(), time.perf_counter()
        saved = ckpt.save(state, step=SAVES)
        blocked = time.perf_counter() - start
        saved.wait()
        durable = time.perf_counter() - start
        used = cpu_seconds() - cpu
    return {"blocked": blocked, "durable": durable, "cpu": used, "state": fingerprint(list(state.values()))}


def restore(place: Path, way: str, nbytes: int, codec: str) -> dict[str, float | str]:
    """In place, into memory that was touched."""
    state = {f"w{i}": torch.ones(TENSOR // 4) for i in range(max(1, nbytes // TENSOR))}
    with ts.Checkpointer(policy(place, way, codec), "run") as ckpt:
        start = time.perf_counter()
        ckpt.restore(into=state)
        seconds = time.perf_counter() - start
        assert ckpt.restored is not None
        assert (ckpt.restored.tiers[0] == "(agent)") == (way == WAYS[1])
    return {"restore": seconds, "state": fingerprint(list(state.values()))}


def child(task: str, place: Path, way: str, nbytes: int, codec: str) -> dict[str, float | str]:
    """What a process of its own has found."""
    given = ["--child", task, str(place), way, "--size", str(nbytes), "--codec", codec]
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.agent", *given], cwd=HOUSE, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float | str] = json.loads(ran.stdout.splitlines()[-1])
    return found | {"whole": time.perf_counter() - start}


def round_of(root: Path, way: str, nbytes: int, codec: str) -> dict[str, float]:
    """One save and one restore."""
    place = root / way.replace(" ", "-")
    place.mkdir()
    os.sync()
    try:
        saved = child("save", place, way, nbytes, codec)
        make_cold(place)
        restored = child("restore", place, way, nbytes, codec)
        if restored["state"] != saved["state"]:
            raise ValueError(f"{way}: another state came back than was saved")
        numbers = {k: float(v) for k, v in (saved | restored).items() if k in FIGURES}
        return numbers | {"imports": _import_seconds()}
    finally:
        shutil.rmtree(place)


def _import_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, tierstate; tierstate.Checkpointer"], check=True, cwd=HOUSE)
    return time.perf_counter() - start


def agent_memory() -> int:
    """Bytes of the agents' own memory: what is resident without shared pages."""
    from tierstate.agent.launch import agents_of_user, ask_agent
    from tierstate.manifest.errors import TierstateError

    found = 0
    for path in agents_of_user():
        try:
            pid = ask_agent(path, "status").head["status"]["pid"]
        except TierstateError:
            continue  # its socket is all that is left of it
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return found


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--path", help="a folder of the disk that is measured")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task, place, way = args.child
        print(json.dumps((save if task == "save" else restore)(Path(place), way, args.size, args.codec)))
        return 0
    root = Path(tempfile.mkdtemp(prefix="tierstate-agent-", dir=args.path))
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    memory = 0
    try:
        print(facts_line(root))
        print("shmem_enabled:", Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().strip(), "\n")
        for number in range(args.rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                found[way].append(round_of(root, way, args.size, args.codec))
                say(f"round {number + 1}: {way}: " + ", ".join(f"{k} {v:.3f}" for k, v in found[way][-1].items()))
                memory = max(memory, agent_memory())
                subprocess.run([sys.executable, "-m", "tierstate", "agent", "stop", "--wait"], check=True, cwd=HOUSE)
    finally:
        shutil.rmtree(root)
    rows = [[way, *(spread([one[k] for one in found[way]]) for k in FIGURES)] for way in WAYS]
    ratios = [
        statistics.median(a[k] / b[k] for a, b in zip(found[WAYS[0]], found[WAYS[1]], strict=True)) for k in FIGURES
    ]
    rows.append(["in process / agent", *(f"{ratio:.2f}" for ratio in ratios)])
    head = "way | blocked, s | durable, s | trainer's CPU, s | restore, s | imports alone, s"
    print(f"{args.size / 2**30:.2f} GiB, codec {args.codec}, medians of {args.rounds} (least–most):\n")
    print(table(head, rows))
    print(f"\nmemory of the agent beyond slabs: {memory / 2**20:.0f} MiB")
    return 0


def spread(numbers: list[float], digits: int = 3) -> str:
    """Median, least and most."""
    middle, least, most = (f"{n:.{digits}f}" for n in (statistics.median(numbers), min(numbers), max(numbers)))
    return f"{middle} ({least}–{most})"


if __name__ == "__main__":
    sys.exit(main())
