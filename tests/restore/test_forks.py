"""Forks: a new run begins with a version of another, shares its packs, and outlives it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, names, opened, pins, policy, scratch, tensors, tier
from support.forked_runs import forked, one_tier, saved, two_days_old

import tierstate as ts
from tierstate.manifest.errors import AlreadyExists, NotFound, TierError
from tierstate.manifest.history.leases import pin_version
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.retention import dropped_groups
from tierstate.tiers.posix.directory import Nvme


def test_a_fork_begins_with_the_version(place: Path) -> None:
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2, 3)
        source = ckpt.info(step=2)
        made = ckpt.fork("run-b", 2)
    assert (made.run, made.seq, made.step, made.parent) == ("run-b", 1, 2, source.id)
    assert (made.metadata, made.tiers, made.nbytes) == ({"loss": 2}, ("nvme",), source.nbytes)
    assert made.time > source.time
    assert made.id != source.id
    nvme = opened(spec, "nvme")
    assert names(nvme, "packs/run-b/") == []
    assert pins(nvme, "run") == {2: "forked by run-b"}
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert ckpt.versions() == [made]
        assert alike(ckpt.load(), tensors(9000, 4096, seed=2))
        assert ckpt.verify(deep=True).ok


def test_what_did_not_change_since_the_fork_is_not_written(place: Path) -> None:
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("run-b")
    with ts.Checkpointer(spec, "run-b") as ckpt:
        state = ckpt.load()
        ckpt.save(state, step=2).wait()
        assert ckpt.stats().tiers["nvme"].stored == 0
        state["b"] += 1
        ckpt.save(state, step=3).wait()
        assert 0 < ckpt.stats().tiers["nvme"].stored < 5000
        first, second, third = ckpt.versions()
    assert second.parent == first.id, "it was restored"
    assert third.parent == second.id


def test_a_fork_that_has_dropped_its_first_version_keeps_no_packs_of_the_old_run(place: Path) -> None:
    """Its pin is there until a prune finds it old; meanwhile saves of the old run free what they drop, as before."""
    spec = one_tier(place, keep={"last": 1})
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("run-b")
    with ts.Checkpointer(spec, "run-b") as ckpt:
        saved(ckpt, 100, 101)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, *range(2, 6))
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert [version.step for version in ckpt.versions()] == [101]
    nvme = opened(spec, "nvme")
    assert pins(nvme, "run") == {1: "forked by run-b"}
    assert len(names(nvme, "packs/run/")) == len(names(nvme, "versions/run/")) == 2, "the newest, and what is pinned"
    with ts.Checkpointer(spec, "run") as ckpt:
        report = ckpt.prune()
        assert report.ok, report
        assert pins(nvme, "run") == {1: "forked by run-b"}, "it is young"
        assert ckpt.prune(grace=0).ok
        assert pins(nvme, "run") == {}


def test_a_fork_that_was_removed_keeps_no_packs_of_the_old_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has dropped its first version; one that is made again under its name is being made until it is."""
    spec, nvme, pin = forked(place)
    ages = {pin: 100.0}  # in seconds of the test, as files of one moment are of the same age
    monkeypatch.setattr(Nvme, "age", lambda self, key: ages.get(key, 50.0))
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert ckpt.remove(step=1, force=True).ok
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, *range(2, 6))
    assert len(names(nvme, "packs/run/")) == len(names(nvme, "versions/run/")) == 2, "the newest, and what is pinned"
    with ts.Checkpointer(spec, "run") as ckpt:
        report = ckpt.prune()
        assert report.ok, report
        ages[pin_version(nvme, "run", 1, "run-b")] = 10.0  # of a fork that has no record yet
        before = len(names(nvme, "packs/run/"))
        saved(ckpt, 6)
        assert not ckpt.prune().ok
    assert len(names(nvme, "packs/run/")) > before


