"""Ranks on several hosts, each with a disk of its own: they save and load through DCP as if all saw all of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import opened, policy, scratch, tier
from support.dcp_jobs import same, save_as_ranks
from support.processes import Gang
from support.thread_teams import CALM
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import tierstate as ts
from tierstate.dcp import TierReader, TierWriter, close
from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.history.log import Log
from tierstate.tiers.connections.secret import JobSecret

pytestmark = pytest.mark.slow


def teams_on(hosts: Sequence[int]) -> list[Team]:
    """Ranks that are threads of this process, on these hosts."""
    store, secret, size = dist.HashStore(), JobSecret.random(), len(hosts)
    return [Team(store, rank, size, hosts, timeouts=CALM, secret=secret) for rank in range(size)]


def spec(place: Path, host: int, rank: int) -> ts.Policy:
    """The policy on a host. Each rank has the tiers opened for itself, as another process would."""
    tiers = {"disk": tier("nvme", place / f"host-{host}"), "site": tier("lustre", place, every=2)}
    return policy(tiers, durable="disk", arena={"size": f"{256 * (rank + 1)}KiB"})


def held(size: int, step: int) -> list[dict[str, Any]]:
    """By rank, its part of the state at a step. The second rank has tensors alone."""
    parts: list[dict[str, Any]] = [{f"w{rank}": torch.arange(3000.0) * (rank + 1) + step} for rank in range(size)]
    for rank in {0, size - 1} - {1}:
        parts[rank][f"n{rank}"] = [step, rank]
    return parts


def load_as_ranks(readers: list[TierReader], states: list[dict[str, Any]]) -> None:
    """A load of several ranks in this process, as DCP makes it; into the states."""
    planners = [DefaultLoadPlanner() for _ in readers]

    def planned(rank: int) -> Any:
        metadata = readers[rank].read_metadata()
        planners[rank].set_up_planner(states[rank], metadata, rank == 0)
        return readers[rank].prepare_local_plan(planners[rank].create_local_plan())

    with ThreadPoolExecutor(len(readers)) as pool:
        plans = readers[0].prepare_global_plan(list(pool.map(planned, range(len(readers)))))
        list(pool.map(lambda reader, plan, planner: reader.read_data(plan, planner).wait(), readers, plans, planners))


def whole_steps(place: Path, hosts: set[int]) -> set[int]:
    """The steps whose chunks all lie on the disks of these hosts, or on what all see."""
    found: dict[int, Any] = {}
    logs = [Log(opened(spec(place, host, 0), "disk"), "run") for host in sorted(hosts)]
    logs.append(Log(opened(spec(place, 0, 0), "site"), "run"))
    for log in logs:
        for seq in log.seqs():
            record = log.read(seq)
            step = record.version.head.step
            found[step] = found.get(step, False) | record.layout.present
    return {step for step, present in found.items() if present.all()}


HOSTS = st.lists(st.integers(0, 1), min_size=2, max_size=3).map(sorted).filter(lambda hosts: hosts[0] == 0)


@settings(max_examples=10)
@given(before=HOSTS, after=st.lists(st.integers(0, 1), min_size=1, max_size=3), lost=st.sampled_from([None, 0, 1]))
@example(before=[0, 1], after=[1, 0, 0], lost=1)
def test_ranks_load_the_newest_version_that_their_hosts_have_between_them(
    before: list[int], after: list[int], lost: int | None
) -> None:
    with scratch() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")
        teams = teams_on(before)
        specs = [spec(place, host, rank) for rank, host in enumerate(before)]
        writers = [TierWriter(one, "run", step=0, process_group=team) for one, team in zip(specs, teams, strict=True)]
        for step in (1, 2, 3):  # the second goes to what all see, too
            for writer in writers:
                writer.reset(step)
            save_as_ranks(writers, held(len(before), step))
        close()
        if lost is not None:
            shutil.rmtree(place / f"host-{lost}", ignore_errors=True)
        right = max(whole_steps(place, set(after)))
        assert right == 3 if lost is None and set(before) <= set(after) else right >= 2
        again = teams_on(after)
        start = "" if lost is None else "new"  # of the keys: with other names, too
        readers = [
            TierReader(
                spec(place, host, rank), "run", rename=lambda path: (start + path[0],), process_group=again[rank]
            )
            for rank, host in enumerate(after)
        ]
        wanted = {key: value for part in held(len(before), right) for key, value in part.items()}
        # Each wants something else, and the first of them all.
        states = [
            {
                start + k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0
                for k, v in wanted.items()
                if not r or r in (int(k[1:]), 2)
            }
            for r in range(len(after))
        ]
        load_as_ranks(readers, states)
        for state in states:
            same(state, {key: wanted[key.removeprefix(start)] for key in state})
        close()
        for team in teams + again:
            team.close()


def test_a_rank_that_loads_without_the_others_is_told_what_to_give(place: Path) -> None:
    store, secret = dist.HashStore(), JobSecret.random()
    team = Team(store, 0, 2, [0, 1], timeouts=Timeouts(0.2, 20.0), secret=secret)
    with pytest.raises(ts.RankFailed, match=r"all ranks load together.*or alone=True where a rank loads by itself"):
        TierReader(spec(place, 0, 0), "run", process_group=team).read_metadata()
    with pytest.raises(ts.NotFound):
        TierReader(spec(place, 0, 0), "run", process_group=team, alone=True).read_metadata()
    team.close()


def test_a_job_of_several_hosts(place: Path) -> None:
    """Real ranks; see the job."""
    text = (
        "version: 1\nchunk: 4KiB\narena: {size: 1MiB}\ndurable: disk\ntiers:\n"
        f'  disk: {{type: nvme, path: "{place}/disk-${{TIERSTATE_HOST}}", keep: {{last: 4}}}}\n'
        f"  site: {{type: lustre, path: {place}/site, every: 2}}\n"
    )
    (place / "policy.yaml").write_text(text)
    hosts = [{"TIERSTATE_HOST": host, "TIERSTATE_ADDRESS": "127.0.0.1"} for host in ("a", "b")]
    with Gang(2, "support.dcp_jobs:hosts", place / "policy.yaml", per_rank=hosts) as gang:
        gang.wait()
