"""Guard by proof: however a guarded tensor is changed during the capture, the version is the state at the call, or the
save fails with an error that names the leaf."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, scratch, tier
from support.equality import difference
from support.guarded_jobs import Job, gated

import tierstate as ts
from tierstate.manifest.errors import CaptureError


def max_norm(job: Job) -> None:
    job.model[0].max_norm = 0.01  # type: ignore[assignment]
    job.model(torch.arange(50))


def load(job: Job) -> None:
    job.model.load_state_dict({name: value + 1 for name, value in job.model.state_dict().items()})


def load_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    with torch.no_grad():
        job.moment.add_(1)


def clip(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.clamp_(-0.001, 0.001)


def average(job: Job) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(job.model)
    averaged.update_parameters(job.model)
    torch.optim.swa_utils.update_bn([], averaged)
    with torch.no_grad():
        for mine, other in zip(job.model.parameters(), averaged.parameters(), strict=True):
            mine.lerp_(other + 1, 0.5)


def step(job: Job) -> None:
    job.backward()
    job.optimizer.step()


def replaced(job: Job) -> None:
    """Another optimizer of the same parameters: its step waits too."""
    job.backward()
    torch.optim.SGD(job.model.parameters(), lr=1.0).step()


def fused(job: Job) -> None:
    job.backward()
    torch.optim.AdamW(job.model.parameters(), lr=1.0, fused=True).step()


def unhooked(job: Job) -> None:
    """The step without its hooks, as torch's own tests call it."""
    job.backward()
    inner = type(job.optimizer).step.__wrapped__.__wrapped__
    with torch.no_grad():
        inner(job.optimizer)


def in_place(job: Job) -> None:
    with torch.no_grad():
        for tensor in (job.table, job.weight, job.moment):
            tensor.add_(1)


def foreach(job: Job) -> None:
    with torch.no_grad():
        torch._foreach_mul_([job.table, job.weight, job.moment], 2.0)


def out(job: Job) -> None:
    with torch.no_grad():
        torch.add(job.weight, 1, out=job.weight)


def one_row(job: Job) -> None:
    with torch.no_grad():
        job.table[17] = 3.0


def by_numpy(job: Job) -> None:
    job.moment.numpy()[...] = 5.0


def by_dlpack(job: Job) -> None:
    torch.from_dlpack(torch.to_dlpack(job.weight.detach())).mul_(3)


def by_address(job: Job) -> None:
    """A kernel that torch knows nothing of."""
    np.asarray((ctypes.c_float * job.weight.numel()).from_address(job.weight.data_ptr()))[:] += 1


def unsafe(job: Job) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(job.weight):
        job.weight.mul_(2)


def inference(job: Job) -> None:
    with torch.inference_mode():
        job.weight.mul_(2)


def set_data(job: Job) -> None:
    job.weight.data = torch.randn_like(job.weight)


def set_data_and_write(job: Job) -> None:
    job.weight.data = torch.randn_like(job.weight)
    in_place(job)


def set_(job: Job) -> None:
    with torch.no_grad():
        job.moment.set_(torch.randn_like(job.moment))


def swap(job: Job) -> None:
    other = torch.randn_like(job.moment)
    torch.utils.swap_tensors(job.moment, other)
    other.fill_(9)


def resize(job: Job) -> None:
    job.moment.untyped_storage().resize_(1 << 20)


def free(job: Job) -> None:
    job.moment.untyped_storage().resize_(0)


def assign(job: Job) -> None:
    """New parameters in the place of the old ones, which nobody writes to."""
    job.model.load_state_dict({name: value + 1 for name, value in job.model.state_dict().items()}, assign=True)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(2)


def double(job: Job) -> None:
    job.model.double()


def in_threads(job: Job) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda change: change(job), [in_place, foreach, one_row]))


HARMLESS = {step, replaced, fused, set_data, assign, double}
"""Those that wait, or that give tensors other memory and leave the old one alone. (`set_` does so too, but counts as
a change: one that came with it could not be told.)"""


WAYS: list[Callable[[Job], None]] = [
    max_norm, load, load_optimizer, clip, average, step, replaced, fused, unhooked, in_place, foreach, out,
    one_row, by_numpy, by_dlpack, by_address, unsafe, inference, set_data, set_data_and_write, set_, swap, resize, free,
    assign, double, in_threads,
]  # fmt: skip


def world(place: Path) -> ts.Policy:
    return policy({"nvme": tier("nvme", place)}, chunk="4KiB")


class Moment(NamedTuple):
    """Before which tensor's reading the capture is held back, and whether the change comes before, during or after."""

    held: int
    when: str


@pytest.mark.slow
def test_the_ways_do_what_their_names_say() -> None:
    for way in WAYS:
        job = Job()
        before = job.truth()
        way(job)
        if way is free:
            continue
        assert way in (resize, double) or difference(before, job.truth()) != "", way.__name__


MOMENTS = st.builds(Moment, st.integers(0, 8), st.sampled_from(["before", "meanwhile", "captured"]))


@pytest.mark.slow
@given(way=st.sampled_from(WAYS), moment=MOMENTS, again=st.booleans())
def test_a_version_is_the_state_at_the_call_or_its_save_fails(
    way: Callable[[Job], None], moment: Moment, again: bool
) -> None:
    job = Job()
    tensors = [p for p in job.model.parameters()] + [v for s in job.optimizer.state.values() for v in s.values()]
    with scratch() as place, gated() as gates, ts.Checkpointer(world(place), "run") as ckpt:
        ckpt.guard(job.optimizer)
        if again:  # the second plan of a state is made in another way
            ckpt.save(job.state(), step=0).wait()
        truth = job.truth()
        reached, opened = gates.hold(tensors[moment.held % len(tensors)].data_ptr())
        if moment.when == "before":
            gates.held.clear()
        save = ckpt.save(job.state(), step=1)
        if moment.when == "meanwhile":
            assert reached.wait(60)
            if way in HARMLESS:  # a step waits for the capture: the gate must open beside it
                threading.Timer(0.05, opened.set).start()
        elif moment.when == "captured":
            opened.set()
            save.wait_captured()
        way(job)
        opened.set()
        try:
            save.wait()
        except CaptureError as refused:
            error = str(refused)
        else:
            error = ""
            assert difference(truth, ckpt.load(step=1)) == ""
        check(error, way, moment.when)
        assert [info.step for info in ckpt.versions()] == [0] * again + [1] * (error == "")
        assert arena_of(ckpt).in_flight == 0


def check(error: str, way: Callable[[Job], None], when: str) -> None:
    """Whether a save failed if it must, and only if it may, and its error names leaf and remedy."""
    if when == "captured" or way in HARMLESS:
        assert error == ""
    elif when == "meanwhile" or error:
        assert re.search(r"leaf (model|optimizer)\..*wait_captured\(\)", error)
