"""DCP's staging of device tensors: at once, and beside the training until the step of a guarded optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import scratch
from support.dcp_jobs import policy_text
from support.device_jobs import on_the_host
from support.equality import difference
from support.fake_cuda import LATE, RANDOM, timing

from tierstate.dcp import TierReader, TierStager, TierWriter, close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    yield
    close()


def training(device: str) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """An optimizer that has made a step, and a state: what it changes, and tensors that it does not.

    Without one of those on the device, nothing waits for the device before a guarded copy begins.
    """
    weight = torch.nn.Parameter(torch.randn(64, 100, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    step(optimizer)
    found = {"w": weight, "seen": torch.zeros(4, device=device), "here": torch.arange(9)}
    return optimizer, found | {"exp_avg": optimizer.state[weight]["exp_avg"].t()}


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    optimizer.step()


def loaded(place: Path, step: int, like: dict[str, Any]) -> dict[str, Any]:
    into = {key: torch.zeros_like(value, device="cpu") for key, value in like.items()}
    dcp.load(into, checkpoint_id=step, storage_reader=TierReader(policy_text(place), "run"))
    return into


@settings(max_examples=16)
@given(
    when=st.sampled_from([LATE, RANDOM]), seed=st.integers(0, 1 << 20), guarded=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning:torch")
def test_a_staged_state_is_the_one_of_the_call(when: int, seed: int, guarded: bool, device: str) -> None:
    optimizer, state = training(device)
    timing(when, seed)
    stager = TierStager(guard=optimizer if guarded else None)
    with scratch() as place:
        expected, responses = {}, []
        for at in range(1, 4):
            expected[at] = {key: value.clone() for key, value in on_the_host(state).items()}
            with torch.no_grad():
                state["w"].mul_(2)  # which the device has not done when the save begins
            expected[at]["w"] = expected[at]["w"] * 2
            writer = TierWriter(policy_text(place), "run")
            responses.append(dcp.async_save(state, checkpoint_id=at, storage_writer=writer, async_stager=stager))
            state["seen"].add_(1)
            state["here"].add_(1)
            step(optimizer)
            getattr(responses[-1], "upload_completion", responses[-1]).result()
        for at, wanted in expected.items():
            assert difference(wanted, loaded(place, at, state)) == ""
        close()
    stager.close()
