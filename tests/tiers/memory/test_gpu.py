"""The gpu tier, on the host: the same code, but for the stream."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tierstate.manifest.chunk import as_buffer, empty_buffer
from tierstate.manifest.errors import AlreadyExists, NotFound, PolicyError, TierError, TierFull, TierUnavailable
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.memory.block_sums import SUM_BLOCK, block_sums, sums_on_host, unchanged_runs
from tierstate.tiers.memory.cuda import CopyStream
from tierstate.tiers.memory.gpu import Gpu
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.testing import TierContract, random_bytes

FOOTER = as_buffer(bytearray(b"what lies before"))


class TestGpuContract(TierContract):
    examples = 25

    def make(self, tmp_path: Path) -> Tier:
        return Gpu(device="cpu")


class TestFullGpuContract(TierContract):
    """A capacity that is never reached changes nothing."""

    def make(self, tmp_path: Path) -> Tier:
        return Gpu(device="cpu", capacity=32 << 20)


def gpu(capacity: int | None = None) -> Gpu:
    tier = Gpu(device="cpu", capacity=capacity)
    tier.name = "gpu"
    return tier


def adopted(tier: Gpu, key: str, nbytes: int = SUM_BLOCK, seed: int = 0) -> torch.Tensor:
    """A snapshot of some bytes, as an object; those bytes."""
    memory, data = tier.reserve(nbytes, key), random_bytes(nbytes, seed)
    memory.copy_(data)
    tier.adopt(key, memory, sums_on_host(block_sums(memory)), FOOTER)
    return data


def test_what_it_is() -> None:
    traits = gpu(77).traits
    assert (traits.persistent, traits.shared, traits.capacity, traits.scarce) == (False, "process", 77, True)
    assert traits.notes == ("memory of cpu",)


def test_a_full_tier_says_so_and_deleting_makes_room() -> None:
    tier = gpu(100)
    tier.put("a", random_bytes(60))
    with pytest.raises(TierFull, match=r"gpu: b: no room for 41B more: 60B of the capacity of 100B are in use"):
        tier.put("b", random_bytes(41))
    tier.delete("a")
    tier.put("b", random_bytes(100))
    assert tier.used == 100


def test_a_snapshot_is_an_object_with_a_footer_behind_it() -> None:
    tier = gpu()
    data = adopted(tier, "packs/run/1")
    assert tier.size("packs/run/1") == SUM_BLOCK + len(FOOTER)
    assert torch.equal(tier.get("packs/run/1"), torch.cat([data, FOOTER]))
    out = empty_buffer(20)
    tier.read("packs/run/1", [Range(SUM_BLOCK - 10, out)])
    assert torch.equal(out, torch.cat([data[-10:], FOOTER[:10]]))


def test_memory_of_a_dropped_version_is_used_by_the_next_of_its_size() -> None:
    tier = gpu(2 * SUM_BLOCK + 100)
    adopted(tier, "a")
    adopted(tier, "b")
    address = tier._objects["a"].pieces[0].buffer.data_ptr()
    with pytest.raises(TierFull):
        tier.reserve(SUM_BLOCK, "c")
    tier.delete("a")
    held = tier.used
    memory = tier.reserve(SUM_BLOCK, "c")
    assert (memory.data_ptr(), tier.used) == (address, held)


def test_spare_memory_gives_way_to_a_state_of_another_size_and_to_anything_else() -> None:
    tier = gpu(3 * SUM_BLOCK)
    tier.give_back(tier.reserve(2 * SUM_BLOCK, "a"))
    assert tier.used == 2 * SUM_BLOCK
    tier.give_back(tier.reserve(3 * SUM_BLOCK, "b"))
    assert tier.used == 3 * SUM_BLOCK
    tier.put("c", random_bytes(1))
    assert tier.used == 1


def test_a_key_that_is_taken_leaves_the_memory_with_whoever_reserved_it() -> None:
    tier = gpu()
    data = adopted(tier, "a")
    memory, before = tier.reserve(SUM_BLOCK, "a"), tier.used
    with pytest.raises(AlreadyExists):
        tier.adopt("a", memory, sums_on_host(block_sums(memory)), FOOTER)
    assert tier.used == before
    assert torch.equal(tier.get("a")[:SUM_BLOCK], data)


def test_nothing_is_held_when_it_is_closed_not_even_by_what_comes_back_later() -> None:
    tier = gpu()
    adopted(tier, "a")
    late = tier.reserve(SUM_BLOCK, "b")
    tier.give_back(tier.reserve(2 * SUM_BLOCK, "c"))
    tier.close()
    assert tier.used == SUM_BLOCK
    tier.give_back(late)
    assert tier.used == 0


def test_memory_that_the_system_does_not_give_is_a_full_tier() -> None:
    tier = gpu()
    tier.give_back(tier.reserve(SUM_BLOCK, "a"))
    with pytest.raises(TierFull, match="gpu: b: cpu has no room for 4096PiB more; keep fewer versions there"):
        tier.reserve((1 << 62) // SUM_BLOCK * SUM_BLOCK, "b")
    assert tier.used == 0, "what waited for the next version was let go of first"


def test_lent_objects_show_what_has_changed_in_them() -> None:
    tier = gpu()
    adopted(tier, "a", 4 * SUM_BLOCK)
    with tier.lent("a") as found:
        assert found is not None
        lent, now = found
        assert np.array_equal(lent.sums, now)
        lent.memory[2 * SUM_BLOCK + 77] ^= 16
    with tier.lent("a") as found:
        assert found is not None
        lent, now = found
        assert (lent.sums != now).any(axis=1).tolist() == [False, False, True, False]
        starts = np.array([0, SUM_BLOCK, 2 * SUM_BLOCK, 2 * SUM_BLOCK - 1, 3 * SUM_BLOCK])
        nbytes = np.array([2 * SUM_BLOCK, SUM_BLOCK + 1, 1, 1, SUM_BLOCK])
        assert unchanged_runs(lent.sums, now, starts, nbytes).tolist() == [True, False, False, True, True]


def test_a_lent_object_stays_until_it_comes_back() -> None:
    tier = gpu()
    data = adopted(tier, "a")
    with tier.lent("a") as found:
        assert found is not None
        tier.delete("a")
        # The memory is not free yet, so that this one is another's.
        tier.reserve(SUM_BLOCK, "b").zero_()
        assert torch.equal(found[0].memory, data)
    with pytest.raises(NotFound), tier.lent("a"):
        pass


def test_an_object_that_came_through_the_host_is_not_lent() -> None:
    tier = gpu()
    tier.put("a", random_bytes(100))
    with tier.lent("a") as found:
        assert found is None


DEVICE_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA driver error"),
    MemoryError(),
]


@pytest.mark.parametrize("error", DEVICE_ERRORS, ids=["memory", "device", "driver", "host"])
@pytest.mark.parametrize("name", ["settle", "taken"])
def test_what_fails_on_the_device_is_an_error_of_the_tier_and_keeps_no_memory(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, out = gpu(), empty_buffer(10)
    data = adopted(tier, "a")
    memory, used = tier.reserve(SUM_BLOCK, "b"), tier.used

    def lend() -> None:
        with tier.lent("a"):
            pytest.fail("nothing is lent")

    calls = {
        "put": lambda: tier.put("c", random_bytes(10)),
        "adopt": lambda: tier.adopt("b", memory, np.zeros((1, 2), "i8"), FOOTER),
        "read": lambda: tier.read("a", [Range(0, out)]),
    } | ({"lent": lend} if name == "taken" else {})

    def fail(_: CopyStream) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(CopyStream, name, fail)
        for call in calls.values():
            with pytest.raises((TierUnavailable, TierFull), match=r"gpu: [abc]: cpu "):
                call()
    assert (tier.used, list(tier.list(""))) == (used, ["a"])
    assert torch.equal(tier.get("a")[:SUM_BLOCK], data)


def test_a_device_that_cannot_be_opened_is_told_by_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = gpu()

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment")

    with monkeypatch.context() as patch:
        patch.setattr(CopyStream, "__init__", fail)
        with pytest.raises(TierUnavailable, match="gpu: cpu has failed: CUDA unknown error"):
            tier.put("a", random_bytes(10))
    tier.put("a", random_bytes(10))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps", "CPU", ""])
def test_what_is_no_device_is_refused_where_it_is_written(device: str) -> None:
    text = f"tiers:\n  fast: {{type: gpu, device: '{device}'}}\n  nvme: {{type: nvme, path: here}}\n"
    with pytest.raises(PolicyError, match=r"<policy>:2:\d+: tiers\.fast\.device: .* is no device; write 'cuda'"):
        Policy.parse(text)
    with pytest.raises(ValueError, match="is no device"):
        Gpu(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_told_when_it_is_first_needed() -> None:
    tier = Gpu(device="cuda:1")
    tier.name = "gpu"
    assert list(tier.list("")) == []
    with pytest.raises(TierError, match="gpu: there is no device cuda:1 here, of 0 CUDA devices; name one that is"):
        tier.put("a", random_bytes(1))
    assert tier.used == 0
