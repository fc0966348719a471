"""Lazy capture: save returns early, and still nothing of the state after the call gets into the version."""

from __future__ import annotations

import copy
import random
import threading
import time
from ctypes import memmove
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, engine_threads, policy, scratch, tier
from support.equality import difference
from support.outcomes import until

import tierstate as ts
from tierstate.dcp import TierReader, close
from tierstate.engine.capture import capture
from tierstate.manifest.errors import CaptureError


class Job:
    """A small model with what changes at other times than its parameters: running means, a counter, a plain tensor."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.seen = torch.zeros(5000)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "seen": self.seen, "steps": self.steps}

    def truth(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**parts, "seen": self.seen, "steps": self.steps})

    def step(self) -> None:
        self.seen += 1
        self.steps += 1
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that takes its time over each chunk."""
    dice = random.Random(3)

    def slowly(*args: Any) -> Any:
        time.sleep(dice.random() * 0.003)
        return memmove(*args)

    monkeypatch.setattr(capture, "memmove", slowly)


@pytest.mark.slow
@pytest.mark.usefixtures("slow")
@settings(max_examples=5)
@given(pauses=st.lists(st.floats(0, 0.03), min_size=6, max_size=6))
def test_versions_are_the_state_at_the_call_whenever_the_next_step_comes(pauses: list[float]) -> None:
    with scratch() as place:
        spec, job, truth = policy({"nvme": tier("nvme", place)}, chunk="4KiB"), Job(), {}
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.guard(job.optimizer)
            for pause in pauses:
                job.step()
                truth[job.steps] = job.truth()
                ckpt.save(job.state(), step=job.steps)
                time.sleep(pause)
            for step, state in truth.items():
                assert difference(state, ckpt.load(step=step)) == ""
            assert ckpt.stats().waited > 0
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []


class Gate:
    """Holds back the capture of one leaf."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: torch.Tensor, error: Exception | None = None) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

        def gated(target: int, source: int, nbytes: int) -> Any:
            if source == held.data_ptr():
                self.reached.set()
                assert self.open.wait(30)
                if error is not None:
                    raise error
            return memmove(target, source, nbytes)

        monkeypatch.setattr(capture, "memmove", gated)


@pytest.fixture
def job() -> Job:
    made = Job()
    made.step()
    return made


@pytest.mark.parametrize("wrapped", [False, True])
def test_memory_for_what_the_optimizer_has_is_ready_before_the_first_save(place: Path, wrapped: bool) -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    job = Job()
    needed = 3 * sum(p.nbytes for p in job.model.parameters())
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, chunk="4KiB"), "run") as ckpt:
        arena = arena_of(ckpt)
        step = Wrapper(job.optimizer) if wrapped else job.optimizer
        ckpt.guard(step)
        for _ in range(3):
            assert not arena._free, "before the optimizer has made its state"
            job.model(torch.randn(8, 64)).square().mean().backward()
            step.step()
        until(lambda: len(arena._free) * arena.slab_size >= needed and not arena._preparing)
        assert len(arena._free) * arena.slab_size < needed + 2 * arena.slab_size


@pytest.mark.slow
def test_steps_and_saves_do_not_fail_of_sparse_state(place: Path) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # its momentum is sparse
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.guard(optimizer)
        for step in range(1, 5):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            ckpt.save({"model": model}, step=step).wait()
        assert torch.equal(ckpt.load()["model"]["weight"], model.weight)


@pytest.mark.slow
def test_save_returns_before_the_parameters_are_captured_and_the_step_waits(
    job: Job, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, job.model[0].weight)
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.guard(job.optimizer)
        truth = job.truth()
        save = ckpt.save(job.state(), step=1)
        assert gate.reached.wait(30), "save has returned, and the capture of this leaf has only begun"
        with pytest.raises(TimeoutError, match=r"^step 1 is not captured after 0\.01 s yet$"):
            save.wait_captured(0.01)
        # What no optimizer owns was captured before save returned, so it may change at once.
        job.seen.fill_(-1)
        job.model[1].running_mean.fill_(-1)
        job.model(torch.randn(8, 64)).square().mean().backward()
        before = job.model[0].weight.detach().clone()
        stepping = threading.Thread(target=job.optimizer.step)
        stepping.start()
        stepping.join(0.2)
        assert stepping.is_alive(), "the step waits"
        assert torch.equal(job.model[0].weight, before)
        gate.open.set()
        stepping.join(30)
        assert not torch.equal(job.model[0].weight, before)
        save.wait()
        assert difference(truth, ckpt.load(step=1)) == ""


def test_a_guarded_capture_that_fails_is_told_and_does_not_stop_the_step(
    job: Job, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, job.model[0].weight, RuntimeError("the device is gone"))
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.guard(job.optimizer)
        save = ckpt.save(job.state(), step=1)
        gate.open.set()
        job.step()
        with pytest.raises(CaptureError, match="the device is gone"):
            save.wait()
        assert ckpt.versions() == []
        assert arena_of(ckpt).in_flight == 0


@pytest.mark.slow
def test_a_restore_waits_and_close_lets_the_optimizer_go(
    job: Job, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, job.model[0].weight)
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.guard(job.optimizer)
        ckpt.guard(job.optimizer)
        gate.open.set()
        ckpt.save(job.state(), step=1).wait()
        first = job.truth()
        job.step()
        second = job.truth()
        gate.reached.clear()
        gate.open.clear()
        ckpt.save(job.state(), step=2)
        assert gate.reached.wait(30)
        threading.Timer(0.1, gate.open.set).start()
        job.steps = ckpt.restore(into=job.state(), step=1)["steps"]
        assert difference(first, job.truth()) == ""
    assert not job.optimizer._optimizer_step_pre_hooks
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        assert difference(second, ckpt.load(step=2)) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is .*")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("by", ["another Checkpointer", "DCP"])
def test_whatever_else_restores_in_this_process_waits_too(
    by: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads into memory that is being captured, and until it is done no version counter shows that."""
    spec, weight = policy({"nvme": tier("nvme", place)}), torch.nn.Parameter(torch.zeros(1000))
    optimizer, gate = torch.optim.SGD([weight]), Gate(monkeypatch, weight)
    with ts.Checkpointer(spec, "run") as ckpt, ts.Checkpointer(spec, "other") as other:
        other.save({"w": torch.ones(1000)}, step=1).wait()
        ckpt.guard(optimizer)
        save = ckpt.save({"w": weight}, step=1)
        assert gate.reached.wait(30)
        threading.Timer(0.3, gate.open.set).start()
        if by == "DCP":
            dcp.load({"w": weight.detach()}, storage_reader=TierReader(spec, "other"), no_dist=True)
        else:
            other.restore(into={"w": weight.detach()})
        assert weight.detach().all()
        save.wait()
        assert not ckpt.load()["w"].detach().any()
    close()


def test_without_a_guard_all_is_captured_when_save_returns(job: Job, place: Path) -> None:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        truth = job.truth()
        save = ckpt.save(job.state(), step=1)
        save.wait_captured(0)
        job.step()
        save.wait()
        assert difference(truth, ckpt.load(step=1)) == ""
