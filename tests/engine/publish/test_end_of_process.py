"""Before the end of a process that was told to go, and in `close`: what only memory has is brought to a disk first."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from support.checkpointer_worlds import faulty, policy, tensors, wrapped
from support.equality import difference
from support.outcomes import until

import tierstate as ts
from tierstate.tiers.memory.host import Host, Memory

SIZES = (30_000, 500, 8192, 60)


@pytest.mark.parametrize("slow", ["near", "far"])
def test_before_the_end_the_newest_version_goes_to_the_nearest_persistent_tier_first(slow: str) -> None:
    """Copies to the other one, which host memory could serve, wait for it; and not the other way round."""
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        tiers = {"host": {"type": "host"}, "near": near, "far": far}
        with ts.Checkpointer(policy(tiers), "run") as ckpt:
            ckpt.save(tensors(*SIZES), step=0).wait("far")
            gate = faulty({"near": near, "far": far}[slow]).shut("writer")
            save = ckpt.save(tensors(*SIZES, seed=1), step=1)
            save.wait("host")
            ckpt._pipeline.hurry(time.monotonic() + 120)
            if slow == "near":
                assert ckpt._pipeline.unfinished() == "step 1 to near, step 1 to far"
                with contextlib.suppress(ts.TierUnavailable):
                    save.wait("far", timeout=0.3)
                assert not save.done("far")
            else:
                save.wait("near")
                assert ckpt._pipeline.unfinished() == "step 1 to far"
                assert "far: step 1 (a faster tier has it" in ckpt._pipeline.left_behind()
            gate.set()
            save.wait("far")
            assert (ckpt._pipeline.unfinished(), ckpt._pipeline.left_behind()) == ("", "")


def test_before_the_end_older_copies_wait_until_the_newest_version_is_on_a_persistent_tier() -> None:
    """The newest one was in host memory only, and an older one is next in the queue of the slower tier."""
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        tiers = {"host": {"type": "host"}, "near": {**near, "every": 2}, "far": {**far, "every": 2}}
        with ts.Checkpointer(policy(tiers), "run") as ckpt, contextlib.ExitStack() as after:
            ckpt.save(tensors(*SIZES), step=0).wait("far")
            to_far = faulty(far).shut("writer")
            after.callback(to_far.set)  # whatever fails here: `close` would wait for it
            running, waiting = (ckpt.save(tensors(*SIZES, seed=step), step=step) for step in (2, 4))
            waiting.wait("near")
            to_near = faulty(near).shut("writer")
            after.callback(to_near.set)
            ckpt.save(tensors(*SIZES, seed=5), step=5).wait("host")
            ckpt._pipeline.hurry(time.monotonic() + 120)
            to_far.set()
            running.wait("far")
            with contextlib.suppress(ts.TierUnavailable):
                waiting.wait("far", timeout=0.5)
            assert not waiting.done("far")
            assert ckpt._pipeline.unfinished() == "step 5 to near, step 4 to far"
            to_near.set()
            until(lambda: not ckpt._pipeline.unfinished())
            assert waiting.done("far")
        with ts.Checkpointer(policy({"near": near}), "run") as ckpt:
            assert [version.step for version in ckpt.versions()] == [0, 2, 4, 5]


def test_before_the_end_a_version_that_no_persistent_tier_was_to_get_is_copied_there() -> None:
    """And what is saved afterwards goes there by itself."""
    with wrapped(Memory()) as near, wrapped(Memory()) as far:
        tiers = {"host": {"type": "host"}, "near": {**near, "every": 100}, "far": {**far, "every": 100}}
        with ts.Checkpointer(policy(tiers), "run") as ckpt:
            for step in range(2):
                ckpt.save(tensors(*SIZES, seed=step), step=step).wait("host")
            ckpt._pipeline.hurry(time.monotonic() + 120)
            until(lambda: not ckpt._pipeline.unfinished())
            ckpt._pipeline.ending = True
            assert ckpt.save(tensors(*SIZES, seed=2), step=2).tiers == ("host", "near")
        with ts.Checkpointer(policy({"near": near}), "run") as ckpt:
            assert [version.step for version in ckpt.versions()] == [0, 1, 2]
            assert difference(tensors(*SIZES, seed=1), ckpt.load(step=1)) == ""


def test_before_the_end_a_version_that_memory_gets_meanwhile_is_waited_for() -> None:
    """The signal came within a step, at the end of which it was saved; `close` begins before memory has it."""
    with wrapped(Host(), lasting=False) as memory, wrapped(Memory()) as near:
        with ts.Checkpointer(policy({"memory": memory, "near": {**near, "every": 100}}), "run") as ckpt:
            ckpt.save(tensors(*SIZES), step=0).wait("near")
            gate = faulty(memory).shut("writer")
            ckpt.save(tensors(*SIZES, seed=1), step=1)
            ckpt._pipeline.hurry(time.monotonic() + 120)
            closing = threading.Thread(target=ckpt.close)
            closing.start()
            try:
                until(lambda: ckpt._pipeline.queues["near"]._ended)
                closing.join(0.2)
                assert closing.is_alive()
            finally:
                gate.set()
                closing.join()
        with ts.Checkpointer(policy({"near": near}), "run") as ckpt:
            assert [version.step for version in ckpt.versions()] == [0, 1]
            assert difference(tensors(*SIZES, seed=1), ckpt.load()) == ""


@pytest.mark.parametrize(("remedy", "told"), [("", True), ("copy", False), ("due", False)])
def test_close_tells_of_a_newest_version_that_no_persistent_tier_was_due_to_get(
    caplog: pytest.LogCaptureFixture, remedy: str, told: bool
) -> None:
    with wrapped(Memory()) as near:
        with ts.Checkpointer(policy({"host": {"type": "host"}, "near": {**near, "every": 10}}), "run") as ckpt:
            for step in (1, 2):
                ckpt.save(tensors(*SIZES, seed=step), step=step).wait("host")
            if remedy == "copy":
                ckpt.copy(step=2, to="near")
            if remedy == "due":
                ckpt.save(tensors(*SIZES, seed=10), step=10)
        said = "closed with step 2, the newest version, in host alone"
        assert [said in record.message for record in caplog.records].count(True) == told
        if told:
            assert "near has step 1; `copy` it to near before `close` to keep it" in caplog.text
