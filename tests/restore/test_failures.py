"""What goes wrong on the way: tiers that fail, are full, missing or slow; two writers; interrupts; forks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import difference
from worlds import arena_of, engine_threads, faulty, names, opened, policy, tensors, tier, unreferenced, wrapped

import tierstate as ts
from tierstate.manifest.chunk import Buffer, Chunk, spans
from tierstate.manifest.leaf import Spec
from tierstate.manifest.log import Log
from tierstate.tiers.lane import Copy
from tierstate.tiers.memory import Memory
from tierstate.tiers.testing import Fault


class Watched(ts.Provider):
    """A value of zeros, whose every fill calls back first."""

    kind = "watched"

    def __init__(self, value: Fill) -> None:
        self.value = value

    @property
    def spec(self) -> Spec:
        return Spec(self.kind, shape=(self.value.nbytes,))

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start, n in spans(self.value.nbytes, size):
            yield Chunk(start, n, self._fill)

    def _fill(self, out: Buffer) -> None:
        self.value.called(out)

    @classmethod
    def fresh(cls, spec: Spec, device: torch.device | None = None) -> Watched:
        return cls(Fill(spec.shape[0], lambda _out: None))

    def load(self, start: int, data: Buffer) -> None:
        assert not data.any()

    def done(self) -> Any:
        return self.value


class Fill:
    """A value whose every fill is a call."""

    def __init__(self, nbytes: int, called: Callable[[Buffer], object]) -> None:
        self.nbytes, self.called = nbytes, called

    def __state_provider__(self) -> ts.Provider:
        return Watched(self)


@contextlib.contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    """A real file system of so many bytes."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# Tiers that fail


