"""Exceptions in any worker, also `BaseException`: the caller gets the error, and later saves work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpointer_worlds import alike, faulty, policy, tensors, wrapped
from support.leaks import at_rest, nothing_left, objects
from support.slow_values import Fill

import tierstate as ts
from tierstate.manifest import digest as digest_room
from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

pytestmark = pytest.mark.slow

UNIT = 1 << 18
PATIENCE = 30


class Odd(BaseException):
    """What nobody catches who catches `Exception`."""


ERRORS = [RuntimeError("worn out"), Odd("worn out"), KeyboardInterrupt("worn out")]
NAMES = [type(error).__name__ for error in ERRORS]


def told_as(error: BaseException) -> type[BaseException]:
    """The type by which a save tells an error of a tier's thread."""
    return type(error) if isinstance(error, Exception) else ts.TierError


def failing(at: int, error: BaseException) -> Callable[[Buffer], None]:
    """Fails at the ``at``-th call."""
    calls: list[Buffer] = []

    def called(out: Buffer) -> None:
        calls.append(out)
        if len(calls) == at:
            raise error
        out.zero_()

    return called


@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
@pytest.mark.parametrize("at", [1, 12])
def test_a_fill_that_raises(place: Path, at: int, error: BaseException) -> None:
    spec = policy({"nvme": {"type": "nvme", "path": str(place / "x")}}, chunk="256KiB", arena={"size": "2MiB"})
    with nothing_left(place), ts.Checkpointer(spec, "run") as ckpt:
        first = tensors(2 * UNIT)
        ckpt.save(first, step=1).wait()
        before = objects(place)
        with pytest.raises(ts.CaptureError, match="worn out"):
            ckpt.save({"bad": Fill(12 * UNIT, failing(at, error))}, step=2)
        ckpt.save(first, step=3).wait()
        assert [v.step for v in ckpt.versions()] == [1, 3]
        assert len(objects(place)) == len(before) + 1, "a record, since no byte is new"
        assert alike(ckpt.load(), first)
        assert at_rest(ckpt)


