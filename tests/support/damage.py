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


def touches(spec: ts.Policy, name: str, path: Path, before: bytes) -> bool:
    """Whether a pack's length, or a byte of it that belongs to a chunk, is another than before.

    Args:
        spec: a policy whose tier of that name has sound records.
    """
    after = path.read_bytes()
    log = Log(opened(spec, name), "run")
    layouts = [log.read(seq).layout for seq in log.seqs()]
    places = {p for layout in layouts for row in range(len(layout.object)) if (p := layout.place(row))}
    chunks = [(p.offset, p.offset + p.stored) for p in places if path.match(p.object)]
    return len(before) != len(after) or any(before[a:b] != after[a:b] for a, b in chunks)
