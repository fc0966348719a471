"""A device that fails or has no memory left, in saves and rollbacks with a gpu tier: other tiers do what it cannot.

On the host: every call that would go to a device is made to fail as torch's calls do.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, engine_threads, gpu_of, policy, scratch, tensors, tier
from support.mutate_state import flip

import tierstate as ts
from tierstate.engine.capture import snapshot
from tierstate.engine.restore import gpu as restore_gpu
from tierstate.engine.restore import restore
from tierstate.manifest.errors import untrusted
from tierstate.tiers.memory import gpu as gpu_tier
from tierstate.tiers.memory.cuda import CopyStream

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA driver error: unknown error"),
    MemoryError(),
)
"""What torch raises for a device."""


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def ring(place: Path) -> ts.Policy:
    gpu = {"type": "gpu", "device": "cpu", "keep": {"last": 2}}
    return policy({"gpu": gpu, "nvme": tier("nvme", place)})


class FailingCopies:
    """Copies into destinations, of which some fail: they leave other bytes in a part of the destination, or all of it.

    Args:
        at: the numbers of the copies that fail.
        late: whether a failure is only seen when the copy is waited for.
    """

    def __init__(self, at: set[int], late: bool, error: Exception) -> None:
        self._at, self._late, self._error, self._count = at, late, error, 0
        self.waited = 0
        self._take = restore_gpu._take

    def __call__(self, to: Any, start: int, data: torch.Tensor) -> Any:
        self._count += 1
        if self._count - 1 not in self._at:
            self._take(to, start, data)
            return self
        self._take(to, start, data[: len(data) // 2 + 1].bitwise_xor(85))
        if not self._late:
            raise self._error
        return _FailedEvent(self._error)

    def synchronize(self) -> None:
        self.waited += 1


class _FailedEvent:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


@settings(max_examples=40)
@given(st.sets(st.integers(0, 8), min_size=1), st.booleans(), st.sampled_from(ERRORS))
def test_a_copy_that_fails_in_a_rollback_is_made_good_by_way_of_the_host(
    at: set[int], late: bool, error: Exception
) -> None:
    state = tensors(30_000, 500, 8192, 60)
    state["odd"] = torch.arange(12_000.0).view(100, 120).t()[::2]
    with scratch() as place, ts.Checkpointer(ring(place), "run") as ckpt:
        truth = copy.deepcopy(state)
        save = ckpt.save(state, step=1)
        save.wait("gpu")
        save.wait()
        flip(state)
        with mock.patch.object(restore_gpu, "_take", FailingCopies(at, late, error)):
            ckpt.restore(state)
        assert alike(state, truth)


def test_all_copies_are_waited_for_though_one_has_failed(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {f"w{i}": torch.randn(2000) for i in range(5)}
    with ts.Checkpointer(ring(place), "run") as ckpt:
        ckpt.save(state, step=1).wait("gpu")
        truth = copy.deepcopy(state)
        flip(state)
        copies = FailingCopies({1}, True, ERRORS[1])
        with mock.patch.object(restore_gpu, "_take", copies), caplog.at_level(logging.WARNING, "tierstate"):
            ckpt.restore(state)
        assert copies.waited == 4
        assert alike(state, truth)
    assert "gpu: the rest is restored by way of the host: CUDA error: an illegal memory access" in caplog.text


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "device", "driver", "host"])
@pytest.mark.parametrize("whole", [False, True], ids=["sums", "sums-and-reads"])
def test_a_device_without_memory_for_sums_or_that_reads_nothing_leaves_the_rollback_to_other_tiers(
    place: Path, error: Exception, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = tensors(30_000, 500, 8192, 60)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        save = ckpt.save(state, step=1)
        save.wait("gpu")
        save.wait()
        truth = copy.deepcopy(state)
        flip(state)
        with mock.patch.object(gpu_tier, "block_sums", failing(error)), caplog.at_level(logging.WARNING, "tierstate"):
            copies = mock.patch.object(gpu_tier.DeviceObject, "copy", failing(error))
            if whole:
                copies.start()
            try:
                ckpt.restore(state)
            finally:
                if whole:
                    copies.stop()
        assert alike(state, truth)
    assert "gpu: the rest is restored by way of the host: gpu: packs/run/" in caplog.text
    assert f"cpu has failed: {error}" in caplog.text


PLACES = ("block_sums", "_rows", "_from")
"""Functions of the snapshot in turn, from the first that may fail to the last."""


@pytest.mark.parametrize("name", PLACES)
def test_a_snapshot_that_fails_at_any_place_is_captured_by_way_of_the_host_in_time(
    place: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before save returns: the state may change right after it."""
    state = tensors(30_000, 500, 8192, 60)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        truth = copy.deepcopy(state)
        with mock.patch.object(snapshot, name, failing(ERRORS[1])):
            save = ckpt.save(state, step=1)
            save.wait_captured(timeout=30)
        flip(state)
        save.wait()
        save.wait("gpu")
        assert alike(ckpt.load(), truth)
        assert len(list(gpu_of(ckpt).list("packs/run/"))) == 1
        assert not any(isinstance(held, gpu_tier.DeviceObject) for held in gpu_of(ckpt)._objects.values())
        assert "step 1 is captured by way of the host, and not within gpu: CUDA error" in caplog.text
        ckpt.save(state, step=2).wait("gpu")
        assert alike(ckpt.load(), state)
    assert engine_threads() == []


