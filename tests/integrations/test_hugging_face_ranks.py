"""Two ranks under torchrun: data parallel by the Trainer and by accelerate, and sharded by FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import Gang
from support.torchrun import Torchrun


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["trainer-fsdp2", "fsdp2", *(pytest.param(one, marks=pytest.mark.soak) for one in ("trainer", "accelerate"))],
)
def test_two_ranks_go_on_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with Torchrun(2, "support.hugging_face_ranks:main", kind, tmp_path) as job:
        job.wait()
        assert [job.said(rank)[-1:] for rank in range(2)] == 2 * [["as without interruption"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_a_host_that_is_new_to_the_job_resumes_with_the_others(kind: str, place: Path) -> None:
    """Its own disk has no version."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    hosts = [{"TIERSTATE_HOST": host, "TIERSTATE_ADDRESS": "127.0.0.1", "ACCELERATE_USE_CPU": "true"} for host in "ab"]
    for mode, there in (("save", hosts[:1]), ("load", hosts)):
        with Gang(len(there), "support.hugging_face_ranks:on_hosts", kind, mode, place, per_rank=there) as gang:
            gang.wait()
