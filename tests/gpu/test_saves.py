"""Saves and restores of state on devices: exact whatever the moments at which the devices do their work."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, scratch, tier
from support.device_jobs import DeviceJob, OddTensors, truth_of
from support.equality import bits, difference
from support.fake_cuda import EAGER, LATE, RANDOM, fake, is_installed, timing
from support.state_strategies import on_device, remake, tensors

import tierstate as ts
from tierstate.engine.capture import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = {"type": "gpu", "keep": {"last": 2}}


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
    when=st.sampled_from([LATE, EAGER, RANDOM, RANDOM, RANDOM]),
    devices=st.integers(1, 3),
    lazy=st.booleans(),
    gpu=st.booleans(),
    beside=st.booleans(),
    stream=st.booleans(),
)
def test_every_version_is_the_state_at_its_call(
    seed: int, when: int, devices: int, lazy: bool, gpu: bool, beside: bool, stream: bool
) -> None:
    timing(when, seed)
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    params, truth = OddTensors(range(min(devices, torch.cuda.device_count())), seed), {}
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
                if when == LATE and is_installed():
                    assert not torch.equal(fake().on_host(params.tensors[0]), truth[step]["0"])
                save = ckpt.save(params.saved(), step=step)
                params.step()
                params.step()
                save.wait()
            for step in (1, 2, 0):
                params.step()  # queued: what is restored must come after it
                ckpt.restore(params.saved(), step=step)
                assert difference(truth[step], truth_of(params.saved())) == ""
                loaded = ckpt.load(step=step, device=str(last))
                assert all(tensor.device == last for tensor in loaded.values())
                assert difference(truth[step], truth_of(loaded)) == ""
            assert arena_of(ckpt).in_flight == 0


def bits_on_device(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor's elements; torch copies not every dtype from a device."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return bits(remake(memory.cpu().untyped_storage(), tensor.detach()))


@settings(max_examples=25)
@given(
    given=st.lists(st.tuples(st.integers(0, 2), tensors()), max_size=12),
    many=st.integers(0, 300),
    inference=st.booleans(),
    when=st.sampled_from([LATE, EAGER, RANDOM]),
    seed=st.integers(0, 1 << 30),
)
def test_tensors_of_any_dtype_and_strides_come_back_beside_many_short_ones(
    given: list[tuple[int, torch.Tensor]], many: int, inference: bool, when: int, seed: int
) -> None:
    timing(when, seed)
    torch.manual_seed(seed)
    count, storages = torch.cuda.device_count(), []
    with torch.inference_mode(inference):
        state = {str(i): torch.randn(1 + i % 50, device=f"cuda:{i % min(2, count)}") for i in range(many)}
    for i, (index, tensor) in enumerate(given):
        with torch.cuda.device(index % count):
            storages.append(on_device(tensor.untyped_storage()))
        state[f"odd {i}"] = remake(storages[-1], tensor)
    truth = {name: bits_on_device(tensor) for name, tensor in state.items()}
    with scratch() as place, ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(state, step=1).wait()
        with torch.no_grad():
            for storage in (*storages, *(state[str(i)].untyped_storage() for i in range(many))):
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(7)  # queued
        with torch.inference_mode(inference):
            ckpt.restore(state)
            loaded = ckpt.load(device=f"cuda:{count - 1}")
        assert {name: bits_on_device(tensor) for name, tensor in state.items()} == truth
        assert {name: bits_on_device(tensor) for name, tensor in loaded.items()} == truth


@pytest.mark.parametrize("gpu", [False, True], ids=["nvme", "gpu"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_tensors_may_be_freed_and_their_memory_used_again_after_save(place: Path, gpu: bool, lazy: bool) -> None:
    tiers = {**({"gpu": GPU} if gpu else {}), "nvme": tier("nvme", place)}
    devices = range(min(2, torch.cuda.device_count()))
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        for step in range(4):
            params = OddTensors(devices, step)
            if lazy:
                ckpt.guard(params)
            truth = truth_of(params.saved())
            save = ckpt.save(params.saved(), step=step)
            if lazy:
                ckpt.before_step()
                ckpt.unguard(params)
            del params
            gc.collect()
            for index in devices:
                torch.full((3000,), 7.0, device=f"cuda:{index}")
            save.wait()
            assert difference(truth, ckpt.load(step=step)) == ""


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
