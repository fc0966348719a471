"""Megatron-core's checkpoints in tiers: any layout into any other, as Megatron itself loads it; killed jobs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from support.megatron_job import POLICY, assert_same
from support.torchrun import Torchrun

import tierstate as ts
from tierstate.files.importing import import_version

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron uses what torch has deprecated
    pytest.importorskip("megatron.core")

JOB = "support.megatron_job"


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_loads_under_any_other_as_megatron_loads_its_own(tmp_path: Path) -> None:
    pairs = ("2x1", "1x2", "1x1")
    with Torchrun(2, f"{JOB}:layouts", tmp_path, *pairs) as job:
        job.wait()
        for rank in range(2):
            same = [line.split()[1:3] for line in job.said(rank) if line.startswith("same ")]
            assert same == [[saved, loaded] for saved in pairs for loaded in pairs]
    with ts.Checkpointer(ts.Policy.parse(POLICY.format(folder=tmp_path)), "job") as ckpt:
        # Megatron's own folder as a version is what the strategy has saved of the same state.
        imported = import_version(ckpt, tmp_path / "native-2x1/iter_0000000")
        assert imported.step == 2
        assert_same(ckpt.load(version=imported.id), ckpt.load(step=0))
        assert {"common", "embedding.word_embeddings.weight", "rng_state/shard_1_2"} <= set(ckpt.load())
    with Torchrun(1, f"{JOB}:load", tmp_path, "2x1/iter_0000000", imported.id) as fewer:
        fewer.wait()
        assert int(fewer.hear(0, "same")) > 100


@pytest.mark.slow
def test_layouts_of_four_ranks(tmp_path: Path) -> None:
    with Torchrun(4, f"{JOB}:layouts", tmp_path, "2x2", "1x2") as job:
        job.wait()


def states(job: Torchrun, rank: int) -> dict[int, str]:
    return {int(step): state for _, step, state in (x.split() for x in job.said(rank) if x.startswith("state "))}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "ranks"), [("async", 2), ("sync", 2), ("async", 1)])
def test_a_killed_job_goes_on_from_the_version_before_to_the_last_bit(how: str, ranks: int, tmp_path: Path) -> None:
    args = (min(ranks, 2), 1, 5, how)
    with Torchrun(ranks, f"{JOB}:main", tmp_path / "killed", *args, 3) as killed:
        for rank in range(ranks):
            killed.hear(rank, "halts")
        killed.kill(0)
        assert killed.code() != 0
        expected = [states(killed, rank) for rank in range(ranks)]
    with Torchrun(ranks, f"{JOB}:main", tmp_path / "killed", *args) as resumed:
        resumed.wait()
        for rank in range(ranks):
            step, state = resumed.hear(rank, "begins").split()
            assert int(step) == (2 if how == "async" else 3)  # step 3 was captured, and not yet taken for the newest
            assert expected[rank][int(step)] == state
            assert states(resumed, rank).keys() == set(range(int(step) + 1, 6))
            for again in expected[rank].keys() & states(resumed, rank).keys():
                assert expected[rank][again] == states(resumed, rank)[again]
    folder = tmp_path / "killed/iter_0000005"
    assert {one.name for one in folder.iterdir()} == {"common.pt", "metadata.json", "tierstate.json"}
    with ts.Checkpointer(ts.Policy.default(tmp_path / "killed/tier"), "job") as ckpt:
        found = json.loads((folder / "tierstate.json").read_text())
        assert (found["version"], found["step"]) == (ckpt.info().id, 5)
        common = ckpt.load(only=["common"])["common"]
        assert common["iteration"] == 5
        assert common["args"]["argparse.Namespace"]["hidden_size"] == 16


@pytest.mark.slow
def test_what_does_not_fit_is_named_on_all_ranks(tmp_path: Path) -> None:
    with Torchrun(2, f"{JOB}:refusals", tmp_path) as job:
        job.wait()


@pytest.mark.slow
def test_the_manager_for_megatron_bridge(tmp_path: Path) -> None:
    with Torchrun(2, f"{JOB}:bridge", tmp_path) as job:
        job.wait()
