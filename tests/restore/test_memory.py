"""The arena under saves: bounded, never stuck; and no thread is left."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import arena_of, engine_threads, faulty, policy, tensors, tier, wrapped
from support.equality import difference
from support.outcomes import until

import tierstate as ts
from tierstate.engine.capture import capture_thread
from tierstate.engine.publish.publish import CascadeJob
from tierstate.manifest.digest import digest_function
from tierstate.tiers.memory.host import Memory


@pytest.mark.slow
def test_a_state_longer_than_the_arena_goes_through_it(place):
    spec = policy({k: tier(k, place) for k in ("nvme", "lustre", "file", "bucket")}, arena={"size": "8KiB"})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            ckpt.save(tensors(300_000, 70_000, seed=step), step=step).wait("bucket")
        assert ckpt.stats().arena_peak <= 8192
        assert difference(tensors(300_000, 70_000, seed=2), ckpt.load()) == ""
        assert ckpt.verify(deep=True).ok


@pytest.mark.timeout(300)
def test_a_cascade_goes_on_behind_which_a_later_save_waits(place, monkeypatch):
    """One tier queue copies an old save, and the slabs of a new one, which fill the arena, wait behind it."""
    gate, found = threading.Event(), CascadeJob._found
    monkeypatch.setattr(CascadeJob, "_found", lambda self, *coming: gate.wait(60) and found(self, *coming))
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
    copied.wait("file", timeout=60)
    saver.join(60)
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
        # Calls of tiers that may hang have threads of their own, and one that watches them.
        assert set(engine_threads()) - {"tierstate-arena", "tierstate-call", "tierstate-watch"} == {
            f"tierstate-{n}" for n in ("host", "nvme", "file", "capture")
        }
    assert engine_threads() == []


def test_no_thread_is_left_of_one_that_could_not_be_made(place):
    spec = policy({"nvme": tier("nvme", place)}, metrics={"events": True}, preemption={})
    refused = []

    def make():
        try:
            ts.Checkpointer(spec, "run")
        except ts.PolicyError as error:
            refused.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(60)
    assert "by the main thread only" in refused[0]
    assert engine_threads() == []


def prepared(ckpt: ts.Checkpointer) -> int:
    """Bytes that a first save need not wait for."""
    arena = arena_of(ckpt)
    for thread in arena._preparers:
        thread.join(60)
    return len(arena._free) * arena.slab_size


def test_memory_is_there_before_the_first_save(place):
    spec = policy({"nvme": tier("nvme", place)}, arena={"size": "256KiB", "prepare": True})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert prepared(ckpt) == 256 << 10
        ckpt.save(tensors(100_000), step=1).wait()
    with ts.Checkpointer(spec.quiet(), "run") as ckpt:
        assert prepared(ckpt) == 0, "who only looks saves nothing"
    spec = policy({"nvme": tier("nvme", place)}, arena={"size": "256KiB"})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert prepared(ckpt) == 0
        state = tensors(100_000)
        assert ckpt.resume(into=state) is not None
        assert 100_000 <= prepared(ckpt) <= 256 << 10, "as much as the state needs, or the restore has used"


def waiting_digest(gate, digesting):
    """A digest function that waits for one event, and sets the other one before."""

    def slow(name):
        own = digest_function(name)

        def digest(data):
            digesting.set()
            assert gate.wait(60)
            return own(data)

        return digest

    return slow


def test_save_returns_when_all_is_copied_and_does_not_wait_for_digests(place, monkeypatch):
    gate, digesting = threading.Event(), threading.Event()
    state = {"w": torch.arange(100_000)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "4MiB"}), "run") as ckpt:
        monkeypatch.setattr(capture_thread, "digest_function", waiting_digest(gate, digesting))
        save = ckpt.save(state, step=1)
        assert digesting.wait(60)
        assert not gate.is_set()
        save.wait_captured(timeout=30)
        state["w"].add_(1)
        assert not save.done()
        gate.set()
        save.wait()
        assert difference({"w": torch.arange(100_000)}, ckpt.load()) == ""
        monkeypatch.setattr(capture_thread, "digest_function", broken_digest)
        late = ckpt.save(state, step=2)
        with pytest.raises(ts.CaptureError, match="planted"):
            late.wait()
        assert [version.step for version in ckpt.versions()] == [1]
        assert arena_of(ckpt).in_flight == 0


def test_a_restored_version_is_the_parent_of_the_saves_after_it_and_of_none_before(place, monkeypatch):
    gate = threading.Event()
    state = {"w": torch.arange(100_000)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "4MiB"}), "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state, step=step).wait()
        monkeypatch.setattr(capture_thread, "digest_function", waiting_digest(gate, threading.Event()))
        late = ckpt.save(state, step=3)
        ckpt.restore(into=state, step=1)
        assert not late.done()
        gate.set()
        ckpt.save(state, step=4).wait()
        steps = {version.id: version.step for version in ckpt.versions()}
        assert {v.step: steps.get(v.parent) for v in ckpt.versions()} == {1: None, 2: 1, 3: 2, 4: 1}


def broken_digest(_name):
    def digest(_data):
        raise MemoryError("planted")

    return digest


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_save_that_is_done_keeps_nothing_of_the_state_in_memory(place, lazy):
    memory = np.ones(100_000, "f4")
    gone, weight = weakref.ref(memory), torch.nn.Parameter(torch.from_numpy(memory))
    optimizer = torch.optim.SGD([weight])
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        if lazy:
            ckpt.guard(optimizer)
        save = ckpt.save({"w": weight}, step=1)
        save.wait()
        ckpt.unguard(optimizer)
        del memory, weight, optimizer
        until(lambda: gc.collect() >= 0 and gone() is None, within=60)
        assert save.done()
