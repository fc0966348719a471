"""`rm`: one version goes, what others need stays, and nothing brings it back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, faulty, names, scratch, tier, wrapped
from support.checkpointer_worlds import policy as tiers_of
from support.cli_calls import Call, state
from support.damaged_runs import Shape, make_world, whole_shapes
from support.equality import difference
from support.outcomes import tried

import tierstate as ts
from tierstate.cli.output.repairs import show_removed
from tierstate.engine.maintain.remove import RemoveReport
from tierstate.engine.packs.keys import PACKS
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import TierError
from tierstate.manifest.history.leases import READ, WHOLE_RUN, Leases
from tierstate.manifest.history.log import Log
from tierstate.manifest.history.removals import mark_removed
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

ARGUMENTS = ("-r", "gpt")


@pytest.mark.slow
def test_a_version_goes_from_all_tiers(call: Call, policy: Path) -> None:
    dry = call("rm", "-p", policy, *ARGUMENTS, "--step", "1", "--dry-run")
    assert dry.status == 0
    assert "nvme: version 1 (step 1) would be removed, with 0 packs, " in dry.out
    assert len(call("ls", "-p", policy, *ARGUMENTS, "--json").json) == 3
    found = call("rm", "-p", policy, *ARGUMENTS, "--step", "1", "--json").json
    assert (found["ok"], [t["removed"] for t in found["tiers"]]) == (True, [True, True])
    assert [t["packs"] for t in found["tiers"]] == [{}, {}], "later versions need them"
    assert [v["step"] for v in call("ls", "-p", policy, *ARGUMENTS, "--json").json] == [2, 3]
    newest = call("rm", "-p", policy, *ARGUMENTS, "--step", "2", "--dry-run")
    assert newest.status == 1
    assert "store: version 2 (step 2) stays: it is the newest version there\nstore: --force" in newest.out
    assert call("verify", "-p", policy, *ARGUMENTS, "--deep").status == 0
    forced = call("rm", "-p", policy, *ARGUMENTS, "--step", "2", "--force", "--json").json
    assert [len(t["packs"]) for t in forced["tiers"]] == [1, 2], "in the second tier nothing is left"
    again = call("rm", "-p", policy, *ARGUMENTS, "--step", "1")
    assert (again.status, "its steps: 3" in again.err) == (2, True)


@pytest.mark.slow
def test_what_must_stay_stays(call: Call, policy: Path) -> None:
    newest = call("rm", "-p", policy, *ARGUMENTS, "--step", "3")
    assert newest.status == 2
    assert "it is the newest version; say --force" in newest.err
    call("tag", "-p", policy, *ARGUMENTS, "best", "--step", "1")
    for force in ([], ["--force"]):
        tagged = call("rm", "-p", policy, *ARGUMENTS, "--step", "1", *force)
        assert (tagged.status, "it has the tag best" in tagged.err) == (2, True)
    assert call("fork", "-p", policy, *ARGUMENTS, "new", "--step", "2").status == 0
    forked = call("rm", "-p", policy, *ARGUMENTS, "--step", "2", "--force")
    assert (forked.status, "it is forked by new" in forked.err) == (2, True)
    assert len(call("ls", "-p", policy, *ARGUMENTS, "--json").json) == 3
    for wrong in ([], ["--step", "1", "--seq", "1"], ["--step", "1", "--tier", "nowhere"]):
        assert call("rm", "-p", policy, *ARGUMENTS, *wrong).status == 2
    assert call("rm", "-p", policy, *ARGUMENTS, "--step", "3", "--force").status == 0


@pytest.mark.slow
def test_from_one_tier_only(call: Call, policy: Path) -> None:
    assert call("rm", "-p", policy, *ARGUMENTS, "--step", "1", "--tier", "nvme").status == 0
    alone = call("rm", "-p", policy, *ARGUMENTS, "--step", "1", "--tier", "store")
    assert (alone.status, "no other persistent tier has all" in alone.err) == (2, True)
    for verb in (["doctor", "--apply"], ["rebuild", "nvme"]):
        assert call(verb[0], "-p", policy, *ARGUMENTS, *verb[1:]).status == 0
    assert call("ls", "-p", policy, *ARGUMENTS, "--json").json[0]["tiers"] == ["store"], "nothing brings it back"
    assert call("copy", "-p", policy, *ARGUMENTS, "--step", "1", "--to", "nvme").status == 0, "but who says so"
    assert call("ls", "-p", policy, *ARGUMENTS, "--json").json[0]["tiers"] == ["nvme", "store"]


def test_a_version_whose_record_cannot_be_read(call: Call, policy: Path) -> None:
    path = policy.parent / "nvme/versions/gpt/000000000003"
    path.write_bytes(b"?")
    assert "`tierstate doctor` may be able" in call("rm", "-p", policy, *ARGUMENTS, "--seq", "3").err
    assert call("rm", "-p", policy, *ARGUMENTS, "--seq", "3", "--force").status == 0
    assert call("ls", "-p", policy, *ARGUMENTS).status == 0
    assert call("doctor", "-p", policy, *ARGUMENTS).status == 0
    to = policy.parent / "out.pt"
    assert call("restore", "-p", policy, *ARGUMENTS, to).status == 0
    assert difference(state(2), torch.load(to, weights_only=True)) == ""


@pytest.mark.slow
def test_a_whole_run_goes(call: Call, policy: Path) -> None:
    everything = ["rm", "-p", policy, *ARGUMENTS, "--all"]
    call("tag", "-p", policy, *ARGUMENTS, "best", "--step", "1")
    refused = call(*everything)
    what = "it has 3 versions in nvme, 2 versions in store, the tags best; say --force to remove all of it"
    assert (refused.status, what in refused.err) == (2, True)
    before = sorted(policy.parent.rglob("gpt/*"))
    dry = call(*everything, "--dry-run")
    assert (dry.status, dry.out.splitlines()[0]) == (0, "nvme: 3 versions and 3 packs, 41.3 KiB, would be removed")
    assert "its tags best would be taken back" in dry.out
    assert sorted(policy.parent.rglob("gpt/*")) == before
    found = call(*everything, "--force", "--json").json
    assert (found["ok"], found["run"], found["tags"]) == (True, "gpt", ["best"])
    assert [(t["tier"], t["versions"], len(t["packs"]), t["left"]) for t in found["tiers"]] == [
        ("nvme", 3, 3, 0), ("store", 2, 2, 0)
    ]  # fmt: skip
    assert call("ls", "-p", policy, "--json").json == [{"run": "other", "tiers": ["nvme", "store"]}]
    assert {path.parent.parent.name for path in policy.parent.rglob("gpt/*")} <= {"removed", "tags"}
    for wrong in (everything, [*everything, "--force"], [*everything, "--dry-run"]):
        again = call(*wrong)
        assert (again.status, "run 'gpt' has nothing in nvme, store; the runs that there are: other" in again.err) == (
            2, True
        )  # fmt: skip
    for wrong in (["--step", "1"], ["--seq", "1"], ["--tier", "nvme"]):
        assert call(*everything, *wrong).status == 2
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.save(state(1), step=1).wait()
        assert [version.step for version in ckpt.versions()] == [1], "the name is free"
        assert ckpt.doctor(apply=True).repairs == []


@pytest.mark.slow
@pytest.mark.parametrize("away", ["nvme", "object"])
@pytest.mark.parametrize("what", [["--all"], ["--step", "2"]], ids=lambda what: what[0])
def test_a_tier_in_whose_place_another_one_lies_is_named_before_anything_goes(
    call: Call, policy: Path, away: str, what: list[str]
) -> None:
    folder, gone = policy.parent / away, policy.parent / "gone"
    told = "is not tier ", "its folder was moved; what that one has stays"
    remove = ["rm", "-p", policy, *ARGUMENTS, *what]
    clean = call(*remove, "--dry-run", "--json").json
    assert clean["replaced"] == {}
    folder.rename(gone)
    dry = call(*remove, "--dry-run")
    assert [text in dry.out for text in told] == [True, True]
    if what == ["--all"]:
        refused = call(*remove)
        assert (refused.status, *(text in refused.err for text in told)) == (2, True, True)
    found = call(*remove, "--force", "--json").json
    assert [*found["replaced"]] == [{"nvme": "nvme", "object": "store"}[away]]
    again = call(*remove, "--force")
    assert (again.status, found["ok"]) == (2, True)
    gone.rename(folder)
    there = call(*remove, "--force", "--json").json
    assert (there["ok"], there["replaced"], len(there["tiers"])) == (True, {}, 1), "what came back goes now"


@pytest.mark.slow
def test_tags_that_cannot_be_read_go_with_their_run(call: Call, policy: Path) -> None:
    for name in ("best", "good"):
        call("tag", "-p", policy, *ARGUMENTS, name)
    for path in policy.parent.rglob("tags/gpt/best@*"):
        path.write_bytes(b"?")
    for left in (["best", "good"], ["best"]):  # the second time nothing else is left of the run
        found = call("rm", "-p", policy, *ARGUMENTS, "--all", "--force", "--json").json
        assert (found["ok"], found["tags"]) == (True, left)
        assert call("rm", "-p", policy, *ARGUMENTS, "--all", "--force").status == 2
        for path in policy.parent.rglob("tags/gpt/best@*"):
            path.write_bytes(b"?")
    call("rm", "-p", policy, *ARGUMENTS, "--all", "--force")
    with ts.Checkpointer(policy, "gpt") as ckpt:
        ckpt.save(state(1), step=1).wait()
        assert ckpt.prune().ok, "a run of that name is pruned"


@pytest.mark.slow
def test_a_run_that_is_needed_stays_whole(call: Call, policy: Path) -> None:
    everything = ["rm", "-p", policy, "--all", "--force", "-r"]
    assert call("fork", "-p", policy, *ARGUMENTS, "new", "--step", "2").status == 0
    forked = call(*everything, "gpt")
    assert (forked.status, "run 'gpt' was not removed: nvme: version 2 is forked by new" in forked.err) == (2, True)
    dry = call(*everything, "gpt", "--dry-run")
    assert (dry.status, "nvme: run gpt stays: version 2 is forked by new" in dry.out) == (1, True)
    assert len(call("ls", "-p", policy, *ARGUMENTS, "--json").json) == 3
    assert call(*everything, "new").status == 0
    assert call("prune", "-p", policy, *ARGUMENTS, "--grace", "0").status == 0, "lets its version go"
    with ts.Checkpointer(policy, "gpt") as ckpt:
        tier_run = ckpt._tier_runs[0]
        leases = Leases(tier_run.tier, "gpt")
        reading = leases.take(3, READ, tier_run.log.read(3).commit["id"])
        assert f"version 3 is {READ} by" in call(*everything, "gpt").err
        leases.release(reading)
        repairing = leases.take(WHOLE_RUN, "doctor")
        assert "nvme: it is repaired by " in call(*everything, "gpt").err
        leases.release(repairing)
    assert call(*everything, "gpt").status == 0


def test_a_run_that_this_process_saves_stays() -> None:
    free = threading.Event()

    class Slow(Memory):
        def put(self, key: str, data: Buffer) -> None:
            if key.startswith("versions/"):
                free.wait(60)
            super().put(key, data)

    with wrapped(Slow()) as keys, ts.Checkpointer(tiers_of({"only": keys}), "gpt") as ckpt:
        saving = ckpt.save({"a": torch.ones(3)}, step=1)
        with pytest.raises(ts.TierstateError, match="only: this process has saves to it under way"):
            ckpt.remove_run(force=True)
        free.set()
        saving.wait()
        assert ckpt.remove_run(force=True).ok
        assert ckpt.versions() == []


def test_a_version_that_this_process_still_saves_to_a_tier_stays_unless_forced(place: Path) -> None:
    """It would be in that tier afterwards, though it was removed."""
    tiers = {"near": tier("nvme", place)}
    with wrapped(Memory()) as keys, ts.Checkpointer(tiers_of({**tiers, "far": keys}), "gpt") as ckpt:
        ckpt.save({"a": torch.zeros(3)}, step=0).wait("far")  # with the marker of the tier
        gate = faulty(keys).shut("put")
        saves = [ckpt.save({"a": torch.full((3,), float(step))}, step=step) for step in (1, 2)]
        for save in saves:
            save.wait("near")
        for name in (None, "near"):
            with pytest.raises(ts.TierstateError, match="it is still being saved to far, and will be there"):
                ckpt.remove(step=1, tier=name)
        gate.set()
        for save in saves:
            save.wait("far")
        assert [t.tier for t in ckpt.remove(step=1).tiers] == ["near", "far"]
        assert [version.step for version in ckpt.versions()] == [0, 2]


@pytest.mark.slow
def test_what_saves_and_damage_have_left_goes_with_a_run(call: Call, policy: Path) -> None:
    """A record that cannot be read, packs of a save that was killed, and those of a removal that was killed."""
    nvme = policy.parent / "nvme"
    (nvme / "versions/gpt/000000000002").write_bytes(b"?")
    killed, removed = (nvme / f"packs/gpt/{seq:012d}-0-0-0123456789ab" for seq in (9, 1))
    for path in (killed, removed):
        path.write_bytes(b"x" * 4096)
    found = call("rm", "-p", policy, *ARGUMENTS, "--all", "--force")
    assert found.status == 0
    assert "nvme: 1 pack that no version names may be of a save under way, and stay" in found.out
    assert sorted(nvme.rglob("packs/gpt/*")) == [killed]
    assert call("prune", "-p", policy, *ARGUMENTS, "--grace", "0").status == 0
    assert not list(nvme.rglob("packs/gpt/*"))


@pytest.mark.slow
def test_a_tier_that_is_away_may_keep_a_run(call: Call, policy: Path) -> None:
    versions = policy.parent / "nvme/versions"
    versions.rename(policy.parent / "elsewhere")
    versions.symlink_to(policy.parent / "elsewhere")  # which the tier refuses to list
    call("tag", "-p", policy, *ARGUMENTS, "best", "--step", "1")
    found = call("rm", "-p", policy, *ARGUMENTS, "--all", "--force")
    assert found.status == 1
    assert "store: 2 versions and 2 packs" in found.out
    assert "nvme cannot be asked, and run gpt may stay there: nvme: " in found.out
    versions.unlink()
    (policy.parent / "elsewhere").rename(versions)
    there = call("ls", "-p", policy, *ARGUMENTS, "--json").json
    assert [(version["step"], version["tiers"]) for version in there] == [(step, ["nvme"]) for step in (1, 2, 3)]
    assert call("rm", "-p", policy, *ARGUMENTS, "--all", "--force").status == 0
    assert call("ls", "-p", policy, "--json").json == [{"run": "other", "tiers": ["nvme", "store"]}]


def keeping(keep: str) -> str:
    return f"version: 1\ndurable: a\ntiers:\n  a: {{type: nvme, path: %s, keep: {keep}}}\n"


@pytest.mark.parametrize(
    ("keep", "left", "gone"),
    [
        ("{last: 2}", [3, 4], 3),
        ("{every: 2}", [1, 2, 4], 2),
        ("{best: {metric: loss, mode: max, count: 2}}", [2, 4], 2),
    ],
)
def test_what_retention_had_dropped_stays_dropped(tmp_path: Path, keep: str, left: list[int], gone: int) -> None:
    """It was killed before it could delete the packs: each has a copy of its version's tables."""
    everything, some = (ts.Policy.parse(keeping(terms) % (tmp_path / "a")) for terms in ("{all: true}", keep))
    state = {"a": torch.zeros(3 << 10), "b": torch.zeros(3 << 10)}
    with ts.Checkpointer(everything, "gpt") as ckpt:
        for step, loss in ((1, 1.0), (2, 9.0), (3, 2.0), (4, 5.0)):
            state["a"].fill_(step)
            ckpt.save(state, step=step, metadata={"loss": loss}).wait()
    with ts.Checkpointer(some, "gpt") as ckpt:
        (plan,) = ckpt.prune(dry_run=True).tiers
        versions = {version.step: version.seq for version in ckpt.versions()}
        assert set(plan.keep) == {versions[step] for step in left}
    for seq in plan.drop:
        next((tmp_path / "a/versions/gpt").glob(f"{seq:012d}*")).unlink()
    with ts.Checkpointer(some, "gpt") as ckpt:
        assert ckpt.remove(step=gone).ok
        rest = [step for step in left if step != gone]
        assert [ckpt.rebuild("a").versions, ckpt.doctor(apply=True).repairs] == [[], []]
        assert [version.step for version in ckpt.versions()] == rest
        # What is lost comes back, also what is older than what was removed.
        next((tmp_path / "a/versions/gpt").glob(f"{ckpt.versions()[0].seq:012d}*")).unlink()
        assert [repair.kind for repair in ckpt.doctor(apply=True).repairs] == ["rebuild"]
        assert [version.step for version in ckpt.versions()] == rest


