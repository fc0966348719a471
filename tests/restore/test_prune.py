"""Pruning: what the policy does not keep goes, and what dead savers left; what anybody needs stays."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import (
    alike,
    faulty,
    names,
    opened,
    policy,
    scratch,
    tensors,
    tier,
    unreferenced,
    wrapped,
)

import tierstate as ts
from tierstate.engine.publish import tier_write
from tierstate.engine.publish.tier_write import TierWrite
from tierstate.engine.store import catalog
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import AccessDenied, TierUnavailable
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.leases import Leases, pin_version
from tierstate.manifest.history.log import commit_id
from tierstate.manifest.history.tags import fork_version
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault


def spec(place: Path, **keys: Any) -> ts.Policy:
    return policy({"nvme": tier("nvme", place, **keys)})


def filled(place: Path, steps: int = 5) -> list[dict[str, torch.Tensor]]:
    """Steps that were saved when everything was kept."""
    states = [tensors(20_000, 8_000, seed=step) for step in range(steps)]
    with ts.Checkpointer(spec(place), "run") as ckpt:
        for step, state in enumerate(states):
            ckpt.save(state, step=step)
    return states


def test_it_drops_what_the_policy_does_not_keep_and_says_why() -> None:
    with scratch() as place:
        states = filled(place)
        keep = spec(place, keep={"last": 2})
        where = opened(keep, "nvme")
        before = names(where)
        with ts.Checkpointer(keep, "run") as ckpt:
            plan = ckpt.prune(dry_run=True)
            assert names(where) == before, "a dry run changes nothing"
            report = ckpt.prune()
            (nvme,) = report.tiers
            assert (nvme.drop, nvme.keep) == ((1, 2, 3), {4: ("last 2",), 5: ("newest", "last 2")})
            assert plan.tiers == report.tiers
            assert plan.dry_run
            assert not report.dry_run
            assert len(nvme.packs) == 3
            assert report.steps["nvme", 5] == 4
            assert [v.step for v in ckpt.versions()] == [3, 4]
            assert alike(ckpt.load(step=4), states[4])
            assert ckpt.verify(deep=True).ok
            assert ckpt.prune().tiers[0].packs == {}
        assert unreferenced(where, "run") == set()


def test_versions_of_one_number_are_told_by_their_own_steps() -> None:
    """Two jobs that each saw one tier alone have used the same numbers."""
    with scratch() as place:
        tiers = {name: tier(name, place) for name in ("nvme", "lustre")}
        for step, name in enumerate(tiers, 7):
            with ts.Checkpointer(policy({name: tiers[name]}), "run") as ckpt:
                ckpt.save(tensors(9000, seed=step), step=step).wait()
        with ts.Checkpointer(policy(tiers), "run") as ckpt:
            assert ckpt.prune(dry_run=True).steps == {("nvme", 1): 7, ("lustre", 1): 8}


def test_a_reader_in_another_process_keeps_what_he_reads() -> None:
    with scratch() as place:
        states = filled(place, 3)
        keep = spec(place, keep={"last": 1})
        where = opened(keep, "nvme")
        lease = Leases(where, "run").take(1)
        with ts.Checkpointer(keep, "run") as ckpt:
            nvme = ckpt.prune().tiers[0]
            assert nvme.drop == (2,)
            assert nvme.keep[1][0].startswith("read by ")
            assert alike(ckpt.load(step=0), states[0])
            Leases(where, "run").release(lease)
            assert ckpt.prune().tiers[0].drop == (1,)


def test_orphans_go_once_they_are_old_and_at_once_without_grace() -> None:
    with scratch() as place:
        filled(place, 1)
        where = opened(spec(place), "nvme")
        orphan = "packs/run/000000000009-0-0-dead"
        where.put(orphan, as_buffer(b"left behind"))
        with ts.Checkpointer(spec(place), "run") as ckpt:
            assert ckpt.prune().tiers[0].young == 1
            assert orphan in names(where)
            assert ckpt.prune(grace=0).tiers[0].packs == {orphan: 11}
            with pytest.raises(ValueError, match="right is a number of seconds, 0 or more"):
                ckpt.prune(grace=-1)
            assert ckpt.verify(deep=True).ok


def test_saves_under_way_in_this_process_keep_their_packs_whatever_the_grace() -> None:
    inner = Memory()
    with scratch() as place, wrapped(inner) as keys:
        world = policy({"nvme": tier("nvme", place), "slow": keys})
        with ts.Checkpointer(world, "run") as ckpt:
            ckpt.save(tensors(20_000), step=0).wait("slow")
            gate = faulty(keys).shut("put")  # packs are written, and the record is not
            save = ckpt.save(tensors(20_000, seed=1), step=1)
            save.wait("nvme")
            while len(names(inner, "packs/")) < 2:
                assert not save.done("slow")
            report = ckpt.prune(grace=0)
            assert report.ok, report
            assert len(names(inner, "packs/")) == 2
            gate.set()
            save.wait("slow")
            assert ckpt.verify(deep=True).ok


def test_what_a_slower_tier_has_not_got_yet_stays() -> None:
    with scratch() as place:
        states = filled(place, 4)
        tiers = {"nvme": tier("nvme", place, keep={"last": 1}), "far": {"type": "nvme", "path": str(place / "far")}}
        with ts.Checkpointer(policy(tiers), "run") as ckpt:
            report = ckpt.prune()
            assert report.tiers[0].keep[1] == ("far has not got it yet",)
            assert not report.tiers[0].drop
            assert alike(ckpt.load(step=0), states[0])


@pytest.mark.parametrize("when", ["deciding what to keep", "dropping"])
def test_what_another_process_saves_during_a_prune_stays_for_a_slower_tier(when: str) -> None:
    """The slower tier gets a version after `prune` has looked at them all, and before it drops the first."""
    with scratch() as place:
        filled(place, 3)
        tiers = {"nvme": tier("nvme", place, keep={"last": 1}), "far": {"type": "nvme", "path": str(place / "far")}}
        spec = policy(tiers)
        with ts.Checkpointer(spec, "run") as pruner:
            pruner.doctor(apply=True)  # the slower tier has what there is
            here = pruner._tier_runs[0]
            saved = []

            def save(doing: str) -> None:
                if not saved and f"nvme: {when}" in doing:
                    for step in (3, 4, 5):  # by a process whose slower tier is late
                        there = here.log.read(here.log.seqs()[-1])
                        head = replace(there.version.head, seq=there.version.head.seq + 1, step=step)
                        version = fork_version(there.version, head)
                        here.log.commit(Record(version, there.layout, {**there.commit, "id": commit_id()}))
                        saved.append(head.seq)

            report = pruner.prune(progress=save)
            assert report.ok, report
            assert saved == here.log.seqs()[-3:], "a slower tier may be waiting for them"
            assert pruner.prune().tiers[0].keep[saved[0]] == ("far has not got it yet",)


def test_a_tier_that_fails_does_not_stop_the_others() -> None:
    inner = Memory()
    with scratch() as place, wrapped(inner) as keys:
        world = policy({"a": {**keys, "keep": {"last": 1}}, "b": tier("nvme", place, keep={"last": 1})})
        with ts.Checkpointer(policy({"a": keys, "b": tier("nvme", place)}), "run") as ckpt:
            for step in range(3):
                ckpt.save(tensors(9_000, seed=step), step=step).wait("b")
        with ts.Checkpointer(world, "run") as ckpt:
            faulty(keys).add(Fault("delete", 0, TierUnavailable("cannot delete now")))
            report = ckpt.prune()
            assert not report.ok
            assert "cannot delete now" in report.tiers[0].problems[0]
            assert report.tiers[1].drop == (1, 2)
            faulty(keys).heal()
            assert ckpt.prune().ok
            assert [v.step for v in ckpt.versions()] == [2]
            assert ckpt.verify(deep=True).ok
    assert unreferenced(inner, "run") == set()


@pytest.mark.parametrize(("nth", "dropped", "packs"), [(0, (), 0), (2, (1,), 0), (5, (1, 2, 3), 1)])
def test_what_could_not_be_deleted_is_not_told_as_gone(nth: int, dropped: tuple[int, ...], packs: int) -> None:
    """The tier is read-only, or fails on the way: first go three records, then three packs."""
    inner = Memory()
    with wrapped(inner) as keys:
        with ts.Checkpointer(policy({"only": keys}), "run") as ckpt:
            for step in range(5):
                ckpt.save(tensors(9000, seed=step), step=step).wait()
        with ts.Checkpointer(policy({"only": {**keys, "keep": {"last": 2}}}), "run") as ckpt:
            faulty(keys).add(Fault("delete", nth, AccessDenied("read-only")))
            (report,) = ckpt.prune(grace=0).tiers
            assert report.problems == ["read-only"]
            assert (report.drop, len(report.packs)) == (dropped, packs)
            faulty(keys).heal()
            (report,) = ckpt.prune(grace=0).tiers
            assert (len(report.packs), report.problems) == (3 - packs, [])


def test_a_pin_that_no_fork_needs_is_taken_away_once_and_the_version_the_next_time() -> None:
    with scratch() as place:
        filled(place, 3)
        keep = spec(place, keep={"last": 1})
        where = opened(keep, "nvme")
        pin_version(where, "run", 1, "fork")
        with ts.Checkpointer(keep, "run") as ckpt:
            first = ckpt.prune(grace=0).tiers[0]
            assert (first.drop, first.pins, first.keep[1]) == ((2,), ((1, "fork"),), ("forked by fork",))
            assert ckpt.prune(grace=0).tiers[0].drop == (1,)


@pytest.mark.slow
def test_packs_that_are_mostly_dead_are_repacked() -> None:
    """One leaf of many stays as it was for as long as an old version is kept."""
    big, small = 12 << 20, 64 << 10
    with scratch() as place:
        with ts.Checkpointer(
            policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "32MiB"}), "run"
        ) as ckpt:
            frozen = torch.randn(small)
            states = [{"big": torch.full((big // 4,), float(i)) + torch.arange(big // 4), "w": frozen} for i in (0, 1)]
            states.append({"big": states[0]["big"][:10].clone(), "w": torch.zeros(10)})
            for step, state in enumerate(states):
                ckpt.save(state, step=step)
        keep = policy({"nvme": tier("nvme", place, keep={"last": 2})}, chunk="1MiB", arena={"size": "32MiB"})
        with ts.Checkpointer(keep, "run") as ckpt:
            plan = ckpt.prune(dry_run=True).tiers[0]
            done = ckpt.prune().tiers[0]
            assert done == plan
            assert done.repacked.versions == (2,)
            assert sum(done.repacked.packs.values()) > big
            assert alike(ckpt.load(step=1), states[1])
            used = sum(file.stat().st_size for file in (place / "nvme/packs").rglob("*") if file.is_file())
            assert set(ckpt.prune(grace=0).tiers[0].packs) == set(done.repacked.packs)
            left = sum(file.stat().st_size for file in (place / "nvme/packs").rglob("*") if file.is_file())
            assert used - left > big
            assert alike(ckpt.load(step=1), states[1])
            assert alike(ckpt.load(step=2), states[2])
            assert ckpt.verify(deep=True).ok


def test_a_run_that_is_not_there_has_nothing_to_prune() -> None:
    with scratch() as place, ts.Checkpointer(spec(place), "none") as ckpt:
        assert ckpt.prune().ok
        assert not (place / "nvme").exists()


def test_a_restore_leaves_no_lease_behind_and_a_folder_that_cannot_be_written_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "LEASE_FROM", 0)
    with scratch() as place:
        states = filled(place, 1)
        with ts.Checkpointer(spec(place), "run") as ckpt:
            assert alike(ckpt.load(), states[0])
            assert names(opened(spec(place), "nvme"), "leases/") == []
        shutil.rmtree(place / "nvme/leases")
        (place / "nvme/leases").write_text("no folder")
        with ts.Checkpointer(spec(place), "run") as ckpt:
            assert alike(ckpt.load(), states[0])


def test_a_save_that_took_longer_than_the_grace_does_not_commit_what_was_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch() as place:
        one, real = spec(place), TierWrite._written_sizes
        where = opened(one, "nvme")

        def swept(self: TierWrite) -> dict[str, int]:
            found = real(self)
            for key in found:
                where.delete(key)
            return found

        monkeypatch.setattr(TierWrite, "_written_sizes", swept)
        monkeypatch.setattr(tier_write, "LONG_SAVE", 0.0)
        with ts.Checkpointer(one, "run") as ckpt:
            handle = ckpt.save(tensors(20_000), step=1)
            with pytest.raises(ts.NotFound, match="which this save wrote, was deleted before its record was created"):
                handle.wait()
            assert list(ckpt.versions()) == []
