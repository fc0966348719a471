"""Calls that hang: the caller gets an error in time, and after the call returns the tier works as before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.checkpointer_worlds import alike, policy, tensors
from support.outcomes import until

import tierstate as ts
from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import AlreadyExists, CommitUnknown, NotFound, TierUnavailable
from tierstate.tiers.base import ObjectWriter, Range, Release, Tier, Traits, layers
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.posix.directory import FileWriter, Nvme
from tierstate.tiers.testing import Lease, TierContract, random_bytes
from tierstate.tiers.wrappers import watchdog
from tierstate.tiers.wrappers.breaker import Hung
from tierstate.tiers.wrappers.deadline import Deadline, DeadlineWriter

LONG, SOON = 60.0, 0.1
"""The deadline of these tests, and what it becomes while a call is stuck: what is healthy may be slow here."""


def set_deadline(tier: Deadline, seconds: float) -> None:
    """Change the deadline of what is under way."""
    with tier._watch._lock:
        tier._watch.seconds = seconds
        tier._watch._changed.notify_all()


class Stuck(Tier):
    """A directory whose calls of one operation do not return before its gate is opened, before or after their work."""

    def __init__(self, path: Path) -> None:
        self.inner = Nvme(path=path)
        self.name = self.inner.name = "shared"
        self.gates: dict[str, threading.Event] = {}
        self.after: dict[str, threading.Event] = {}
        self.entered = threading.Semaphore(0)
        self.outer: Deadline | None = None

    def shut(self, operation: str, *, after: bool = False) -> threading.Event:
        gate = threading.Event()
        (self.after if after else self.gates)[operation] = gate
        return gate

    def do(self, operation: str, call: Callable[[], object]) -> object:
        self._wait(self.gates, operation)
        result = call()
        self._wait(self.after, operation)
        return result

    def _wait(self, gates: dict[str, threading.Event], operation: str) -> None:
        gate = gates.get(operation)
        if gate is not None and not gate.is_set():
            self.entered.release()
            if self.outer is not None:
                set_deadline(self.outer, SOON)
            gate.wait()
            if self.outer is not None:
                set_deadline(self.outer, LONG)

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def put(self, key: str, data: Buffer) -> None:
        self.do("put", lambda: self.inner.put(key, data))

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self.do("read", lambda: self.inner.read(key, ranges))

    def list(self, prefix: str) -> Iterator[str]:
        # As a generator may: nothing happens before the first key is asked for.
        self.do("list", lambda: None)
        yield from self.inner.list(prefix)

    def size(self, key: str) -> int:
        found = self.do("size", lambda: self.inner.size(key))
        assert isinstance(found, int)
        return found

    def delete(self, key: str) -> None:
        self.do("delete", lambda: self.inner.delete(key))

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        made = self.do("writer", lambda: self.inner.writer(key, size_hint))
        assert isinstance(made, ObjectWriter)
        return StuckWriter(self, made)

    def close(self) -> None:
        self.do("close", self.inner.close)


class StuckWriter(ObjectWriter):
    def __init__(self, tier: Stuck, inner: ObjectWriter) -> None:
        self.tier, self.inner = tier, inner

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        self.tier.do("append", lambda: self.inner.append(buffer, release))

    def close(self) -> None:
        self.tier.do("finish", self.inner.close)

    def abort(self) -> None:
        self.tier.do("abort", self.inner.abort)


@pytest.fixture
def inner(place: Path) -> Iterator[Stuck]:
    stuck = Stuck(place)
    yield stuck
    for gate in [*stuck.gates.values(), *stuck.after.values()]:
        gate.set()


@pytest.fixture
def tier(inner: Stuck) -> Iterator[Deadline]:
    tier = impatient(inner)
    yield tier
    tier.close()


def impatient(inner: Stuck) -> Deadline:
    """A tier that gives a stuck call up soon."""
    inner.outer = Deadline(inner, LONG)
    return inner.outer


def back(tier: Deadline) -> None:
    """Wait until it can be used again."""
    until(lambda: not tier.traits.notes)


def temporary(place: Path) -> list[Path]:
    return list(place.rglob(".tmp*"))


class TestDeadlineContract(TierContract):
    examples = 10

    def make(self, tmp_path: Path) -> Tier:
        return Deadline(Nvme(path=tmp_path), 60)

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, Deadline)
        assert isinstance(tier.inner, Nvme)
        return Deadline(Nvme(path=tier.inner.path), 60)


CALLS: dict[str, Callable[[Tier], object]] = {
    "put": lambda tier: tier.put("new", random_bytes(10)),
    "read": lambda tier: tier.read("old", [Range(0, empty_buffer(10))]),
    "list": lambda tier: list(tier.list("")),
    "size": lambda tier: tier.size("old"),
    "delete": lambda tier: tier.delete("old"),
    "writer": lambda tier: tier.writer("new").abort(),
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", list(CALLS))
def test_a_call_that_hangs_is_given_up_and_then_all_fail_at_once(tier: Deadline, inner: Stuck, operation: str) -> None:
    tier.put("old", random_bytes(10))
    gate = inner.shut(operation)
    with pytest.raises(
        TierUnavailable, match=r"shared: hangs since \d\d:\d\d:\d\d: .* has not come back in 0.1 s"
    ) as e:
        CALLS[operation](tier)
    assert (e.value.tier, e.value.transient) == ("shared", True)
    assert inner.entered.acquire(timeout=30)
    for name, call in CALLS.items():
        with pytest.raises(TierUnavailable, match="it is used again once that has come back"):
            call(tier)
        assert not inner.entered.acquire(blocking=False), f"{name} was tried"
    (note,) = tier.traits.notes
    assert note.startswith("hangs since")
    gate.set()
    back(tier)
    for name in ("size", "read", "list", "delete"):
        if name == "delete" or operation != "delete":
            CALLS[name](tier)


def test_a_slow_call_is_no_hung_one(inner: Stuck) -> None:
    tier = Deadline(inner, LONG)
    tier.put("old", random_bytes(10))
    gate = inner.shut("size")
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(tier.size("old")))
    thread.start()
    assert inner.entered.acquire(timeout=30)
    assert list(tier.list("")) == ["old"], "other calls go on beside it"
    gate.set()
    thread.join()
    assert sizes == [10]
    tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_stop_of_this_process_is_no_silence_of_the_tier(
    inner: Stuck, monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    """As by SIGSTOP, by which a scheduler suspends a job: time goes on, and nothing else does."""
    stopped = [0.0]
    monkeypatch.setattr(watchdog, "PULSE", 0.05)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0]))
    tier = Deadline(inner, 3.0)
    tier.put("old", random_bytes(10))
    found: list[int | type[BaseException]] = []

    def look() -> None:
        try:
            found.append(tier.size("old"))
        except TierUnavailable as error:
            found.append(type(error))

    gate = inner.shut("size")
    thread = threading.Thread(target=look)
    thread.start()
    assert inner.entered.acquire(timeout=30)
    for _ in range(3):
        time.sleep(0.2)
        with tier._watch._lock:
            stopped[0] += 3600.0
            tier._watch._changed.notify_all()  # whoever sleeps wakes up at once then
    time.sleep(0.2)
    assert found == []
    if hangs:
        thread.join(30)
    gate.set()
    thread.join()
    assert found == [Hung if hangs else 10]
    tier.close()


def test_errors_come_as_they_are(tier: Deadline) -> None:
    tier.put("a", random_bytes(1))
    with pytest.raises(AlreadyExists):
        tier.put("a", random_bytes(1))
    with pytest.raises(NotFound):
        tier.get("b")
    with pytest.raises(ValueError, match="is not a key"):
        tier.size("../b")


def test_a_late_read_never_writes_into_memory_that_was_handed_back(tier: Deadline, inner: Stuck) -> None:
    data = random_bytes(3 << 20)
    tier.put("a", data)
    before = inner.shut("read")
    out = torch.full((3 << 20,), 7, dtype=torch.uint8)
    with pytest.raises(TierUnavailable):
        tier.read("a", [Range(0, out)])
    before.set()
    back(tier)
    assert (out == 7).all(), "what was read late went elsewhere"
    tier.read("a", [Range(0, out)])
    assert torch.equal(out, data)


def test_a_late_put_holds_what_was_given(tier: Deadline, inner: Stuck) -> None:
    """Whether it comes to be is open, as when an answer is lost; but never with other bytes."""
    data = random_bytes(5000)
    given, gate = data.clone(), inner.shut("put")
    with pytest.raises(TierUnavailable):
        tier.put("a", given)
    given.zero_()
    gate.set()
    back(tier)
    assert torch.equal(tier.get("a"), data)


def test_a_late_writer_is_aborted(tier: Deadline, inner: Stuck, place: Path) -> None:
    tier.put("other", random_bytes(1))
    gate = inner.shut("writer", after=True)
    with pytest.raises(TierUnavailable):
        tier.writer("a")
    assert temporary(place)
    gate.set()
    back(tier)
    assert temporary(place) == []
    tier.put("a", random_bytes(1))


def test_a_late_writer_that_cannot_be_aborted_does_not_leave_the_tier_out_for_ever(
    tier: Deadline, inner: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = FileWriter.abort

    def leave(writer: FileWriter) -> None:
        abort(writer)
        raise SystemExit(3)

    monkeypatch.setattr(FileWriter, "abort", leave)
    tier.put("other", random_bytes(1))
    gate = inner.shut("writer", after=True)
    with pytest.raises(TierUnavailable):
        tier.writer("a")
    gate.set()
    back(tier)
    tier.put("a", random_bytes(1))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_late_append_leaves_nothing_and_keeps_its_lease_until_then(
    tier: Deadline, inner: Stuck, place: Path, after: bool
) -> None:
    writer, first, second, third = tier.writer("a"), *(Lease(random_bytes(2 << 20, n)) for n in range(3))
    writer.append(first.buffer, first.release)
    gate = inner.shut("append", after=after)
    with pytest.raises(TierUnavailable):
        writer.append(second.buffer, second.release)
    if not after:
        assert second.releases == 0, "it may be read still"
    with pytest.raises(TierUnavailable):
        writer.append(third.buffer, third.release)
    assert third.releases == 1, "it was never handed on"
    with pytest.raises(TierUnavailable):
        writer.close()
    writer.abort()
    writer.abort()
    gate.set()
    back(tier)
    assert [lease.releases for lease in (first, second, third)] == [1, 1, 1]
    assert list(tier.list("")) == []
    assert temporary(place) == []


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_late_close_that_was_aborted_leaves_nothing(tier: Deadline, inner: Stuck, place: Path, after: bool) -> None:
    writer, gate = tier.writer("a"), inner.shut("finish", after=after)
    writer.append(random_bytes(3 << 20))
    with pytest.raises(TierUnavailable):
        writer.close()
    writer.abort()
    gate.set()
    back(tier)
    assert list(tier.list("")) == []
    assert temporary(place) == []


def test_a_late_close_that_nobody_aborts_publishes_the_whole_object(tier: Deadline, inner: Stuck) -> None:
    """As when an answer is lost: whoever committed it reads it back."""
    writer, gate, data = tier.writer("a"), inner.shut("finish"), random_bytes(3 << 20)
    writer.append(data)
    with pytest.raises(TierUnavailable):
        writer.close()
    gate.set()
    back(tier)
    assert torch.equal(tier.get("a"), data)


def test_an_abort_that_hangs_goes_on_by_itself(tier: Deadline, inner: Stuck, place: Path) -> None:
    writer, gate = tier.writer("a"), inner.shut("abort")
    writer.append(random_bytes(10))
    writer.abort()
    assert tier.traits.notes
    gate.set()
    back(tier)
    assert temporary(place) == []


def test_what_is_put_off_may_hang_too(tier: Deadline, inner: Stuck, place: Path) -> None:
    writer, append, abort = tier.writer("a"), inner.shut("append"), inner.shut("abort")
    with pytest.raises(TierUnavailable):
        writer.append(random_bytes(10))
    assert inner.entered.acquire(timeout=30)
    append.set()
    assert inner.entered.acquire(timeout=30), "the abort came next"
    with pytest.raises(TierUnavailable):
        tier.size("a")
    abort.set()
    back(tier)
    assert temporary(place) == []


def test_leases_that_nobody_gives_back_are_a_hang_of_their_own(inner: Stuck) -> None:
    """Transfers go on beside the caller: when they hang he may be waiting elsewhere, for these very slabs."""

    class Keeping(StuckWriter):
        def append(self, buffer: Buffer, release: Release | None = None) -> None:
            kept.append(release)

    kept: list[Release | None] = []
    inner.writer = lambda key, size_hint=None: Keeping(inner, inner.inner.writer(key))  # type: ignore[method-assign]
    arena = Arena(4 << 20, 1 << 20)
    tier = Deadline(inner, LONG, arena)
    writer = tier.writer("a")
    slabs = [arena.acquire() for _ in range(3)]
    for slab in slabs:
        writer.append(slab.buffer, slab.release)
    assert arena.in_flight == 3
    set_deadline(tier, SOON)
    fresh = arena.acquire()  # waits until the three do not count any more
    assert tier.traits.notes
    assert (arena.in_flight, arena.kept) == (1, 3)
    set_deadline(tier, LONG)
    for release in kept:
        assert release is not None
        release()
    back(tier)
    assert (arena.in_flight, arena.kept) == (1, 0)
    fresh.release()
    writer.abort()
    tier.close()
    arena.close()


def test_progress_of_a_writer_is_progress_of_all_it_has_under_way(inner: Stuck) -> None:
    """Many transfers under way, each waiting its turn: none is late as long as one after the other comes back."""
    kept: list[Release] = []

    class Slow(StuckWriter):
        def append(self, buffer: Buffer, release: Release | None = None) -> None:
            assert release is not None
            kept.append(release)

    inner.writer = lambda key, size_hint=None: Slow(inner, inner.inner.writer(key))  # type: ignore[method-assign]
    tier = Deadline(inner, LONG)
    writer, leases = tier.writer("a"), [Lease(random_bytes(1)) for _ in range(6)]
    assert isinstance(writer, DeadlineWriter)
    for lease in leases:
        writer.append(lease.buffer, lease.release)
    for release in kept:
        before = writer._effort.last
        time.sleep(0.01)
        release()
        assert writer._effort.last > before, "the time of all that is left begins anew"
    writer.abort()
    tier.close()


def test_all_who_wait_are_told_at_once(tier: Deadline, inner: Stuck) -> None:
    tier.put("a", random_bytes(1))
    gate = inner.shut("size")
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            tier.size("a")
        except TierUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 8
    gate.set()
    back(tier)
    assert tier.size("a") == 1


def test_it_hangs_again_and_again(tier: Deadline, inner: Stuck) -> None:
    tier.put("a", random_bytes(1))
    for _ in range(3):
        gate = inner.shut("size")
        with pytest.raises(TierUnavailable):
            tier.size("a")
        gate.set()
        back(tier)
        assert tier.size("a") == 1


def test_a_thread_that_dies_for_lack_of_memory_does_not_leave_the_tier_out_for_ever(
    tier: Deadline, inner: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call is taken by another thread, once there is memory again."""
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    threads, deaths = tier._watch._threads, count()
    real = threads._next

    def die_first() -> Callable[[], None] | None:
        if next(deaths) == 0:
            set_deadline(tier, SOON)
            raise MemoryError
        set_deadline(tier, LONG)
        return real()

    inner.inner.put("a", random_bytes(3))
    monkeypatch.setattr(threads, "_next", die_first)
    with pytest.raises(Hung, match="size of a has not come back"):
        tier.size("a")
    with suppress(Hung):
        tier.size("a")
    back(tier)
    assert tier.size("a") == 3


