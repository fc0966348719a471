"""Directory tiers on file systems without hard links, without renames that replace nothing, or without exact names.

Mounted for real: FUSE with what is named taken away, exFAT, and FAT where the kernel has it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import scratch
from support.filesystems import MIB, Disk, exfat, fuse, vfat

import tierstate as ts
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import AlreadyExists, NotFound, TierError, TierUnavailable
from tierstate.tiers.base import Tier
from tierstate.tiers.posix import naming
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.posix.files import UNLOCKED_AGE
from tierstate.tiers.posix.naming import LOCK, Naming, lock_file
from tierstate.tiers.testing import TierContract, random_bytes

pytestmark = pytest.mark.slow

MOUNTS: dict[str, tuple[Naming, Callable[[Path], AbstractContextManager[Disk]]]] = {
    "fuse": (Naming.LINK, lambda folder: fuse(folder)),
    "no-links": (Naming.RENAME, lambda folder: fuse(folder, "links")),
    "no-links-no-renames": (Naming.LOCK, lambda folder: fuse(folder, "links", "noreplace")),
    "no-links-no-renames-no-case": (Naming.LOCK, lambda folder: fuse(folder, "links", "noreplace", "case")),
    "no-links-no-renames-no-locks": (Naming.LOCK, lambda folder: fuse(folder, "links", "noreplace", "locks")),
    "exfat": (Naming.LOCK, lambda folder: exfat(folder, 256 * MIB)),
    "vfat": (Naming.RENAME, lambda folder: vfat(folder, 256 * MIB)),
}

IGNORE_CASE = ("no-links-no-renames-no-case", "exfat", "vfat")


@pytest.fixture(scope="module", params=list(MOUNTS))
def mounted(request: pytest.FixtureRequest, root) -> Iterator[tuple[str, Path]]:
    """The name of a kind of mount, and where it is."""
    with scratch() as place, MOUNTS[request.param][1](place) as disk:
        yield request.param, disk.path


@pytest.fixture
def kind(mounted: tuple[str, Path]) -> str:
    """The kind of mount."""
    return mounted[0]


@pytest.fixture
def tmp_path(mounted: tuple[str, Path]) -> Path:
    """A new folder on the mount."""
    path = mounted[1] / uuid.uuid4().hex
    path.mkdir()
    return path


class TestContract(TierContract):
    examples = 5

    @pytest.fixture(autouse=True)
    def exact_names(self, request: pytest.FixtureRequest, kind: str) -> None:
        """The promise of lists has keys that differ in case, which `test_keys_that_differ_in_case` is about."""
        if kind in IGNORE_CASE and "lists-are-whole" in request.node.name:
            pytest.skip("names ignore case on this one")

    def make(self, tmp_path: Path) -> Tier:
        return Nvme(path=tmp_path / "tier")

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, Nvme)
        return Nvme(path=tier.path)


def left(path: Path) -> list[str]:
    """Every file below a folder, temporary ones too. FUSE gives removed files that are open a name of its own."""
    found = (str(one.relative_to(path)) for one in path.rglob("*") if not one.is_dir())
    return sorted(one for one in found if ".fuse_hidden" not in one)


def test_it_is_told_how_names_are_given(kind: str, tmp_path: Path) -> None:
    tier = Nvme(path=tmp_path)
    tier.put("a", as_buffer(b"a"))
    assert tier.naming is MOUNTS[kind][0]
    assert (tier.naming.value in tier.traits.notes) == (tier.naming is not Naming.LINK)
    assert any("upper from lower case" in note for note in tier.traits.notes) == (kind in IGNORE_CASE)
    assert left(tmp_path) == ["a"]


RACER = """
    import os, sys, torch
    from pathlib import Path
    from tierstate.manifest.errors import AlreadyExists
    from tierstate.tiers.posix.directory import Nvme
    tier = Nvme(path=Path(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
    me = torch.full((3000,), int(sys.argv[2]), dtype=torch.uint8)
    for n in range(int(sys.argv[3])):
        try:
            tier.put(f"run/{n}", me)
            print(n, flush=True)
        except AlreadyExists:
            pass
"""


def test_many_processes_race_and_one_wins(tmp_path: Path) -> None:
    racers, keys = 6, 40
    command = [sys.executable, "-c", textwrap.dedent(RACER), tmp_path]
    children = [
        subprocess.Popen(
            [*map(str, command), str(n), str(keys)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for n in range(racers)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    winners: dict[int, int] = {}
    for number, child in enumerate(children):
        told, _ = child.communicate()
        assert child.returncode == 0
        for key in map(int, told.split()):
            assert key not in winners, "two winners"
            winners[key] = number
    tier = Nvme(path=tmp_path)
    assert sorted(winners) == list(range(keys))
    for key, number in winners.items():
        assert torch.equal(tier.get(f"run/{key}"), torch.full((3000,), number, dtype=torch.uint8))
    assert len(left(tmp_path)) == keys


KILLED = """
    import itertools, os, signal, sys, torch
    from pathlib import Path
    from tierstate.tiers.posix import naming
    from tierstate.tiers.posix.directory import Nvme
    tier = Nvme(path=Path(sys.argv[1]))
    tier.put("run/first", torch.zeros(1, dtype=torch.uint8))
    count = itertools.count()

    def counted(call):
        def change(*arguments, **keys):
            if next(count) == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keys)
        return change

    for name in ("open", "pwrite", "fdatasync", "fsync", "link", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    naming._rename_no_replace = counted(naming._rename_no_replace)
    tier.put("run/a", torch.ones(5000, dtype=torch.uint8))
"""


def test_killed_at_any_step_there_is_the_whole_object_or_none_and_the_next_writer_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "LOCK_WAIT", 0.1)
    outcomes: Counter[bool] = Counter()
    for step in range(100):
        place = tmp_path / str(step)
        code = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), place, str(step)]).returncode
        if code == 0:
            break
        assert code == -signal.SIGKILL
        opened = Nvme(path=place)
        there = list(opened.list("run/a"))
        outcomes[bool(there)] += 1
        if there:
            assert torch.equal(opened.get("run/a"), torch.ones(5000, dtype=torch.uint8))
            with pytest.raises(AlreadyExists):
                opened.put("run/a", random_bytes(3))
        elif kind.endswith("no-locks") and lock_file(place / "run/a").exists():
            # Nobody can tell that its owner is dead: it counts as held, until it is old.
            with pytest.raises(TierUnavailable, match="another writer's lock stays"):
                opened.put("run/a", random_bytes(3))
            os.utime(lock_file(place / "run/a"), (1, time.time() - UNLOCKED_AGE - 60))
            opened.put("run/a", random_bytes(3))
        else:
            opened.put("run/a", random_bytes(3))
            assert torch.equal(opened.get("run/a"), random_bytes(3))
        if not kind.endswith("no-locks"):
            assert left(place) == ["run/a", "run/first"]
    assert outcomes[True]
    assert outcomes[False] > 3


def test_a_lock_left_beside_is_no_obstacle_for_a_handle_that_swept_before(kind: str, tmp_path: Path) -> None:
    tier = Nvme(path=tmp_path)
    tier.put("first", as_buffer(b"1"))
    place = lock_file(tmp_path / "a")
    place.touch()
    if kind.endswith("no-locks"):
        os.utime(place, (1, 1))
    tier.put("a", as_buffer(b"a"))
    assert bytes(tier.get("a").numpy()) == b"a"
    assert (tier.naming is Naming.LOCK) != place.exists()
    assert place.name.startswith(LOCK)


def test_a_lock_whose_owner_lives_is_waited_for_and_then_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if MOUNTS[kind][0] is not Naming.LOCK:
        pytest.skip("nothing is locked on this one")
    monkeypatch.setattr(naming, "LOCK_WAIT", 0.1)
    tier = Nvme(path=tmp_path)
    tier.put("first", as_buffer(b"1"))
    held = naming.create_locked(lock_file(tmp_path / "a"))
    assert held is not None
    with contextlib.closing(held):
        with pytest.raises(TierUnavailable, match=r"a: cannot write .*another writer's lock stays.*ETIMEDOUT"):
            tier.put("a", as_buffer(b"a"))
        assert held.path.exists()
        os.unlink(held.path)
    tier.put("a", as_buffer(b"a"))
    assert left(tmp_path) == ["a", "first"]


def test_keys_that_differ_in_case_are_told_apart_or_refused(kind: str, tmp_path: Path) -> None:
    tier = Nvme(path=tmp_path)
    keys = {"Run/A": b"1", "run/B": b"2", "Run/a": b"3", "Z": b"4", "z": b"5", "Run.": b"6"}
    kept: dict[str, bytes] = {}
    refused: list[TierError] = []
    for key, data in keys.items():
        try:
            tier.put(key, as_buffer(data))
            kept[key] = data
        except TierError as error:
            refused.append(error)
    # It is no race that was lost, which would be tried again.
    assert all(type(error) is TierError and "ignores case" in str(error) for error in refused)
    assert list(kept) == (["Run/A", "Z"] if kind in IGNORE_CASE else list(keys))
    for handle in (tier, Nvme(path=tmp_path), Nvme(path=tmp_path)):
        for key in reversed(keys):
            if key in kept:
                assert bytes(handle.get(key).numpy()) == kept[key]
                assert list(handle.list(key)) == [one for one in sorted(kept) if one.startswith(key)]
            else:
                for ask in (handle.size, handle.get, handle.age):
                    with pytest.raises(NotFound):
                        ask(key)
                assert list(handle.list(key)) == []
                handle.delete(key)
        assert list(handle.list("")) == sorted(kept)


def test_saves_and_restores(kind: str, tmp_path: Path) -> None:
    policy = ts.Policy.default(tmp_path)
    state = {"w": torch.arange(3_000_000, dtype=torch.float32), "step": 0}
    with ts.Checkpointer(policy, "Run") as ckpt:
        for step in range(3):
            state["w"] += 1
            ckpt.save({**state, "step": step}, step=step).wait()
        assert ckpt.verify(deep=True).ok
    with ts.Checkpointer(policy, "Run") as ckpt:
        found = ckpt.load()
        assert found["step"] == 2
        assert torch.equal(found["w"], state["w"])
    if kind in IGNORE_CASE:
        with ts.Checkpointer(policy, "run") as ckpt:
            assert ckpt.versions() == []
            with pytest.raises(TierError, match="ignores case"):
                ckpt.save(state, step=9).wait()
