"""Real ranks save and load through torch.distributed.checkpoint, with our records in place of its metadata."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_jobs import same
from support.processes import Gang

import tierstate as ts
from tierstate.dcp import TierReader, close
from tierstate.files.importing import open_source

pytestmark = pytest.mark.slow


@pytest.fixture
def policy(place: Path) -> Path:
    path = place / "policy.yaml"
    path.write_text(
        "version: 1\nchunk: 4KiB\narena: {size: 1MiB}\n"
        f"tiers:\n  nvme: {{type: nvme, path: {place}/nvme}}\n"
        f"  lustre: {{type: lustre, path: {place}/lustre, every: 3}}\n"
    )
    return path


def blank(state: Any) -> Any:
    """A state of the same structure, with zeros."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else state


def test_states_go_from_one_mesh_to_others_through_dcp_and_natively(policy: Path) -> None:
    with Gang(2, "support.dcp_jobs:rounds", policy) as gang:
        gang.wait()
    # One process loads what two saved, into whole tensors.
    whole = torch.load(policy.parent / "whole.pt", weights_only=False)
    for run in ("run", "native"):
        into = blank(whole) | {"loader": {"rank_0": b"", "rank_1": b""}}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is .*")
            dcp.load(into, checkpoint_id=1 if run == "run" else 8, storage_reader=TierReader(policy, run))
        close()
        assert into["loader"].pop("rank_1") == bytes([1, 1])
        same(into, whole)
    with ts.Checkpointer(policy, "run") as ckpt:
        saved = ckpt.versions()
        assert [v.step for v in saved] == [1, 2, 3]
        assert saved[0].metadata == {"loss": 1.5}
        assert [v.parent for v in saved[1:]] == [v.id for v in saved[:-1]]
        assert [v.tiers for v in saved] == [("nvme", "lustre"), ("nvme",), ("nvme", "lustre")]
        assert not ckpt.verify(deep=True).problems
        loaded = ckpt.load(step=1)
        restored = blank(loaded)
        ckpt.restore(restored, step=1)
        for found in (loaded, restored):
            assert found["loader"].pop("rank_1") == bytes([1, 1])
            found["schedule"]["lambdas"] = [{}, {}]  # of empty dicts, of which DCP tells nothing
            same(found, whole)
        packs = {path.name: path.stat().st_size for path in (policy.parent / "nvme" / "packs" / "run").iterdir()}
        first = sum(size for name, size in packs.items() if name.startswith(min(packs)[:12]))
        assert sum(packs.values()) < 2 * first  # two more saves of which hardly anything had changed
        # Without its record a version is made again of another tier's, and never of one rank's part.
        tier_run = ckpt._tier_runs[0]
        for version in saved[1:]:
            tier_run.log.forget(version.seq)
        tier_run.look_again()
        told = {one.seq: (one.rebuilt, one.id) for one in ckpt.rebuild("nvme").versions}
        assert told[saved[2].seq] == (True, saved[2].id)
        assert not told.get(saved[1].seq, (False, ""))[0]
        assert [v.step for v in ckpt.versions()] == [1, 3]
        assert not ckpt.verify(deep=True).problems
        # A rank's items of lists are one value again, as they are where a Checkpointer saves them.
        assert {leaf.name: leaf.spec.kind for leaf in ckpt.leaves()}["optim.param_groups"] == "value"


@pytest.mark.soak
def test_saves_go_on_beside_the_training(policy: Path) -> None:
    with Gang(2, "support.dcp_jobs:later", policy) as gang:
        gang.wait()


