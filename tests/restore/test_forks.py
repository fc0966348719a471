"""Forks: a new run begins with a version of another, shares its packs, and outlives it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import alike, faulty, names, opened, pins, policy, scratch, tensors, tier, wrapped

import tierstate as ts
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import AlreadyExists, NotFound, TierError, TierUnavailable
from tierstate.manifest.leases import pin, unpin
from tierstate.manifest.log import Log
from tierstate.tiers.memory import Memory
from tierstate.tiers.testing import Fault


def one_tier(place: Path, **keys: object) -> ts.Policy:
    return policy({"nvme": tier("nvme", place, **keys)})


def saved(ckpt: ts.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(tensors(9000, 4096, seed=step), step=step, metadata={"loss": step}).wait()


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


# What goes wrong


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


OPERATIONS = ["put", "list", "read", "size", "delete"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nth", range(1, 6))
def test_a_fork_that_fails_leaves_nothing(operation: str, nth: int) -> None:
    """Whichever call fails, there is a fork under a pin, or neither of them."""
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            saved(ckpt, 1, 2)
            ckpt.load()
            faulty(keys).add(Fault(operation, nth, TierUnavailable("no answer")))  # type: ignore[arg-type]
            try:
                ckpt.fork("run-b", 1)
            except (TierError, ts.Damaged):
                assert Log(inner, "run-b").seqs() == []
                assert pins(inner, "run") == {}
            else:
                assert Log(inner, "run-b").seqs() == [1]
                assert pins(inner, "run") == {1: "forked by run-b"}
            faulty(keys).heal()
            if not Log(inner, "run-b").seqs():
                ckpt.fork("run-b", 1)
        with ts.Checkpointer(spec, "run-b") as ckpt:
            assert alike(ckpt.load(), tensors(9000, 4096, seed=1))


def test_a_commit_of_which_nobody_knows_keeps_its_pin() -> None:
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            saved(ckpt, 1)
            where = faulty(keys)
            put = where.put

            def lost(key: str, data: Buffer) -> None:
                put(key, data)
                if key.startswith("versions/"):
                    where.add(Fault("size", 0, TierUnavailable("no answer")))
                    raise TierUnavailable("no answer")

            where.put = lost  # type: ignore[method-assign]
            with pytest.raises(TierError) as caught:
                ckpt.fork("run-b")
            assert "was not confirmed" in str(caught.value)
            where.heal()
        assert pins(inner, "run") == {1: "forked by run-b"}
        assert Log(inner, "run-b").seqs() == [1], "it had taken effect"


def test_a_source_that_is_dropped_meanwhile_is_noticed() -> None:
    """Between pin and commit somebody who did not see the pin drops the version: no fork is left of it."""
    inner = Memory()
    with wrapped(inner) as keys:
        spec = policy({"only": keys})
        with ts.Checkpointer(spec, "run") as ckpt:
            saved(ckpt, 1, 2)
            where = faulty(keys)
            put = where.put

            def dropped(key: str, data: Buffer) -> None:
                put(key, data)
                if key.startswith("versions/run-b/"):
                    Log(inner, "run").forget(1)

            where.put = dropped  # type: ignore[method-assign]
            with pytest.raises(TierError, match="step 1 of run 'run' was not forked"):
                ckpt.fork("run-b", 1)
        assert Log(inner, "run-b").seqs() == []
        assert pins(inner, "run") == {}


def test_a_pin_that_is_there_already_is_used_and_left(place: Path) -> None:
    """As after a fork that was interrupted before its commit."""
    spec = one_tier(place)
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        pin(opened(spec, "nvme"), "run", 1, "run-b")
        ckpt.fork("run-b")
    assert pins(opened(spec, "nvme"), "run") == {1: "forked by run-b"}


def test_what_is_no_longer_pinned_is_dropped(place: Path) -> None:
    spec = one_tier(place, keep={"last": 1})
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.fork("run-b")
        saved(ckpt, 2)
    nvme = opened(spec, "nvme")
    assert Log(nvme, "run").seqs() == [1, 2]
    unpin(nvme, "run", 1, "run-b")
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 3)
    assert Log(nvme, "run").seqs() == [3]
