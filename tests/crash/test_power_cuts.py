"""A power cut at every system call of a directory tier: what was not synced is lost, in any combination."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tensors
from support.crash_checks import CHANCES, RUN, Past
from support.leaks import temporary
from support.outcomes import Background, tried, write
from support.power_cut import Cut, Disk, rooms_with

import tierstate as ts
from tierstate.manifest.errors import AlreadyExists
from tierstate.tiers.base import Tier
from tierstate.tiers.posix import directory, files
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.posix.files import BufferedFile
from tierstate.tiers.testing import random_bytes

pytestmark = pytest.mark.slow

KEYS = ("packs/r/a", "packs/r/b", "versions/r/a")
LONG = (1 << 20) + 5000
"""Bytes from which on a file is not written in one call."""


def data_of(key: str, nbytes: int = 900) -> Any:
    """What lies under a key, if anything does."""
    return random_bytes(nbytes, KEYS.index(key))


class Use:
    """What is done with a directory tier, and told: what is there for good, and what is gone for good."""

    def __init__(self, disk: Disk, nbytes: int = 900, io: Any = "buffered") -> None:
        self.disk, self.nbytes = disk, nbytes
        self.tier = Directory(disk.place / "tier", io=io)
        self.tier.name = "disk"

    def put(self, key: str) -> None:
        write(self.tier, key, data_of(key, self.nbytes), 700_000)
        self.disk.tell(("there", key))

    def give_up(self, key: str) -> None:
        writer = self.tier.writer(key)
        writer.append(data_of(key, self.nbytes))
        writer.abort()

    def delete(self, key: str) -> None:
        self.disk.tell(("going", key))
        self.tier.delete(key)
        self.disk.tell(("gone", key))


def look(cut: Cut, nbytes: int = 900) -> None:
    """What a power cut left is whole, has all that was there for good and nothing that was gone, and is of use."""
    with scratch() as place:
        cut.build(place)
        tier = Directory(place / "tier", io="buffered")
        tier.name = "disk"
        found = list(tier.list(""))
        for key in found:
            assert tier.get(key).equal(data_of(key, nbytes)), f"{key} is not what was put there"
        state = {key: what for what, key in cut.told}  # type: ignore[misc]
        for key, what in state.items():
            assert what != "there" or key in found, f"{key} was durable and is lost"
            assert what != "gone" or key not in found, f"{key} was deleted and is back"
        for key in KEYS:
            error = tried(lambda key=key: write(tier, key, data_of(key, nbytes), 700_000))  # type: ignore[misc]
            assert isinstance(error, AlreadyExists) if key in found else error is None
            assert tier.get(key).equal(data_of(key, nbytes))
        assert temporary(place) == [], "the first write removes what dead writers left"
        tier.close()


def used(place: Path, use: Callable[[Use], None], nbytes: int = 900, io: Any = "buffered") -> Disk:
    """The disk after a tier was used."""
    disk = Disk(place)
    with disk.watched():
        using = Use(disk, nbytes, io)
        use(using)
        using.tier.close()
    return disk


def simple(use: Use) -> None:
    use.put("packs/r/a")
    use.put("versions/r/a")
    use.delete("versions/r/a")
    use.delete("packs/r/a")


def given_up(use: Use) -> None:
    use.put("packs/r/a")
    use.give_up("packs/r/b")
    use.put("packs/r/b")


def racing(use: Use) -> None:
    calls = [Background(lambda key=key: use.put(key)) for key in KEYS[:2]]  # type: ignore[misc]
    assert [call.outcome() for call in calls] == [None, None]
    use.delete("packs/r/a")


def look_at_each(disk: Disk) -> int:
    """Every outcome of a power cut at every moment, each once; how many there are."""
    outcomes = {repr(cut): cut for at in range(disk.now + 1) for cut in disk.cuts(at)}
    for cut in outcomes.values():
        look(cut)
    return len(outcomes)


@pytest.mark.parametrize("use", [simple, given_up, racing])
def test_every_outcome_of_a_power_cut_at_every_call(use: Callable[[Use], None]) -> None:
    with scratch() as place:
        disk = used(place, use)
    assert look_at_each(disk) > disk.now / 2


@pytest.mark.parametrize("io", ["buffered", "threads"])
@given(chance=CHANCES)
@settings(max_examples=max(8, settings().max_examples // 5))
def test_long_files_are_whole_or_absent_too(io: str, chance: random.Random) -> None:
    """Files of many writes, some of them past the page cache."""
    with scratch() as place:
        disk = used(place, simple, LONG, io)
        look(chosen(disk, chance), LONG)


def chosen(disk: Disk, chance: random.Random) -> Cut:
    """One outcome of one power cut."""
    return disk.cut(chance.randint(0, disk.now), chance.choice)


# A broken protocol is seen: each of these leaves out one step of it.


@contextmanager
def instead(where: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Another function in a class, or in every room that knows one of this room."""
    rooms = [where] if isinstance(where, type) else rooms_with(name, getattr(where, name))
    with ExitStack() as stack:
        for room in rooms:
            stack.enter_context(mock.patch.object(room, name, other))
        yield


