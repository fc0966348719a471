"""The gpu tier on a CUDA device: snapshots beside what it computes, rollback within it, and its memory when short."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import gpu_of, policy, tier
from support.device_jobs import DeviceJob, on_the_host
from support.equality import difference

import tierstate as ts
from tierstate.engine.restore import restore
from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import TierFull
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.block_sums import SUM_BLOCK, block_sums, sums_on_host
from tierstate.tiers.memory.gpu import DeviceObject, Gpu
from tierstate.tiers.memory.host import Host
from tierstate.tiers.testing import TierContract, random_bytes

MIB = 1 << 20

SPIN = 1 << 32
"""Cycles for which a device is kept busy: two seconds and more."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestGpuContract(TierContract):
    examples = 10

    def make(self, tmp_path: Path) -> Tier:
        return Gpu()


@pytest.fixture
def ckpt(place: Path) -> Iterator[ts.Checkpointer]:
    tiers = {"gpu": {"type": "gpu", "keep": {"last": 2}}, "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers, chunk="1MiB", arena={"size": "64MiB"}), "run") as made:
        yield made


def snapshots(ckpt: ts.Checkpointer) -> list[DeviceObject]:
    return [held for held in gpu_of(ckpt)._objects.values() if isinstance(held, DeviceObject)]


@pytest.mark.parametrize("beside", [False, True], ids=["default-stream", "another-stream"])
def test_versions_are_the_state_at_the_call_and_roll_back_beside_what_is_queued(
    ckpt: ts.Checkpointer, beside: bool
) -> None:
    stream = torch.cuda.Stream() if beside else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        job, truth = DeviceJob(), {}
        for _ in range(4):
            job.step()
            truth[job.steps] = job.truth()
            job.forward()  # still queued while the state is copied
            save = ckpt.save(job.state(), step=job.steps)
            job.step()
            job.steps -= 1
            save.wait("gpu")
            save.wait()
        assert len(snapshots(ckpt)) == 2
        for step in (3, 4, 1):
            job.forward()
            job.odd.zero_()  # queued: what is restored must come after it
            job.steps = ckpt.restore(job.state(), step=step)["steps"]
            assert difference(truth[step], job.truth()) == ""
        assert difference(truth[4], on_the_host(ckpt.load(step=4, device="cuda"))) == ""
        assert difference(truth[4], ckpt.load(step=4)) == ""


def test_save_waits_for_nothing_but_the_copy_within_the_device(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, acquire = threading.Event(), Arena.acquire

    def gated(arena: Arena, *args: Any, **keys: Any) -> Any:
        assert threading.current_thread().name != "tierstate-capture" or opened.wait(60)
        return acquire(arena, *args, **keys)

    monkeypatch.setattr(Arena, "acquire", gated)
    monkeypatch.setattr(Arena, "try_acquire", lambda _: None)
    job = DeviceJob()
    job.step()
    truth = job.truth()
    state = job.state()
    del state["big"]  # a long tensor on the host is captured as ever
    save = ckpt.save(state, step=1)
    save.wait_captured(timeout=0)
    job.step()
    assert not save.done("gpu")
    opened.set()
    save.wait("gpu")
    loaded = on_the_host(ckpt.load(device="cuda"))
    assert difference({k: v for k, v in truth.items() if k != "big"}, loaded) == ""


def test_a_rollback_takes_tensors_of_the_device_from_the_device(
    ckpt: ts.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(64, 64).cuda()
    state = {"model": model, "odd": torch.randn(70, 90, device="cuda").t()[::2]}
    truth = copy.deepcopy(on_the_host({**state, "model": model.state_dict()}))
    ckpt.save(state, step=1).wait("gpu")
    with torch.no_grad():
        model.weight.add_(1)
        state["odd"].zero_()
    monkeypatch.setattr(restore.Fetch, "_one", lambda *_: pytest.fail("something was read by way of the host"))
    ckpt.restore(state)
    assert difference(truth, on_the_host({**state, "model": model.state_dict()})) == ""


def test_the_host_reads_the_copy_while_the_device_computes(place: Path) -> None:
    tiers = {"gpu": {"type": "gpu", "keep": {"last": 1}}, "nvme": tier("nvme", place)}
    job = DeviceJob(4096)
    job.step()
    with ts.Checkpointer(policy(tiers, arena={"size": "512MiB"}, chunk="16MiB"), "run") as ckpt:
        ckpt.save(job.state(), step=0).wait("gpu")
        truth = job.truth()
        save = ckpt.save(job.state(), step=1)
        torch.cuda._sleep(SPIN)
        end = torch.cuda.Event()
        end.record()
        save.wait("gpu")
        assert not end.query(), "the host has read all while the device was busy"
        end.synchronize()
        assert difference(truth, on_the_host(ckpt.load(device="cuda"))) == ""


def test_memory_that_changed_on_the_device_is_found_there(
    ckpt: ts.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.randn(300_000, device="cuda")}
    truth = copy.deepcopy(on_the_host(state))
    save = ckpt.save(state, step=1)
    save.wait("gpu")
    save.wait()
    snapshots(ckpt)[0].memory[400_000] ^= 1
    torch.cuda.synchronize()
    state["w"].zero_()
    ckpt.restore(state)
    assert difference(truth, on_the_host(state)) == ""
    assert "chunks are not what was copied there" in caplog.text


def test_sums_are_the_same_on_the_device_and_on_the_host() -> None:
    memory = random_bytes(5 * SUM_BLOCK, 3)
    assert (sums_on_host(block_sums(memory.cuda())) == sums_on_host(block_sums(memory))).all()
    for part in (memory, memory.cuda()):
        with pytest.raises(RuntimeError):  # no bytes are left out
            block_sums(part[:-4])


def test_a_device_without_room_is_a_full_tier_and_not_the_end_of_training(
    ckpt: ts.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TierFull, match=r"has no room for .* more; keep fewer versions there"):
        gpu_of(ckpt).reserve(torch.cuda.mem_get_info()[1] // SUM_BLOCK * 2 * SUM_BLOCK, "a")
    assert gpu_of(ckpt).used == 0
    state = {"w": torch.randn(64 << 20, device="cuda")}
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        save = ckpt.save(state, step=1)
        save.wait()
        with pytest.raises(TierFull):
            save.wait("gpu")
        state["w"].add_(1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "step 1 is captured by way of the host, and not within gpu" in caplog.text
    ckpt.save(state, step=2).wait("gpu")


@pytest.mark.parametrize("kept", [0, 1], ids=["nvme", "gpu"])
def test_a_save_and_a_restore_take_100_mib_beside_the_snapshots_and_all_of_it_comes_back(
    place: Path, kept: int
) -> None:
    """Of a state so large that a second copy of it, or of one of its tensors, would be seen."""
    length = 128 * MIB
    state = {name: torch.full((length // 4,), 1.0, device="cuda") for name in ("w", "m")}
    tiers = {"gpu": {"type": "gpu", "keep": {"last": kept}}} if kept else {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    snapshots = (kept + 1) * 2 * (length + SUM_BLOCK) if kept else 0  # one is made before the oldest goes
    tiers["nvme"] = tier("nvme", place)
    with ts.Checkpointer(policy(tiers, chunk="16MiB", arena={"size": "256MiB"}), "run") as ckpt:
        for step in range(kept + 1):
            for value in state.values():
                value.fill_(step)
            ckpt.save(state, step=step).wait()
        for value in state.values():
            value.zero_()
        ckpt.restore(into=state)
        assert all(value.eq(kept).all() for value in state.values())
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= snapshots + 100 * MIB
    assert torch.cuda.memory_allocated() == before


def test_a_range_may_be_memory_of_the_device() -> None:
    made = Gpu()
    data = random_bytes(100_000)
    made.put("a", data)
    out = torch.zeros(50_000, dtype=torch.uint8, device="cuda")
    here = empty_buffer(10).pin_memory()
    made.read("a", [Range(10, out), Range(0, here)])
    assert torch.equal(out.cpu(), data[10:50_010])
    assert torch.equal(here, data[:10])
    made.close()


def test_the_tier_settles_on_the_device_that_was_current_when_it_was_made() -> None:
    torch.cuda.set_device(0)
    assert Gpu().line.device == torch.device("cuda", 0)


def test_the_host_tier_copies_into_pinned_memory() -> None:
    torch.cuda.init()
    made = Host()
    made.put("a", random_bytes(1000))
    assert all(piece.buffer.is_pinned() for piece in made._objects["a"].pieces)
    assert made.traits.notes == ("memory is pinned",)
