"""torchtitan: its own trainer, killed and resumed, on one rank and on two with FSDP2, through tiers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support.processes import Gang

pytest.importorskip("torchtitan")
if importlib.util.find_spec("triton") is None:
    pytest.skip("torchtitan's models need triton: pip install --no-deps triton", allow_module_level=True)

pytestmark = pytest.mark.slow

PATIENCE = 300.0
"""Seconds for a job: torchtitan alone takes half a minute to import on a busy machine."""

POLICY = """
version: 1
chunk: 64KiB
arena: {{size: 8MiB}}
durable: nvme
ranks: {{timeout: 60s, silence: 20s}}
tiers:
  nvme: {{type: nvme, path: "{place}/nvme"}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POLICY.format(place=tmp_path))
    return tmp_path


def losses(said: str) -> dict[int, str]:
    """The loss of each step, bit for bit."""
    lines = (line.split() for line in said.splitlines() if line.startswith("loss "))
    return {int(step): loss for _, step, loss in lines}


def test_killed_and_resumed_with_equal_losses(place: Path) -> None:
    more = json.dumps({"steps": 10})
    with Gang(2, "support.torchtitan_job:train", place, '{"enable": false}', more) as job:
        right = losses(job.wait(PATIENCE)[0])
    with Gang(2, "support.torchtitan_job:train", place, "{}", json.dumps({"steps": 1000})) as job:
        job.hear(0, "loss 7 ", PATIENCE)
        for rank in range(2):
            job.kill(rank)
        killed = losses(job.said(0))
    assert killed.items() >= {step: right[step] for step in range(1, 8)}.items()
    with Gang(2, "support.torchtitan_job:train", place, "{}", more) as job:
        resumed = losses(job.wait(PATIENCE)[0])
    assert 1 < min(resumed) <= 1 + max(killed)
    assert resumed == {step: loss for step, loss in right.items() if step >= min(resumed)}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_other_numbers_of_ranks_go_on(place: Path, before: int, after: int) -> None:
    with Gang(before, "support.torchtitan_job:train", place) as job:
        job.wait(PATIENCE)
    with Gang(after, "support.torchtitan_job:resume", place) as job:
        job.wait(PATIENCE)


@pytest.mark.parametrize(
    "job",
    [
        "when_and_how_many",
        "last_step",
        "left_out",
        "seed",
        "from_its_own",
        "hugging_face",
        "wrong",
        "generators",
        "moments_keep_their_bits",
    ],
)
def test_an_option_is_followed_or_refused(place: Path, job: str) -> None:
    with Gang(1, "support.torchtitan_job:alone", place, job) as gang:
        gang.wait(PATIENCE)
