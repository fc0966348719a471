"""Two tiers in directories, and functions to find and damage the objects in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.checkpointer_worlds import opened, policy, tensors, tier

import tierstate as ts
from tierstate.manifest.history.log import Log

FOLDER = {"nvme": "nvme", "file": "object"}
STATE = (20_000, 300, 5000, 40)


def two(place: Path, **keys: Any) -> ts.Policy:
    """A policy over two tiers of files."""
    return policy({"nvme": tier("nvme", place, **keys), "file": tier("file", place, codec="auto")})


def saved(spec: ts.Policy, versions: int = 3) -> list[dict[str, torch.Tensor]]:
    """Save versions that share most chunks; what they were."""
    state, truth = tensors(*STATE), []
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(versions):
            state["abcd"[step % 4]] += 1.0
            state["a"][step] = -1.0
            ckpt.save(state, step=step)
            truth.append({name: t.clone() for name, t in state.items()})
    return truth


def objects(place: Path, name: str, prefix: str) -> list[Path]:
    """The files of a tier's objects."""
    return sorted(p for p in (place / FOLDER[name] / prefix).rglob("*") if p.is_file())


def used_ranges(spec: ts.Policy, name: str, run: str) -> dict[str, list[tuple[int, int]]]:
    """By pack of a tier, from where to where bytes are a chunk of some version of a run, or the base of its delta.

    A pack that records name has an entry, even if no bytes of it are used: its length counts.
    """
    log = Log(opened(spec, name), run)
    found: dict[str, set[tuple[int, int]]] = {}
    for layout in (log.read(seq).layout for seq in log.seqs()):
        for key in layout.objects:
            found.setdefault(key, set())
        for row in range(len(layout.object)):
            for place in (layout.place(row), layout.base(row)):
                if place is not None:
                    found[place.object].add((place.offset, place.offset + place.stored))
    return {key: sorted(ranges) for key, ranges in found.items()}


def touches(spec: ts.Policy, name: str, path: Path, before: bytes) -> bool:
    """Whether a pack's length, or a byte of it that some version uses, is another than before.

    Args:
        spec: a policy whose tier of that name has sound records.
    """
    after = path.read_bytes()
    used = [ranges for key, ranges in used_ranges(spec, name, "run").items() if path.match(key)]
    return len(before) != len(after) or any(before[a:b] != after[a:b] for ranges in used for a, b in ranges)