def test_failures_reach_every_rank(policy: Path) -> None:
    with Gang(2, "support.dcp_jobs:failing", policy) as gang:
        gang.wait()
    with ts.Checkpointer(policy, "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [1]
        before = list((policy.parent / "nvme" / "packs" / "run").iterdir())
        ckpt.prune(grace=0)
        after = list((policy.parent / "nvme" / "packs" / "run").iterdir())
        assert len(after) == 2 <= len(before)


@pytest.mark.soak
def test_a_rank_that_dies_leaves_a_whole_version_or_nothing(policy: Path) -> None:
    policy.write_text(policy.read_text() + "ranks: {silence: 3s}\n")
    with Gang(2, "support.dcp_jobs:dying", policy) as gang:
        gang.hear(1, "wrote")
        gang.kill(1)
        assert gang.codes()[0] != 0
    with ts.Checkpointer(policy, "run") as ckpt:
        # Its part is written in the background, so that it may be whole when it dies, and the version with it.
        saved = [version.step for version in ckpt.versions()]
        assert saved in ([], [1])
        assert not ckpt.verify(deep=True).problems
        ckpt.prune(grace=0)
    assert len(list((policy.parent / "nvme" / "packs").rglob("*-*"))) == 2 * len(saved)


@pytest.mark.soak
def test_what_torch_wrote_of_other_meshes_is_imported(policy: Path) -> None:
    with Gang(2, "support.dcp_jobs:peers", policy.parent) as gang:
        gang.wait()
    whole = torch.load(policy.parent / "whole.pt", weights_only=False)
    for name, right in whole.items():
        with ts.Checkpointer(policy, name) as ckpt:
            with open_source(policy.parent / name) as found:
                ckpt.save(found.state, step=1).wait()
            back = ckpt.load()
        assert back["loader"].pop("rank_1") == bytes([1 + (name == "fsdp"), 1])
        right["schedule"].pop("lambdas")  # of which DCP tells nothing
        assert back.keys() == right.keys()
        for key in right:
            same({k: back[key][k] for k in right[key]}, right[key])


def test_guarded_tensors_of_all_ranks_are_copied_beside_the_training(policy: Path) -> None:
    with Gang(2, "support.dcp_jobs:guarded", policy) as gang:
        gang.wait()


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.soak)])
def test_code_that_names_a_path_is_routed_on_all_ranks_of_two_hosts(policy: Path, kind: str) -> None:
    policy.write_text(
        policy.read_text().replace(f"{policy.parent}/nvme", f'"{policy.parent}/nvme-${{TIERSTATE_HOST}}"')
    )
    hosts = [{"TIERSTATE_HOST": host, "TIERSTATE_ADDRESS": "127.0.0.1"} for host in ("a", "b")]
    with Gang(2, "support.dcp_jobs:by_path", policy, kind, per_rank=hosts) as gang:
        gang.wait()


def test_what_was_promised_survives_a_rank_and_the_next_job_brings_what_is_owed(place: Path) -> None:
    policy = place / "policy.yaml"
    text = (
        "version: 1\nchunk: 16KiB\narena: {size: 4MiB}\nranks: {silence: 5s}\ndurable: nvme\ntiers:\n"
        f"  nvme: {{type: nvme, path: {place}/nvme}}\n"
        f"  lustre: {{type: lustre, path: {place}/lustre, bandwidth: BANDWIDTH}}\n"
    )
    policy.write_text(text.replace("BANDWIDTH", "200KiB/s"))
    with Gang(2, "support.dcp_jobs:killed", policy, env={"STEPS": "1000"}) as gang:
        gang.hear(0, "durable 3")
        gang.kill(1)
        assert gang.codes()[0] != 0
        promised = gang.said(0).count("durable")
    with ts.Checkpointer(policy, "run") as ckpt:
        owed = [v.step for v in ckpt.versions() if "lustre" not in v.tiers]
        assert owed
    policy.write_text(text.replace("BANDWIDTH", "1GiB/s"))
    with Gang(2, "support.dcp_jobs:killed", policy, env={"STEPS": "1"}) as gang:
        begun = {int(line.split()[1]) for said in gang.wait() for line in said.splitlines() if line.startswith("ready")}
        assert len(begun) == 1
        assert min(begun) >= promised
    with ts.Checkpointer(policy, "run") as ckpt:
        found = {v.step: v.tiers for v in ckpt.versions()}
        assert {step for step, tiers in found.items() if tiers == ("nvme", "lustre")} >= {*range(1, promised + 1)}
        assert not ckpt.verify(deep=True).problems
