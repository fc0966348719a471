"""Tags over several tiers: the last word counts, whichever tiers were away when it was said."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, names, policy, scratch, tensors, tier

import tierstate as ts
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions import tags as tags_module
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import AlreadyExists, FormatError, NotFound, TierError, TierUnavailable, Unreadable
from tierstate.manifest.history.tags import MAX_TAG_NUMBER, TaggedVersion, TagReader, TagTarget, write_tag
from tierstate.tiers.base import Traits
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault, Faulty

NAMES = ("best", "last-good", "x")


class Lasting(Faulty):
    """Memory that says it lasts."""

    def __init__(self, name: str) -> None:
        super().__init__(Memory())
        self.name = name

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, persistent=True)


@contextmanager
def away(*tiers: Lasting) -> Iterator[None]:
    for one in tiers:
        for operation in ("list", "put", "read", "delete", "size"):
            one.add(Fault(operation, 0, TierUnavailable(f"{one.name} is away")))
    try:
        yield
    finally:
        for one in tiers:
            one.heal()


@pytest.fixture
def three() -> list[Lasting]:
    return [Lasting(name) for name in "abc"]


def tags(tiers: list[Lasting], ticks: Iterator[int] | None = None) -> Tags:
    """Another process's view; its clock goes on by a second each time that it is asked."""
    clock = itertools.count(1000) if ticks is None else ticks
    return Tags([TierRun(one, "run") for one in tiers], lambda: float(next(clock)))


steps = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.none() | st.builds(TagTarget, st.integers(1, 9), st.just("ff")),
        st.sets(st.integers(0, 2)),
    ),
    max_size=12,
)


@given(steps)
def test_the_last_word_counts(said: list[tuple[str, TagTarget | None, set[int]]]) -> None:
    """Any names given, given anew and taken back, with any tiers away: with all back it is as was said last."""
    tiers = [Lasting(name) for name in "abc"]
    ticks, model = itertools.count(1000), dict[str, TagTarget]()
    for name, tag, gone in said:
        with away(*(tiers[i] for i in gone)):
            if len(gone) == 3:
                with pytest.raises(TierError, match="no tier took the tag"):
                    tags(tiers, ticks).give(name, tag)
                continue
            tags(tiers, ticks).give(name, tag)
        model.pop(name, None)
        if tag is not None:
            model[name] = tag
        assert tags(tiers).current() == dict(sorted(model.items()))
    # One more word said to all, and every tier knows every name by itself: what retention asks.
    tags(tiers, ticks).give("all", TagTarget(1, "ff"))
    for one in tiers:
        there = {name: seq for seq, names in TagReader(one, "run").by_version().items() for name in names}
        assert there == {**{name: tag.seq for name, tag in model.items()}, "all": 1}
        told = {name for name, _, gone in said if len(gone) < 3}
        assert len(list(one.list("tags/"))) == len(told) + 1, "one object for each name"


def test_only_the_newest_number_of_each_name_is_left(three: list[Lasting]) -> None:
    ours = tags(three)
    for seq in range(1, 6):
        ours.give("best", TagTarget(seq, "ff"))
    for one in three:
        assert len(list(one.list("tags/"))) == 1
    ours.give("best", None)
    assert ours.current() == {}
    for one in three:
        assert len(list(one.list("tags/"))) == 1, "that it was taken back must be known to tiers that come back"


def test_tiers_that_do_not_take_it_are_told(three: list[Lasting], caplog: pytest.LogCaptureFixture) -> None:
    with away(three[1]):
        tags(three).give("best", TagTarget(1, "ff"))
    assert "b: tag 'best' is not up to date there: b is away" in caplog.text


def test_writers_that_race_agree(three: list[Lasting]) -> None:
    """Each gives the name to its own version, all at once, with a clock that stands still; all tiers agree on one."""
    start, errors = threading.Barrier(4), list[BaseException]()

    def give(seq: int) -> None:
        try:
            start.wait()
            tags(three, itertools.repeat(0)).give("best", TagTarget(seq, "ff"))
        except AlreadyExists:
            pass  # the others were always faster
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=give, args=(seq,)) for seq in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = tags(three).current()["best"]
    assert found.seq in range(1, 5)
    assert tags(three[::-1]).current()["best"] == found


