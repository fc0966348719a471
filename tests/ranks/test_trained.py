"""The example that trains on many ranks: what one mesh saved, another has bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import Gang
from support.trained_jobs import EXAMPLES, same

import tierstate as ts

pytestmark = pytest.mark.slow

MESHES = [((2, 2), (2, 1)), ((4, 2), (2, 1)), ((2, 1), (4, 4)), ((4, 2), (1, 1)), ((4, 2), (4, 2)), ((1, 1), (2, 2))]
"""Ranks, and over how many of them each perceptron is split, before and after."""


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(*pair, marks=[pytest.mark.soak] if i else []) for i, pair in enumerate(MESHES)]
)
def test_another_mesh_has_each_bit(
    place: Path, before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERSTATE_DEMO", str(place))
    with Gang(before[0], "support.trained_jobs:save", place, before[1]) as gang:
        gang.wait()
    with Gang(after[0], "support.trained_jobs:restore", place, after[1], "same" if before == after else "") as gang:
        gang.wait()

    right = torch.load(place / "right.pt", weights_only=True)
    with ts.Checkpointer(str(EXAMPLES / "ranks.yaml"), "gpt") as ckpt:  # and a single process has it without a mesh
        found = ckpt.load()
        assert found["model"]["head.weight"].data_ptr() == found["model"]["embedding.weight"].data_ptr()
        same(right["model"], dict(found["model"]))
        same(right["moments"], found["optimizer"]["state"])
        assert sorted(found["rng"]) == list(range(before[0]))
        assert not ckpt.verify(deep=True).problems
