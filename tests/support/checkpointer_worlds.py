"""Checkpointers over tiers of every kind, whose storage a test can inspect, damage and repair."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

import tierstate as ts
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import NotFound
from tierstate.manifest.history.leases import Leases
from tierstate.manifest.history.log import Log
from tierstate.tiers.base import Tier, Traits, layer_of
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.gpu import Gpu
from tierstate.tiers.posix.io_engine import UringEngine
from tierstate.tiers.registry import open_tier
from tierstate.tiers.testing import Fault, Faulty
from tierstate.tiers.testing.faulty import FaultyCall

KINDS = ("memory", "host", "nvme", "lustre", "file", "bucket")
"""Every type of tier; ``file`` and ``bucket`` are object tiers on ``file://`` and ``memory://``."""

ELSEWHERE = {"memory", "host", "bucket"}
"""Kinds of which nothing is left when the Checkpointer, or the process, is gone."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed afterwards; in memory where there is such a place, since tests need no disk."""
    shared = "/dev/shm"
    base = shared if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1 << 30 else None
    path = Path(tempfile.mkdtemp(prefix="tierstate-test-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def tier(kind: str, place: Path, **keys: Any) -> dict[str, Any]:
    """A tier's keys in a policy."""
    if kind in ("nvme", "lustre"):
        return {"type": kind, "path": str(place / kind), **keys}
    if kind in ("file", "bucket"):
        url = f"file://{place}/object" if kind == "file" else f"memory://{place.name}-{uuid.uuid4().hex}"
        return {"type": "object", "url": url, **keys}
    return {"type": kind, **keys}


def policy(tiers: Mapping[str, Mapping[str, Any]], **keys: Any) -> ts.Policy:
    """A policy with chunks of 4 KiB and an arena of 64 of them, unless ``keys`` say otherwise."""
    document = {"chunk": "4KiB", "arena": {"size": "256KiB"}, **keys}
    return ts.Policy.parse(
        yaml.safe_dump({**document, "tiers": {n: dict(t) for n, t in tiers.items()}}, sort_keys=False)
    )


def alone(kind: str, place: Path, *, chunk: int = 4096, digest: str = "xxh3-128", **keys: Any) -> ts.Policy:
    """A policy by which everything goes to the tier ``only``; the persistent one that every policy needs gets none."""
    tiers = {"only": tier(kind, place, **keys)}
    if kind in ELSEWHERE:
        tiers["unused"] = {"type": "nvme", "path": str(place / "unused")}
    rules = [{"match": "**", "tiers": ["only"]}]
    return policy(tiers, rules=rules, chunk=chunk, digest=digest, arena={"size": 8 * max(chunk, 4096)})


def opened(spec: ts.Policy, name: str) -> Tier:
    """A handle of its own on a tier of a policy."""
    found = spec.tier(name)
    return open_tier(found.name, found.type, found.options)


def tensors(*sizes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state of float32 tensors ``a``, ``b``, ... of so many bytes each."""
    generator = torch.Generator().manual_seed(seed)
    return {chr(97 + i): torch.randn(n // 4, generator=generator) for i, n in enumerate(sizes)}


def alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states of `tensors` are the same bit for bit; `strategies.same` is for all others, and slower."""
    return list(one) == list(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def names(where: Tier, prefix: str = "") -> list[str]:
    """All keys of a tier."""
    return list(where.list(prefix))


def unreferenced(where: Tier, run: str) -> set[str]:
    """Packs that no record names."""
    log = Log(where, run)
    named = {key for seq in log.seqs() for key in log.read(seq).layout.objects}
    return set(where.list(f"packs/{run}/")) - named


def has_uring() -> bool:
    """Whether a ring can be made here."""
    try:
        UringEngine().close()
    except OSError:
        return False
    return True


_STRANGERS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def meet_strangers() -> None:
    """Take note of the threads that are alive as a test begins: those of earlier ones may take a while to end."""
    _STRANGERS.clear()
    _STRANGERS.update(threading.enumerate())


def own_threads() -> list[threading.Thread]:
    """Threads that were begun by this test and are alive."""
    return [thread for thread in threading.enumerate() if thread not in _STRANGERS]


def engine_threads() -> list[str]:
    """Names of those that are the engine's."""
    return [thread.name for thread in own_threads() if thread.name.startswith("tierstate")]


def arena_of(ckpt: ts.Checkpointer) -> Arena:
    """The arena, to see what is in flight."""
    return ckpt._arena


def gpu_of(ckpt: ts.Checkpointer) -> Gpu:
    """The first tier, which is a `gpu` tier."""
    found = layer_of(ckpt._tier_runs[0].tier, Gpu)
    assert found is not None
    return found


class Wrapped(Faulty):
    """A tier type for policies, ``wrapped``: whatever stands under ``key`` in `PLACES`, with faults.

    Args:
        key: the name under which the test put the tier.
        lasting: it is said to be persistent, so that the engine cascades to it; otherwise to lose all with the process.
    """

    PLACES: ClassVar[dict[str, Tier]] = {}
    OPEN: ClassVar[dict[str, Wrapped]] = {}
    persistent: ClassVar[bool] = True

    def __init__(self, *, key: str, lasting: bool = True) -> None:
        if key not in self.PLACES:
            raise NotFound(f"the test has put no tier under {key!r}")
        super().__init__(self.PLACES[key])
        self.gates: dict[str, threading.Event] = {}
        self.log: list[tuple[str, str]] = []
        self.OPEN[key] = self
        self._lasting = lasting

    @property
    def traits(self) -> Traits:
        """Those of the tier inside, but for its persistence."""
        return replace(self.inner.traits, persistent=self._lasting)

    def begin(self, operation: FaultyCall) -> Fault | None:
        """As in `Faulty`, once the gate of the operation, if there is one, is open."""
        gate = self.gates.get(operation)
        if gate is not None and not gate.wait(120):
            raise AssertionError(f"nobody opened the gate of {operation}")
        return super().begin(operation)

    def put(self, key: str, data: Buffer) -> None:
        self.log.append(("put", key))
        super().put(key, data)

    def shut(self, operation: str) -> threading.Event:
        """Let calls of an operation wait until the event that is returned is set."""
        self.gates[operation] = threading.Event()
        return self.gates[operation]

    def close(self) -> None:
        """Nothing: the test's tier outlives the Checkpointer, as a disk would."""


@contextmanager
def wrapped(inner: Tier, *, lasting: bool = True) -> Iterator[dict[str, Any]]:
    """Keys of a policy's tier that is ``inner`` with faults; `faulty` finds it once it is open."""
    key = uuid.uuid4().hex
    ts.register_tier("wrapped", Wrapped)
    Wrapped.PLACES[key] = inner
    try:
        yield {"type": "wrapped", "key": key, "lasting": lasting}
    finally:
        del Wrapped.PLACES[key]
        Wrapped.OPEN.pop(key, None)


def faulty(keys: Mapping[str, Any]) -> Wrapped:
    """The tier that was opened for `wrapped` keys."""
    return Wrapped.OPEN[keys["key"]]


def pins(where: Tier, run: str) -> dict[int, str]:
    """Versions of a run that are held in a tier, and why."""
    return Leases(where, run).live(where.age)
