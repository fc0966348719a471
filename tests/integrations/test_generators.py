"""A framework's job goes on where there are other CUDA devices than those of which generators were saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstate as ts
from tierstate.integrations.generators import ResumedRng


class OnTwoDevices(ts.Rng):
    """The generators of a process that sees two CUDA devices."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"cuda": [torch.arange(16, dtype=torch.uint8)] * 2}


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_generators_of_other_devices_are_left_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ts.Checkpointer(ts.Policy.default(tmp_path), "run") as ckpt:
        ckpt.save({"rng": ts.PerRank(OnTwoDevices())}, step=1).wait()
        truth = drawn()
        with pytest.raises(ts.StateMismatch, match="generators of 2 CUDA devices, here are 0"):
            ckpt.restore({"rng": ts.PerRank(ts.Rng())})
        ckpt.restore({"rng": ts.PerRank(ResumedRng())})
        assert caplog.text.count("generators of 2 CUDA devices were saved, and here are 0") == 1
    assert drawn() == truth
