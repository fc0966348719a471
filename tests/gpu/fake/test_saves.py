"""Saves and restores of state on devices, whatever the moments at which the devices do their work."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, scratch, tier
from support.device_jobs import DeviceJob, OddTensors, on_the_host
from support.equality import difference
from support.fake_cuda import EAGER, LATE, RANDOM, fake
from support.outcomes import tried

import tierstate as ts
from tierstate.engine.save import capture
from tierstate.manifest.errors import TierstateError

GPU = {"type": "gpu", "keep": {"last": 2}}


def truth_of(state: Any) -> Any:
    return copy.deepcopy(on_the_host(state))


@contextmanager
def digests_in_threads(beside: bool) -> Iterator[None]:
    """Also small states are digested by threads of their own."""
    worth = capture.WORTH_A_THREAD
    capture.WORTH_A_THREAD = 1000 if beside else worth
    try:
        yield
    finally:
        capture.WORTH_A_THREAD = worth


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    timing=st.sampled_from([LATE, EAGER, RANDOM, RANDOM, RANDOM]),
    devices=st.integers(1, 3),
    lazy=st.booleans(),
    gpu=st.booleans(),
    beside=st.booleans(),
    stream=st.booleans(),
)
def test_every_version_is_the_state_at_its_call(
    seed: int, timing: int, devices: int, lazy: bool, gpu: bool, beside: bool, stream: bool
) -> None:
    fake().timing(timing, seed)
    params, truth = OddTensors(range(devices), seed), {}
    with scratch() as place, digests_in_threads(beside):
        tiers = {**({"gpu": GPU} if gpu else {}), "nvme": tier("nvme", place)}
        with (
            torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.current_stream()),
            ts.Checkpointer(policy(tiers), "run") as ckpt,
        ):
            for step in range(3):
                params.step()
                truth[step] = truth_of(params.saved())
                if lazy and step == 1:
                    ckpt.guard(params)
                params.step()  # queued when save is called
                for tensor in truth[step].values():
                    tensor.add_(1)
                if timing == LATE:
                    assert not torch.equal(fake().on_host(params.tensors[0]), truth[step]["0"])
                save = ckpt.save(params.saved(), step=step)
                params.step()
                params.step()
                save.wait()
            for step in (1, 2, 0):
                params.step()  # queued: what is restored must come after it
                ckpt.restore(params.saved(), step=step)
                assert difference(truth[step], truth_of(params.saved())) == ""
                loaded = ckpt.load(step=step, device="cuda:1")
                assert all(tensor.device == torch.device("cuda:1") for tensor in loaded.values())
                assert difference(truth[step], truth_of(loaded)) == ""
            assert arena_of(ckpt).in_flight == 0
    assert fake().faults() == []


@pytest.mark.parametrize("gpu", [False, True], ids=["nvme", "gpu"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_tensors_may_be_freed_and_their_memory_used_again_after_save(place: Path, gpu: bool, lazy: bool) -> None:
    tiers = {**({"gpu": GPU} if gpu else {}), "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        for step in range(4):
            params = OddTensors(range(2), step)
            if lazy:
                ckpt.guard(params)
            truth = truth_of(params.saved())
            save = ckpt.save(params.saved(), step=step)
            if lazy:
                ckpt.before_step()
                ckpt.unguard(params)
            del params
            gc.collect()
            for index in range(2):
                torch.full((3000,), 7.0, device=f"cuda:{index}")
            save.wait()
            assert difference(truth, ckpt.load(step=step)) == ""


def test_only_devices_that_hold_state_are_used(place: Path) -> None:
    state = {"w": torch.randn(5000, device="cuda:2"), "host": torch.randn(100)}
    with fake().one_context() as used:
        with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
            ckpt.save(state, step=1).wait()
            ckpt.restore(state)
            assert used() == [2]
            loaded = ckpt.load(device="cuda:3")
        assert used() == [2, 3]
    assert difference(truth_of(state), truth_of(loaded)) == ""


def test_a_load_to_a_device_is_pinned_for_it_although_it_is_the_first_use(place: Path) -> None:
    state = {"w": torch.randn(50_000)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(state, step=1).wait()
    with fake().one_context() as used, ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        loaded = ckpt.load(device="cuda:3")
        assert used() == [3]
        ckpt.save(loaded, step=2).wait()
        assert used() == [3]
        assert fake().pinned()
    assert not fake().pinned()


def save_everywhere(ckpt: ts.Checkpointer, state: Any, step: int) -> None:
    """Save, and look at what became of it in each tier. Raises what kept it out of the persistent one."""
    save = ckpt.save(state, step=step)
    tried(lambda: save.wait("gpu"))
    save.wait("nvme")


@pytest.mark.parametrize("what", ["launch", "allocation", "register"])
def test_a_failing_device_fails_a_save_clearly_or_not_at_all(place: Path, what: str) -> None:
    params = OddTensors([0], 1)
    tiers = {"gpu": GPU, "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        ckpt.save(params.saved(), step=0).wait()
        for step in range(1, 40):
            params.step()
            truth = truth_of(params.saved())
            fake().fail(what, step - 1)
            kept = tried(lambda step=step: save_everywhere(ckpt, params.saved(), step)) is None
            fake().fail(what, -1)
            assert fake().device.take_last_error() == 0
            if kept:
                assert difference(truth, ckpt.load(step=step)) == ""
        ckpt.save(params.saved(), step=99).wait()
        assert difference(truth_of(params.saved()), ckpt.load(step=99)) == ""
        assert arena_of(ckpt).in_flight == 0


def test_a_failing_device_in_a_rollback_leaves_it_to_the_host(place: Path) -> None:
    params = OddTensors([0], 1)
    with ts.Checkpointer(policy({"gpu": GPU, "nvme": tier("nvme", place)}), "run") as ckpt:
        save = ckpt.save(params.saved(), step=0)
        save.wait("gpu")
        save.wait()
        truth = truth_of(params.saved())
        for after in range(12):
            params.step()
            torch.cuda.synchronize()
            fake().fail("launch", after)
            try:
                ckpt.restore(params.saved())
            except TierstateError:  # the device fails the copies from the host too; then it is said
                fake().fail("launch", -1)
                ckpt.restore(params.saved())
            fake().fail("launch", -1)
            assert difference(truth, truth_of(params.saved())) == ""


def test_lossy_leaves_of_a_device_are_saved_as_those_of_the_host(place: Path) -> None:
    here = {"m": torch.randn(5000), "w": torch.randn(300)}
    there = {name: tensor.cuda() for name, tensor in here.items()}
    spec = policy({"nvme": tier("nvme", place)}, rules=[{"match": "m", "lossy": "bf16"}])
    with ts.Checkpointer(spec, "run") as ckpt:
        for step, state in enumerate((here, there)):
            ckpt.save(state, step=step).wait()
        one, other = (ckpt.load(step=step, allow_lossy=True) for step in range(2))
    assert difference(one, other) == ""


def test_a_forked_child_leaves_the_device_and_the_parents_saves_alone(place: Path) -> None:
    job = DeviceJob()
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, chunk="64KiB", arena={"size": "8MiB"}), "run") as ckpt:
        ckpt.guard(job.optimizer)
        save = ckpt.save(job.state(), step=1)
        if (child := os.fork()) == 0:
            code = 1
            try:
                ckpt.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        job.step()
        save.wait()
        assert difference(job.optimizer.param_groups[0]["lr"], ckpt.load()["optimizer"]["param_groups"][0]["lr"]) == ""
