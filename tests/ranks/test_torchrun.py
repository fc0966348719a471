"""Jobs under torchrun: another number of ranks goes on, bit for bit, also where one was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rank_jobs import check, state_of
from support.torchrun import Torchrun

import tierstate as ts

pytestmark = pytest.mark.slow

POLICY = """
version: 1
chunk: 4KiB
arena: {{size: 1MiB}}
durable: shared
ranks: {{timeout: 60s, silence: 20s}}
tiers:
  nvme: {{type: nvme, path: "{place}/nvme", keep: {{last: 3}}}}
  shared: {{type: lustre, path: "{place}/shared", keep: {{last: 3}}}}
"""

STEPS = 6


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_other_numbers_of_ranks_go_on(place: Path, before: int, after: int) -> None:
    policy = place / "policy.yaml"
    policy.write_text(POLICY.format(place=place))
    with Torchrun(before, "support.rank_jobs:job", policy, STEPS, 0) as job:
        job.wait()
        assert [job.hear(rank, "ready") for rank in range(before)] == ["0"] * before

    with Torchrun(after, "support.rank_jobs:job", policy) as job:  # compares each bit of what it finds
        assert [job.hear(rank, "ready") for rank in range(after)] == [str(STEPS)] * after
        saved = [[STEPS, rank] if rank < before else [-1, -1] for rank in range(after)]
        assert [job.hear(rank, "own") for rank in range(after)] == list(map(str, saved))
        promised = STEPS + 3
        job.hear(0, f"durable shared {promised}")
        job.kill(after - 1)
        assert job.code() != 0, "the job went on without one of its ranks"

    alone = state_of(0, 0, 1)
    with ts.Checkpointer(str(policy), "run") as ckpt:
        assert check(ckpt.restore(into=alone), 0, 1) >= promised
        assert not ckpt.verify(deep=True).problems


def test_no_job_starts_afresh_where_the_site_is_not_mounted(place: Path) -> None:
    policy = place / "policy.yaml"
    policy.write_text(POLICY.format(place=place))
    with Torchrun(2, "support.rank_jobs:job", policy, STEPS, 0) as job:
        job.wait()
    (place / "shared").rename(place / "away")
    with Torchrun(2, "support.rank_jobs:job", policy) as job:
        assert job.code() != 0, "it went on without what the tier has"
    assert not (place / "shared").exists()
    (place / "away").rename(place / "shared")
    with Torchrun(2, "support.rank_jobs:job", policy) as job:
        assert [job.hear(rank, "ready") for rank in range(2)] == [str(STEPS)] * 2
        job.kill(1)
        assert job.code() != 0