def test_a_snapshot_that_cannot_even_be_waited_for_gives_its_memory_back(place: Path) -> None:
    state = tensors(30_000, 500)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        with (
            mock.patch.object(snapshot, "block_sums", failing(ERRORS[0])),
            mock.patch.object(CopyStream, "settle", failing(ERRORS[1])),
        ):
            save = ckpt.save(state, step=1)
            save.wait()
            with pytest.raises(ts.TierUnavailable, match=r"gpu: .*: cpu has failed: CUDA error"):
                save.wait("gpu")
        assert [len(m) for m in gpu_of(ckpt)._spare] == [gpu_of(ckpt).used]
        assert alike(ckpt.load(), state)


def test_sums_that_cannot_be_read_leave_the_version_to_the_other_tiers(place: Path) -> None:
    state = tensors(30_000, 500)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        with mock.patch.object(snapshot, "sums_on_host", failing(ERRORS[1])):
            save = ckpt.save(state, step=1)
            with pytest.raises(ts.TierUnavailable, match=r"gpu: packs/run/.*: cpu has failed: CUDA error"):
                save.wait("gpu")
            save.wait()
        assert alike(ckpt.load(), state)
        assert list(gpu_of(ckpt).list("")) == []


@pytest.fixture
def full_device() -> Iterator[None]:
    """torch refuses memory of the device "cuda", with the words of torch 2.13."""
    empty = torch.empty

    def refusing(*args: Any, device: Any = None, **keys: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity")
        return empty(*args, device=device, **keys)

    # Elsewhere there is no such device, and a load to it is refused before that.
    with mock.patch.object(torch, "empty", refusing), mock.patch.object(restore, "absence", return_value=""):
        yield


@pytest.mark.usefixtures("full_device")
def test_a_load_for_which_the_device_has_no_room_names_the_leaf_and_is_out_of_memory(place: Path) -> None:
    with ts.Checkpointer(ring(place), "run") as ckpt:
        save = ckpt.save({"big": torch.ones(5000)}, step=1)
        save.wait()
        with pytest.raises(ts.OutOfMemory, match=r"^big: CUDA out of memory. Tried to allocate 20.00 GiB") as caught:
            ckpt.load(device="cuda")
        assert isinstance(caught.value, MemoryError)
        assert alike(ckpt.load(), {"big": torch.ones(5000)})


@given(st.sampled_from(ERRORS))
def test_a_device_that_fails_is_no_error_of_the_version(error: Exception) -> None:
    """A restore that goes on to older versions would meet the same failure there."""
    right = {0: ts.OutOfMemory, 1: torch.AcceleratorError, 2: ts.FormatError, 3: ts.OutOfMemory}[ERRORS.index(error)]
    with pytest.raises(right), untrusted("version 7"):
        raise error
