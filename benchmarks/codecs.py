"""The codecs: what they save on weights and moments, how fast, and what `auto` makes of a fast and of a slow tier.

python -m benchmarks.codecs [--size 512MiB] [--rounds 5] [--threads 2] [--limit 200MiB/s] [--path DIR]

The state is made: weights are normally distributed, moments are what Adam keeps of normally distributed gradients.
First each kind is encoded chunk by chunk in memory; then whole saves go to a directory by `raw` and by `auto`, in turn,
once at the disk's speed and once with a `bandwidth`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import yaml

import tierstate as ts
from benchmarks.machine import facts_line
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.engine.codecs.codecs import compress, decompress
from tierstate.manifest.chunk import CHUNK_SIZE, Buffer
from tierstate.tiers.units import parse_size

Kinds = dict[str, tuple[torch.Tensor, int]]
"""Bytes and itemsize of each kind of leaf."""


def kinds(nbytes: int) -> Kinds:
    """So many bytes of each kind of leaf."""
    generator = torch.Generator().manual_seed(0)
    grown = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    for _ in range(20):
        gradient = torch.randn(nbytes // 4, generator=generator) * 1e-3
        grown[0].mul_(0.9).add_(gradient, alpha=0.1)
        grown[1].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    weights = torch.randn(nbytes // 2, generator=generator) * 0.02
    return {
        "weights, bf16": (weights.bfloat16().view(torch.uint8), 2),
        "weights, fp32": (weights[: nbytes // 4].clone().view(torch.uint8), 4),
        "Adam exp_avg, fp32": (grown[0].view(torch.uint8), 4),
        "Adam exp_avg_sq, fp32": (grown[1].view(torch.uint8), 4),
    }


def alone(threads: int, rounds: int) -> str:
    """Each codec on each kind, in memory."""
    rows = []
    for kind, (data, itemsize) in kinds(8 * CHUNK_SIZE).items():
        chunks = list(data.split(CHUNK_SIZE))
        for codec in ("fast", "small"):
            tries = [timed(chunks, codec, itemsize, threads) for _ in range(rounds)]
            ratio = tries[0][0]
            told = [f"{statistics.median(one[column] for one in tries):.2f}" for column in range(1, 5)]
            rows.append([kind, codec, f"{ratio:.3f}", *told])
            say(f"{kind}: {codec}: {ratio:.3f}, {', '.join(told)} GB/s")
    head = f"kind | codec | stored / raw | encode, GB/s, {threads} threads | GB/s per core | decode, GB/s"
    return table(f"{head} | GB/s per core", rows)


def timed(chunks: list[Buffer], codec: str, itemsize: int, threads: int) -> list[float]:
    """Stored per raw byte; raw GB/s by the wall and per second of CPU, of encoding and of decoding."""
    gigabytes = sum(map(len, chunks)) / 1e9

    def run(work: Callable[[int], float]) -> tuple[float, float]:
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            spent = sum(pool.map(work, range(len(chunks))))
            return gigabytes / (time.perf_counter() - start), gigabytes / spent

    stored: dict[int, tuple[str, Buffer]] = {}

    def one(i: int) -> float:
        start = time.thread_time()
        stored[i] = compress(codec, chunks[i], itemsize)
        return time.thread_time() - start

    def back(i: int) -> float:
        start = time.thread_time()
        raw = decompress(*stored[i], len(chunks[i]))
        spent = time.thread_time() - start
        if not torch.equal(raw, chunks[i]):
            raise ValueError("other bytes came back than were encoded")
        return spent

    encoded = run(one)
    return [sum(len(data) for _, data in stored.values()) / gigabytes / 1e9, *encoded, *run(back)]


def whole(root: Path, nbytes: int, rounds: int, limit: str | None) -> str:
    """Whole saves, raw and auto in turn; what is known of the tier after the first is known for good."""
    states = [{"w": (torch.randn(nbytes // 2) * 0.02).bfloat16()} for _ in range(2)]
    seconds: dict[str, list[float]] = {"raw": [], "auto": []}
    written = dict.fromkeys(seconds, 0)
    open_ = {codec: ts.Checkpointer(policy(root / codec, codec, limit), "bench") for codec in seconds}
    try:
        for number in range(rounds + 1):
            for codec in list(seconds) if number % 2 else list(seconds)[::-1]:
                before = open_[codec].stats().tiers["nvme"].stored
                start = time.perf_counter()
                open_[codec].save(states[number % 2], step=number).wait()
                if number:  # at the first one memory is touched, and nothing is known
                    seconds[codec].append(time.perf_counter() - start)
                    written[codec] = open_[codec].stats().tiers["nvme"].stored - before
                say(f"{limit or 'no limit'}: {codec}: {time.perf_counter() - start:.3f} s")
    finally:
        for ckpt in open_.values():
            ckpt.close()
    base = statistics.median(seconds["raw"])
    rows = [
        [
            limit or "none",
            codec,
            f"{statistics.median(times):.3f} ({min(times):.3f}-{max(times):.3f})",
            f"{statistics.median(times) / base:.3f}",
            f"{statistics.median(a / b for a, b in zip(times, seconds['raw'], strict=True)):.3f}",
            f"{written[codec] / nbytes:.3f}",
        ]
        for codec, times in seconds.items()
    ]
    head = "limit | codec | durable, s (least-most) | / raw, medians | / raw, round by round | stored / raw"
    return table(head, rows)


def policy(place: Path, codec: str, limit: str | None) -> ts.Policy:
    """A directory, and nothing else."""
    keys = {"type": "nvme", "path": str(place), "keep": {"last": 1}, "codec": codec}
    if limit:
        keys["bandwidth"] = limit
    return ts.Policy.parse(yaml.safe_dump({"version": 1, "arena": {"size": "1GiB"}, "tiers": {"nvme": keys}}))


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=512 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", default="200MiB/s")
    parser.add_argument("--path", help="a folder of the disk that is measured")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-codecs-", dir=args.path))
    try:
        print(facts_line(root))
        print(alone(args.threads, args.rounds), flush=True)
        for limit in (None, args.limit):
            print(whole(root / str(bool(limit)), args.size, args.rounds, limit), flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
