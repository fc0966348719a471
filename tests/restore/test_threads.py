"""Threads share a Checkpointer: each version is the state that its thread gave, whatever the others save meanwhile."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.equality import difference
from support.outcomes import tried, until

import tierstate as ts
from tierstate.pause_gc import gc_paused

THREADS, SAVES = 4, 12


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns so often that every order comes up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*calls: Any) -> list[BaseException]:
    """Run these in threads of their own; what they raise."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Any) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False], ids=["of one structure", "of several structures"])
def test_states_that_threads_save_at_once_are_not_mixed(place: Path, alike: bool) -> None:
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place)})
    shared = torch.arange(1000.0)
    saved: dict[int, Any] = {}

    def saving(ckpt: ts.Checkpointer, thread: int) -> None:
        own = {} if alike else {f"x{thread}": torch.full((10 + thread,), thread)}
        for at in range(SAVES):
            step = 100 * thread + at
            # Memory of its own, memory that all of them save, and memory that is new at each save.
            state = {"w": torch.full((3000,), float(step)), "all": shared, "at": at, "list": [thread, at], **own}
            saved[step] = {key: value.clone() if key == "w" else value for key, value in state.items()}
            ckpt.save(state, step=step)
            state["w"].fill_(-1)

    with ts.Checkpointer(spec, "run") as ckpt:
        assert not together(*(lambda n=n: saving(ckpt, n) for n in range(THREADS)))
        assert ckpt.stats().saves == len(saved)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert sorted(version.step for version in ckpt.versions()) == sorted(saved)
        for step, state in saved.items():
            assert difference(state, ckpt.load(step=step)) == "", step


@pytest.mark.parametrize("timeout", [None, 30.0, 0.05])
def test_close_waits_for_a_save_that_another_thread_is_making(
    place: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """A save that came to the capture after that had ended would wait for ever. One that comes later is refused."""
    ckpt = ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run")
    ckpt.save({"w": torch.ones(10)}, step=1).wait()
    plan, planning, go_on = ckpt._plan, threading.Event(), threading.Event()
    saved, raised = [1], list[BaseException]()

    def slow(state: Any, seq: int) -> Any:
        planning.set()
        go_on.wait(30)
        return plan(state, seq)

    def saving() -> None:
        for step in (2, 3):
            try:
                ckpt.save({"w": torch.full((10,), float(step))}, step=step)
                saved.append(step)
            except ts.TierstateError as error:
                raised.append(error)

    monkeypatch.setattr(ckpt, "_plan", slow)
    saver = threading.Thread(target=saving, daemon=True)
    closer = threading.Thread(target=lambda: ckpt.close(timeout), daemon=True)
    saver.start()
    planning.wait(30)
    closer.start()
    closer.join(0.3)
    go_on.set()
    closer.join(30)
    saver.join(30)
    assert not saver.is_alive()
    assert not closer.is_alive()
    assert all(str(error) == "this Checkpointer is closed; make a new one" for error in raised)
    assert (2 in saved) == (timeout != 0.05)
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as fresh:
        assert fresh.load()["w"].tolist() == [float(saved[-1])] * 10


def test_close_takes_no_longer_than_it_may_and_closes_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run")
    ckpt.save({"w": torch.ones(10)}, step=1).wait()
    finish, told = ckpt._pipeline.close, list[float | None]()

    def close(timeout: float | None, progress: Any) -> str:
        told.append(timeout)
        return finish(timeout, progress)

    monkeypatch.setattr(ckpt._pipeline, "close", close)
    ckpt._turn.acquire()  # as a save of this thread would
    closers = [threading.Thread(target=lambda: ckpt.close(60), daemon=True) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[0].join(0.3)
    ckpt._turn.release()
    for closer in closers:
        closer.join(30)
    assert not any(closer.is_alive() for closer in closers)
    [left] = told
    assert left is not None
    assert left < 59.8, "what it has waited for the save is a part of it"
    assert ckpt._turn.acquire(blocking=False), "and it is nobody's turn"


def test_a_forked_child_may_not_save_whoever_was_saving_at_the_fork(place: Path) -> None:
    ckpt = ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run")
    ckpt.save({"w": torch.ones(10)}, step=1).wait()
    go_on, there = threading.Event(), threading.Event()

    def saving() -> None:
        with ckpt._turn, gc_paused():
            there.set()
            go_on.wait(60)

    saver = threading.Thread(target=saving, daemon=True)
    saver.start()
    there.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons: a fork of a process with threads
        child = os.fork()
    if child == 0:
        try:
            refused = tried(lambda: ckpt.save({"w": torch.ones(10)}, step=2))
            with gc_paused():
                pass
            os._exit(0 if isinstance(refused, ts.CaptureError) and gc.isenabled() else 1)
        finally:
            os._exit(2)
    go_on.set()
    saver.join(30)
    until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0), within=30)
    ckpt.close()


def test_the_garbage_collector_is_enabled_after_the_last_pause() -> None:
    """Also where one pause begins while another one ends."""

    def pausing() -> None:
        for _ in range(2000):
            with gc_paused():
                pass

    for _ in range(3):
        assert not together(*[pausing] * 4)
        assert gc.isenabled()
    gc.disable()
    try:
        pausing()
        assert not gc.isenabled()
    finally:
        gc.enable()