def linked_first(writer: directory.FileWriter) -> None:
    writer._stream.finish()
    writer._name()
    writer._file.sync()
    files.sync_folder(writer._path.parent)
    writer._clear()


def deleted_carelessly(tier: Tier, key: str) -> None:
    assert isinstance(tier, Directory)
    os_of_tier: Any = vars(directory)["os"]
    os_of_tier.unlink(tier.file(key))


def made_carelessly(tier: Directory, folder: Path) -> None:
    os_of_tier: Any = vars(directory)["os"]
    if not folder.exists():
        os_of_tier.mkdir(folder)


BROKEN: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "bytes are not synced": (BufferedFile, "sync", lambda _: None, "is not what was put there"),
    "folders are not synced": (files, "sync_folder", lambda _: None, "was durable and is lost"),
    "new folders are not synced": (Directory, "_make_and_sync", made_carelessly, "was durable and is lost"),
    "the link comes first": (directory.FileWriter, "_publish", linked_first, "is not what was put there"),
    "deleting is not synced": (Directory, "delete", deleted_carelessly, "was deleted and is back"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_step_of_the_protocol_left_out_is_seen(how: str) -> None:
    where, name, other, message = BROKEN[how]
    with scratch() as place, instead(where, name, other):
        disk = used(place, simple)
    with pytest.raises(AssertionError, match=message):
        look_at_each(disk)


# Whole runs


TIERS: dict[str, dict[str, Any]] = {
    "nvme": {"type": "nvme", "keep": {"last": 2}, "io": "buffered"},
    "lustre": {"type": "lustre", "keep": {"last": 1, "every": 3}, "io": "buffered"},
}


def tiers_in(place: Path) -> dict[str, dict[str, Any]]:
    """The tiers of a policy, below a folder."""
    return {name: {**keys, "path": str(place / name)} for name, keys in TIERS.items()}


@given(
    history=st.lists(st.tuples(st.sets(st.integers(0, 2)), st.booleans()), min_size=1, max_size=4),
    chances=st.lists(CHANCES, min_size=3, max_size=3),
)
@settings(max_examples=max(8, settings().max_examples // 5))
def test_a_run_that_loses_power_anywhere(history: list[tuple[set[int], bool]], chances: list[random.Random]) -> None:
    """Saves, a cascade and retention on two directories, which lose power at the same moment."""
    state, truth = tensors(9000, 4096, 100), {}
    with scratch() as place:
        disk = Disk(place)
        with disk.watched(), ts.Checkpointer(policy(tiers_in(place)), RUN) as ckpt:
            for step, (leaves, wait) in enumerate(history):
                for leaf in leaves:
                    state[chr(97 + leaf)] += 1.0
                truth[step] = {name: tensor.clone() for name, tensor in state.items()}
                save = ckpt.save(state, step=step)
                for name in save.tiers if wait else ():
                    save.wait(name)
                    disk.tell((name, step))
    for chance in chances:
        cut = chosen(disk, chance)
        with scratch() as place:
            cut.build(place)
            Past(truth, cut.told).check_all(tiers_in(place), tensors(9000, 4096, 100, seed=9))
            assert temporary(place / "nvme") == []


def test_what_is_recorded_is_what_is_there() -> None:
    """Guards the guard: with nothing lost, the recording gives the very files that are there."""
    with scratch() as place, scratch() as other:
        disk = used(place, given_up, LONG, "threads")
        disk.cut(disk.now, lambda options: options[-1]).build(other)
        names = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
        assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*"))
        for name in filter(lambda name: (place / name).is_file(), names):
            assert (place / name).read_bytes() == (other / name).read_bytes()
            assert os.path.getsize(place / name) == LONG