def test_a_lost_answer_is_no_race(three: list[Lasting]) -> None:
    three[0].add(Fault("put", 1, AlreadyExists("by the first try"), after=True))
    tags(three).give("best", TagTarget(1, "ff"))
    for one in three:
        assert len(list(one.list("tags/"))) == 1


def test_a_tag_that_cannot_be_read_is_told_and_can_be_given_again(
    three: list[Lasting], caplog: pytest.LogCaptureFixture
) -> None:
    ours = tags(three)
    ours.give("best", TagTarget(1, "ff"))
    for one in three[:2]:
        (key,) = one.list("tags/")
        one.delete(key)
        one.put(key, as_buffer(b"junk"))
    assert ours.resolve("best") == TaggedVersion("best", 1, "ff"), "the third tier has it"
    three[2].delete(key)
    assert ours.current() == {}
    assert caplog.text.count("tag 'best' of run") == 1
    with pytest.raises(FormatError, match="give or delete the tag again"):
        ours.resolve("best")
    with away(three[2]), pytest.raises(Unreadable, match=r"has no tag 'last'; .*c cannot be asked: c is away"):
        ours.resolve("last")
    ours.give("best", TagTarget(2, "ff"))
    assert ours.current() == {"best": TagTarget(2, "ff")}


# Through a Checkpointer


@pytest.fixture
def spec(place: Path) -> ts.Policy:
    return policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place), "host": tier("host", place)})


def saved(ckpt: ts.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(tensors(9000, seed=step), step=step).wait("lustre")


def test_a_version_is_found_by_its_name(spec: ts.Policy) -> None:
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2, 3)
        assert ckpt.tag("best", 2).tags == ("best",)
        assert ckpt.tag("newest").step == 3
        ckpt.tag("good", version=ckpt.info(step=2).id[:10])
        assert [v.tags for v in ckpt.versions()] == [(), ("best", "good"), ("newest",)]
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(ckpt.load(tag="best"), tensors(9000, seed=2))
        state = tensors(9000)
        assert alike(ckpt.restore(state, tag="best"), tensors(9000, seed=2))
        assert ckpt.info(tag="best").tags == ("best", "good")
        assert [leaf.name for leaf in ckpt.leaves(tag="best")][-1] == "a"
        assert {name: v.step for name, v in ckpt.tags().items() if not isinstance(v, TagTarget)} == {
            "best": 2, "good": 2, "newest": 3,
        }  # fmt: skip
        ckpt.tag("best", 3)
        assert alike(ckpt.load(tag="best"), tensors(9000, seed=3))
        ckpt.untag("best")
        with pytest.raises(NotFound, match="no tag 'best'; known tags: good, newest"):
            ckpt.load(tag="best")
        with pytest.raises(NotFound, match="no tag 'best'"):
            ckpt.untag("best")
    with ts.Checkpointer(spec, "empty") as ckpt, pytest.raises(NotFound, match="known tags: there are none"):
        ckpt.load(tag="best")