@pytest.mark.slow
@given(whole_shapes, st.integers(0, 9), st.booleans())
def test_all_others_are_as_they_were(shape: Shape, number: int, forced: bool) -> None:
    with scratch() as place:
        world = make_world(shape, place)
        kept = set()  # retention has dropped the others
        for name in world.runs():
            with ts.Checkpointer(world.spec, name) as ckpt:
                kept |= {(name, version.id) for version in ckpt.versions()}
        run, id = sorted(kept)[number % len(kept)]
        with ts.Checkpointer(world.spec, run) as ckpt:
            try:
                gone = ckpt.remove(version=id, force=forced).ok
            except ts.TierstateError:
                gone = False
        for key, truth in world.truth.items():
            with ts.Checkpointer(world.spec, key[0]) as ckpt:
                there = {version.id for version in ckpt.versions()}
                assert (key[1] in there) == (key in kept and not (gone and key == (run, id)))
                assert key[1] not in there or alike(ckpt.load(version=key[1]), truth)
                report = ckpt.doctor(apply=True)
                assert report.ok
                # With `every`, the version after a removed one may be due on a tier.
                assert {repair.kind for repair in report.repairs} <= {"copy"}, "a removed version is not taken for lost"
                assert {version.id for version in ckpt.versions()} == there
                assert ckpt.verify(deep=True).ok
                assert ckpt.prune(grace=0).ok


