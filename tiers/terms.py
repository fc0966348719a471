"""Terms: small sums that retiring does with what is kept, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from tierstate.manifest.retention import Keep

AT_ONCE = 64
"""Versions that go between two looks at leases and tags."""


def parts(seqs: Collection[int]) -> list[list[int]]:
    """The same, some at a time."""
    every = list(seqs)
    return [every[at : at + AT_ONCE] for at in range(0, len(every), AT_ONCE)]


def less(keep: Keep | None) -> Keep | None:
    """The same, with room for one more among the last."""
    return replace(keep, last=max(1, keep.last - 1)) if keep is not None and keep.last else keep


def join(pins: dict[int, str], more: Mapping[int, str]) -> None:
    """Add reasons why versions stay."""
    for seq, why in more.items():
        pins[seq] = f"{pins[seq]}; {why}" if seq in pins else why