def test_a_call_is_made_though_there_is_no_memory_for_another_thread(
    tier: Deadline, inner: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has taken it looks for one for the next call, and must not end with the call."""
    threads = tier._watch._threads
    real = threads.staff

    def staff() -> None:
        if threading.current_thread().name == "tierstate-call":
            raise MemoryError
        real()

    inner.inner.put("a", random_bytes(3))
    monkeypatch.setattr(threads, "staff", staff)
    assert tier.size("a") == 3


def test_a_caller_is_told_though_the_breaker_cannot_be(
    tier: Deadline, inner: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    inner.inner.put("a", random_bytes(3))
    monkeypatch.setattr(tier._watch._breaker, "answered", no_memory)
    assert tier.size("a") == 3


def test_close_does_not_wait_for_what_hangs(inner: Stuck) -> None:
    tier = impatient(inner)
    gate, done = inner.shut("put"), inner.shut("close")
    with pytest.raises(TierUnavailable):
        tier.put("a", random_bytes(1))
    tier.close()
    assert inner.entered.acquire(timeout=30)
    assert not inner.entered.acquire(blocking=False), "the tier inside is in use, and not closed yet"
    gate.set()
    assert inner.entered.acquire(timeout=30), "then it is"
    done.set()


def test_close_that_hangs_itself(inner: Stuck) -> None:
    tier = impatient(inner)
    tier.put("a", random_bytes(1))
    gate = inner.shut("close")
    tier.close()
    gate.set()


def test_nothing_is_left_of_one_that_was_closed(place: Path) -> None:
    before = set(threading.enumerate())
    tier = Deadline(Nvme(path=place), 60)
    data = random_bytes(3 << 20)
    with tier.writer("a") as writer:
        writer.append(data)
    assert torch.equal(tier.get("a"), data)
    tier.close()
    assert [thread.name for thread in set(threading.enumerate()) - before] == []


def test_nothing_is_left_of_one_that_was_dropped(place: Path) -> None:
    before = set(threading.enumerate())
    tier = Deadline(Nvme(path=place), 60)
    tier.put("a", random_bytes(1))
    del tier
    until(lambda: set(threading.enumerate()) <= before)


def test_a_forked_child_begins_anew(tier: Deadline, inner: Stuck) -> None:
    tier.put("a", random_bytes(9))
    gate = inner.shut("size")
    with pytest.raises(TierUnavailable):
        tier.size("a")
    child = os.fork()
    if not child:
        found: list[str] = []
        try:
            found = list(tier.list(""))
        finally:
            os._exit(0 if found == ["a"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(TierUnavailable):
        tier.list("")
    gate.set()
    back(tier)


def test_the_name_is_that_of_the_tier_inside(place: Path) -> None:
    tier = Deadline(Nvme(path=place), 60)
    tier.name = "lustre"
    with pytest.raises(NotFound, match=r"^lustre: a"):
        tier.get("a")
    tier.close()


# The whole


class Sticky(Deadline):
    """The tier type ``sticky``."""

    def __init__(self, *, path: Path) -> None:
        stuck = Stuck(path)
        super().__init__(stuck, LONG)
        stuck.outer = self


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["list", "writer", "append", "finish", "put"])
def test_training_asks_a_hung_tier_once(place: Path, operation: str) -> None:
    """What the thread that trains asks tiers (numbers of versions, what is due there) it asks a hung one once."""
    ts.register_tier("sticky", Sticky)
    tiers = {"local": {"type": "nvme", "path": str(place / "local")}, "sticky": {"type": "sticky", "path": str(place)}}
    spec = policy(tiers)
    ckpt = ts.Checkpointer(spec, "run")
    found = [t.inner for s in ckpt._tier_runs for t in layers(s.tier) if isinstance(t, Deadline)]
    (inner,) = [t for t in found if isinstance(t, Stuck)]
    gate = inner.shut(operation)
    for step in (1, 2, 3):
        save = ckpt.save(tensors(40_000, seed=step), step=step)
        save.wait("local")
        with pytest.raises((TierUnavailable, CommitUnknown), match="hangs since"):
            save.wait("sticky")
        assert alike(ckpt.load(), tensors(40_000, seed=step))
    assert inner.entered.acquire(timeout=30)
    assert not inner.entered.acquire(blocking=False), "nothing was asked again"
    gate.set()
    until(lambda: not any(s.tier.traits.notes for s in ckpt._tier_runs))
    last = ckpt.save(tensors(40_000, seed=4), step=4)
    last.wait("sticky")
    ckpt.close()
    with ts.Checkpointer(policy({"sticky": tiers["sticky"]}), "run") as ckpt:
        assert alike(ckpt.load(), tensors(40_000, seed=4))
        assert ckpt.verify(deep=True).ok
    assert temporary(place) == []
