"""A rank that is to read for others, and is late: they read in its place, it is named, and all have everything."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.processes import Gang
from support.straggler_jobs import VICTIM

pytestmark = pytest.mark.slow

SIZE = 3


def is_named(gang: Gang) -> None:
    """Both others say who is late; by when, is a property of `tierstate.engine.ranks.restore.stragglers`."""
    for rank in set(range(SIZE)) - {VICTIM}:
        assert gang.hear(rank, f"log rank {rank}: rank {VICTIM} is late: ").endswith("it is read here")
        assert gang.hear(rank, f"event rank {VICTIM} is late: ").endswith("it is read here")


def all_restore(gang: Gang) -> None:
    for rank in range(SIZE):
        assert gang.hear(rank, "restored ").endswith("True")
    gang.wait()


@pytest.mark.parametrize("how", ["hangs", pytest.param("slow", marks=pytest.mark.soak)])
def test_others_read_for_a_rank_whose_tier_is_too_slow(tmp_path: Path, how: str) -> None:
    """The read that hangs goes on when all have what they want, so nobody has waited for it."""
    with Gang(SIZE, "support.straggler_jobs:restore", tmp_path, how) as gang:
        is_named(gang)
        gang.hear(VICTIM, f"log rank {VICTIM} reads so slowly that others read ")
        all_restore(gang)


@pytest.mark.soak
def test_others_read_for_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with Gang(SIZE, "support.straggler_jobs:restore", tmp_path, "stops") as gang:
        is_named(gang)
        gang.kill(VICTIM, signal.SIGCONT)
        all_restore(gang)
        assert " is late: " not in gang.said(VICTIM)  # the others have given it up, and none of them is slow
