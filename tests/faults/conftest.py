"""How bytes move in the tests of faults: every way that there is here."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpointer_worlds import has_uring, policy

import tierstate as ts

SAYS = {"uring": "direct, by io_uring", "threads": "direct, by threads", "buffered": "buffered"}
"""How the traits of a tier begin once it has moved a long object."""


@pytest.fixture(params=list(SAYS))
def io(request: pytest.FixtureRequest) -> str:
    """What moves the bytes."""
    if request.param == "uring" and not has_uring():
        pytest.skip("io_uring is forbidden here")
    return str(request.param)


class World:
    """Policies with an nvme tier at a folder, chunks of 1 MiB and an arena of eight, so that I/O is direct."""

    def __init__(self, io: str) -> None:
        self.io = io

    def policy(self, folder: Path, *, first: dict[str, object] | None = None, **keys: object) -> ts.Policy:
        """The policy; ``first`` is a tier before the nvme one, ``keys`` are more of the latter's."""
        tiers = {"first": first} if first else {}
        nvme = {"type": "nvme", "path": str(folder), "io": self.io, **keys}
        return policy({**tiers, "nvme": nvme}, chunk="1MiB", arena={"size": "8MiB"})

    def check(self, ckpt: ts.Checkpointer) -> None:
        """The bytes moved in the way that is asked for."""
        (tier_run,) = [s for s in ckpt._tier_runs if s.name == "nvme"]
        assert tier_run.tier.traits.io.startswith(SAYS[self.io])


@pytest.fixture
def world(io: str) -> World:
    """Policies for each way in turn."""
    return World(io)