@pytest.mark.slow
@settings(max_examples=max(8, settings().max_examples // 5))
@given(
    forks=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=2, unique_by=lambda f: f[0]),
    after=st.integers(0, 1),
    format=st.sampled_from([None, "safetensors"]),
)
def test_forks_outlive_the_versions_of_the_old_run(
    forks: list[tuple[int, bool]], after: int, format: str | None
) -> None:
    """The old run goes on under ``keep: {last: 1}``; every fork restores bit for bit, and so does what it saved."""
    with scratch() as place:
        keys = {} if format is None else {"format": format}
        everything, last = one_tier(place, **keys), one_tier(place, keep={"last": 1}, **keys)
        with ts.Checkpointer(everything, "run") as ckpt:
            saved(ckpt, *range(3))
            for step, _ in forks:
                ckpt.fork(f"fork-{step}", step)
        with ts.Checkpointer(last, "run") as ckpt:
            saved(ckpt, *range(10, 11 + after))
        kept = Log(opened(last, "nvme"), "run").seqs()
        assert kept == sorted({step + 1 for step, _ in forks} | {4 + after}), "what is pinned stays, nothing else"
        for step, goes_on in forks:
            with ts.Checkpointer(last, f"fork-{step}") as ckpt:
                assert alike(ckpt.load(), tensors(9000, 4096, seed=step))
                if goes_on:
                    state = ckpt.load()
                    ckpt.save({**state, "a": state["a"] * 2}, step=100).wait()
                    ckpt.save({**state, "a": state["a"] * 3}, step=101).wait()
        # A fork whose first version is dropped leaves the old run's packs alone.
        with ts.Checkpointer(last, "run") as ckpt:
            assert ckpt.verify(deep=True).ok
            for step, _ in forks:
                assert alike(ckpt.load(step=step), tensors(9000, 4096, seed=step))
        for step, goes_on in forks:
            with ts.Checkpointer(last, f"fork-{step}") as ckpt:
                assert [v.step for v in ckpt.versions()] == ([101] if goes_on else [step])
                assert ckpt.verify(deep=True).ok
                was = tensors(9000, 4096, seed=step)
                assert alike(ckpt.load(), {**was, "a": was["a"] * 3} if goes_on else was)


def test_a_fork_of_a_fork(place: Path) -> None:
    spec = one_tier(place)
    with ts.Checkpointer(spec, "one") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("two")
    with ts.Checkpointer(spec, "two") as ckpt:
        ckpt.fork("three")
    assert pins(opened(spec, "nvme"), "two") == {1: "forked by three"}
    with ts.Checkpointer(spec, "three") as ckpt:
        assert alike(ckpt.load(), tensors(9000, 4096, seed=1))


def test_every_tier_that_lasts_and_has_it_has_the_fork(place: Path) -> None:
    rules = [{"match": "b", "tiers": ["nvme", "host"]}]
    tiers = {
        "host": tier("host", place), "nvme": tier("nvme", place), "lustre": tier("lustre", place),
        "file": tier("file", place, every=2),
    }  # fmt: skip
    spec = policy(tiers, rules=rules)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000, 4096, seed=2), step=2).wait("file")
        ckpt.save(tensors(9000, 4096, seed=3), step=3).wait("lustre")
        made = ckpt.fork("run-b", 3)
        assert (made.tiers, made.partial) == (("nvme", "lustre"), ("lustre",))
        ckpt.tag("best", 2)
        other = ckpt.fork("run-c", tag="best")
        assert other.tiers == ("nvme", "lustre", "file")
    with ts.Checkpointer(spec, "run-b") as ckpt:
        assert ckpt.versions()[0].id == made.id
        assert alike(ckpt.load(), tensors(9000, 4096, seed=3))
    for name in ("nvme", "lustre", "file"):
        assert Log(opened(spec, name), "run-c").read(1).version.id == other.id


def test_mended_chunks_come_along(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000, seed=1), step=1).wait("lustre")
    (pack,) = (place / "nvme/packs/run").iterdir()
    pack.write_bytes(bytes(pack.stat().st_size))
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.load()  # from lustre, and mended in nvme
        ckpt.fork("run-b")
    alone = one_tier(place)
    with ts.Checkpointer(alone, "run-b") as ckpt:
        assert alike(ckpt.load(), tensors(9000, seed=1))
        assert ckpt.verify(deep=True).ok


