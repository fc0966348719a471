"""Ages: by the clock of whatever keeps the objects, and unknown where it cannot be asked."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpointer_worlds import scratch
from support.small_records import pack, record

from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import NotFound
from tierstate.manifest.history.log import Log, commit_id
from tierstate.tiers import clock as clock_module
from tierstate.tiers.base import Tier
from tierstate.tiers.clock import CLOCK_REFRESH, RemoteClock
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.object.bucket import Bucket
from tierstate.tiers.object.filesystem import FsspecClient
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.posix import directory
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.posix.lustre import Lustre
from tierstate.tiers.wrappers.retry import Retried

DAY = 24 * 3600.0


@pytest.fixture(params=["nvme", "lustre", "file", "retried"])
def folder(request: pytest.FixtureRequest) -> Iterator[tuple[Tier, Path]]:
    with scratch() as place:
        makes = {
            "nvme": lambda: Nvme(path=place),
            "lustre": lambda: Lustre(path=place),
            "file": lambda: ObjectStore(url=f"file://{place}"),
            "retried": lambda: Retried(Nvme(path=place), 1),
        }
        tier: Tier = makes[request.param]()
        yield tier, place
        tier.close()


def test_a_file_is_as_old_as_its_file_system_says(folder: tuple[Tier, Path]) -> None:
    tier, place = folder
    tier.put("a/b", as_buffer(b"x"))
    now = time.time()
    os.utime(place / "a/b", (now - 2 * DAY, now - 2 * DAY))
    age = tier.age("a/b")
    assert age is not None
    assert 2 * DAY - 60 < age < 2 * DAY + 600
    os.utime(place / "a/b", (now + DAY, now + DAY))
    assert tier.age("a/b") == 0.0, "what comes from the future is new"
    with pytest.raises(NotFound):
        tier.age("a")
    assert [entry.name for entry in place.iterdir()] == ["a"], "nothing is left of looking at the clock"


@pytest.mark.parametrize(("code", "told"), [(errno.EROFS, False), (errno.EACCES, False), (errno.ENOSPC, True)])
def test_where_no_file_can_be_made(code: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch() as place:
        tier = Nvme(path=place)
        tier.put("a", as_buffer(b"x"))
        tier.close()
        tier = Nvme(path=place)

        def refuse(_folder: Path) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(directory, "create_temp", refuse)
        assert (tier.age("a") is not None) == told
        tier.close()


def test_a_distant_clock_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = [100.0], iter([5_000.0, None, 9_000.0])
    monkeypatch.setattr(clock_module.time, "monotonic", lambda: here[0])
    clock = RemoteClock(lambda: next(there))
    assert clock.now() == 5_000.0
    here[0] += CLOCK_REFRESH
    assert clock.now() == 5_000.0 + CLOCK_REFRESH
    here[0] += 1
    assert clock.now() is None, "it is not answered by what was seen long ago"
    assert clock.now() == 9_000.0


def test_a_store_that_tells_no_time_is_asked_by_an_object() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    tier = Bucket(url, {}, None, FsspecClient(url, {}))
    tier.put("a", as_buffer(b"x"))
    age = tier.age("a")
    assert age is not None
    assert age >= 0
    assert list(tier.list("")) == ["a"]
    assert [name for name in tier._store.names("") if name != "a"] == []


def test_a_record_that_was_read_is_known_again_until_it_is_dropped_or_replaced() -> None:
    tier, pieces = Memory(), {"a": b"x"}
    log, first = Log(tier, "run"), record(tier, 1, pieces, pack(tier, 1, pieces))
    log.commit(first)
    assert log.holds(log.read(1))
    second = replace(first, commit={"id": commit_id()})
    log.commit(second, 1)
    assert log.holds(log.read(1)), "both are true"
    log.forget(1)
    assert not log.holds(first)
    assert log.holds(second)
    log.forget(1, [1])
    assert not log.holds(second)
