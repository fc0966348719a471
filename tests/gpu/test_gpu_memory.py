"""What a gpu tier takes of a device's memory: little beside the copies, and never what torch keeps for training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import gpu_of, policy, tier
from support.outcomes import until

import tierstate as ts
from tierstate.tiers.memory.block_sums import SUM_BLOCK, block_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


@pytest.fixture
def ckpt(place: Path) -> Iterator[ts.Checkpointer]:
    tiers = {"gpu": {"type": "gpu", "keep": {"last": 1}}, "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers, chunk="1MiB", arena={"size": "64MiB"}), "run") as made:
        yield made


def flushes() -> int:
    """How often torch has freed its cache to satisfy an allocation."""
    found: int = torch.cuda.memory_stats()["num_alloc_retries"]
    return found


def leave_free(nbytes: int) -> None:
    """Let torch have no more than this beyond what it has."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)


@pytest.fixture
def _no_limit() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_sums_need_less_than_40_mib_beside_the_memory() -> None:
    memory = torch.zeros(256 * MIB + SUM_BLOCK, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sums = block_sums(memory)
    torch.cuda.synchronize()
    assert not sums.any()
    assert torch.cuda.max_memory_allocated() - before < 40 * MIB


@pytest.mark.usefixtures("_no_limit")
def test_saves_to_a_full_device_leave_training_s_cache_alone(ckpt: ts.Checkpointer) -> None:
    state = {"w": torch.arange(16 * MIB, dtype=torch.int32, device="cuda")}
    cached = torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")
    del cached
    torch.cuda.synchronize()
    leave_free(50 * MIB)
    before = flushes(), torch.cuda.memory_reserved()
    for step in range(3):
        save = ckpt.save(state, step=step)
        save.wait()
        with pytest.raises(ts.TierFull, match=r"has no room for .* in torch's cache are kept for training"):
            save.wait("gpu")
    assert flushes() == before[0]
    assert torch.cuda.memory_reserved() >= before[1]
    torch.cuda.set_per_process_memory_fraction(1.0)
    ckpt.save(state, step=3).wait("gpu")


@pytest.mark.usefixtures("_no_limit")
def test_after_training_was_short_it_gets_what_lies_between_two_saves(ckpt: ts.Checkpointer) -> None:
    state = {"w": torch.arange(16 * MIB, dtype=torch.int32, device="cuda")}

    def save(step: int) -> None:
        made = ckpt.save(state, step=step)
        made.wait("gpu")
        made.wait()

    for step in range(2):
        save(step)
    # A tier retires a version after it has committed the next one.
    until(lambda: sum(len(memory) for memory in gpu_of(ckpt)._spare) >= 64 * MIB)
    leave_free(80 * MIB)
    cached = torch.ones(60 * MIB, dtype=torch.uint8, device="cuda")
    del cached
    short = torch.ones(78 * MIB, dtype=torch.uint8, device="cuda")  # CUDA has 20 MiB: what was cached is freed
    del short
    torch.cuda.empty_cache()
    save(2)
    ckpt._pipeline.close()  # tiers retire versions after they have committed
    assert gpu_of(ckpt)._spare == []
    before = torch.cuda.memory_allocated()
    peak = torch.ones(120 * MIB, dtype=torch.uint8, device="cuda")  # only with the block that the tier gave back
    assert torch.cuda.memory_allocated() - before >= 120 * MIB
    del peak
