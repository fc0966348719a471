"""Tiers that are not the expected ones: not mounted, replaced, copied, or two of them in one place."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import faulty, opened, policy, tensors, wrapped
from support.equality import difference
from support.filesystems import tmpfs
from support.single_steps import resumed, save

import tierstate as ts
from tierstate.engine.maintain.adopt import adopt_tier, init_tiers
from tierstate.engine.store import identity
from tierstate.engine.store.identity import read_marker
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.format.marker import MARKER_KEY, TierMarker, named_tiers
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault


def spec(place: Path, **keys: Any) -> ts.Policy:
    """A tier of this host, and one of the site."""
    return policy(
        {
            "local": {"type": "nvme", "path": str(place / "local")},
            "site": {"type": "lustre", "path": str(place / "site"), **keys},
        },
        durable="site",
    )


def test_a_job_starts_afresh_once(place):
    assert resumed(spec(place)) is None
    assert list(place.iterdir()) == [], "looking writes nothing"
    save(spec(place), 1)
    assert resumed(spec(place)) == 1
    assert resumed(spec(place), "other") is None


def test_records_name_the_tiers_they_were_written_with(place):
    save(spec(place), 1)
    save(spec(place), 2)
    markers = {name: read_marker(opened(spec(place), name)) for name in ("local", "site")}
    assert {name: marker.tier for name, marker in markers.items() if marker} == {"local": "local", "site": "site"}
    for name in markers:
        newest = Log(opened(spec(place), name), "run").latest()
        assert newest is not None
        named = named_tiers(newest.commit)
        assert {n: t.id for n, t in named.items()} == {n: m.id for n, m in markers.items() if m}


@pytest.mark.slow
def test_what_is_not_mounted_is_expected(place):
    save(spec(place), 1)
    (place / "site").rename(place / "away")
    for _ in range(2):
        with pytest.raises(ts.WrongTier, match=r"site: tier .* is expected here.*no marker.*tierstate adopt site"):
            resumed(spec(place))
        with ts.Checkpointer(spec(place), "run") as ckpt:
            with pytest.raises(ts.WrongTier):
                ckpt.load()
            with pytest.raises(ts.WrongTier):
                ckpt.load(step=7)
            assert difference(tensors(9000, seed=1), ckpt.load(step=1)) == "", "what is named and there is given"
    assert not (place / "site").exists()


def test_nothing_is_saved_where_the_tier_is_not_and_all_of_it_later(place):
    save(spec(place), 1)
    (place / "site").rename(place / "away")
    (place / "site").mkdir()  # the mount point
    with ts.Checkpointer(spec(place), "run") as ckpt:
        made = ckpt.save(tensors(9000, seed=2), step=2)
        made.wait("local")
        with pytest.raises(ts.WrongTier):
            made.wait("site")
        assert list((place / "site").iterdir()) == []
        (place / "site").rmdir()
        (place / "away").rename(place / "site")
        ckpt.save(tensors(9000, seed=3), step=3).wait("site")
    shutil.rmtree(place / "local")
    with ts.Checkpointer(spec(place), "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [1, 2, 3], "it was owed, and brought"


def test_a_mount_that_goes_away_under_a_running_job(place):
    with ts.Checkpointer(spec(place), "run") as ckpt:
        ckpt.save(tensors(9000, seed=1), step=1).wait()
        (place / "site").rename(place / "away")
        with pytest.raises(ts.WrongTier, match="this process has used it"):
            ckpt.save(tensors(9000, seed=2), step=2).wait()
        with pytest.raises(ts.WrongTier):
            ckpt.resume(into=tensors(9000))
        assert not (place / "site").exists()
        (place / "away").rename(place / "site")
        assert ckpt.resume(into=tensors(9000)) is not None


@pytest.mark.slow
def test_what_went_away_before_a_record_named_it_stays_expected(place, monkeypatch):
    """The tier was slow, so that the first record did not wait for it; the next ones are written when it is away."""

    saved = threading.Event()

    def slow(tier: ts.Tier) -> TierMarker | None:
        if tier.name == "site":
            saved.wait(60)
        return read_marker(tier)

    monkeypatch.setattr(identity, "OTHERS_WAIT", 0.0)
    monkeypatch.setattr(identity, "read_marker", slow)
    with suppress(ts.WrongTier), ts.Checkpointer(spec(place), "run") as ckpt:
        made = ckpt.save(tensors(9000, seed=1), step=1)
        made.wait("local")
        first = next(iter(Log(opened(spec(place), "local"), "run").newest_first())).record
        assert first is not None
        assert "site" not in named_tiers(first.commit)
        saved.set()
        made.wait("site")
        (place / "site").rename(place / "away")
        with pytest.raises(ts.WrongTier):
            ckpt.resume(into=tensors(9000))
        for step in (2, 3):
            made = ckpt.save(tensors(9000, seed=step), step=step)
            made.wait("local")
            with pytest.raises(ts.WrongTier):
                made.wait("site")
    with pytest.raises(ts.WrongTier, match="records name it"):
        save(spec(place), 4)
    assert not (place / "site").exists()


def test_a_new_disk_of_a_node_is_no_error(place):
    save(spec(place), 1)
    old = read_marker(opened(spec(place), "local"))
    shutil.rmtree(place / "local")
    assert resumed(spec(place)) == 1
    save(spec(place), 2)
    new = read_marker(opened(spec(place), "local"))
    assert old is not None
    assert new is not None
    assert old.id != new.id
    assert resumed(spec(place)) == 2


@pytest.mark.root
def test_a_disk_of_a_node_that_is_not_mounted_is_one(place, tmp_path):
    keys = policy(
        {
            "local": {"type": "nvme", "path": str(tmp_path / "disk" / "ckpt")},
            "site": {"type": "lustre", "path": str(place / "site"), "every": 2},
        }
    )
    with tmpfs(tmp_path / "disk", 1 << 22):
        save(keys, 1)
        subprocess.run(["umount", tmp_path / "disk"], check=True)
        try:
            with pytest.raises(ts.WrongTier, match=r"in the file system at .*disk, not in"):
                resumed(keys)
            with ts.Checkpointer(keys, "run") as ckpt:
                made = ckpt.save(tensors(9000), step=2)
                with pytest.raises(ts.WrongTier):
                    made.wait("local")
                with pytest.raises(ts.TierUnavailable):
                    made.wait("site")
                made = ckpt.save(tensors(9000, seed=2), step=2)
                made.wait("site")
                with pytest.raises(ts.WrongTier):
                    made.wait("local")
            assert list((tmp_path / "disk").iterdir()) == []
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "disk"], check=True)
        assert resumed(keys) == 2, "a disk that is mounted and empty is a new one"


@pytest.mark.root
def test_a_single_tier_that_was_initialized_is_missed(tmp_path):
    one = policy({"disk": {"type": "nvme", "path": str(tmp_path / "disk"), "initialized": True}})
    with tmpfs(tmp_path / "disk", 1 << 22):
        with pytest.raises(ts.WrongTier, match="tierstate init"):
            resumed(one)
        with ts.Checkpointer(one, "run") as ckpt, pytest.raises(ts.WrongTier, match="initialized: true"):
            ckpt.save(tensors(9000), step=1).wait()
        (made,) = init_tiers(one)
        assert made.created
        assert not init_tiers(one)[0].created
        save(one, 1)
        subprocess.run(["umount", tmp_path / "disk"], check=True)
        try:
            with pytest.raises(ts.WrongTier):
                resumed(one)
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "disk"], check=True)


def test_another_tier_in_its_place_is_refused_until_it_is_adopted(place):
    save(spec(place), 1)
    (place / "site").rename(place / "away")
    save(policy({"site": {"type": "lustre", "path": str(place / "site")}}), 5, "stranger")
    with pytest.raises(ts.WrongTier, match="marker of another tier"):
        resumed(spec(place))
    with ts.Checkpointer(spec(place), "run") as ckpt, pytest.raises(ts.WrongTier):
        ckpt.save(tensors(9000, seed=2), step=2).wait()
    adopted = adopt_tier(spec(place), "site")
    assert not adopted.created
    assert len(adopted.replaces) == 1
    assert resumed(spec(place)) == 2, "it was saved to the local tier"
    save(spec(place), 3)
    assert resumed(spec(place)) == 3
    shutil.rmtree(place / "site")
    (place / "away").rename(place / "site")
    with pytest.raises(ts.WrongTier, match="marker of another tier"):
        resumed(spec(place))


def test_a_run_that_nothing_names_does_not_start_afresh_beside_runs_that_name_the_missing_tier(place):
    save(spec(place), 1, "other")
    (place / "site").rename(place / "away")
    with pytest.raises(ts.WrongTier):
        resumed(spec(place))
    with pytest.raises(ts.WrongTier), ts.Checkpointer(spec(place), "run") as ckpt:
        ckpt.restore(tensors(9000))
    with pytest.raises(ts.WrongTier):
        init_tiers(spec(place))
    adopt_tier(spec(place), "site")
    assert resumed(spec(place)) is None


def test_a_tier_that_cannot_be_asked_is_no_reason_to_start_afresh(place):
    with ExitStack() as held:
        local, site = held.enter_context(wrapped(Memory())), held.enter_context(wrapped(Memory()))
        with ts.Checkpointer(policy({"local": local, "site": site}, durable="site"), "run") as ckpt:
            ckpt.save(tensors(9000, seed=1), step=1).wait()
            faulty(site).add(Fault("list", 0, ts.TierUnavailable("no answer")))
            found = ckpt.resume(into=tensors(9000))
            assert found is not None
            assert found.tiers == ("local",)
            for key in list(faulty(local).inner.list("versions/")):
                faulty(local).inner.delete(key)
            with pytest.raises(ts.Unreadable, match="site cannot be asked now: no answer"):
                ckpt.resume(into=tensors(9000))
            faulty(site).heal()
            found = ckpt.resume(into=tensors(9000))
            assert found is not None
            assert (found.step, found.tiers) == (1, ("site",))


def test_a_damaged_newest_version_is_no_reason_either(place):
    save(spec(place), 1)
    for record in place.glob("*/versions/run/*"):
        record.write_bytes(b"damaged" * 100)
    with pytest.raises(ts.Damaged):
        resumed(spec(place))


def test_a_lost_marker_comes_back_with_its_id(place):
    save(spec(place), 1)
    before = read_marker(opened(spec(place), "site"))
    (place / "site" / MARKER_KEY).unlink()
    assert resumed(spec(place)) == 1
    save(spec(place), 2)
    after = read_marker(opened(spec(place), "site"))
    assert before is not None
    assert after is not None
    assert before.id == after.id


def test_a_damaged_marker_keeps_nobody_out(place, caplog):
    save(spec(place), 1)
    (place / "site" / MARKER_KEY).write_bytes(b"{")
    assert resumed(spec(place)) == 1
    assert caplog.text.count("`tierstate adopt`") == 1
    save(spec(place), 2)
    assert resumed(spec(place)) == 2
    assert adopt_tier(spec(place), "site").created
    save(spec(place), 3)
    assert resumed(spec(place)) == 3


def test_tiers_may_change_their_names(place):
    two = {"a": {"type": "lustre", "path": str(place / "x")}, "b": {"type": "lustre", "path": str(place / "y")}}
    save(policy(two), 1)
    for names in (("b", "a"), ("a", "c")):
        other = policy(dict(zip(names, two.values(), strict=True)))
        assert resumed(other) == 1
        save(other, 1)


def far_in_place_of_near(place: Path) -> ts.Policy:
    """Two file systems of the site with a version, of which one is mounted in the place of the other now."""
    sites = {name: {"type": "lustre", "path": str(place / name)} for name in ("near", "far")}
    both = policy({"local": {"type": "nvme", "path": str(place / "local")}, **sites}, durable="near")
    save(both, 1)
    (place / "near").rename(place / "away")
    (place / "far").rename(place / "near")
    return both


@pytest.mark.usefixtures("patient_records")
def test_a_tier_that_is_mounted_in_the_place_of_another_has_not_changed_its_name(place):
    """The mount point of the tier that it was is empty: what is written there lies on another disk."""
    both = far_in_place_of_near(place)
    for run in ("run", "another"):
        with suppress(ts.WrongTier), ts.Checkpointer(both, run) as ckpt:
            made = ckpt.save(tensors(9000, seed=2), step=2)
            for name in ("near", "far"):
                with pytest.raises(ts.WrongTier, match=f"{name}: tier .* is expected here"):
                    made.wait(name)
        assert not (place / "far").exists()
    (place / "near").rename(place / "far")
    (place / "away").rename(place / "near")
    save(both, 3)
    assert resumed(both) == 3


def test_what_is_adopted_in_place_of_another_tier_is_missed_in_its_own_place(place):
    both = far_in_place_of_near(place)
    assert adopt_tier(both, "near").created, "it is another tier now"
    with suppress(ts.WrongTier), ts.Checkpointer(both, "run") as ckpt:
        made = ckpt.save(tensors(9000, seed=2), step=2)
        made.wait("near")
        with pytest.raises(ts.WrongTier, match="far: tier"):
            made.wait("far")
    assert not (place / "far").exists()


def test_a_repository_without_markers_is_read_and_gets_them_with_a_save(place):
    save(spec(place), 1)
    for name in ("local", "site"):
        (place / name / MARKER_KEY).unlink()
        record = next((place / name / "versions" / "run").iterdir())
        log = Log(opened(spec(place), name), "run")
        old = log.latest()
        assert old is not None
        record.unlink()
        log.commit(type(old)(old.version, old.layout, {k: v for k, v in old.commit.items() if k != "tiers"}))
    assert resumed(spec(place)) == 1
    assert not list(place.glob(f"*/{MARKER_KEY}"))
    save(spec(place), 2)
    assert len(list(place.glob(f"*/{MARKER_KEY}"))) == 2


def test_checking_costs_nothing_once_it_is_done(place):
    with (
        wrapped(Memory()) as one,
        wrapped(Memory()) as other,
        ts.Checkpointer(policy({"a": one, "b": other}), "run") as c,
    ):
        c.save(tensors(9000, seed=1), step=1).wait("b")
        assert c.load()
        before = [type(faulty(t).calls)(faulty(t).calls) for t in (one, other)]
        seen: list[str] = []
        for t in (one, other):
            forward = faulty(t).inner.size
            faulty(t).inner.size = lambda key, forward=forward: seen.append(key) or forward(key)  # type: ignore[method-assign]
        c.save(tensors(9000, seed=2), step=2).wait("b")
        assert c.load()
        assert MARKER_KEY not in seen
        assert before[0]["put"] >= 2, "a marker and a record"


def test_a_marker_that_another_process_creates_first_is_taken(place):
    inner = Memory()
    with wrapped(inner) as one:
        theirs = TierMarker(tier="x")
        forward = inner.put

        def put(key: str, data: Any) -> None:
            if key == MARKER_KEY and not list(inner.list(MARKER_KEY)):
                forward(key, as_buffer(theirs.encode()))
            forward(key, data)

        inner.put = put  # type: ignore[method-assign]
        with ts.Checkpointer(policy({"a": one}), "run") as ckpt:
            ckpt.save(tensors(9000), step=1).wait()
            ckpt.save(tensors(9000), step=2).wait()
        assert read_marker(inner) == theirs
        newest = Log(inner, "run").latest()
        assert newest is not None
        assert named_tiers(newest.commit)["a"].id == theirs.id


def test_a_copy_of_a_disk_is_a_second_tier_once_it_is_adopted(place):
    save(spec(place), 1)
    shutil.copytree(place / "site", place / "copy")
    three = policy(
        {
            "local": {"type": "nvme", "path": str(place / "local")},
            "site": {"type": "lustre", "path": str(place / "site")},
            "copy": {"type": "lustre", "path": str(place / "copy")},
        }
    )
    with ts.Checkpointer(three, "run") as ckpt:
        made = ckpt.save(tensors(9000, seed=2), step=2)
        made.wait("local")
        for name in ("site", "copy"):
            with pytest.raises(ts.PolicyError, match="copy of the other"):
                made.wait(name)
    assert adopt_tier(three, "copy").created
    save(three, 3)
    assert resumed(three) == 3
    shutil.rmtree(place / "site")
    shutil.move(place / "copy", place / "site")  # a copy that takes the place of the original needs to be adopted too
    with pytest.raises(ts.WrongTier):
        resumed(spec(place))
    adopt_tier(spec(place), "site")
    assert resumed(spec(place)) == 3


def test_the_state_of_a_module_and_its_optimizer_resumes(place):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with ts.Checkpointer(spec(place), "run") as ckpt:
        assert ckpt.resume(into=state) is None
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        ckpt.save({**state, "step": 1}, step=1).wait()
        weight = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        found = ckpt.resume(into=state)
        assert found is not None
        assert torch.equal(model.weight, weight)
        assert state["step"] == 1


DONE_BY_HAND: dict[str, Callable[[ts.Checkpointer], object]] = {
    "copy": lambda ckpt: ckpt.copy(step=1, to="site"),
    "doctor": lambda ckpt: ckpt.doctor(apply=True),
    "tag": lambda ckpt: ckpt.tag("best", 1),
    "fork": lambda ckpt: ckpt.fork("other", 1),
    "remove": lambda ckpt: ckpt.remove(step=1),
    "prune": lambda ckpt: ckpt.prune(),
    "rebuild": lambda ckpt: ckpt.rebuild("site"),
    "verify": lambda ckpt: ckpt.verify(mend=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DONE_BY_HAND)
def test_what_is_done_by_hand_writes_nothing_where_the_tier_is_not(place, what):
    save(spec(place), 1)
    save(spec(place), 2)
    (place / "site").rename(place / "away")
    (place / "site").mkdir()  # the mount point
    with ts.Checkpointer(spec(place), "run") as ckpt, suppress(ts.TierstateError):
        DONE_BY_HAND[what](ckpt)
    assert list((place / "site").iterdir()) == []
    (place / "site").rmdir()
    (place / "away").rename(place / "site")
    with ts.Checkpointer(spec(place), "run") as ckpt:
        assert ckpt.info(step=2).tiers == ("local", "site")
        assert ckpt.verify(data=True).ok


def test_a_doctor_says_which_tier_is_not_there(place):
    save(spec(place), 1)
    (place / "site").rename(place / "away")
    (place / "site").mkdir()
    for apply in (False, True):
        with ts.Checkpointer(spec(place), "run") as ckpt:
            report = ckpt.doctor(apply=apply)
            assert not report.ok
            assert report.repairs == []
            assert "is its file system not mounted?" in report.unreachable["site"]
            assert [version.restorable for version in report.versions] == [True]
    assert adopt_tier(spec(place), "site").created
    with ts.Checkpointer(spec(place), "run") as ckpt:
        assert [repair.kind for repair in ckpt.doctor(apply=True).repairs] == ["copy"]
        assert ckpt.doctor().ok


def test_a_removal_says_where_a_version_may_stay(place):
    save(spec(place), 1)
    save(spec(place), 2)
    (place / "site").rename(place / "away")
    (place / "site").mkdir()
    with ts.Checkpointer(spec(place), "run") as ckpt:
        report = ckpt.remove(step=1)
        assert not report.ok
        assert list(report.unreachable) == ["site"]


def test_a_fork_is_not_begun_while_it_may_exist_where_the_tier_is_not(place):
    save(spec(place), 1)
    with ts.Checkpointer(spec(place), "run") as ckpt:
        ckpt.fork("other")
    (place / "site").rename(place / "away")
    shutil.rmtree(place / "local/versions/other")
    (place / "site").mkdir()
    with (
        ts.Checkpointer(spec(place), "run") as ckpt,
        pytest.raises(ts.TierstateError, match="has versions already"),
    ):
        ckpt.fork("other")
    assert not (place / "local/versions/other").exists()


def test_a_copy_names_the_tiers_of_the_policy_as_a_save_does(place):
    """So that a tier that is not mounted later is missed, also by who sees the copy alone."""
    with ts.Checkpointer(spec(place, every=100), "run") as ckpt:
        ckpt.save(tensors(9000, seed=1), step=1).wait()
        ckpt.save(tensors(9000, seed=2), step=2).wait("local")
        ckpt.copy(step=2, to="site")
    newest = Log(opened(spec(place), "site"), "run").latest()
    assert newest is not None
    assert newest.version.head.step == 2
    assert set(named_tiers(newest.commit)) == {"local", "site"}


@pytest.mark.slow
@pytest.mark.clock_numbers
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_prune_drops_nothing_of_what_is_mounted_in_the_place_of_a_tier(place, dry_run):
    """An archive of the same run, say, which keeps what this tier does not."""
    for step in (1, 2, 3):
        save(spec(place), step)
    (place / "site").rename(place / "archive")
    shutil.rmtree(place / "local")
    (place / "site").mkdir()
    for step in (4, 5):
        save(spec(place), step)
    (place / "site").rename(place / "away")
    (place / "archive").rename(place / "site")
    with ts.Checkpointer(spec(place, keep={"last": 1}), "run") as ckpt:
        local, site = ckpt.prune(dry_run=dry_run).tiers
        assert "cannot be asked" in str(local.keep)
        assert ["is expected here" in problem for problem in site.problems] == [True]
        assert (site.drop, site.packs) == ((), {})
    assert len(list((place / "site/versions/run").iterdir())) == 3