def test_what_cannot_be_forked_is_told(place: Path) -> None:
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(NotFound, match="'run' has no version"):
            ckpt.fork("run-b")
        saved(ckpt, 1)
        with pytest.raises(ValueError, match="cannot be forked into itself"):
            ckpt.fork("run")
        with pytest.raises(ValueError, match="cannot name a run"):
            ckpt.fork("../x")
        with pytest.raises(NotFound, match="step 7"):
            ckpt.fork("run-b", 7)
        first = ckpt.fork("run-b")
        assert ckpt.fork("run-b").id == first.id, "the very same fork is done already"
        saved(ckpt, 2)
        with pytest.raises(AlreadyExists, match="'run-b' has versions in nvme already"):
            ckpt.fork("run-b")
    assert pins(opened(spec, "nvme"), "run") == {1: "forked by run-b"}


def test_a_version_in_no_tier_that_lasts_cannot_be_forked(place: Path) -> None:
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place, every=5)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(tensors(9000), step=0).wait()
        ckpt.save(tensors(9000, seed=1), step=1).wait("host")
        with pytest.raises(TierError, match="step 1 of run 'run' was not forked: no tier that lasts has it"):
            ckpt.fork("run-b", 1)


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0, None])
@settings(max_examples=max(5, settings().max_examples // 10), deadline=None)
@given(order=st.permutations(["one", "two", "three"]), goes_on=st.booleans())
def test_prunes_of_all_runs_leave_a_fork_of_a_fork_whole(grace: float | None, order: list[str], goes_on: bool) -> None:
    """The two older runs go on and are pruned again and again; what the last one has of the first stays."""
    with scratch() as place:
        spec = one_tier(place, keep={"last": 1})
        with ts.Checkpointer(spec, "one") as ckpt:
            saved(ckpt, 1)
            ckpt.fork("two")
        with ts.Checkpointer(spec, "two") as ckpt:
            ckpt.fork("three")
            saved(ckpt, 2)
        with ts.Checkpointer(spec, "one") as ckpt:
            saved(ckpt, 3)
        truth = tensors(9000, 4096, seed=1)
        if goes_on:
            with ts.Checkpointer(spec, "three") as ckpt:
                truth["b"] += 1
                ckpt.save(truth, step=2).wait()
        two_days_old(*(path for path in place.rglob("*") if path.is_file()))
        for run in [*order, *order, *order]:
            with ts.Checkpointer(spec, run) as ckpt:
                assert ckpt.prune(grace=grace).ok
        with ts.Checkpointer(spec, "three") as ckpt:
            assert alike(ckpt.load(), truth)
            assert ckpt.verify(deep=True).ok


def test_a_fork_finds_what_was_mended_in_the_old_run_afterwards(place: Path) -> None:
    alone = one_tier(place)
    both = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})
    with ts.Checkpointer(both, "run") as ckpt:
        ckpt.save(tensors(9000, seed=1), step=1).wait("lustre")
    with ts.Checkpointer(alone, "run") as ckpt:
        ckpt.fork("run-b")
    (pack,) = (place / "nvme/packs/run").iterdir()
    pack.write_bytes(bytes(pack.stat().st_size))
    with ts.Checkpointer(both, "run") as ckpt:
        ckpt.load()
    with ts.Checkpointer(alone, "run-b") as ckpt:
        assert alike(ckpt.load(), tensors(9000, seed=1))


def test_what_is_no_longer_pinned_is_dropped(place: Path) -> None:
    spec = one_tier(place, keep={"last": 1})
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("run-b")
        saved(ckpt, 2)
    nvme = opened(spec, "nvme")
    assert Log(nvme, "run").seqs() == [1, 2]
    for key in names(nvme, "leases/run/"):
        nvme.delete(key)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 3)
    assert Log(nvme, "run").seqs() == [3]


# Forks of versions that are not whole

OPTIMIZER = [{"match": "b", "keep": {"last": 1}}]


