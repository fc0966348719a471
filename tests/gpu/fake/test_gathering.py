"""Short tensors of a device cross the bus together, and arrive as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, scratch, tier
from support.device_jobs import on_the_host
from support.equality import difference
from support.fake_cuda import LATE, RANDOM, fake
from support.outcomes import tried

import tierstate as ts
from tierstate.engine.save import streamed
from tierstate.manifest.errors import CaptureError


@pytest.fixture
def ckpt(place: Path) -> Iterator[ts.Checkpointer]:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "4MiB"}, chunk="1MiB"), "run") as made:
        yield made


def downloads() -> int:
    return fake().counts().get("download", 0)


def test_a_thousand_tensors_take_a_few_transfers(ckpt: ts.Checkpointer) -> None:
    state = {str(i): torch.randn(50 + i % 7, device="cuda") for i in range(1000)}
    before = downloads()
    ckpt.save(state, step=1).wait()
    assert downloads() - before <= 3
    assert difference(on_the_host(state), ckpt.load()) == ""


def test_the_memory_they_are_gathered_in_is_taken_once(ckpt: ts.Checkpointer) -> None:
    state = {str(i): torch.randn(50, device="cuda") for i in range(10)}
    ckpt.save(state, step=0).wait()
    taken = torch.cuda.memory_allocated()
    for step in range(1, 4):
        state["0"].add_(1)
        ckpt.save(state, step=step).wait()
        assert torch.cuda.memory_allocated() == taken


def test_without_room_on_the_device_each_is_copied_by_itself(ckpt: ts.Checkpointer) -> None:
    state = {str(i): torch.randn(50, device="cuda") for i in range(30)}
    fake().limit(torch.cuda.memory_reserved() + (streamed.STAGING >> 1))
    before, refused = downloads(), torch.cuda.memory_stats()["num_alloc_retries"]
    ckpt.save(state, step=1).wait()
    assert downloads() - before == 30
    assert torch.cuda.memory_stats()["num_alloc_retries"] == refused, "training's cache is left alone"
    assert difference(on_the_host(state), ckpt.load()) == ""


def test_a_copy_that_fails_in_the_middle_never_writes_into_a_later_save(ckpt: ts.Checkpointer) -> None:
    there = {str(i): torch.randn(3000, device="cuda") for i in range(16)}
    here = {"host": torch.randn(900_000)}  # copied by the host itself, to memory that the failed save has released
    fake().timing(LATE)
    fake().limit(torch.cuda.memory_reserved() + (streamed.STAGING >> 1))  # so that each is copied by itself
    for step in range(20):
        for tensor in (*there.values(), *here.values()):
            tensor.add_(1)
        fake().synchronize()
        fake().fail("launch", step)
        error = tried(lambda step=step: ckpt.save(there, step=step).wait())
        fake().fail("launch", -1)
        assert error is None or isinstance(error, CaptureError)
        save = ckpt.save(here, step=step + 100)
        save._save_state.captured.result(30)
        fake().synchronize()
        save.wait()
        assert torch.equal(here["host"], ckpt.load(step=step + 100)["host"])
        assert arena_of(ckpt).in_flight == 0


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70_000), st.integers(0, 3), st.booleans()), max_size=60),
    st.sampled_from([1000, 50_000, streamed.STAGING]),
    st.integers(0, 1 << 30),
)
def test_any_mixture_of_lengths_offsets_and_devices(
    kinds: list[tuple[int, int, int, bool]], room: int, seed: int
) -> None:
    fake().timing(RANDOM, seed)
    torch.manual_seed(seed)
    state = {}
    for i, (index, nbytes, offset, dense) in enumerate(kinds):
        memory = torch.randint(0, 255, (2 * nbytes + 8,), dtype=torch.uint8, device=f"cuda:{index % 2}")
        state[str(i)] = memory[offset : offset + nbytes] if dense else memory[offset::2][:nbytes]
    state["host"] = torch.randn(100)
    with (
        pytest.MonkeyPatch.context() as patch,
        scratch() as place,
        ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "256KiB"}, chunk="64KiB"), "run") as ckpt,
    ):
        patch.setattr(streamed, "STAGING", room)
        ckpt.save(state, step=1).wait()
        assert difference(on_the_host(state), ckpt.load()) == ""
    assert fake().faults() == []