@pytest.mark.slow
@settings(max_examples=max(8, settings().max_examples // 4))
@given(st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_a_name_is_of_one_version_whatever_others_have_its_number(one: int, two: int, turned: bool) -> None:
    """Two processes that each saw one tier alone have used the same numbers: every version is found by its own name."""
    with scratch() as place:
        tiers = {"nvme": tier("nvme", place), "lustre": tier("lustre", place)}
        step = 0
        for name, count in (("nvme", one), ("lustre", two)):
            with ts.Checkpointer(policy({name: tiers[name]}), "run") as ckpt:
                for _ in range(count):
                    ckpt.save(tensors(9000, seed=step), step=step).wait()
                    step += 1
        both = policy(dict(reversed(tiers.items())) if turned else tiers)
        with ts.Checkpointer(both, "run") as ckpt:
            versions = {v.step: v for v in ckpt.versions()}
            assert [versions[i].seq for i in range(step)] == [*range(1, one + 1), *range(1, two + 1)]
            for i, version in versions.items():
                ckpt.tag(f"step{i}", version=version.id)
            for i, version in versions.items():
                assert alike(ckpt.load(tag=f"step{i}"), tensors(9000, seed=i))
                assert ckpt.restored is not None
                assert ckpt.restored.id == version.id
                assert alike(ckpt.restore(tensors(9000, seed=99), tag=f"step{i}"), tensors(9000, seed=i))
                found = ckpt.info(tag=f"step{i}")
                assert (found.id, found.tags) == (version.id, (f"step{i}",))


def test_a_name_is_not_that_of_a_later_version_with_its_number(spec: ts.Policy, place: Path) -> None:
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2)
        ckpt.tag("best", 2)
    for name in ("nvme", "lustre"):
        (place / name / "versions/run/000000000002").unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 3)
        assert ckpt.info(step=3).seq == 2
        for find in (ckpt.load, ckpt.info):
            with pytest.raises(NotFound, match="which is not there any more"):
                find(tag="best")
        assert ckpt.info(step=3).tags == ()


def test_what_is_wrong_with_a_name_is_told(spec: ts.Policy) -> None:
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1)
        ckpt.tag("best")
        with pytest.raises(ValueError, match="cannot be a tag"):
            ckpt.tag("a/b")
        with pytest.raises(NotFound, match="no version with step 9"):
            ckpt.tag("best", 9)
        with pytest.raises(ValueError, match="give no step and no id beside it"):
            ckpt.load(tag="best", step=1)


def test_the_name_of_a_version_that_is_gone(spec: ts.Policy, place: Path) -> None:
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2)
        was = ckpt.tag("best", 1)
    for name in ("nvme", "lustre"):
        (place / name / "versions/run/000000000001").unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.tags() == {"best": TagTarget(1, was.id)}
        with pytest.raises(
            NotFound, match=f"tag 'best': it names version 1 .{was.id[:12]}., which is not there any more"
        ):
            ckpt.load(tag="best")


def test_a_named_version_that_is_damaged_leads_back_to_older_ones(spec: ts.Policy, place: Path) -> None:
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2, 3)
        ckpt.tag("best", 2)
    for name in ("nvme", "lustre"):
        for pack in (place / name / "packs/run").glob("000000000002-*"):
            pack.write_bytes(bytes(pack.stat().st_size))
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.Damaged):
            ckpt.load(tag="best")
        assert alike(ckpt.load(tag="best", on_damage="older"), tensors(9000, seed=1))


def test_versions_with_names_are_found_without_reading_the_newer_ones(spec: ts.Policy, place: Path) -> None:
    with ts.Checkpointer(spec, "run") as ckpt:
        saved(ckpt, 1, 2)
        ckpt.tag("best", 1)
    for name in ("nvme", "lustre"):
        record = place / name / "versions/run/000000000002"
        record.write_bytes(b"junk")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(ckpt.load(tag="best"), tensors(9000, seed=1))


def test_a_tier_that_is_away_is_no_reason_not_to_name(spec: ts.Policy, place: Path) -> None:
    with ExitStack() as stack:
        ckpt = stack.enter_context(ts.Checkpointer(spec, "run"))
        saved(ckpt, 1)
        (place / "lustre").rename(place / "gone")
        (place / "lustre").write_text("a file in place of the folder")
        ckpt.tag("best")
        (place / "lustre").unlink()
        (place / "gone").rename(place / "lustre")
        assert list(ckpt.tags()) == ["best"]


# Versions that are dropped while they are named