def test_a_tier_that_fails_does_not_hold_up_the_others_and_recovers(place):
    with wrapped(Memory()) as keys:
        spec = policy({"nvme": tier("nvme", place), "bad": {**keys, "every": 10}, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            bad = faulty(keys)
            bad.add(Fault("writer", 0, ts.TierUnavailable("the switch is gone", tier="bad")))
            save = ckpt.save(tensors(9000), step=0)
            save.wait()
            save.wait("file")
            with pytest.raises(ts.TierUnavailable, match="the switch is gone"):
                save.wait("bad")
            assert set(save.errors()) == {"bad"}
            assert not ckpt.stats().tiers["bad"].healthy
            assert ckpt.stats().tiers["bad"].failures == 1
            bad.heal()
            # Not due by its cadence, but it has nothing of this multiple of ten yet.
            ckpt.save(tensors(9000, seed=1), step=1).wait("bad")
            assert ckpt.stats().tiers["bad"].healthy
            assert ckpt.save(tensors(9000, seed=2), step=2).tiers == ("nvme", "file")
            assert [v.step for v in ckpt.versions() if "bad" in v.tiers] == [1]
            assert ckpt.verify(deep=True).ok
            assert arena_of(ckpt).in_flight == 0


def test_a_slower_tier_gets_the_save_although_the_first_durable_one_fails(place):
    with wrapped(Memory()) as keys:
        spec = policy({"host": tier("host", place), "bad": keys, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            faulty(keys).add(Fault("append", 0, ts.TierFull("full", tier="bad")))
            for step in range(3):
                save = ckpt.save(tensors(40_000, seed=step), step=step)
                save.wait("file")
                with pytest.raises(ts.TierFull):
                    save.wait()
            assert names(faulty(keys).inner) == []
        with ts.Checkpointer(spec, "run") as ckpt:
            assert difference(tensors(40_000, seed=2), ckpt.load()) == ""


@pytest.mark.parametrize(
    "error", [OSError(5, "input/output error"), ValueError("a bug of theirs"), TimeoutError("late")]
)
@pytest.mark.parametrize("operation", ["writer", "append", "close", "put", "list", "delete", "size"])
def test_errors_that_no_tier_should_raise_are_told_and_stop_nothing(place, error, operation):
    """Somebody's backend raises what it likes; the lane's thread lives on, and so do the other tiers."""
    with wrapped(Memory()) as keys:
        spec = policy({"nvme": tier("nvme", place), "bad": {**keys, "keep": {"last": 1}}, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in range(2):
                ckpt.save(tensors(9000, seed=step), step=step).wait("bad")
            bad = faulty(keys)
            bad.add(Fault(operation, 0, error))
            save = ckpt.save({**tensors(9000, seed=1), "new": torch.ones(9)}, step=2)
            save.wait("file")
            if operation in ("writer", "append", "close", "put"):
                with pytest.raises(type(error)):
                    save.wait("bad")
            with contextlib.suppress(type(error)):
                save.wait("bad", timeout=10)
            bad.heal()
            ckpt.save(tensors(9000, seed=3), step=3).wait("bad")
            assert difference(tensors(9000, seed=3), ckpt.load()) == ""


# When errors are told: docs/decisions/0004


@pytest.fixture
def failing() -> Iterator[tuple[ts.Policy, dict[str, Any]]]:
    """A policy with one tier, which fails; and its keys."""
    with wrapped(Memory()) as keys:
        yield policy({"bad": keys}), keys


def fails(keys: dict[str, Any]) -> None:
    faulty(keys).add(Fault("put", 0, ts.TierFull("no room at all", tier="bad")))


def settled(save: ts.Save) -> None:
    """Wait without being told of errors."""
    for future in save._ticket.tiers.values():
        future.exception()


def test_a_save_without_a_durable_copy_is_told_at_the_next_save_once(failing):
    spec, keys = failing
    with ts.Checkpointer(spec, "run") as ckpt:
        fails(keys)
        settled(ckpt.save(tensors(100), step=1))
        with pytest.raises(ts.TierFull, match="no room at all") as caught:
            ckpt.save(tensors(100), step=2)
        assert "step 1" in caught.value.__notes__[0]
        assert "no durable copy" in caught.value.__notes__[0]
        faulty(keys).heal()
        ckpt.save(tensors(100), step=3).wait()
        assert [v.step for v in ckpt.versions()] == [3]


def test_close_tells_every_failure_that_nobody_asked_about(failing):
    spec, keys = failing
    ckpt = ts.Checkpointer(spec, "run")
    fails(keys)
    ckpt.save(tensors(100), step=4)
    with pytest.raises(ts.TierFull) as caught:
        ckpt.close()
    assert caught.value.__notes__ == ["step 4 did not arrive at bad: no room at all"]
    ckpt.close()
    with pytest.raises(ts.TierstateError, match="closed"):
        ckpt.save(tensors(100), step=5)
    with pytest.raises(ts.TierstateError, match="closed"):
        ckpt.load()


def test_what_was_told_by_wait_is_not_told_again(failing):
    spec, keys = failing
    with ts.Checkpointer(spec, "run") as ckpt:
        fails(keys)
        with pytest.raises(ts.TierFull):
            ckpt.save(tensors(100), step=1).wait()


def test_the_block_s_own_error_comes_first(failing):
    def block() -> None:
        with ts.Checkpointer(spec, "run") as ckpt:
            fails(keys)
            ckpt.save(tensors(100), step=1)
            raise ZeroDivisionError

    spec, keys = failing
    with pytest.raises(ZeroDivisionError) as caught:
        block()
    assert "saves failed too" in caught.value.__notes__[0]
    assert "no room at all" in caught.value.__notes__[0]


def test_close_waits_no_longer_than_it_is_told_and_says_what_is_late(place):
    with wrapped(Memory()) as slow, wrapped(Memory()) as bad:
        spec = policy({"nvme": tier("nvme", place), "slow": slow, "bad": bad})
        ckpt = ts.Checkpointer(spec, "run")
        gate = faulty(slow).shut("writer")
        faulty(bad).add(Fault("put", 0, ts.AccessDenied("not yours", tier="bad")))
        ckpt.save(tensors(9000), step=1).wait()
        start = time.monotonic()
        with pytest.raises(ts.TierUnavailable, match="step 1 to slow") as caught:
            ckpt.close(timeout=0.5)
        assert time.monotonic() - start < 5
        assert any("step 1 did not arrive at bad: not yours" in note for note in caught.value.__notes__)
        gate.set()
        for thread in threading.enumerate():
            if thread.name.startswith("tierstate"):
                thread.join(10)
        assert engine_threads() == []


def test_close_drains_what_is_under_way(place):
    with wrapped(Memory()) as slow:
        spec = policy({"nvme": tier("nvme", place), "slow": slow})
        ckpt = ts.Checkpointer(spec, "run")
        gate = faulty(slow).shut("close")
        for step in range(3):
            ckpt.save(tensors(9000, seed=step), step=step)
        threading.Timer(0.2, gate.set).start()
        ckpt.close()
        assert Log(faulty(slow).inner, "run").seqs() == [1, 2, 3]
        assert engine_threads() == []


# Full, missing, read-only


def test_a_disk_that_is_full_keeps_what_it_has(place, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        spec = policy({"host": tier("host", place), "nvme": tier("nvme", disk), "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(600_000), step=1).wait()
            save = ckpt.save(tensors(600_000, seed=1), step=2)
            with pytest.raises(ts.TierFull, match=r"nvme: packs/run/.*ENOSPC.*free some space"):
                save.wait()
            save.wait("file")
            assert [v.tiers for v in ckpt.versions()] == [("host", "nvme", "file"), ("host", "file")]
            assert ckpt.verify(deep=True).ok
            assert unreferenced(opened(spec, "nvme"), "run") == set()
            assert [p.name for p in disk.rglob(".tmp*")] == []
            assert difference(tensors(600_000, seed=1), ckpt.load()) == ""
            assert difference(tensors(600_000), ckpt.load(step=1)) == ""
            assert arena_of(ckpt).in_flight == 0


def test_a_capacity_is_full_too(place):
    spec = policy({"nvme": tier("nvme", place, capacity="50KiB", keep={"last": 1})})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(30_000), step=1).wait()
        with pytest.raises(ts.TierFull, match=r"capacity of 50 ?KiB"):
            ckpt.save(tensors(30_000, seed=1), step=2).wait()
        assert difference(tensors(30_000), ckpt.load()) == ""
        ckpt.save({"a": tensors(8000, seed=2)["a"]}, step=3).wait()
        ckpt.save(tensors(30_000, seed=3), step=4).wait()


def test_a_read_only_place_is_read_and_not_written(place, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        spec = policy({"host": tier("host", place), "nvme": tier("nvme", disk), "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000), step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with ts.Checkpointer(spec, "run") as ckpt:
            assert difference(tensors(9000), ckpt.load()) == ""
            save = ckpt.save(tensors(9000, seed=1), step=2)
            with pytest.raises(ts.AccessDenied, match=r"nvme: .*EROFS"):
                save.wait()
            save.wait("file")
            assert ckpt.verify(deep=True).ok


def test_a_folder_that_is_a_file_is_told(place):
    (place / "nvme").write_text("not a folder")
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        save = ckpt.save(tensors(9000), step=1)
        with pytest.raises(ts.TierError, match=r"nvme.*is not a folder"):
            save.wait()
        save.wait("file")
        assert difference(tensors(9000), ckpt.load()) == ""


def test_a_folder_that_vanishes_is_made_again(place):
    spec = policy({"nvme": tier("nvme", place), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000), step=1).wait("file")
        shutil.rmtree(place / "nvme")
        assert difference(tensors(9000), ckpt.load()) == ""
        # Its newest record named packs that are gone: the first save may find that out, the next builds on nothing.
        found = ckpt.save(tensors(9000), step=2)
        for name in ("nvme", "file"):
            with contextlib.suppress(ts.TierstateError):
                found.wait(name)
        ckpt.save(tensors(9000), step=3).wait()
        assert ckpt.verify(deep=True).ok
        assert "nvme" in ckpt.info(step=3).tiers


# Two writers


def test_two_writers_of_one_run_are_told_and_both_go_on(place):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as one, ts.Checkpointer(spec, "run") as two:
        one.save(tensors(20_000, 5000), step=1).wait("file")
        two.save(tensors(20_000, 5000), step=2).wait("file")
        with pytest.raises(ts.AlreadyExists, match="versions/run/000000000002"):
            one.save(tensors(20_000, 5000), step=2).wait()
        # The other one's packs are dropped: what it remembers of them is wrong by now.
        for step in range(3, 6):
            one.save(tensors(20_000, 5000, seed=step), step=step).wait("file")
        with pytest.raises((ts.AlreadyExists, ts.NotFound)):
            two.save(tensors(20_000, 5000), step=3).wait()
        save = two.save(tensors(20_000, 5000), step=10)
        save.wait()
        save.wait("file")
        assert difference(tensors(20_000, 5000), one.load()) == ""
        assert one.verify(deep=True).ok
        for ckpt in (one, two):
            with pytest.raises(ts.TierUnavailable, match="no faster tier has it"):
                ckpt.close()
    assert unreferenced(opened(spec, "nvme"), "run") == set()


def test_a_conflict_while_a_later_save_is_under_way(place):
    """The number of the later save is not given out a second time."""
    with wrapped(Memory()) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            where = faulty(keys)
            gate = where.shut("put")
            first = ckpt.save(tensors(100), step=1)
            second = ckpt.save(tensors(200), step=2)
            where.inner.put("versions/run/000000000001", torch.zeros(5, dtype=torch.uint8))
            del where.gates["put"]
            gate.set()
            with pytest.raises((ts.AlreadyExists, ts.CommitUnknown)):
                first.wait()
            third = ckpt.save(tensors(300), step=3)
            second.wait()
            third.wait()
            assert third.seq == 3


# Memory


def test_a_state_longer_than_the_arena_goes_through_it(place):
    spec = policy({k: tier(k, place) for k in ("nvme", "lustre", "file", "bucket")}, arena={"size": "8KiB"})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            ckpt.save(tensors(300_000, 70_000, seed=step), step=step).wait("bucket")
        assert ckpt.stats().arena_peak <= 8192
        assert difference(tensors(300_000, 70_000, seed=2), ckpt.load()) == ""
        assert ckpt.verify(deep=True).ok


@pytest.mark.timeout(60)
def test_a_cascade_goes_on_behind_which_a_later_save_waits(place, monkeypatch):
    """One lane copies an old save, and the slabs of a new one, which fill the arena, wait behind it."""
    gate, holdings = threading.Event(), Copy._holdings
    monkeypatch.setattr(Copy, "_holdings", lambda self: gate.wait(30) and holdings(self))
    tiers = {"nvme": tier("nvme", place, every=2), "file": tier("file", place)}
    spec = policy(tiers, arena={"size": "16KiB"})
    ckpt = ts.Checkpointer(spec, "run")
    copied = ckpt.save(tensors(100_000), step=2)
    copied.wait("nvme")
    saver = threading.Thread(target=ckpt.save, args=(tensors(100_000, seed=1), 3), daemon=True)
    saver.start()
    while not arena_of(ckpt).lacks(1):
        time.sleep(0.01)
    gate.set()
    copied.wait("file", timeout=20)
    saver.join(20)
    assert not saver.is_alive()
    ckpt.close()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [2, 3]
        assert ckpt.verify(deep=True).ok


def test_a_full_arena_blocks_or_skips(place):
    with wrapped(Memory()) as keys:
        spec = policy({"only": keys}, arena={"size": "64KiB", "on_full": "skip"})
        with ts.Checkpointer(spec, "run") as ckpt:
            gate = faulty(keys).shut("append")
            first = ckpt.save(tensors(50_000), step=1)
            second = ckpt.save(tensors(50_000, seed=1), step=2)
            assert second.skipped
            assert not first.skipped
            with pytest.raises(ts.CaptureError, match="skipped: the arena was full"):
                second.wait()
            assert ckpt.stats().skipped == 1
            gate.set()
            first.wait()
            ckpt.save(tensors(50_000, seed=2), step=3).wait()
            assert [v.step for v in ckpt.versions()] == [1, 3]


def test_no_thread_is_left(place):
    spec = policy({k: tier(k, place) for k in ("host", "nvme", "file")})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert engine_threads() == [], "reading needs no threads"
        ckpt.save(tensors(9000), step=1)
        assert len(engine_threads()) == 4
    assert engine_threads() == []


# The state, the process, the signal


def test_a_state_that_cannot_be_copied_leaves_nothing(place):
    def explode(_out: Buffer) -> None:
        raise RuntimeError("the device fell off")

    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place), "file": tier("file", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000), step=1).wait()
        with pytest.raises(ts.CaptureError, match=r"leaf model\.bad could not be read: the device fell off"):
            ckpt.save({"model": {**tensors(90_000, seed=1), "bad": Fill(5000, explode)}}, step=2)
        ckpt.save(tensors(9000, seed=2), step=3).wait("file")
        assert [v.step for v in ckpt.versions()] == [1, 3]
        assert unreferenced(opened(spec, "nvme"), "run") == set()
        assert [p.name for p in place.rglob(".tmp*")] == []
        assert arena_of(ckpt).in_flight == 0


@pytest.mark.parametrize("state", [object(), {"a": [object()]}, {"f": lambda: 0}])
def test_a_value_without_a_provider_is_named(place, state):
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        with pytest.raises(ts.CaptureError):
            ckpt.save(state, step=1)
        for step in (-1, 1.5, True, "1"):
            with pytest.raises(ValueError, match="a step is an int"):
                ckpt.save({}, step=step)
        with pytest.raises(ts.CaptureError, match="metadata"):
            ckpt.save({}, step=1, metadata={"x": torch.ones(1)})
        assert ckpt.versions() == []


def test_after_an_interrupt_nobody_reads_the_state(place):
    """KeyboardInterrupt in the middle of save: when it has come out, the state is free, and later saves work."""
    reads: list[float] = []

    def slow(out: Buffer) -> None:
        reads.append(time.monotonic())
        time.sleep(0.02)
        out.zero_()

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place), "file": tier("file", place)})
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000), step=1).wait()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save({"slow": Fill(4096 * 500, slow)}, step=2)
            free = time.monotonic()
            time.sleep(0.1)
            assert 1 <= len(reads) < 100
            assert max(reads) <= free
            ckpt.save(tensors(9000, seed=3), step=3).wait("file")
            assert [v.step for v in ckpt.versions()] == [1, 3]
            assert arena_of(ckpt).in_flight == 0
            assert ckpt.verify(deep=True).ok
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_save_that_waits_for_the_arena_can_be_interrupted(place):
    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with wrapped(Memory()) as keys, ts.Checkpointer(policy({"only": keys}, arena={"size": "16KiB"}), "run") as ckpt:
            gate = faulty(keys).shut("writer")
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(tensors(100_000), step=1)
            gate.set()
            ckpt.save(tensors(100_000, seed=1), step=2).wait()
            assert [v.step for v in ckpt.versions()] == [2]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_save_and_harms_nothing(place):
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000), step=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                ckpt.save(tensors(9000), step=2)
            except ts.CaptureError as error:
                ckpt.close()
                status = 0 if "another process" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ckpt.save(tensors(9000, seed=3), step=3).wait()
        assert [v.step for v in ckpt.versions()] == [1, 3]
