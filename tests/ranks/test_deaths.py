"""Real processes: each rank is killed, or stopped, at every point of a commit; the others end, and say why."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.commit_jobs import HELD, tier_of
from support.processes import Gang

from tierstate.manifest.history.log import Log

pytestmark = pytest.mark.slow

SILENCE = 5
FAILED, UNKNOWN, DONE = "RankFailed", "CommitUnknown", "committed"

SITE = [
    (0, "before merge", UNKNOWN, False),
    (0, "after merge", UNKNOWN, False),
    (0, "before record", UNKNOWN, False),
    (0, "after record", UNKNOWN, True),
    (0, "before decision", UNKNOWN, True),
    (0, "after decision", DONE, True),
    (1, "before vote", FAILED, False),
    (1, "after vote", DONE, True),
]
HOST = [
    *(case for case in SITE if case[0] == 0 and "record" not in case[1]),
    (0, "before version", UNKNOWN, False),
    (0, "after version", UNKNOWN, False),
    (0, "after version-id", UNKNOWN, False),
    (1, "before vote", FAILED, False),
    (1, "after vote", FAILED, False),
    (1, "before record", FAILED, False),
    (1, "after record", FAILED, False),
    (1, "before acknowledgement", FAILED, False),
    (1, "after acknowledgement", DONE, True),
]
LONG = [
    (0, "before fetched", UNKNOWN, False),
    (0, "after fetched", UNKNOWN, False),
]
UNREACHED = [
    *LONG,
    (1, "after vote", FAILED, False),
    (1, "before second-vote", FAILED, False),
    (1, "after second-vote", DONE, True),
]


def die(folder: Path, shared: str, size: int, case: tuple[int, str, str, bool], how: int) -> None:
    """One rank is held at a point of the second commit, and gets a signal."""
    victim, point, expected, whole = case
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # which no rank owns
    points = [{"TIERSTATE_HOST": f"host-{rank}"} for rank in range(size)]
    saves = 3 if expected == DONE else 2
    args = [folder, shared, f"{victim}:{point}", saves, SILENCE, store.port]
    with Gang(size, "support.commit_jobs:ranks", *args, per_rank=points) as gang:
        gang.hear(victim, "held")
        gang.kill(victim, how)
        for rank in set(range(size)) - {victim}:
            assert gang.hear(rank, "1: ").startswith(DONE)
            said = gang.hear(rank, "2: ")
            assert said.startswith(expected), (rank, said)
            if expected != DONE:
                assert f"rank {victim}" in said
            if expected == FAILED:
                assert said.startswith(f"{FAILED} ({victim},)")
            if expected == DONE:  # of that one; what comes after it waits for the dead
                later = gang.hear(rank, "3: ")
                assert f"rank {victim}" in later, later
                assert later.startswith((FAILED, UNKNOWN))
            gang.hear(rank, "closed")
    assert is_whole(folder, shared, size) == whole


def is_whole(folder: Path, shared: str, size: int) -> bool:
    """Whether the records of the second version are all there."""
    tiers = [tier_of(shared, folder, rank) for rank in range(size)]
    there = [HELD in Log(tier, "run").seqs() for tier in tiers]
    ids = {Log(t, "run").read(HELD).version.id for t, here in zip(tiers, there, strict=True) if here}
    assert len(ids) <= 1
    return all(there)


@pytest.mark.parametrize(
    ("shared", "case"),
    [("site", SITE[3]), ("site", SITE[6]), ("long", LONG[1]), ("unreached", UNREACHED[3])],
    ids=str,
)
def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path: Path, shared: str, case: Any) -> None:
    die(tmp_path, shared, 2, case, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("shared", "case"),
    [
        (shared, case)
        for shared, cases in {"site": SITE, "host": HOST, "long": LONG, "unreached": UNREACHED}.items()
        for case in cases
    ],
    ids=str,
)
def test_a_rank_that_dies_at_any_point_is_named_by_the_others(
    tmp_path: Path, shared: str, size: int, case: Any, how: int
) -> None:
    die(tmp_path, shared, size, case, how)


@pytest.mark.soak
def test_ranks_whose_store_dies_with_its_owner_say_so(tmp_path: Path) -> None:
    """The first rank owns the store, as without an agent that does."""
    with Gang(2, "support.commit_jobs:ranks", tmp_path, "site", "0:after record", 3, 60) as gang:
        gang.hear(0, "held")
        gang.kill(0)
        assert gang.hear(1, "1: ").startswith(DONE)
        said = gang.hear(1, "2: ")
        assert said.startswith(UNKNOWN)
        assert "the store by which ranks speak is lost" in said
        said = gang.hear(1, "3: ")
        assert said.startswith((FAILED, UNKNOWN))
        gang.hear(1, "closed")


@pytest.mark.soak
@pytest.mark.parametrize("shared", ["site", "long", "unreached"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_which_none_dies(tmp_path: Path, size: int, shared: str) -> None:
    folder = tmp_path / "all"
    with Gang(size, "support.commit_jobs:ranks", folder, shared, "", 3, 60) as gang:
        for rank, said in enumerate(gang.wait()):
            lines = [line for line in said.splitlines() if line[1:3] == ": "]
            assert [line[3:].split()[0] for line in lines] == [DONE] * 3
            assert all(line.endswith("part") == (rank > 0) for line in lines)
    tier = tier_of(shared, folder, 0)
    assert Log(tier, "run").seqs() == [1, 2, 3]
    assert not [key for key in tier.list("packs/") if "-part-" in key]
    record = Log(tier, "run").read(3)
    assert record.version.head.world == size
    assert bool(record.layout.present.all())
