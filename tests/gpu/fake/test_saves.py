"""Saves and restores of state on devices: which of them are used, and what happens when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import arena_of, policy, tier
from support.device_jobs import OddTensors, truth_of
from support.equality import difference
from support.fake_cuda import fake
from support.outcomes import tried

import tierstate as ts
from tierstate.manifest.errors import TierstateError

GPU = {"type": "gpu", "keep": {"last": 2}}


def test_only_devices_that_hold_state_are_used(place: Path) -> None:
    state = {"w": torch.randn(5000, device="cuda:2"), "host": torch.randn(100)}
    with fake().one_context() as used:
        with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
            ckpt.save(state, step=1).wait()
            ckpt.restore(state)
            assert used() == [2]
            loaded = ckpt.load(device="cuda:3")
        assert used() == [2, 3]
    assert difference(truth_of(state), truth_of(loaded)) == ""


def test_a_load_to_a_device_is_pinned_for_it_although_it_is_the_first_use(place: Path) -> None:
    state = {"w": torch.randn(50_000)}
    with ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        ckpt.save(state, step=1).wait()
    with fake().one_context() as used, ts.Checkpointer(policy({"nvme": tier("nvme", place)}), "run") as ckpt:
        loaded = ckpt.load(device="cuda:3")
        assert used() == [3]
        ckpt.save(loaded, step=2).wait()
        assert used() == [3]
        assert fake().pinned()
    assert not fake().pinned()


def save_everywhere(ckpt: ts.Checkpointer, state: Any, step: int) -> None:
    """Save, and look at what became of it in each tier. Raises what kept it out of the persistent one."""
    save = ckpt.save(state, step=step)
    tried(lambda: save.wait("gpu"))
    save.wait("nvme")


@pytest.mark.parametrize("what", ["launch", "allocation", "register"])
def test_a_failing_device_fails_a_save_clearly_or_not_at_all(place: Path, what: str) -> None:
    params = OddTensors([0], 1)
    tiers = {"gpu": GPU, "nvme": tier("nvme", place)}
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        ckpt.save(params.saved(), step=0).wait()
        for step in range(1, 40):
            params.step()
            truth = truth_of(params.saved())
            fake().fail(what, step - 1)
            kept = tried(lambda step=step: save_everywhere(ckpt, params.saved(), step)) is None
            fake().fail(what, -1)
            assert fake().device.take_last_error() == 0
            if kept:
                assert difference(truth, ckpt.load(step=step)) == ""
        ckpt.save(params.saved(), step=99).wait()
        assert difference(truth_of(params.saved()), ckpt.load(step=99)) == ""
        assert arena_of(ckpt).in_flight == 0


def test_a_failing_device_in_a_rollback_leaves_it_to_the_host(place: Path) -> None:
    params = OddTensors([0], 1)
    with ts.Checkpointer(policy({"gpu": GPU, "nvme": tier("nvme", place)}), "run") as ckpt:
        save = ckpt.save(params.saved(), step=0)
        save.wait("gpu")
        save.wait()
        truth = truth_of(params.saved())
        for after in range(12):
            params.step()
            torch.cuda.synchronize()
            fake().fail("launch", after)
            try:
                ckpt.restore(params.saved())
            except (
                TierstateError,
                torch.AcceleratorError,
            ):  # the device fails the copies from the host too; it is said
                fake().fail("launch", -1)
                ckpt.restore(params.saved())
            fake().fail("launch", -1)
            assert difference(truth, truth_of(params.saved())) == ""
