"""Ties: what the lane of one tier asks of the flow that it is part of, and tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .jobs import Copy
from .owing import Due
from .ticket import Ticket


@dataclass(frozen=True)
class Ties:
    """A lane's ties.

    Attributes:
        pinned: versions that retention must leave alone for now, and which tier waits for each.
        missed: copies of the versions that should have come here before this process began.
        debt: the copy by which a save that failed here may yet come; None where no faster tier can have it.
        settled: a save has been here.
        brought: a version that had failed has come after all.
    """

    pinned: Callable[[], Mapping[int, str]]
    missed: Callable[[], Sequence[Copy]]
    debt: Callable[[Ticket], Copy | None]
    settled: Callable[[Ticket], None]
    brought: Callable[[Due], None]