def test_a_version_that_was_removed_unread_and_copied_back_is_as_any_other(tmp_path: Path) -> None:
    tiers = "".join(f"  {name}: {{type: nvme, path: {tmp_path / name}}}\n" for name in "ab")
    with ts.Checkpointer(ts.Policy.parse(f"version: 1\ntiers:\n{tiers}"), "gpt") as ckpt:
        for step in (1, 2):
            ckpt.save({"a": torch.full((3 << 10,), step)}, step=step).wait("b")
        seq = ckpt.info(step=1).seq
        for name in "ab":
            record = tmp_path / name / f"versions/gpt/{seq:012d}"
            record.write_bytes(b"?")
        assert ckpt.remove(seq=seq, tier="b", force=True).ok
        assert [(repair.kind, repair.tier) for repair in ckpt.doctor(apply=True).repairs] == [("rebuild", "a")]
        assert ckpt.copy(step=1, to="b").tiers == ("b",)
        record.unlink()
        assert [repair.kind for repair in ckpt.doctor(apply=True).repairs] == ["rebuild"]
        assert ckpt.info(step=1).tiers == ("a", "b")


def saved(ckpt: ts.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save({"a": torch.full((3 << 10,), step)}, step=step).wait()


def test_another_version_of_its_number_stays(tmp_path: Path) -> None:
    """Each process saw one of the tiers alone."""
    a, b = ({name: tier("nvme", tmp_path / name)} for name in "ab")
    for keys, steps in ((a, (1, 2)), (b, (11, 12))):
        with ts.Checkpointer(tiers_of(keys), "gpt") as ckpt:
            saved(ckpt, *steps)
    with ts.Checkpointer(tiers_of(a | b), "gpt") as ckpt:
        first, other, *_ = sorted(ckpt.versions(), key=lambda version: version.step)[::2]
        assert first.seq == other.seq
        assert [found.tier for found in ckpt.remove(step=1, force=True).tiers] == ["a"]
        assert sorted(version.step for version in ckpt.versions()) == [2, 11, 12]
        second = ckpt.info(step=2)
        assert ckpt.info(step=12).seq == second.seq
        with pytest.raises(ts.NotFound, match="is not in b"):
            ckpt.remove(step=2, tier="b", force=True)
        assert ckpt.remove(seq=second.seq, tier="a", force=True).id == second.id, "the one that this tier has"
        assert sorted(version.step for version in ckpt.versions()) == [11, 12]


class Full(Memory):
    """A tier that takes no objects but while it has at most so many packs, records or tags."""

    packs = records = tags = 1 << 20

    def put(self, key: str, data: Buffer) -> None:
        has = {PACKS: self.packs, "versions/": self.records, "tags/": self.tags}
        if any(len(names(self, prefix)) > most for prefix, most in has.items()):
            raise ts.TierFull(f"{self.name}: no room for {key}", tier=self.name)
        super().put(key, data)


@pytest.mark.parametrize(("packs", "records", "enough"), [(9, 2, True), (2, 9, True), (1, 9, False)])
def test_no_room_is_needed_to_make_some(
    packs: int, records: int, enough: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = Full()
    with wrapped(inner) as keys, ts.Checkpointer(tiers_of({"only": keys}), "gpt") as ckpt:
        saved(ckpt, 1, 2, 3)
        inner.packs, inner.records = packs, records
        report = ckpt.remove(step=1)
        (found,) = report.tiers
        assert (found.removed, len(found.packs), not found.error) == (True, 1, enough)
        assert len(names(inner, PACKS)) == 2
        assert len(names(inner, "removed/")) == enough
        show_removed(report, False, False)
        said = capsys.readouterr().out
        assert "only: version 1 (step 1) was removed, with 1 pack" in said
        assert ("but there is still no room for the mark" in said) == (not enough)
        assert "stays" not in said


@pytest.mark.parametrize("nth", range(10))
def test_a_tier_that_does_not_answer_for_a_moment_is_told(nth: int) -> None:
    inner = Memory()
    with wrapped(inner) as keys, ts.Checkpointer(tiers_of({"only": keys}), "gpt") as ckpt:
        saved(ckpt, 1, 2, 3)
        faulty(keys).add(Fault("list", nth, ts.TierUnavailable("no answer")))
        done: list[RemoveReport] = []
        if (error := tried(lambda: done.append(ckpt.remove(step=1)))) is not None:
            assert "no answer" in str(error)
            return
        (found,) = done[0].tiers
        assert (found.removed, found.error) in [(True, ""), (False, "no answer"), (True, "no answer")]
        assert found.removed == (Log(inner, "gpt").seqs() == [2, 3])


def test_no_room_is_needed_to_take_a_tag_back() -> None:
    """It keeps its version, so that a full tier would keep both."""
    inner = Full()
    with wrapped(inner) as keys, ts.Checkpointer(tiers_of({"only": keys}), "gpt") as ckpt:
        saved(ckpt, 1, 2, 3)
        for name in ("best", "other"):
            ckpt.tag(name, 1)
        inner.tags = 1
        with pytest.raises(TierError, match="no room for tags/"):
            ckpt.tag("best", 2)
        assert ckpt.tags()["best"].seq == ckpt.info(step=1).seq, "what is moved stays where it was"
        ckpt.untag("best")
        ckpt.untag("other")
        assert ckpt.tags() == {}
        assert ckpt.remove(step=1).ok


def test_marks_of_removed_versions_are_read_several_at_a_time() -> None:
    """Where each takes long to come, they come together; in the order of the versions."""
    together = threading.Barrier(3, timeout=30)

    class Far(Memory):
        def get_within(self, key: str, limit: int, what: str) -> Buffer:
            together.wait()
            return super().get_within(key, limit, what)

    far = Far()
    for seq in range(1, 7):
        mark_removed(far, "run", seq, f"{seq:x}")
    assert [one.entry.seq for one in TierRun(far, "run").removals()] == [1, 2, 3, 4, 5, 6]
    assert [one.entry.seq for one in TierRun(far, "run").removals({2, 4, 5})] == [2, 4, 5]
