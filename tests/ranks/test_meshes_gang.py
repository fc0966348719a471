"""Real ranks under one parallelism after another: FSDP2, tensor parallelism, both, replicas, one rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.mesh_jobs import spec
from support.processes import Gang

import tierstate as ts

pytestmark = pytest.mark.slow

FAST = [(2, "fsdp", ""), (2, "tp", "fsdp,hsdp")]
LONG = [
    (4, "both", ""),
    (2, "tp", "fsdp,plain"),
    (4, "hsdp", "both,tp,fsdp"),
    (1, "fsdp", "plain"),
    (4, "fsdp", "both,hsdp,tp"),
]


@pytest.mark.parametrize("story", [FAST, pytest.param(LONG, marks=pytest.mark.soak)])
def test_a_job_goes_on_under_any_parallelism(place: Path, story: list[tuple[int, str, str]]) -> None:
    for step, (size, name, names) in enumerate(story):
        with Gang(size, "support.mesh_jobs:chain", place, name, names) as gang:
            said = gang.wait()
        kinds = [*filter(None, names.split(",")), name] if step else []
        assert all(text.count("restored") == len(kinds) for text in said)
    truth = torch.load(place / "truth.pt")
    with ts.Checkpointer(spec(place), "run") as alone:
        assert [v.step for v in alone.versions()] == list(range(len(story)))
        assert alone.verify(deep=True).ok
        got = alone.load()
    assert torch.equal(got["table"], truth["table"])
    assert sorted(got["own"]) == list(range(truth["size"]))
    for key, value in truth["found"].items():
        if key.startswith("model."):
            assert torch.equal(got["model"][key.removeprefix("model.")], value), key
