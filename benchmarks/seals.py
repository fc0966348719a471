"""What seals and encryption cost: saves to durable and restores, in turn with those of a plain tier.

python -m benchmarks.seals [--size 1GiB] [--rounds 9] [--ways GLOB] [--path DIR]

All of the state changes between two saves. Every way takes its turn in each round, and what is shown are medians of the
ratios to the plain save or restore of the same round, so that a machine that others use too is no great matter.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

import tierstate as ts
from benchmarks.machine import facts
from benchmarks.rounds import say
from benchmarks.tables import table
from tierstate.manifest.digest import ALGORITHMS
from tierstate.tiers.units import parse_size
from tierstate.tiers.wrappers.keyring import new_cipher

TENSORS = 100
PIECE = 16 << 20
BLOCK = 256 << 10
WAYS: dict[str, tuple[dict[str, object], bool]] = {
    "plain": ({}, False),
    "plain, digest: blake3": ({"digest": "blake3"}, False),
    "sealed (blake3)": ({"seal": {"file": ""}}, False),
    "sealed, digest: sha256": ({"seal": {"file": ""}, "digest": "sha256"}, False),
    "encrypted": ({}, True),
    "sealed and encrypted": ({"seal": {"file": ""}}, True),
}
"""The keys of the policy, and whether the tier is encrypted."""


def policy(place: Path, key: Path, top: dict[str, object], encrypt: bool) -> ts.Policy:
    """One directory."""
    tier = {"type": "nvme", "path": str(place), "keep": {"last": 1}} | (
        {"encrypt": {"file": str(key)}} if encrypt else {}
    )
    keys = {name: {"file": str(key)} if name == "seal" else value for name, value in top.items()}
    return ts.Policy.parse(yaml.safe_dump({"arena": {"size": "512MiB"}, **keys, "tiers": {"nvme": tier}}))


def functions() -> str:
    """How fast the functions are that this rests on, in one thread."""
    data = memoryview(bytearray(secrets.token_bytes(PIECE)))
    cipher, out = new_cipher(bytes(32)), bytearray(BLOCK + 16)

    def encrypt() -> None:
        for at in range(0, PIECE, BLOCK):
            cipher.encrypt_into(at.to_bytes(12, "big"), data[at : at + BLOCK], None, out)

    calls: dict[str, Callable[[], object]] = {name: lambda f=f: f(data) for name, f in ALGORITHMS.items()}  # type: ignore[misc]
    calls["blake2b"] = lambda: hashlib.blake2b(data).digest()
    calls["HMAC-SHA256"] = lambda: hmac.digest(bytes(32), data, "sha256")
    calls["AES-256-GCM"] = encrypt
    best = dict.fromkeys(calls, 1e9)
    for _ in range(15):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return table(
        "function | GB/s, one thread, the best of 15", [[n, f"{PIECE / s / 1e9:.1f}"] for n, s in best.items()]
    )


@contextmanager
def runs(root: Path, ways: Sequence[str]) -> Iterator[dict[str, ts.Checkpointer]]:
    """A run for each way."""
    key = root / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(ts.Checkpointer(policy(root / str(i), key, *way), "run"))
            for i, (name, way) in enumerate(WAYS.items())
            if name in ways
        }


class Taken(NamedTuple):
    """What one save or restore took: seconds, and seconds of all cores."""

    seconds: float
    cpu: float


@contextmanager
def taken(into: list[Taken]) -> Iterator[None]:
    """Adds what the block took."""
    start, cpu = time.perf_counter(), time.process_time()
    yield
    into.append(Taken(time.perf_counter() - start, time.process_time() - cpu))


def rounds(root: Path, nbytes: int, count: int, ways: Sequence[str]) -> str:
    """Saves and restores in turn."""
    state = {f"t{i}": torch.randn(nbytes // TENSORS // 4) for i in range(TENSORS)}
    saves: dict[str, list[Taken]] = {name: [] for name in ways}
    restores: dict[str, list[Taken]] = {name: [] for name in ways}
    with runs(root, ways) as opened:
        for number in range(count + 1):
            for name in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
                for tensor in state.values():
                    tensor.add_(1.0)
                with taken(saves[name]):
                    opened[name].save(state, step=number).wait()
                with taken(restores[name]):
                    opened[name].restore(into=state)
            say(f"round {number} of {count}")
    return "\n\n".join(_shown(what, found) for what, found in [("durable", saves), ("restored", restores)])


def _shown(what: str, found: dict[str, list[Taken]]) -> str:
    rows = []
    for name, every in found.items():
        # The first one, which faults memory in, does not count.
        pairs = list(zip(every[1:], found["plain"][1:], strict=True))
        seconds, cpu = [one.seconds for one, _ in pairs], [one.cpu for one, _ in pairs]
        ratios = [
            statistics.median(one.seconds / plain.seconds for one, plain in pairs),
            min(seconds) / min(plain.seconds for _, plain in pairs),
            statistics.median(one.cpu / plain.cpu for one, plain in pairs),
        ]
        span = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        rows.append(
            [name, span, *(f"{ratio:.2f}" for ratio in ratios[:2]), f"{statistics.median(cpu):.2f}", f"{ratios[2]:.2f}"]
        )
    return table(f"way | {what}, s (least-most) | / plain | least / least | CPU, s | / plain", rows)


def main() -> None:
    """Measure, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", default="*", help="which ones, by a glob, beside the plain one")
    parser.add_argument("--path", type=Path, default=None)
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tierstate-seals-", dir=given.path))
    try:
        print("; ".join(f"{name}: {value}" for name, value in facts(root).items()))
        print(functions())
        print(rounds(root, given.size, given.rounds, [w for w in WAYS if w == "plain" or fnmatch(w, given.ways)]))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
