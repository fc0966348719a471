"""Retention: what is kept is whole, and of the rest nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import (
    alike,
    arena_of,
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
from support.equality import difference

import tierstate as ts
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.history.retention import BestVersions, RetentionPolicy
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault


@pytest.mark.slow
@given(
    last=st.integers(1, 4),
    every=st.one_of(st.none(), st.integers(2, 6)),
    changes=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=10),
    process=st.integers(0, 10),
    kind=st.sampled_from(["memory", "host", "nvme", "file"]),
)
def test_what_is_kept_restores_and_nothing_else_is_left(
    last: int, every: int | None, changes: list[set[int]], process: int, kind: str
) -> None:
    """Versions share chunks; whatever is dropped, the others are whole, and no pack is left that nobody names."""
    with scratch() as place:
        keep = {"last": last} if every is None else {"last": last, "every": every}
        spec = policy({kind: tier(kind, place, keep=keep), "all": tier("lustre", place)})
        state, truth = tensors(9000, 4096, 100, 12_000), []
        ckpt = ts.Checkpointer(spec, "run")
        for step, leaves in enumerate(changes):
            for leaf in leaves:
                state[chr(97 + leaf)] += 1.0
            if step == process and kind not in ("memory", "host"):
                ckpt.close()
                ckpt = ts.Checkpointer(spec, "run")
            truth.append({name: t.clone() for name, t in state.items()})
            # Waited for, since what a slower tier still reads is not dropped yet.
            ckpt.save(state, step=step).wait("all")
        with ckpt:
            ckpt._pipeline.close()
            steps = range(len(changes))
            kept = [s for s in steps if s in steps[-last:] or (every is not None and s % every == 0)]
            assert [v.step for v in ckpt.versions() if kind in v.tiers] == kept
            assert unreferenced(ckpt._tier_runs[0].tier, "run") == set()
            assert ckpt.verify(deep=True).ok
            for step, was in enumerate(truth):
                assert alike(was, ckpt.load(step=step))


def test_runs_in_one_tier_do_not_keep_each_other_from_being_dropped(place):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1})})
    with ts.Checkpointer(spec, "one") as one, ts.Checkpointer(spec, "a-mend-2") as two:
        for step in range(3):
            one.save(tensors(9000, seed=step), step=step).wait()
            two.save(tensors(9000, seed=10 + step), step=step).wait()
    where = opened(spec, "nvme")
    assert len(names(where, "packs/one/")) == len(names(where, "packs/a-mend-2/")) == 1
    with ts.Checkpointer(spec, "a-mend-2") as two:
        assert torch.equal(two.load()["a"], tensors(9000, seed=12)["a"])


def test_packs_that_could_not_be_deleted_are_deleted_later(place):
    with wrapped(Memory()) as keys:
        spec = policy({"only": {**keys, "keep": {"last": 1}}})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(5000), step=0).wait()
            where = faulty(keys)
            # The record goes, then its pack does not.
            where.add(Fault("delete", 2, ts.TierUnavailable("no answer")))
            ckpt.save(tensors(5000, seed=1), step=1).wait()
            ckpt.save(tensors(5000, seed=2), step=2).wait()
            ckpt._pipeline.close()
            assert unreferenced(where.inner, "run") == set()
            assert ckpt.verify(deep=True).ok


def test_an_unreadable_record_stops_the_deleting_of_packs(place):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 2})})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2):
            ckpt.save(tensors(9000, seed=step), step=step)
    record = place / "nvme/versions/run/000000000001"
    record.write_bytes(record.read_bytes()[:-1] + bytes([record.read_bytes()[-1] ^ 1]))
    before = set(names(opened(spec, "nvme"), "packs/"))
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2, 6):
            ckpt.save(tensors(9000, seed=step), step=step)
    assert before <= set(names(opened(spec, "nvme"), "packs/"))
    assert record.exists()


def test_a_version_that_a_slower_tier_still_reads_is_not_dropped(place):
    with wrapped(Memory()) as slow:
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow})
        with ts.Checkpointer(spec, "run") as ckpt:
            gate = faulty(slow).shut("writer")
            saves = [ckpt.save(tensors(9000, seed=step), step=step) for step in range(3)]
            for save in saves:
                save.wait("nvme")
            assert [v.step for v in ckpt.versions()] == [0, 1, 2]
            gate.set()
            for save in saves:
                save.wait("slow")
            ckpt.save(tensors(9000, seed=3), step=3).wait("nvme")
        with ts.Checkpointer(spec, "run") as ckpt:
            assert [v.step for v in ckpt.versions() if "nvme" in v.tiers] == [3]
            assert [v.step for v in ckpt.versions() if "slow" in v.tiers] == [0, 1, 2, 3]
            assert ckpt.verify(deep=True).ok


def test_a_host_tier_lets_go_of_its_slabs(place):
    spec = policy({"host": tier("host", place, keep={"last": 2}), "nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(6):
            ckpt.save(tensors(80_000, seed=step), step=step)
        ckpt._pipeline.close()
        arena = arena_of(ckpt)
        assert arena.in_flight == 0
        assert 0 < arena.kept <= 2 * 20
        assert ckpt.stats().arena_peak <= 256 * 1024 + 3 * 20 * 4096
        assert difference(tensors(80_000, seed=5), ckpt.load()) == ""
    assert arena.kept == 0


@pytest.mark.slow
def test_what_a_lagging_tier_held_back_is_dropped_at_close(place):
    with wrapped(Memory()) as slow:
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "slow": slow})
        with ts.Checkpointer(spec, "run") as ckpt:
            gate = faulty(slow).shut("put")
            for step in range(4):
                ckpt.save(tensors(9000, seed=step), step=step).wait("nvme")
            assert [v.step for v in ckpt.versions() if "nvme" in v.tiers] == [0, 1, 2, 3], (
                "the slow tier reads them yet"
            )
            gate.set()
        where = opened(spec, "nvme")
        assert len(names(where, "versions/run/")) == len(names(where, "packs/run/")) == 1
        assert len(names(faulty(slow).inner, "versions/run/")) == 4


# Leaves with a retention of their own

LAST = st.integers(1, 4)
EVERY = st.none() | st.integers(2, 4)


def kept_by(keep: dict[str, int], step: int, steps: int) -> bool:
    """Whether a policy keeps a step of a run that saved each one."""
    return step >= steps - keep["last"] or ("every" in keep and step % keep["every"] == 0)


def keeping(last: int, every: int | None) -> dict[str, int]:
    return {"last": last} if every is None else {"last": last, "every": every}


@pytest.mark.slow
@settings(max_examples=max(10, settings().max_examples // 2))
@given(
    keep=st.builds(keeping, LAST, EVERY),
    rule=st.builds(keeping, LAST, EVERY),
    changes=st.lists(st.sets(st.sampled_from("abcd")), min_size=1, max_size=8),
    process=st.integers(0, 8),
    kind=st.sampled_from(["memory", "host", "nvme", "file"]),
)
def test_each_version_restores_what_is_kept_of_it_and_says_what_is_not(
    keep: dict[str, int], rule: dict[str, int], changes: list[set[str]], process: int, kind: str
) -> None:
    with scratch() as place:
        rules = [{"match": "optimizer.**", "keep": rule}, {"match": "**", "tiers": ["only"]}]
        spec = policy({"only": tier(kind, place, keep=keep), "unused": tier("lustre", place)}, rules=rules)
        leaves, truth = tensors(9000, 200, 9000, 4096), []
        ckpt = ts.Checkpointer(spec, "run")
        for step, changed in enumerate(changes):
            for leaf in changed:
                leaves[leaf] += 1.0
            if step == process and kind not in ("memory", "host"):
                ckpt.close()
                ckpt = ts.Checkpointer(spec, "run")
            parts = {"model": ("a", "b"), "optimizer": ("c", "d")}
            truth.append({part: {n: leaves[n].clone() for n in names} for part, names in parts.items()})
            state = {part: {n: leaves[n] for n in names} for part, names in parts.items()}
            ckpt.save({**state, "optimizer": {**state["optimizer"], "step": step}}, step=step).wait("only")
        with ckpt:
            ckpt._pipeline.close()
            where, steps = ckpt._tier_runs[0].tier, len(changes)
            promised = {
                step: {part for part, said in (("model", keep), ("optimizer", rule)) if kept_by(said, step, steps)}
                for step in range(steps)
            }
            found = {v.step: v for v in ckpt.versions()}
            assert found.keys() == {step for step, parts in promised.items() if parts}
            assert unreferenced(where, "run") == set()
            assert ckpt.verify(deep=True).ok
            for step, version in found.items():
                assert bool(version.partial) == (len(promised[step]) == 1)
                for part in promised[step]:
                    assert alike(truth[step][part], _tensors(ckpt.load(step=step, only=[f"{part}.**"])[part]))
                if version.partial:
                    with pytest.raises(
                        ts.Damaged, match=r"`keep` has dropped leaves of it \(.* from only\): ask for oth"
                    ):
                        ckpt.load(step=step)
            assert ckpt.load()["optimizer"]["step"] == steps - 1


def _tensors(part: dict[str, object]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in part.items() if isinstance(value, torch.Tensor)}


OPTIMIZER = [{"match": "optimizer.**", "keep": {"last": 1}}]


def trained(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": tensors(9000, seed=seed), "optimizer": tensors(9000, 4096, seed=100 + seed)}


def test_without_the_newest_version_what_was_thinned_is_passed_over_with_the_reason(place, caplog):
    spec = policy({"nvme": tier("nvme", place, keep={"last": 3})}, rules=OPTIMIZER)
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            ckpt.save(trained(step), step=step).wait()
    (place / "nvme/versions/run/000000000003").unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.Damaged, match=r"no whole version.*`keep` has dropped.*optimizer\.\*\* from nvme"):
            ckpt.load()
        assert difference(tensors(9000, seed=1), ckpt.load(only=["model.**"])["model"]) == ""
        assert ckpt.restored is not None
        assert ckpt.restored.step == 1
    assert "is passed over" in caplog.text


def test_a_tier_that_has_all_of_it_makes_a_thinned_version_whole(place):
    tiers = {"nvme": tier("nvme", place, keep={"last": 3}), "all": tier("lustre", place, keep={"all": True})}
    rules = [{"match": "optimizer.**", "keep": {"last": 2}}]
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        for step in range(3):
            ckpt.save(trained(step), step=step).wait("all")
    with ts.Checkpointer(policy({"nvme": tiers["nvme"]}, rules=rules), "run") as ckpt:
        ckpt.save(trained(3), step=3).wait()
    with ts.Checkpointer(policy(tiers), "run") as ckpt:
        assert [v.step for v in ckpt.versions() if "nvme" in v.partial] == [1]
        for step in range(3):
            assert difference(trained(step), ckpt.load(step=step)) == ""
        assert ckpt.verify(deep=True).ok


def test_a_version_that_a_slower_tier_is_to_get_is_not_thinned_before(place):
    with wrapped(Memory()) as slow:
        tiers = {"nvme": tier("nvme", place, keep={"last": 9}), "slow": {**slow, "keep": {"last": 9}}}
        with ts.Checkpointer(policy(tiers, rules=OPTIMIZER), "run") as ckpt:
            gate = faulty(slow).shut("writer")
            saves = [ckpt.save(trained(step), step=step) for step in range(3)]
            for save in saves:
                save.wait("nvme")
            assert [v.partial for v in ckpt.versions()] == [(), (), ()]
            assert set(ckpt.stats().tiers["nvme"].held.values()) <= {"slow has not got it yet"}
            gate.set()
            for save in saves:
                save.wait("slow")
            # Each came whole, before either tier thinned it by the same rule.
            ckpt.save(trained(3), step=3).wait("slow")
        with ts.Checkpointer(policy(tiers, rules=OPTIMIZER), "run") as ckpt:
            assert [v.partial for v in ckpt.versions()] == [("nvme", "slow")] * 3 + [()]
            for step in range(4):
                assert difference(tensors(9000, seed=step), ckpt.load(step=step, only=["model.**"])["model"]) == ""
            assert ckpt.verify(deep=True).ok


def test_what_an_archive_promises_is_not_dropped_before_it_is_there(place):
    """The fast tier keeps one version; the archive is due to get and keep every other one, and is away."""
    with wrapped(Memory()) as away:
        archive = {**away, "every": 2, "keep": {"every": 2}}
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "archive": archive})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(trained(0), step=0).wait("archive")
            faulty(away).add(Fault("put", 0, ts.TierUnavailable("away")))
            faulty(away).add(Fault("writer", 0, ts.TierUnavailable("away")))
            for step in range(1, 6):
                save = ckpt.save(trained(step), step=step)
                save.wait("nvme")
                if step > 1:  # after one that did not arrive, every save is due
                    with pytest.raises(ts.TierUnavailable):
                        save.wait("archive")
            assert {2, 4} <= {v.step for v in ckpt.versions() if "nvme" in v.tiers}
            faulty(away).heal()
        with ts.Checkpointer(spec, "run") as ckpt:
            assert [v.step for v in ckpt.versions() if "archive" in v.tiers] == [0, 2, 4]
            assert [v.step for v in ckpt.versions() if "nvme" in v.tiers] == [5]
            for step in (0, 2, 4):
                assert difference(trained(step), ckpt.load(step=step)) == ""


def test_the_best_versions_stay_and_one_that_was_owed_is_brought_for_it(place):
    with wrapped(Memory()) as away:
        keep = {"last": 1, "best": {"metric": "eval.loss", "mode": "min"}}
        spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "away": {**away, "keep": keep}})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(trained(0), step=0, metadata={"eval": {"loss": 3.0}}).wait("away")
            faulty(away).add(Fault("writer", 0, ts.TierUnavailable("away")))
            for step, loss in ((1, 1.0), (2, 2.0)):
                with pytest.raises(ts.TierUnavailable):
                    ckpt.save(trained(step), step=step, metadata={"eval": {"loss": loss}}).wait("away")
            faulty(away).heal()
        with ts.Checkpointer(spec, "run") as ckpt:
            assert [v.step for v in ckpt.versions() if "away" in v.tiers] == [1, 2]
            assert difference(trained(1), ckpt.load(step=1)) == ""


def test_tags_count_on_tiers_that_last_and_for_rules_unless_the_policy_says_otherwise(place):
    tiers = {
        "host": tier("host", place, keep={"last": 1}),
        "sure": tier("memory", place, keep={"last": 1, "tags": True}),
        "nvme": tier("nvme", place, keep={"last": 1}),
        "file": tier("file", place, keep={"last": 1, "tags": False}),
    }
    best = {"metric": "loss", "mode": "max"}
    rules = [
        {"match": "a", "tiers": ["host", "nvme"]},
        {"match": "b", "keep": {"within": "2d", "best": best}},
        {"match": "b", "keep": {"last": 9}},
        {"match": "c", "keep": {"last": 2, "tags": False}},
    ]
    with ts.Checkpointer(policy(tiers, rules=rules), "run") as ckpt:
        host, sure, nvme, file = ckpt._tier_runs
    assert [tier_run.keep.tags for tier_run in (host, sure, nvme, file)] == [False, True, True, False]
    promised = RetentionPolicy(within=172800.0, best=BestVersions("loss", "max", 1), tags=True)
    assert dict(nvme.rules) == {"b": promised, "c": RetentionPolicy(last=2)}
    assert dict(host.rules) == {"b": replace(promised, tags=False), "c": RetentionPolicy(last=2)}


class Full(Memory):
    """A tier that is full while it has more packs than ``room``; what is deleted makes room."""

    room = 1 << 20

    def put(self, key: str, data: Buffer) -> None:
        if len(names(self, "packs/")) > self.room:
            raise ts.TierFull(f"{self.name}: no room for {key}", tier=self.name)
        super().put(key, data)


@pytest.mark.parametrize("room", [0, 2])
def test_a_full_tier_gets_room_although_what_loses_leaves_needs_some(room: int) -> None:
    """The record of a version that loses leaves is written anew. What is dropped beside goes all the same."""
    inner = Full()
    rules = [{"match": "b", "keep": {"last": 1}}]
    with wrapped(inner) as keys:
        with ts.Checkpointer(policy({"only": keys}), "run") as ckpt:
            for step in range(4):
                ckpt.save({"a": torch.full((500,), step), "b": torch.full((500,), -step)}, step=step).wait()
        inner.room = room
        with ts.Checkpointer(policy({"only": {**keys, "keep": {"last": 2}}}, rules=rules), "run") as ckpt:
            (report,) = ckpt.prune().tiers
            assert (report.drop, len(report.packs)) == ((1, 2), 2)
            assert len(names(inner, "packs/")) == 2
            assert list(report.thin) == ([3] if room else [])
            assert [problem for problem in report.problems if "no room" in problem] == report.problems
            assert bool(report.problems) == (not room)
            inner.room = 1 << 20
            (report,) = ckpt.prune().tiers
            assert (report.drop, report.problems) == ((), [])
            with pytest.raises(ts.Damaged, match="`keep` has dropped leaves"):
                ckpt.load(step=2)
            assert ckpt.load(step=2, only=["a"])["a"][0] == 2
            assert ckpt.verify(data=True).lost[0].step == 2
