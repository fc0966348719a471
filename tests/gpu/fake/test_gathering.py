"""Short tensors of a device cross the bus together, and arrive as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import arena_of, policy, scratch, tier
from support.device_jobs import on_the_host, truth_of
from support.equality import difference
from support.fake_cuda import LATE, RANDOM, fake
from support.outcomes import tried

import tierstate as ts
from tierstate.engine.capture import streamed
from tierstate.engine.restore import short_uploads
from tierstate.manifest.errors import CaptureError, Damaged
from tierstate.providers.tensors.devices import uploads_wait_once
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.memory import device_room


@pytest.fixture
def ckpt(place: Path) -> Iterator[ts.Checkpointer]:
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}, arena={"size": "4MiB"}, chunk="1MiB"), "run") as made:
        yield made


def downloads() -> int:
    return fake().counts().get("download", 0)


def uploads() -> int:
    return fake().counts().get("upload", 0)


def filled(state: dict[str, torch.Tensor], value: int) -> None:
    """Overwrite all bytes: queued on the devices, so that what is restored has to come after it."""
    for tensor in state.values():
        tensor.fill_(value)


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
    fake().limit(torch.cuda.memory_reserved() + (device_room.STAGING >> 1))
    before, refused = downloads(), torch.cuda.memory_stats()["num_alloc_retries"]
    ckpt.save(state, step=1).wait()
    assert downloads() - before == 30
    assert torch.cuda.memory_stats()["num_alloc_retries"] == refused, "training's cache is left alone"
    assert difference(on_the_host(state), ckpt.load()) == ""


def test_a_copy_that_fails_in_the_middle_never_writes_into_a_later_save(ckpt: ts.Checkpointer) -> None:
    there = {str(i): torch.randn(3000, device="cuda") for i in range(16)}
    here = {"host": torch.randn(900_000)}  # copied by the host itself, to memory that the failed save has released
    fake().timing(LATE)
    fake().limit(torch.cuda.memory_reserved() + (device_room.STAGING >> 1))  # so that each is copied by itself
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


def test_a_thousand_tensors_come_back_in_a_few_transfers(ckpt: ts.Checkpointer) -> None:
    state = {str(i): torch.randn(50 + i % 7, device=f"cuda:{i % 2}") for i in range(1000)}
    truth = truth_of(state)
    ckpt.save(state, step=1).wait()
    filled(state, 7)
    before = uploads()
    ckpt.restore(state)
    assert uploads() - before <= 6
    assert difference(truth, on_the_host(state)) == ""
    before = uploads()
    assert difference(truth, on_the_host(ckpt.load(device="cuda:1"))) == ""
    assert uploads() - before <= 3


def test_equal_tensors_cross_the_bus_once(ckpt: ts.Checkpointer) -> None:
    state = {str(i): torch.zeros(20_000, device=f"cuda:{i % 2}") for i in range(40)}
    ckpt.save(state, step=1).wait()
    filled(state, 7)
    before = uploads()
    ckpt.restore(state)
    assert uploads() - before == 2
    assert all(not tensor.any() for tensor in on_the_host(state).values())


def test_without_room_on_the_device_each_comes_back_by_itself(ckpt: ts.Checkpointer) -> None:
    state = {str(i): torch.randn(50, device="cuda") for i in range(30)}
    truth = truth_of(state)
    fake().limit(torch.cuda.memory_reserved() + (device_room.STAGING >> 1))
    ckpt.save(state, step=1).wait()
    filled(state, 7)
    before, refused = uploads(), torch.cuda.memory_stats()["num_alloc_retries"]
    ckpt.restore(state)
    assert uploads() - before == 30
    assert torch.cuda.memory_stats()["num_alloc_retries"] == refused, "training's cache is left alone"
    assert difference(truth, on_the_host(state)) == ""


def test_a_damaged_short_chunk_never_reaches_the_device(place: Path) -> None:
    state = {str(i): torch.randn(500, device="cuda") for i in range(8)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(state, step=1).wait()
    (pack,) = (file for file in place.rglob("packs/**/*") if file.is_file())
    data = bytearray(pack.read_bytes())
    data[data.index(state["5"].cpu().numpy().tobytes()) + 100] ^= 1
    pack.write_bytes(data)
    filled(state, 7)
    reader = ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run")
    with reader as ckpt, pytest.raises(Damaged, match='leaf "5" of version'):
        ckpt.restore(state)
    assert (state["5"] == 7).all()


def test_uploads_wait_for_each_stream_on_which_the_caller_has_receivers_made() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    tensors = [torch.zeros(1000, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    data = torch.arange(4000).to(torch.uint8).pin_memory()
    with uploads_wait_once():
        for stream, tensor in zip((one, other), tensors, strict=True):
            with torch.cuda.stream(stream):
                tensor.fill_(7)
                provider = TensorProvider(tensor)
                provider.receiver(provider.spec)
    for tensor in tensors:
        event = TensorProvider(tensor).load(0, data)
        assert event is not None
        event.synchronize()
    torch.cuda.synchronize()
    assert all(torch.equal(tensor.cpu().view(torch.uint8), data) for tensor in tensors)


@pytest.mark.parametrize("room", [True, False], ids=["together", "alone"])
def test_an_upload_that_fails_in_the_middle_is_no_restore(ckpt: ts.Checkpointer, room: bool) -> None:
    state = {str(i): torch.randn(3000, device="cuda") for i in range(16)}
    truth = truth_of(state)
    ckpt.save(state, step=1).wait()
    fake().timing(LATE)
    if not room:
        fake().limit(torch.cuda.memory_reserved() + (device_room.STAGING >> 1))
    failures = 0
    for step in range(24):
        filled(state, 7)
        fake().fail("launch", step)
        try:
            ckpt.restore(state)
        except torch.AcceleratorError:
            failures += 1
            assert not fake().device.pending(), "a copy from a slab that others may have now"
        else:
            fake().fail("launch", -1)
            assert difference(truth, on_the_host(state)) == ""
        fake().fail("launch", -1)
        assert arena_of(ckpt).in_flight == 0
    assert failures >= 16
    ckpt.restore(state)
    assert difference(truth, on_the_host(state)) == ""


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70_000), st.integers(0, 3), st.booleans()), max_size=60),
    st.sampled_from([1000, 50_000, device_room.STAGING]),
    st.integers(0, 1 << 30),
)
@example([(0, 20_000, 0, True)] * 6, 50_000, 0)  # more than there is room for
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
        for module in (device_room, streamed, short_uploads):
            patch.setattr(module, "STAGING", room)
        ckpt.save(state, step=1).wait()
        truth = truth_of(state)
        assert difference(truth, ckpt.load()) == ""
        filled(state, 7)
        ckpt.restore(state)
        copies = {name: tensor.clone() for name, tensor in state.items()}  # queued: they come after what is restored
        assert difference(truth, on_the_host(copies)) == ""
        assert difference(truth, on_the_host(ckpt.load(device="cuda:1"))) == ""
        assert arena_of(ckpt).in_flight == 0
    assert fake().faults() == []
