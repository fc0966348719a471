"""Per-rank values: what each rank has its own of, under one path."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from tierstate.manifest.leaf import Path

from .stateful import Stateful


class PerRank:
    """A value of which each rank has its own: ``{"loader": ts.PerRank(loader), "rng": ts.PerRank(ts.Rng())}``.

    In a version it is a dict by rank, so that ``load()`` gives what all ranks had. On a restore each rank takes the
    entry of its own number and leaves the others alone; ``value`` is then what was restored, in place where it can be.

    Args:
        value: whatever a state may hold, also things that have a state.
        missing: what a restore does where the version has no entry of this rank, as when there are more ranks now:
            ``error`` raises StateMismatch, ``keep`` keeps the value and logs it.

    Raises:
        ValueError: ``missing`` is neither.
    """

    def __init__(self, value: Any, missing: Literal["error", "keep"] = "error") -> None:
        if missing not in ("error", "keep"):
            raise ValueError(f"missing={missing!r:.40}: right are 'error' and 'keep'")
        self.value, self.missing = value, missing

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@cache
def entry_of(rank: int) -> Stateful:
    """How a rank's own value is taken and given back: as a thing whose state is a dict with this rank's entry alone."""

    def put(own: PerRank, state: Any) -> None:
        own.value = state[rank]

    def takes(path: Path) -> bool:
        return type(path[0]) is int and path[0] == rank

    return Stateful(lambda own: {rank: own.value}, put, strict=True, takes=lambda _own: takes)