@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
@pytest.mark.parametrize("at", [1, 7])
def test_a_digest_that_raises(place: Path, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    spec = policy({"nvme": {"type": "nvme", "path": str(place / "x")}}, chunk="256KiB", arena={"size": "2MiB"})
    with nothing_left(place), ts.Checkpointer(spec, "run") as ckpt:
        fail, right = failing(at, error), digest_room.ALGORITHMS["xxh3-128"]

        def digest(data: Buffer | memoryview) -> bytes:
            fail(empty_buffer(1))
            return right(data)

        with monkeypatch.context() as patch:
            patch.setitem(digest_room.ALGORITHMS, "xxh3-128", digest)
            with pytest.raises(ts.CaptureError, match="worn out"):
                ckpt.save(tensors(9 * UNIT), step=1)
        ckpt.save(tensors(9 * UNIT), step=2).wait()
        assert alike(ckpt.load(), tensors(9 * UNIT))
        assert at_rest(ckpt)


@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
@pytest.mark.parametrize("operation", ["writer", "append", "close", "put"])
def test_a_tier_that_raises(place: Path, operation: str, error: BaseException) -> None:
    """At the second call, in the middle of a save; told once, and by whoever is asked first. What is no `Exception` is
    told as an error of the tier: it would end the program that waits."""
    with nothing_left(place), wrapped(Memory()) as keys:
        ckpt = ts.Checkpointer(policy({"only": keys}, chunk="256KiB", arena={"size": "2MiB"}), "run")
        ckpt.save(tensors(3 * UNIT), step=1).wait()
        faulty(keys).add(Fault(operation, 2 if operation == "append" else 1, error))
        lost = ckpt.save(tensors(12 * UNIT, seed=1), step=2)
        with pytest.raises(told_as(error), match="worn out"):
            lost.wait(timeout=PATIENCE)
        faulty(keys).heal()
        state = tensors(12 * UNIT, seed=2)
        ckpt.save(state, step=3).wait(timeout=PATIENCE)
        assert alike(ckpt.load(), state)
        assert at_rest(ckpt)
        ckpt.close()


@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
def test_a_read_that_raises(place: Path, error: BaseException) -> None:
    with nothing_left(place), wrapped(Memory()) as keys:
        spec = policy({"only": keys}, chunk="256KiB", arena={"size": "2MiB"})
        with ts.Checkpointer(spec, "run") as ckpt:
            state = tensors(12 * UNIT, 5 * UNIT)
            ckpt.save(state, step=1).wait()
            ckpt.load()
            faulty(keys).add(Fault("read", 2, error))
            with pytest.raises(type(error), match="worn out"):
                ckpt.load()
            assert at_rest(ckpt)
            faulty(keys).heal()
            assert alike(ckpt.load(), state)


@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
def test_a_failure_that_nobody_asked_about_is_told_at_the_next_save_and_at_close(
    place: Path, error: BaseException
) -> None:
    with nothing_left(place), wrapped(Memory()) as keys:
        ckpt = ts.Checkpointer(policy({"only": keys}, chunk="256KiB", arena={"size": "2MiB"}), "run")
        faulty(keys)  # opened
        faulty(keys).add(Fault("close", 0, error))
        lost = ckpt.save(tensors(3 * UNIT), step=1)
        while not lost.errors():
            lost.wait_captured()
        with pytest.raises(told_as(error), match="worn out"):
            ckpt.save(tensors(3 * UNIT), step=2)
        ckpt.save(tensors(3 * UNIT), step=3)
        with pytest.raises(told_as(error), match="worn out"):
            ckpt.close()


def test_a_tier_whose_close_raises_leaves_the_others_closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme = {"type": "nvme", "path": str(place / "x"), "io": "threads"}
    state = tensors(12 * UNIT)
    with nothing_left(place), wrapped(Memory()) as keys:
        ckpt = ts.Checkpointer(policy({"odd": keys, "nvme": nvme}, chunk="256KiB", arena={"size": "2MiB"}), "run")
        ckpt.save(state, step=1).wait("nvme")

        def fail() -> None:
            raise RuntimeError("cannot let go")

        monkeypatch.setattr(faulty(keys), "close", fail)
        with pytest.raises(RuntimeError, match="cannot let go"):
            ckpt.close()


def none(thread: threading.Thread) -> None:
    """In place of `Thread.start`, in a process at its limit of threads."""
    raise RuntimeError("can't start new thread")


def test_no_thread_can_be_had(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads: the save says so, and the next one works."""
    spec = policy({"nvme": {"type": "nvme", "path": str(place / "x")}}, chunk="256KiB", arena={"size": "2MiB"})
    with nothing_left(place), ts.Checkpointer(spec, "run") as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                ckpt.save(tensors(3 * UNIT), step=1)
        ckpt.save(tensors(3 * UNIT), step=2).wait(timeout=PATIENCE)
        assert alike(ckpt.load(), tensors(3 * UNIT))
        assert at_rest(ckpt)


def test_a_checkpointer_is_closed_though_no_thread_can_be_had(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is saved by then: the error said that it was not, and the events were in no tier."""
    keys = {"chunk": "256KiB", "arena": {"size": "2MiB"}, "metrics": {"events": True}}
    with nothing_left(place):
        ckpt = ts.Checkpointer(policy({"nvme": {"type": "nvme", "path": str(place / "x")}}, **keys), "run")
        ckpt.save(tensors(UNIT), step=1).wait(timeout=PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none)
            ckpt.close()
    with ts.Checkpointer(policy({"nvme": {"type": "nvme", "path": str(place / "x")}}), "run") as ckpt:
        assert "committed" in [event.kind for event in ckpt.events()]
