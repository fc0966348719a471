"""States that cannot be copied, interrupts and forks: the state is let go, and later saves work."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import arena_of, faulty, opened, policy, tensors, tier, unreferenced, wrapped
from support.interrupts import Interrupted, in_a_thread_of_its_own, interrupt_at
from support.outcomes import until
from support.slow_values import Fill

import tierstate as ts
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.memory.host import Memory


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
    reads, number = list[float](), itertools.count()

    def slow(out: Buffer) -> None:
        reads.append(time.monotonic())
        if next(number) == 5:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        time.sleep(0.02)
        out.zero_()

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place), "file": tier("file", place)})
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(9000), step=1).wait()
            with pytest.raises(KeyboardInterrupt):
                ckpt.save({"slow": Fill(4096 * 2000, slow)}, step=2)
            free = time.monotonic()
            time.sleep(0.1)
            assert len(reads) < 1000
            assert max(reads) <= free
            ckpt.save(tensors(9000, seed=3), step=3).wait("file")
            assert [v.step for v in ckpt.versions()] == [1, 3]
            assert arena_of(ckpt).in_flight == 0
            assert ckpt.verify(deep=True).ok
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@in_a_thread_of_its_own
def test_nothing_is_written_once_an_interrupted_restore_has_raised(place):
    """Whichever thread was being started, waited for or ended at that moment."""
    states = {step: {str(i): torch.full((1 << 16,), step) for i in range(12)} for step in (1, 2)}
    into = {name: value.clone() for name, value in states[1].items()}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "1MiB"}), "run") as ckpt:
        for step, state in states.items():
            ckpt.save(state, step=step).wait()
        for moment in itertools.count(1):
            with interrupt_at(moment) as moments, suppress(Interrupted, RuntimeError):
                ckpt.restore(into, step=1 + moment % 2)
            left = {name: value.clone() for name, value in into.items()}
            time.sleep(0.002)
            assert all(torch.equal(value, left[name]) for name, value in into.items()), (
                f"written after an interrupt at moment {moment}"
            )
            if moments() < moment:
                break
        assert moment > 40
        assert all(torch.equal(value, states[1 + moment % 2][name]) for name, value in into.items())
        assert arena_of(ckpt).in_flight == 0


def test_a_save_that_waits_for_the_arena_can_be_interrupted(place):
    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with wrapped(Memory()) as keys, ts.Checkpointer(policy({"only": keys}, arena={"size": "16KiB"}), "run") as ckpt:
            gate = faulty(keys).shut("writer")

            def interrupt_it() -> None:
                until(lambda: arena_of(ckpt).lacks(1))
                signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

            interrupter = threading.Thread(target=interrupt_it)
            interrupter.start()
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(tensors(100_000), step=1)
            interrupter.join()
            gate.set()
            ckpt.save(tensors(100_000, seed=1), step=2).wait()
            assert [v.step for v in ckpt.versions()] == [2]
    finally:
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


@pytest.mark.parametrize("begun", [False, True])
def test_a_submit_that_is_interrupted_holds_up_nobody(place, monkeypatch, begun):
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(tensors(9000), step=0).wait()
        put, given = ckpt._pipeline._capturing.put, []

        def interrupted(work):
            given.append(work)
            if len(given) > 1 or begun:
                put(work)
            if len(given) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(ckpt._pipeline._capturing, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(tensors(9000, seed=1), step=1)
        monkeypatch.undo()
        ckpt.save(tensors(9000, seed=2), step=2).wait(timeout=30)
        assert arena_of(ckpt).in_flight == 0
        assert [v.step for v in ckpt.versions()][-1] == 2
        ckpt._pipeline.failures()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """In this block SIGALRM is as Ctrl-C. A function that has another thread than the main one get it; it returns when
    the main one has handled it, or else, after a while, False."""
    handled = threading.Event()

    def handle(_number: int, _frame: Any) -> None:
        handled.set()
        raise KeyboardInterrupt

    def interrupt() -> bool:
        time.sleep(0.05)  # so that the main thread most likely waits by now; if not, it is interrupted before
        signal.raise_signal(signal.SIGALRM)
        return handled.wait(20)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_that_does_not_wake_a_save_ends_it_all_the_same(place):
    """As one that comes between the interpreter's last look for signals and the wait for the capture."""
    noticed: list[bool] = []
    with interrupts() as interrupt, ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(tensors(9000), step=1).wait()

        def fill(out: Buffer) -> None:
            if not noticed:
                noticed.append(interrupt())
                assert ckpt._pipeline._saves.save_states()[-1].cancelled.wait(20)
            out.zero_()

        with pytest.raises(KeyboardInterrupt):
            ckpt.save({"slow": Fill(4096 * 100, fill)}, step=2)
        assert noticed == [True]
        ckpt.save(tensors(9000, seed=3), step=3).wait()
        assert [v.step for v in ckpt.versions()] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["wait_captured", "step", "wait", "close"])
def test_an_interrupt_that_does_not_wake_a_wait_ends_it_all_the_same(moment):
    weight = torch.nn.Parameter(torch.zeros(50_000))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    noticed: list[bool] = []
    with interrupts() as interrupt, wrapped(Memory()) as keys:
        # The capture waits for the arena, and that for the tier.
        ckpt = ts.Checkpointer(policy({"only": keys}, arena={"size": "16KiB"}), "run")
        ckpt.guard(optimizer)
        gate = faulty(keys).shut("writer")
        save = ckpt.save({"weight": weight}, step=1)

        def interrupted() -> None:
            noticed.append(interrupt())
            gate.set()

        thread = threading.Thread(target=interrupted)
        waits = {"wait_captured": save.wait_captured, "step": optimizer.step, "wait": save.wait, "close": ckpt.close}

        def waited() -> None:
            thread.start()
            waits[moment]()

        with pytest.raises(KeyboardInterrupt):
            waited()
        thread.join()
        assert noticed == [True]
        if moment != "close":
            optimizer.step()  # which waits for what was being copied
            ckpt.close()
            with ts.Checkpointer(policy({"only": keys}), "run") as ckpt:
                assert torch.equal(ckpt.load()["weight"], torch.zeros(50_000))


def test_an_interrupt_between_a_submit_and_the_wait_for_it_cancels_the_save(place, monkeypatch):
    began, reads = threading.Event(), [0]

    def fill(out: Buffer) -> None:
        began.set()
        reads[0] += 1
        time.sleep(0.01)
        out.zero_()

    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(tensors(9000), step=1).wait()
        submit = ckpt._pipeline.submit

        def interrupted(*args: Any) -> None:
            submit(*args)
            began.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(ckpt._pipeline, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save({"slow": Fill(4096 * 1000, fill)}, step=2)
        before = reads[0]
        monkeypatch.undo()
        ckpt.save(tensors(9000, seed=3), step=3).wait()
        assert reads[0] == before < 1000
        assert [v.step for v in ckpt.versions()] == [1, 3]
        assert ckpt._pipeline.failures() == []
