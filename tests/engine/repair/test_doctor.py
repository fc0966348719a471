"""The doctor: what it says can be had is had once it has repaired, and what can be had it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, names, opened, policy, scratch, tensors, wrapped
from support.damaged_runs import Blow, Oracle, Shape, World, blows, damage, make_world, shapes, spec_of, whole_shapes
from support.ill_tiers import ANSWERS, HEALTH, Health, Ill
from support.sharded_versions import keep, mesh

import tierstate as ts
from tierstate.engine.repair.health import DoctorReport
from tierstate.manifest.history.log import Log


def look(world: World, run: str, *, apply: bool = False) -> DoctorReport:
    with ts.Checkpointer(world.spec, run) as ckpt:
        return ckpt.doctor(apply=apply)


A_TAG_AND_A_RECORD = [Blow(0, "versions", 0, "delete", 0.0), Blow(0, "tags", 0, "flip", 0.0)]


@pytest.mark.slow
@settings(max_examples=40)
@given(whole_shapes, blows)
@example(
    Shape((("raw", "native", 1), ("raw", "native", 1)), (1, 1), fork=False, keep=1, parted=False), A_TAG_AND_A_RECORD
)
def test_what_it_says_can_be_had_is_had_and_nothing_else(shape: Shape, struck: list[Blow]) -> None:
    with scratch() as place:
        world = make_world(shape, place)
        oracle = Oracle(world)
        for blow in struck:
            damage(world, blow)
        after = world.files()
        had = {key: world.restorable(*key) for key in world.truth}
        said: dict[tuple[str, str], bool] = dict.fromkeys(world.truth, False)
        for run in world.runs():
            # A restore repairs what it meets, so the damage is made again.
            put_back(world, after)
            dry = look(world, run)
            assert world.files() == after, "a dry run changes nothing"
            said |= {(run, v.id): v.state in ("whole", "damaged") for v in dry.versions if (run, v.id) in said}
            now = {v.id: v.restorable for v in dry.versions}
            for key in [key for key in world.truth if key[0] == run]:
                assert had[key] or not now.get(key[1]), "it says what a restore gets"
                assert said[key] or not oracle.can_be_had(after, *key), "what can be had"
        for run in world.runs():
            done = look(world, run, apply=True)
            assert [r.error for r in done.repairs if not r.done] == []
            assert all(path in world.files() for path in after if "/packs/" in path), "packs are never deleted"
        for run in world.runs():
            assert look(world, run).repairs == []
        for key, expected in said.items():
            assert world.restorable(*key) == expected, key
            assert expected or not had[key], "what was had before is had afterwards"


@pytest.mark.slow
@settings(max_examples=15)
@given(shapes)
def test_nothing_is_wrong_with_what_was_saved(shape: Shape) -> None:
    """Also where `keep` has dropped, or the rules have left out, leaves of a version."""
    with scratch() as place:
        world = make_world(shape, place)
        for run in world.runs():
            report = look(world, run, apply=True)
            assert (report.ok, report.repairs) == (True, [])
            assert {version.state for version in report.versions} <= {"whole", "part"}
            for version in report.versions:
                assert world.restorable(run, version.id) == version.restorable == (version.state == "whole")
        assert world.files() == world.before


@pytest.mark.slow
@settings(max_examples=15)
@given(shapes, st.sampled_from([1, 2]))
@example(Shape((("raw", "native", 1),), (15, 3, 13), fork=False), 1)
@example(Shape((("raw", "native", 1), ("raw", "native", 1)), (1, 2, 2), fork=False, parted=True), 1)
@example(Shape((("raw", "native", 1), ("raw", "native", 1)), (1, 8, 3), fork=False, parted=True), 1)
@example(Shape((("raw", "native", 1), ("raw", "safetensors", 1)), (1, 2, 2), fork=False, parted=True), 1)
def test_what_retention_has_dropped_is_not_lost_when_keep_becomes_wider(shape: Shape, kept: int) -> None:
    """Packs that newer versions share are still there, and one of them may say what the version consisted of. What is
    all there is had again.

    A leaf that only the first tier had is left out of the version, which another tier still has in part. Not where the
    first tier's files are of another kind: they have no list of their chunks, so it may be in one of them, or lost.
    """
    shape = shape._replace(parted=shape.parted and shape.tiers[0][1] == "native")
    with scratch() as place:
        world = make_world(shape._replace(keep=kept), place)
        world.spec = spec_of(shape._replace(keep=0), place)
        for run in world.runs():
            report = look(world, run, apply=True)
            assert {version.state for version in report.versions} <= {"whole", "part", "damaged"}
            again = look(world, run)
            assert (again.ok, again.repairs) == (True, [])
            for version in again.versions:
                assert world.restorable(run, version.id) == version.restorable == (version.state == "whole")


@pytest.mark.parametrize("record", ["lost", "damaged"])
@pytest.mark.parametrize("others", [None, 1])
def test_leaves_that_a_rule_has_dropped_are_not_lost_with_a_record(
    place: Path, record: str, others: int | None
) -> None:
    """The chunks of the others are there, and are had again."""
    states = [tensors(9000, 9 << 20, seed=step) for step in range(4)]
    keep = {"keep": {"last": 5, "every": others}} if others else {}
    spec = policy(
        {"only": {"type": "nvme", "path": str(place / "only"), **keep}},
        rules=[{"match": "b", "keep": {"last": 1}}], chunk="1MiB", arena={"size": "32MiB"},
    )  # fmt: skip
    with ts.Checkpointer(spec, "run") as ckpt:
        for step, state in enumerate(states):
            ckpt.save(state, step=step).wait()
        ckpt.prune(grace=0)
        ckpt.prune(grace=0)  # what the first one has emptied
        seq = ckpt.info(step=1).seq
    only = opened(spec, "only")
    assert sum(map(only.size, names(only, "packs/"))) < 20 << 20, "those of two versions at most"
    (key,) = (key for key in names(only, "versions/") if f"{seq:012d}" in key)
    path = place / "only" / key
    data = bytearray(path.read_bytes())
    path.unlink()
    if record == "damaged":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with ts.Checkpointer(spec, "run") as ckpt:
        (repair,) = ckpt.doctor(apply=True).repairs
        assert (repair.kind, repair.seq, repair.done, repair.chunks) == ("rebuild", seq, True, 0)
        again = ckpt.doctor()
        assert (again.ok, again.repairs) == (True, [])
        assert {v.seq: v.left_out for v in again.versions}[seq] == 1
        assert alike(ckpt.load(step=1, only=["a"]), {"a": states[1]["a"]})
        assert all(tier.thin == {} for tier in ckpt.prune(dry_run=True, grace=0).tiers)


health = st.sampled_from(HEALTH)
PASSING = ("away", "denied")
Places = list[list[tuple[Health, Health]]]
"""For each version and each tier the health of the record, and of the pack, which has all of the version."""


@contextmanager
def ill_tiers(places: Places) -> Iterator[tuple[list[Ill], ts.Policy]]:
    with ExitStack() as stack:
        tiers = [Ill(), Ill()]
        keys = [stack.enter_context(wrapped(tier)) for tier in tiers]
        spec = policy({"one": keys[0], "two": keys[1]}, durable="two")
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in (0, 1):
                ckpt.save({"w": torch.full((64,), float(step))}, step=step)
        for step, healths in enumerate(places):
            for tier, (record, pack) in zip(tiers, healths, strict=True):
                tier.fall_ill(step, record, pack)
        yield tiers, spec


def right(places: Places, step: int) -> set[str | None]:
    """What may be said of a version; None: nothing, as if it had never been there."""
    if any(pack in ANSWERS for _, pack in places[step]):
        # Where a record cannot be asked, none can be written beside it.
        return {"whole", "damaged"} | ({"unknown"} if any(r in PASSING for r, _ in places[step]) else set())
    passing = any(one in PASSING for healths in places for pair in healths for one in pair)
    return {"unknown", None} if passing else {"lost", None}


@given(st.lists(st.lists(st.tuples(health, health), min_size=2, max_size=2), min_size=2, max_size=2))
def test_what_cannot_be_asked_now_is_not_called_lost(places: Places) -> None:
    with ill_tiers(places) as (tiers, spec):
        with ts.Checkpointer(spec, "run") as ckpt:
            said = {version.seq - 1: version.state for version in ckpt.doctor(apply=True).versions}
        assert [said.get(step) in right(places, step) for step in (0, 1)] == [True, True], said
        for tier in tiers:  # all answer again
            tier.health = {key: one for key, one in tier.health.items() if one not in (*PASSING, "flipped")}
        had = [step for step in (0, 1) if any(pack in (*ANSWERS, *PASSING) for _, pack in places[step])]
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.doctor(apply=True)
            assert ckpt.doctor().repairs == []
            assert [ckpt.load(step=step)["w"].tolist() for step in had] == [[float(step)] * 64 for step in had]


def put_back(world: World, files: dict[str, bytes]) -> None:
    """Lay the objects in the tiers again as they were."""
    for name in world.files().keys() - files.keys():
        (world.place / name).unlink()
    for name, data in files.items():
        path = world.place / name
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(data)


@pytest.mark.slow
def test_what_is_repaired_from_a_fork_outlives_what_the_fork_drops() -> None:
    """And the other way round: a lost record of the fork names again what its pin keeps, and nothing is copied."""

    def spec(**keys: Any) -> ts.Policy:
        return policy({"only": {"type": "nvme", "path": str(place / "only"), **keys}})

    states = [{**tensors(9000, seed=step), "frozen": tensors(5000)["a"]} for step in range(6)]
    with scratch() as place:
        with ts.Checkpointer(spec(), "run") as ckpt:
            ckpt.save(states[1], step=1).wait()
            ckpt.fork("fork", 1)
            for step in (2, 3):
                ckpt.save(states[step], step=step).wait()
        with ts.Checkpointer(spec(), "fork") as ckpt:
            ckpt.save(states[2], step=2).wait()
        tier = opened(spec(), "only")
        tier.discard(names(tier, "packs/run/000000000002-"))
        Log(tier, "fork").forget(2)
        with ts.Checkpointer(spec(), "run") as ckpt:
            (repair,) = ckpt.doctor(apply=True).repairs
            assert (repair.kind, repair.done, repair.chunks) == ("mend", True, 3)
            assert ckpt.verify(data=True).problems == []
        with ts.Checkpointer(spec(), "fork") as ckpt:
            (repair,) = ckpt.doctor(apply=True).repairs
            assert (repair.kind, repair.done, repair.chunks) == ("rebuild", True, 0)
            assert ckpt.verify(data=True).problems == []
        with ts.Checkpointer(spec(keep={"last": 1}), "fork") as ckpt:
            for step in (4, 5):
                ckpt.save(states[step], step=step).wait()
            ckpt.prune(grace=0)
        with ts.Checkpointer(spec(), "run") as ckpt:
            for step in (1, 2, 3):
                assert alike(states[step], ckpt.load(step=step))


def test_what_a_fork_has_repaired_is_not_repaired_for_its_source(place: Path) -> None:
    """A restore of the source looks for repaired copies in its own packs only."""
    state, tiers = tensors(9000), {name: {"type": "nvme", "path": str(place / name)} for name in ("one", "two")}
    both, alone = policy(tiers), policy({"one": tiers["one"]})
    with ts.Checkpointer(both, "run") as ckpt:
        save = ckpt.save(state, step=1)
        for name in tiers:
            save.wait(name)
        ckpt.fork("fork")
    one = opened(both, "one")
    one.discard(names(one, "packs/run/"))
    with ts.Checkpointer(both, "fork") as ckpt:
        assert alike(ckpt.load(), state)
    assert len(names(one, "packs/fork/")) == 1
    with ts.Checkpointer(alone, "run") as ckpt:
        with pytest.raises(ts.Damaged):
            ckpt.load()
        (found,) = ckpt.doctor().versions
        assert (found.state, found.restorable) == ("damaged", False)
        assert [repair.done for repair in ckpt.doctor(apply=True).repairs] == [True]
        assert alike(ckpt.load(), state)
    with ts.Checkpointer(alone, "fork") as ckpt:
        assert ckpt.doctor().ok


@pytest.mark.parametrize("kind", ["lustre", "nvme"])
def test_a_tier_that_all_hosts_see_gets_a_version_of_several_ranks_as_a_whole(place: Path, kind: str) -> None:
    """Its record and the packs of a rank are lost. A tier of one host had the chunks of its own ranks only."""
    spec = policy({name: {"type": kind, "path": str(place / name)} for name in ("one", "two")})
    state, cuts = tensors(2400, 1200), {"a": mesh((600,), (3,)), "b": mesh((300,), (3,))}
    for name in ("one", "two"):
        keep(opened(spec, name), state, cuts)
    one = opened(spec, "one")
    for key in (*names(one, "versions/"), names(one, "packs/")[1]):
        one.delete(key)
    alone = policy({"one": {"type": kind, "path": str(place / "one")}})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [repair.kind for repair in ckpt.doctor(apply=True).repairs] == ["rebuild"]
        assert ckpt.doctor().ok
        assert alike(ckpt.load(), state)
    with ts.Checkpointer(alone, "run") as ckpt:
        if kind == "lustre":
            assert alike(ckpt.load(), state)
        else:
            with pytest.raises(ts.Damaged, match="not whole"):
                ckpt.load()