def test_a_thinned_version_is_forked_only_where_a_tier_has_all_of_it(place: Path) -> None:
    tiers = {"nvme": tier("nvme", place), "lustre": tier("lustre", place, keep={"all": True})}
    both = policy(tiers)
    with ts.Checkpointer(both, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(tensors(9000, 4096, seed=step), step=step).wait("lustre")
    with ts.Checkpointer(policy({"nvme": tiers["nvme"]}, rules=OPTIMIZER), "run") as ckpt:
        ckpt.prune(grace=0)
        with pytest.raises(NotFound, match=r"`keep` has dropped leaves of it \(b from nvme\): fork another version"):
            ckpt.fork("run-b", 1)
    nvme = opened(both, "nvme")
    assert (Log(nvme, "run-b").seqs(), pins(nvme, "run")) == ([], {})
    with ts.Checkpointer(both, "run") as ckpt:
        made = ckpt.fork("run-b", 1)
    assert (made.tiers, made.partial) == (("nvme", "lustre"), ("nvme",))
    assert dropped_groups(Log(nvme, "run-b").read(1).commit) == ("b",)
    with ts.Checkpointer(both, "run-b") as ckpt:
        assert alike(ckpt.load(), tensors(9000, 4096, seed=1))


def test_leaves_that_go_to_no_tier_that_lasts_are_told(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place)}, rules=[{"match": "b", "tiers": ["host"]}])
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        assert ckpt.fork("run-b").partial == ("nvme",)
    assert "1 leaves are in none of them, b the first; a fork of it begins without them" in caplog.text


# A name that was used before


def remove_all(spec: ts.Policy, run: str) -> None:
    with ts.Checkpointer(spec, run) as ckpt:
        for version in ckpt.versions():
            assert ckpt.remove(version=version.id, force=True).ok


@pytest.mark.parametrize("legible", [True, False])
def test_a_fork_of_a_name_that_was_removed_goes_to_every_tier(place: Path, legible: bool) -> None:
    """The first version of every fork has the number 1, as the one that was removed had."""
    late = {"nvme": tier("nvme", place), "lustre": tier("lustre", place, every=2)}
    with ts.Checkpointer(policy(late), "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(tensors(9000, 4096, seed=step), step=step)
    with ts.Checkpointer(policy(late), "run") as ckpt:
        assert ckpt.fork("run-b", 2).tiers == ("nvme", "lustre")
    if legible:
        remove_all(policy(late), "run-b")
    else:
        for name in late:
            (place / name / "versions/run-b/000000000001").write_bytes(b"?")
        with ts.Checkpointer(policy(late), "run-b") as ckpt:
            assert ckpt.remove(seq=1, force=True).ok
    with ts.Checkpointer(policy(late), "run") as ckpt:
        assert ckpt.fork("run-b", 3).tiers == ("nvme",), "the other tier has not got it"
    every = policy({"nvme": late["nvme"], "lustre": tier("lustre", place)})
    with ts.Checkpointer(every, "run-b") as ckpt:
        assert [version.late for version in ckpt.versions()] == [("lustre",)]
        assert [(repair.kind, repair.tier) for repair in ckpt.doctor().repairs] == [("copy", "lustre")]
        ckpt.save(ckpt.load(), step=4).wait("lustre")
    with ts.Checkpointer(every, "run-b") as ckpt:
        assert [(version.step, version.tiers) for version in ckpt.versions()] == [
            (3, ("nvme", "lustre")),
            (4, ("nvme", "lustre")),
        ]
        (place / "lustre/versions/run-b/000000000001").unlink()
        assert [(repair.kind, repair.tier) for repair in ckpt.doctor(apply=True).repairs] == [("rebuild", "lustre")]


@pytest.mark.clock_numbers
def test_a_fork_of_a_name_that_was_removed_is_not_listed_as_what_was_removed(place: Path) -> None:
    """An index that a prune has left says what the number was."""
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2)
        ckpt.fork("run-b", 1)
    with ts.Checkpointer(spec, "run-b") as ckpt:
        saved(ckpt, *range(10, 16))
    with ts.Checkpointer(one_tier(place, keep={"last": 3, "every": 1000}), "run-b") as ckpt:
        (report,) = ckpt.prune().tiers
        assert report.drop
    assert names(opened(spec, "nvme"), "index/run-b/")
    remove_all(spec, "run-b")
    with ts.Checkpointer(spec, "run") as ckpt:
        made = ckpt.fork("run-b", 2)
    with ts.Checkpointer(spec, "run-b") as ckpt:
        saved(ckpt, *range(20, 26))
    with ts.Checkpointer(spec, "run-b") as ckpt:
        first, *_ = ckpt.versions()
        assert (first.id, first.step) == (made.id, 2)