@pytest.mark.parametrize("before", [None, 1], ids=["new", "given before"])
def test_a_version_that_is_dropped_while_it_is_named_gets_no_tag(place: Path, before: int | None) -> None:
    """Who drops it has looked at the tags before: the tag comes too late, and that is told."""
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt, pytest.MonkeyPatch.context() as patch:
        for step in (1, 2, 3):
            ckpt.save(tensors(9000, seed=step), step=step).wait()
        if before is not None:
            ckpt.tag("good", before)
        patch.setattr(tags_module, "write_tag", dropping(ckpt, 2))
        with pytest.raises(NotFound, match=r"version 2 \(step 2\) of run 'run' was dropped while it was named 'good'"):
            ckpt.tag("good", 2)
        now = ckpt.tags()
        assert {name: found.step for name, found in now.items() if isinstance(found, ts.VersionInfo)} == (
            {} if before is None else {"good": before}
        )
        assert len(now) == (before is not None)


def dropping(ckpt: ts.Checkpointer, seq: int) -> Callable[..., None]:
    """Writes tags; the version goes from the first tier just after."""

    def write(*args: Any) -> None:
        write_tag(*args)
        ckpt._tier_runs[0].log.forget(seq)

    return write


def test_a_version_that_one_of_its_tiers_drops_meanwhile_keeps_its_tag(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place), "lustre": tier("lustre", place)})
    with ts.Checkpointer(spec, "run") as ckpt, pytest.MonkeyPatch.context() as patch:
        ckpt.save(tensors(9000), step=1).wait("lustre")
        patch.setattr(tags_module, "write_tag", dropping(ckpt, 1))
        ckpt.tag("good", 1)
        assert ckpt.info(tag="good").step == 1


# Numbers


@given(
    used=st.lists(
        st.integers(0, 10**18 - 1) | st.integers(MAX_TAG_NUMBER - 2, MAX_TAG_NUMBER + 2), max_size=4, unique=True
    ),
    tag=st.none() | st.builds(TagTarget, st.integers(1, 9), st.just("new")),
)
def test_whatever_numbers_are_there_a_tag_that_was_given_counts_or_it_is_told(
    used: list[int], tag: TagTarget | None
) -> None:
    tier = Lasting("a")
    for number in used:
        tier.put(f"tags/run/best@{number:06d}", as_buffer(b'{"seq": 7, "id": "old"}'))
    before = names(tier, "tags/")
    counted = max((n for n in used if n <= MAX_TAG_NUMBER), default=0)
    assert tags([tier]).current() == ({"best": TagTarget(7, "old")} if [n for n in used if n <= MAX_TAG_NUMBER] else {})
    if counted == MAX_TAG_NUMBER:
        with pytest.raises(TierError, match="has the highest number there is; delete its objects and give it again"):
            tags([tier]).give("best", tag)
        assert names(tier, "tags/") == before, "nothing was changed"
        return
    tags([tier]).give("best", tag)
    assert tags([tier]).current() == ({} if tag is None else {"best": tag})
    assert TagReader(tier, "run").by_version() == ({} if tag is None else {tag.seq: ("best",)})


def test_a_number_that_is_too_high_is_told(three: list[Lasting], caplog: pytest.LogCaptureFixture) -> None:
    three[0].put("tags/run/best@" + "9" * 18, as_buffer(b'{"seq": 7, "id": "ff"}'))
    assert tags(three).current() == {}
    assert f"a: tags/run/best@{'9' * 18}: a tag's number is {MAX_TAG_NUMBER} at most, so this is none" in caplog.text


def test_a_tag_that_was_copied_over_another_one_names_nothing_and_verify_says_so(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in (1, 2):
            ckpt.save({"w": step}, step=step).wait()
        ckpt.tag("best", step=1)
        ckpt.tag("last", step=2)
        assert ckpt.verify().ok
        folder = place / "nvme/tags/run"
        best, last = sorted(folder.iterdir())
        best.write_bytes(last.read_bytes())
        with pytest.raises(ts.FormatError, match="written as tag 'last' of run 'run'"):
            ckpt.load(tag="best")
        assert ckpt.load(tag="last") == {"w": 2}
        assert ["written as tag 'last'" in problem.what for problem in ckpt.verify().problems] == [True]
        ckpt.tag("best", step=1)
        assert ckpt.load(tag="best") == {"w": 1}
        assert ckpt.verify().ok
