"""Accelerators that are none of CUDA: the fake is used through ``torch.accelerator`` alone, as XPU and MPS are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import policy, scratch, tier
from support.device_jobs import OddTensors, on_the_host, truth_of
from support.equality import difference
from support.fake_cuda import EAGER, LATE, RANDOM, fake

import tierstate as ts
from tierstate.providers.tensors import devices


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "STREAMED", ())


@settings(max_examples=15)
@given(
    st.integers(0, 1 << 30), st.sampled_from([LATE, EAGER, RANDOM, RANDOM]), st.booleans(), st.booleans(), st.booleans()
)
def test_every_version_is_the_state_at_its_call(seed: int, timing: int, lazy: bool, stream: bool, lossy: bool) -> None:
    fake().timing(timing, seed)
    truth = {}
    rules = [{"match": "2", "lossy": "bf16"}] if lossy else []
    with (
        scratch() as place,
        torch.cuda.stream(torch.cuda.Stream("cuda:1") if stream else torch.cuda.current_stream("cuda:1")),
        torch.cuda.device(0),
        ts.Checkpointer(policy({"nvme": tier("nvme", place)}, rules=rules), "run") as ckpt,
    ):
        params = OddTensors([1], seed)
        if lazy:
            ckpt.guard(params)
        for step in range(3):
            params.step()
            if lossy:
                params.tensors[2].copy_(params.tensors[2].bfloat16().float())
            truth[step] = truth_of(params.saved())
            params.tensors[0].mul_(-1)  # queued when save is called
            truth[step]["0"].mul_(-1)
            save = ckpt.save(params.saved(), step=step)
            params.step()
            save.wait()
        for step in (1, 2, 0):
            params.step()
            ckpt.restore(params.saved(), step=step, allow_lossy=True)
            assert difference(truth[step], truth_of(params.saved())) == ""
            params.step()
            loaded = ckpt.load(step=step, device="cuda:1", allow_lossy=True)
            assert loaded["0"].device == torch.device("cuda:1")
            assert difference(truth[step], on_the_host(loaded)) == ""
    assert fake().faults() == []


def test_nothing_is_captured_after_save_has_returned() -> None:
    params = OddTensors([1], 0)
    with scratch() as place, ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.guard(params)
        truth = truth_of(params.saved())
        save = ckpt.save(params.saved(), step=1)
        params.tensors[0].mul_(0)  # no step, so that nothing waits for a capture
        save.wait()
        assert difference(truth, ckpt.load()) == ""
