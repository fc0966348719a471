"""Writers of directory tiers that die, meet each other, or find no room."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from support.leaks import files

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import NotFound, TierFull, TierUnavailable
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.testing import random_bytes

pytestmark = pytest.mark.slow


@pytest.fixture
def tier(tmp_path: Path) -> Nvme:
    return Nvme(path=tmp_path / "tier")


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Another process that runs the code, once it has said that it is ready."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


# Leftovers


KILLED = """
    import sys, torch
    from pathlib import Path
    from tierstate.tiers.posix.directory import Nvme
    tier = Nvme(path=Path(sys.argv[1]))
    tier.put("run/whole", torch.ones(1000, dtype=torch.uint8))
    writer = tier.writer("run/half")
    writer.append(torch.ones(1_000_000, dtype=torch.uint8))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_writer_that_is_killed_leaves_nothing(tier: Nvme) -> None:
    with start(KILLED, tier.path) as child:
        assert len(files(tier.path)) == 2

        # While it lives, neither a reader nor another writer sees or removes anything of it.
        tier.put("other", empty_buffer(1))
        assert list(tier.list("")) == ["other", "run/whole"]
        assert len(files(tier.path)) == 3
        child.send_signal(signal.SIGKILL)

    opened = Nvme(path=tier.path)
    assert list(opened.list("")) == ["other", "run/whole"]
    with pytest.raises(NotFound):
        opened.size("run/half")
    assert len(files(tier.path)) == 3, "reading removes nothing"
    opened.put("run/half", random_bytes(10))
    assert files(tier.path) == ["other", "run/half", "run/whole"]


def test_a_writer_of_the_same_process_is_left_alone(tier: Nvme) -> None:
    with tier.writer("a") as writer:
        writer.append(random_bytes(10))
        Nvme(path=tier.path).put("b", empty_buffer(1))
    assert files(tier.path) == ["a", "b"]


@pytest.mark.parametrize(("age", "left"), [(3000, True), (4000, False)])
def test_where_locks_tell_nothing_age_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, left: bool
) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    leftover = tmp_path / ".tmp-0123"
    leftover.write_text("half")
    os.utime(leftover, (time.time() - age,) * 2)
    Nvme(path=tmp_path).put("a", empty_buffer(1))
    assert leftover.exists() == left


def test_a_sweep_that_is_quicker_than_the_lock(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose file is removed between its creation and its lock takes another."""
    tier.put("z", empty_buffer(1))
    real, removed = fcntl.flock, []

    def remove_first(fd: int, how: int) -> None:
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(removed[0])
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    tier.put("a", random_bytes(10))
    assert removed
    assert torch.equal(tier.get("a"), random_bytes(10))


def test_a_sweep_that_holds_the_lock(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("z", empty_buffer(1))
    real, taken = fcntl.flock, []

    def busy_first(fd: int, how: int) -> None:
        if not taken:
            taken.append(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
            real(taken[0], how)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", busy_first)
    tier.put("a", random_bytes(10))
    os.close(taken[0])
    assert torch.equal(tier.get("a"), random_bytes(10))


@pytest.mark.parametrize("where", ["fcntl.flock", "os.lstat"])
def test_a_file_that_cannot_be_locked_or_looked_at_is_removed(
    tier: Nvme, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tier.put("z", empty_buffer(1))
    module, name = {"fcntl": fcntl, "os": os}[where.split(".")[0]], where.split(".")[1]
    real = getattr(module, name)

    def fail(what: object, *more: object, **named: object) -> object:
        if ".tmp-" in (os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(what, *more, **named)

    with monkeypatch.context() as failing:
        failing.setattr(module, name, fail)
        with pytest.raises(TierUnavailable, match="ESTALE"):
            tier.put("a", random_bytes(10))
    assert files(tier.path) == ["z"]


# Races and capacity


RACER = """
    import sys, time
    from pathlib import Path
    from tierstate.manifest.errors import AlreadyExists
    from tierstate.tiers.posix.directory import Nvme
    from tierstate.tiers.testing import random_bytes
    tier, seed, rounds = Nvme(path=Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    for n in range(rounds):
        while time.time() < start + 0.03 * n:
            pass
        try:
            tier.put(f"run/{n}", random_bytes(100_000, seed))
            print(n, flush=True)
        except AlreadyExists:
            continue
"""


def test_two_processes_race_and_one_wins(tmp_path: Path) -> None:
    rounds = 30
    racers = [start(RACER, tmp_path, seed, rounds) for seed in range(2)]
    at = time.time() + 0.1
    won = [set(map(int, racer.communicate(f"{at}\n".encode())[0].split())) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert won[0] | won[1] == set(range(rounds))
    assert not won[0] & won[1]
    tier = Nvme(path=tmp_path)
    for seed in range(2):
        for n in won[seed]:
            assert torch.equal(tier.get(f"run/{n}"), random_bytes(100_000, seed))
    assert files(tmp_path) == sorted(f"run/{n}" for n in range(rounds))


def test_capacity_counts_what_is_there_already(tmp_path: Path) -> None:
    Nvme(path=tmp_path).put("run/a", empty_buffer(600))
    tier = Nvme(path=tmp_path, capacity=1000)
    writer = tier.writer("run/b")
    writer.append(empty_buffer(400))
    with pytest.raises(TierFull, match="1000B of the capacity of 1000B are in use"):
        tier.put("run/c", empty_buffer(1))
    writer.abort()
    tier.put("run/c", empty_buffer(400))
    tier.delete("run/a")
    tier.delete("run/a")
    tier.put("run/d", empty_buffer(600))
    with pytest.raises(TierFull):
        tier.put("run/e", empty_buffer(1))
