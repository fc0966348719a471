"""An asynchronous save whose guarded tensors are copied while the training goes on to its next step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_jobs import policy_text as text
from torch.distributed.checkpoint.api import CheckpointException

from tierstate.dcp import TierReader, TierStager, TierWriter, staging


class Training:
    """A model, an optimizer that has made a step, and a tensor that no optimizer knows."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.randn(64, 8))
        self.seen = torch.zeros(4)
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.step()

    def step(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state[self.weight]
        return {"w": self.weight, "exp_avg": moments["exp_avg"], "seen": self.seen}


def copies(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() for key, value in state.items()}


def save(place: Path, made: Training, stager: TierStager, step: int) -> Any:
    writer = TierWriter(text(place), "run")
    return dcp.async_save(made.state(), checkpoint_id=step, storage_writer=writer, async_stager=stager)


def loaded(place: Path, step: int) -> dict[str, Any]:
    into = {"w": torch.zeros(64, 8), "exp_avg": torch.zeros(64, 8), "seen": torch.zeros(4)}
    dcp.load(into, checkpoint_id=step, storage_reader=TierReader(text(place), "run"))
    return into


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies of guarded tensors begin when it is set."""
    go, copy = threading.Event(), staging._LazyCopy._copy

    def waiting(self: Any) -> None:
        assert go.wait(60)
        copy(self)

    monkeypatch.setattr(staging._LazyCopy, "_copy", waiting)
    return go


@pytest.mark.slow
def test_a_step_waits_for_the_copy_and_all_else_may_change_at_once(place: Path, held: threading.Event) -> None:
    made = Training()
    stager, right = TierStager(guard=made.optimizer), copies(made.state())
    response = save(place, made, stager, 1)  # it returns though nothing that is guarded is copied
    made.seen.add_(1)
    stepping = threading.Thread(target=made.step)
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive()
    assert not response.staging_completion.done()
    held.set()
    stepping.join(60)
    assert not stepping.is_alive()
    response.upload_completion.result()
    found = loaded(place, 1)
    assert all(torch.equal(found[key], right[key]) for key in right)
    assert not torch.equal(made.weight, right["w"])
    stager.close()
    made.step()


@pytest.mark.slow
def test_what_changes_without_a_step_fails_that_save_and_is_copied_at_once_later(
    place: Path, held: threading.Event
) -> None:
    made = Training()
    stager = TierStager(guard=made.optimizer)
    response = save(place, made, stager, 1)
    with torch.no_grad():
        made.weight.mul_(2)
    held.set()
    with pytest.raises(CheckpointException, match=r"CaptureError: w: changed between the return of async_save and"):
        response.upload_completion.result()
    right = copies(made.state())
    response = save(place, made, stager, 2)
    with torch.no_grad():
        made.weight.mul_(2)  # it was copied before the save returned
    response.upload_completion.result()
    found = loaded(place, 2)
    assert all(torch.equal(found[key], right[key]) for key in right)
    stager.close()
