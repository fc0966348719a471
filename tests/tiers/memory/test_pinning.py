"""Pinning: every slab on loan is known to CUDA once this process uses it, and forgotten before its memory goes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.outcomes import until

from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.memory import arena as arena_room
from tierstate.tiers.memory import pinning
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.pages import PAGE

MIB = 1 << 20
BIG = 4 * MIB


class Pinned:
    """Stands in for CUDA: which memory is pinned, and by whom."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.devices: list[int | None] = []
        self.free = threading.Event()
        self.free.set()
        self.answer: int | None = 0

    def pin(self, buffer: torch.Tensor, device: int | None = None) -> int | None:
        assert self.free.wait(60)
        self.devices.append(device)
        if self.answer == 0:
            assert buffer.data_ptr() not in self.addresses
            self.addresses.add(buffer.data_ptr())
        return self.answer

    def unpin(self, buffer: torch.Tensor, device: int | None = None) -> int:
        self.addresses.remove(buffer.data_ptr())
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    made = Pinned()
    monkeypatch.setattr(pinning, "pin_memory", made.pin)
    monkeypatch.setattr(pinning, "unpin_memory", made.unpin)
    monkeypatch.setattr(arena_room, "current_device", lambda: 3)
    monkeypatch.setattr(arena_room, "node_of_device", lambda device: None)
    return made


def test_every_slab_on_loan_is_pinned_and_unpinned_once(cuda: Pinned) -> None:
    arena = Arena(6 * PAGE, PAGE)
    arena.prepare(2 * PAGE)
    for thread in threading.enumerate():
        if thread.name == "tierstate-arena":
            thread.join(60)
    slabs = [*(arena.acquire() for _ in range(5)), arena.acquire(last=True)]
    until(lambda: not arena._preparing)  # a slab that was prepared too late to be needed is unpinned again
    assert cuda.addresses == {slab.buffer.data_ptr() for slab in slabs}
    assert set(cuda.devices) == {3}, "in the context of the device that the saving thread works on"
    for slab in slabs:
        slab.release()
    pinned = len(cuda.devices)
    again = arena.acquire()
    assert len(cuda.devices) == pinned, "what is pinned stays pinned for the next save"
    arena.close()
    assert cuda.addresses == {again.buffer.data_ptr()}, "never unpinned under a copy"
    again.release()
    assert cuda.addresses == set()


def test_a_slab_made_before_cuda_was_used_is_pinned_once_it_is(cuda: Pinned) -> None:
    arena = Arena(4 * PAGE, PAGE)
    cuda.answer = None
    slab = arena.acquire(last=True)
    slab.release()
    assert cuda.addresses == set()
    cuda.answer = 0
    slab = arena.acquire(last=True)
    assert cuda.addresses == {slab.buffer.data_ptr()}
    slab.release()
    arena.close()
    assert cuda.addresses == set()


def test_pinning_that_is_refused_is_tried_once_and_the_slabs_are_used_all_the_same(
    cuda: Pinned, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(4 * PAGE, PAGE)
    first = arena.acquire(last=True)
    cuda.answer = 2
    slabs = [arena.acquire(last=True) for _ in range(2)]
    for slab in slabs:
        slab.buffer.fill_(1)
        slab.release()
    arena.acquire(last=True).release()
    assert len(cuda.devices) == 2
    assert cuda.addresses == {first.buffer.data_ptr()}, "what is pinned stays pinned"
    first.release()
    arena.close()
    assert cuda.addresses == set()
    [told] = caplog.messages
    assert "CUDA refused to pin 4 KiB of an arena of 16 KiB (error 2), of which 4 KiB are pinned" in told
    assert "limit of locked memory" in told
    assert "ulimit -l unlimited" in told
    assert "LimitMEMLOCK=infinity" in told
    assert "--ulimit memlock=-1" in told
    assert "smaller `arena: size`" in told


def test_pinning_holds_up_nobody_else(cuda: Pinned) -> None:
    arena = Arena(4 * PAGE, PAGE)
    held = arena.acquire(last=True)
    cuda.free.clear()
    other = threading.Thread(target=lambda: arena.acquire(last=True).release())
    other.start()
    while arena.in_flight < 2:
        time.sleep(0.001)
    held.release()
    assert not arena.lacks(PAGE)
    cuda.free.set()
    other.join(60)
    assert arena.in_flight == 0
    arena.close()


def test_a_slab_whose_pinning_fails_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_buffer: torch.Tensor, _device: int | None) -> bool:
        raise RuntimeError("the driver is gone")

    arena = Arena(4 * PAGE, PAGE)
    monkeypatch.setattr(pinning, "pin_memory", fail)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        arena.acquire()
    assert arena.in_flight == 0
    arena.close()


def test_a_failing_device_holds_up_nothing_when_memory_is_unpinned(
    cuda: Pinned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena(6 * PAGE, PAGE)
    slabs = [arena.acquire(last=True) for _ in range(4)]
    monkeypatch.setattr(pinning, "_still_pinned", kept := [])
    tried = []

    def unpin(buffer: torch.Tensor, device: int | None) -> int:
        tried.append(buffer)
        if len(tried) % 2:
            raise RuntimeError("the driver is gone")
        return cuda.unpin(buffer, device)

    monkeypatch.setattr(pinning, "unpin_memory", unpin)
    for slab in slabs[:3]:
        slab.release()
    arena.close()
    slabs[3].release()
    assert len(tried) == 4
    assert arena.shared is None or arena.shared.descriptor == -1
    assert cuda.addresses == {buffer.data_ptr() for buffer in kept}
    assert arena.pinning.nbytes == 2 * PAGE
    assert len([one for one in caplog.messages if "the driver is gone" in one]) == 1


def test_memory_that_cannot_be_prepared_is_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_buffer: torch.Tensor) -> None:
        raise MemoryError

    arena = Arena(4 * PAGE, PAGE)
    monkeypatch.setattr(arena_room, "fault_in", fail)
    arena.prepare(2 * PAGE)
    assert arena._preparers
    for thread in arena._preparers:
        thread.join(60)
    assert "memory could not be prepared" in caplog.text
    assert arena.shared is not None
    assert arena.shared._holes == [0]
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_knows_every_slab_until_it_is_given_back() -> None:
    tensor = torch.arange(MIB, device="cuda", dtype=torch.float32)
    arena = Arena(4 * BIG, BIG)
    arena.prepare(2 * BIG)
    slabs = [arena.acquire() for _ in range(3)]
    assert all(slab.pinned and slab.buffer.is_pinned() for slab in slabs)
    for chunk in TensorProvider(tensor).chunks(BIG):
        event = chunk.fill(slabs[2].buffer[: chunk.nbytes])
        assert event is not None
        event.synchronize()
    assert torch.equal(slabs[2].buffer.view(torch.float32), tensor.cpu())
    arena.close()
    memory = slabs[2].buffer
    slabs[2].release()
    assert not memory.is_pinned()
