"""The read set of a lazy capture: which operations may still be under way, and what shows that a tensor has changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.guarded_jobs import Job, gated

import tierstate as ts
from tierstate.engine.capture import read_set
from tierstate.engine.capture.read_set import ReadSet, ThreadState
from tierstate.manifest.errors import CaptureError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.tiers.thread_stacks import thread_stacks

MORE_THAN_A_PIPE_HOLDS = 4 << 20
"""Bytes; Linux gives a pipe 64 KiB, and at most 1 MiB unless its administrator allows more."""


def read_set_of(*tensors: torch.Tensor, turn: int = 0) -> ReadSet:
    leaves = np.arange(len(tensors))
    host = leaves, np.array([t.data_ptr() for t in tensors]), np.array([t.nbytes for t in tensors])
    made = ReadSet.of(leaves, tensors, [], [], host, turn, set())
    assert made is not None
    return made


class Stuck:
    """A thread in a function that writes to the pipe when it begins, and is over when the pipe is closed and the event
    set."""

    def __init__(self, function: Callable[[Stuck], object]) -> None:
        self._read, self.pipe = os.pipe()
        self.over = threading.Event()
        self._thread = threading.Thread(target=function, args=(self,))

    def start(self) -> None:
        self._thread.start()
        os.read(self._read, 1)

    def go_on(self) -> None:
        self.over.set()
        os.close(self._read)
        self._thread.join()
        os.close(self.pipe)


@contextmanager
def stuck(function: Callable[[Stuck], object]) -> Iterator[Stuck]:
    made = Stuck(function)
    try:
        yield made
    finally:
        made.go_on()


def in_a_call(thread: Stuck) -> None:
    """In an operation of which Python knows nothing: one that begins, and ends when it is let."""
    with suppress(BrokenPipeError):
        os.write(thread.pipe, bytes(MORE_THAN_A_PIPE_HOLDS))


def in_a_wait(thread: Stuck) -> None:
    os.write(thread.pipe, b"x")
    thread.over.wait()


def on_and_on(thread: Stuck) -> None:
    os.write(thread.pipe, b"x")
    while not thread.over.is_set():
        sum(range(100))


@pytest.fixture(autouse=True)
def only_threads_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test runner may have threads that Python's `threading` does not know; they never count as at rest."""

    def known() -> dict[int | None, threading.Thread]:
        return {thread.ident: thread for thread in threading.enumerate()}

    def threads() -> dict[int, ThreadState]:
        # A thread of the test can get the ident of one that has ended since: it is another thread all the same.
        now, states = known(), plain()
        return {i: state for i, state in states.items() if i not in before or before[i] is not now.get(i)}

    plain, there = read_set._threads, known()
    before = {ident: there.get(ident) for ident in thread_stacks(1)}
    monkeypatch.setattr(read_set, "_threads", threads)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_set, "PATIENCE", 0.05)


@pytest.mark.usefixtures("impatient")
def test_an_operation_that_began_after_the_call_may_be_under_way() -> None:
    with stuck(in_a_call) as thread:
        reads = read_set_of(torch.zeros(3))
        assert reads.settle(lambda: False)
        thread.start()
        assert not reads.settle(lambda: False)
    assert reads.settle(lambda: False)


def test_a_save_that_is_cancelled_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_set, "PATIENCE", 3600.0)
    with stuck(in_a_call) as thread:
        reads = read_set_of(torch.zeros(3))
        thread.start()
        assert not reads.settle(lambda: True)


@pytest.mark.parametrize("function", [in_a_wait, on_and_on])
def test_a_thread_that_waits_or_goes_on_is_in_no_operation(
    function: Callable[[Stuck], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_set, "PATIENCE", 3600.0)
    with stuck(function) as thread:
        reads = read_set_of(torch.zeros(3))
        thread.start()
        assert reads.settle(lambda: False)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count what threads have run")
def test_a_thread_that_has_not_run_since_the_call_is_in_no_operation_of_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_set, "PATIENCE", 3600.0)
    with stuck(in_a_call) as thread:
        thread.start()
        while not any(state.ran for state in read_set._threads().values()):
            pass  # until it sleeps
        assert read_set_of(torch.zeros(3)).settle(lambda: False)


