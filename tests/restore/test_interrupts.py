"""States that cannot be copied, interrupts and forks: the state is let go, and later saves work."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from filling import Fill
from worlds import arena_of, faulty, opened, policy, tensors, tier, unreferenced, wrapped

import tierstate as ts
from tierstate.manifest.chunk import Buffer
from tierstate.tiers.memory import Memory


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


@pytest.mark.parametrize("begun", [False, True])
def test_a_submit_that_is_interrupted_holds_up_nobody(place, monkeypatch, begun):
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(tensors(9000), step=0).wait()
        queue, put = ckpt._flow._capturing, []

        class Interrupted:
            def put(self, work):
                put.append(work)
                if len(put) == 1:
                    if begun:
                        queue.put(work)
                    raise KeyboardInterrupt
                queue.put(work)

        monkeypatch.setattr(ckpt._flow, "_capturing", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(tensors(9000, seed=1), step=1)
        monkeypatch.undo()
        ckpt.save(tensors(9000, seed=2), step=2).wait(timeout=30)
        assert arena_of(ckpt).in_flight == 0
        assert [v.step for v in ckpt.versions()][-1] == 2
        ckpt._flow.failures()
