"""Pruning beside other processes, and after some that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import concurrent_processes, forked
from support.checkpointer_worlds import scratch, unreferenced

import tierstate as ts
from tierstate.manifest.history.leases import Leases
from tierstate.tiers.posix.directory import Nvme

pytestmark = pytest.mark.slow

SCRIPT = Path(concurrent_processes.__file__).resolve()

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 512KiB}}
tiers:
  nvme: {{type: nvme, path: {place}/nvme, keep: {{last: 2, every: 7}}}}
"""


def saved(place: Path, count: int) -> None:
    """Save so many steps, in this process."""
    (place / "policy.yaml").write_text(POLICY.format(place=place))
    with ts.Checkpointer(place / "policy.yaml", "run") as ckpt:
        concurrent_processes.save(ckpt, count)


def start(role: str, place: Path, count: int) -> subprocess.Popen[str]:
    command = [*forked.command(str(SCRIPT)), role, str(place / "policy.yaml"), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], *, killed: bool = False) -> str:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == (-signal.SIGKILL if killed else 0), errors
    return output


def make_old(place: Path) -> None:
    """Let all that is there be two days old."""
    then = time.time() - 2 * 24 * 3600
    for file in (place / "nvme").rglob("*"):
        os.utime(file, (then, then))


def test_packs_of_a_killed_saver_and_the_lease_of_a_killed_reader_are_swept() -> None:
    with scratch() as place:
        saved(place, 3)
        for process in [start("die", place, 1), start("hold", place, 1)]:
            ended(process, killed=True)
        tier = Nvme(path=place / "nvme")
        orphans, leases = unreferenced(tier, "run"), list(tier.list("leases/"))
        assert orphans
        assert len(leases) == 1
        assert Leases(tier, "run").look(tier.age).gone == tuple(leases)
        with ts.Checkpointer(place / "policy.yaml", "run") as ckpt:
            assert ckpt.prune().tiers[0].young == len(orphans), "they may be of a save under way"
            assert list(tier.list("leases/")) == []
            make_old(place)
            assert set(ckpt.prune().tiers[0].packs) == orphans
            assert ckpt.verify(deep=True).ok
            concurrent_processes.read(ckpt, 4)
        assert unreferenced(tier, "run") == set()


def side_by_side(place: Path, saves: int, reads: int, prunes: int) -> None:
    """A saver, two that prune, and a reader at once, where older processes have left something."""
    saved(place, 12)
    ended(start("die", place, 1), killed=True)
    make_old(place)
    processes = [start("save", place, saves), start("read", place, reads)]
    processes += [start("prune", place, prunes) for _ in range(2)]
    answers = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, [errors for _, errors in answers]
    assert "repacked" in answers[-1][0]
    tier = Nvme(path=place / "nvme")
    make_old(place)
    with ts.Checkpointer(place / "policy.yaml", "run") as ckpt:
        while ckpt.prune().tiers[0].packs:
            continue
        report = ckpt.verify(deep=True)
        assert report.ok, report
        steps = [v.step for v in ckpt.versions()]
        assert max(steps) == 12 + saves - 1
        assert {step for step in steps if step % 7 == 0} == set(range(0, 12 + saves, 7)), "what is kept is there"
    assert unreferenced(tier, "run") == set()
    assert list(tier.list("leases/")) == []


@pytest.mark.soak
def test_a_saver_a_reader_and_two_that_prune_work_beside_each_other() -> None:
    with scratch() as place:
        side_by_side(place, saves=15, reads=10, prunes=3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_they_do_so_for_long() -> None:
    with scratch() as place:
        side_by_side(place, saves=1_000, reads=600, prunes=150)