def test_a_changed_version_another_tensor_and_freed_memory_are_seen() -> None:
    tensors = [torch.zeros(5000) for _ in range(4)]
    reads = read_set_of(*tensors)
    assert reads.changed() == set()
    tensors[1][77] = 1
    assert reads.changed() == {1}
    with torch.inference_mode():
        tensors[2].view(-1)[5:6].fill_(3)
    assert reads.changed() == {1, 2}
    assert reads.only(np.array([0, 2])).changed() == {2}
    tensors[3].untyped_storage().resize_(0)
    assert reads.freed() == {3}
    assert reads.changed() == {3}


def test_a_tensor_that_was_swapped_with_another_is_seen() -> None:
    tensor, other = torch.zeros(100), torch.ones(100)
    nowhere = (np.zeros(0, "i8"),) * 3
    reads = ReadSet.of(np.array([7]), [tensor.detach()], [tensor], [tensor.data_ptr()], nowhere, 0, set())
    assert reads is not None
    torch.utils.swap_tensors(tensor, other)
    assert tensor._version == other._version
    assert reads.changed() == {7}


def test_bytes_that_changed_without_a_version_are_found_in_the_sample() -> None:
    """Dense changes in every save; of a part of the tensor only where the sample of that save lies."""
    tensor = torch.zeros(5000)
    for turn in range(20):
        reads = read_set_of(tensor, turn=turn)
        tensor.data.add_(1)
        assert reads.changed() == {0}
    seen = 0
    for turn in range(50):
        reads = read_set_of(tensor, turn=turn)
        tensor.data[1000:2000] += 1
        seen += reads.changed() == {0}
    assert 5 < seen < 50


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 7, 8, 9])
def test_short_tensors_at_any_address_are_sampled_inside(nbytes: int) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    for start in range(8):
        part = memory[start : start + nbytes]
        reads = read_set_of(part)
        assert all(part.data_ptr() <= at and at + 4 <= part.data_ptr() + nbytes for at in reads.at.tolist())


def test_inference_tensors_have_no_versions() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert ReadSet.of(np.array([0]), [tensor], [], [], (np.zeros(0, "i8"),) * 3, 0, set()) is None


def test_the_error_names_a_few_leaves_and_the_remedy() -> None:
    reads = read_set_of(torch.zeros(3))
    leaves = [Leaf(("model", f"w{i}"), Spec("tensor", "float32", 4, (3,))) for i in range(5)]
    text = str(reads.refuse(leaves))
    assert "leaf model.w0, model.w1, model.w2 and 2 more: changed" in text
    assert "wait_captured()" in text
    assert reads.unstable == {leaf.path for leaf in leaves}
    assert " more" not in str(reads.refuse(leaves[:3]))


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("changes", [False, True])
def test_where_an_operation_stays_under_way_the_bytes_decide(changes: bool, place: Path) -> None:
    """One element, which is not in the sample, of a leaf that is captured already, by a kernel that counts nothing."""
    job = Job()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, chunk="4KiB"), "run") as ckpt, gated() as gates:
        ckpt.guard(job.optimizer)
        reached, opened = gates.hold(job.weight.data_ptr())
        with stuck(in_a_call) as thread:
            save = ckpt.save(job.state(), step=1)
            assert reached.wait(60)
            thread.start()
            job.table.data.view(-1)[1] += changes
            opened.set()
            if changes:
                with pytest.raises(CaptureError, match="leaf model"):
                    save.wait()
            else:
                save.wait()


def test_what_was_changed_once_is_captured_before_save_returns_from_then_on(place: Path) -> None:
    job = Job()
    job.model[0].max_norm = 0.01
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, chunk="4KiB"), "run") as ckpt, gated() as gates:
        ckpt.guard(job.optimizer)
        for number in range(4):
            with torch.no_grad():
                job.table.normal_()
            truth = job.table.detach().clone()
            reached, opened = gates.hold(job.weight.data_ptr())
            save = ckpt.save(job.state(), step=number)
            assert reached.wait(60), "the others are captured lazily all the same"
            job.model(torch.arange(50))
            assert not torch.equal(truth, job.table)
            opened.set()
            if number == 0:
                with pytest.raises(CaptureError, match=r'leaf model\."0.weight": changed'):
                    save.wait()
            else:
                save.wait()
                assert torch.equal(ckpt.load(step=number)["model"]["0.weight"], truth)
            gates.held.clear()
