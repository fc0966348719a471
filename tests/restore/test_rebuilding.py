"""Rebuilding: records that are lost, made again of packs and what other tiers know."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, names, opened, policy, scratch, tensors, tier
from support.damage import FOLDER, STATE, objects, saved, two

import tierstate as ts
from tierstate.engine.maintain.repack import repack
from tierstate.manifest.digest import checksum
from tierstate.manifest.history.log import Log

LOSSES = st.lists(
    st.tuples(
        st.sampled_from(["nvme", "file"]), st.integers(0, 2), st.sampled_from(["delete", "flip", "cut", "empty"])
    ),
    min_size=1,
    max_size=6,
)


def lose(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes()) if path.exists() else bytearray()
    if how == "delete":
        path.unlink(missing_ok=True)
    elif how == "flip" and data:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[:50] if how == "cut" else b"")


def lose_all(place: Path, name: str, prefix: str = "versions") -> None:
    for path in objects(place, name, prefix):
        path.unlink()


@pytest.mark.slow
@pytest.mark.clock_numbers  # or a save after the newest record is lost everywhere would take its number
@settings(max_examples=10)
@given(losses=LOSSES, again=st.booleans())
@example(losses=[("nvme", 2, "delete"), ("file", 2, "delete")], again=True)
def test_whatever_records_are_lost_come_back_from_the_packs(losses: list[tuple[str, int, str]], again: bool) -> None:
    with scratch() as place:
        spec = two(place)
        truth = saved(spec)
        log = Log(opened(spec, "nvme"), "run")
        ids = {seq: log.read(seq).version.id for seq in log.seqs()}
        for name, which, how in losses:
            lose(place / FOLDER[name] / f"versions/run/{sorted(ids)[which]:012d}", how)
        with ts.Checkpointer(spec, "run") as ckpt:
            if again:  # a save comes before anybody knows
                truth.append({**truth[-1], "b": truth[-1]["b"] + 1})
                ckpt.save(truth[-1], step=3).wait("file")
            bad = {name: [v.seq for v in ckpt.versions() if name not in v.tiers] for name in FOLDER}
            for name in FOLDER:
                dry = ckpt.rebuild(name, dry_run=True)
                found = ckpt.rebuild(name)
                assert found == dry
                assert found.ok
                assert {v.seq for v in found.versions} >= set(bad[name])
                assert all(v.id == ids.get(v.seq, v.id) for v in found.versions)
                assert ckpt.rebuild(name).versions == []
            report = ckpt.verify(deep=True)
            assert report.ok, report
            assert report.versions == 2 * len(truth)
        for name in FOLDER:
            other = place / FOLDER["nvme" if name == "file" else "file"]
            aside = other.rename(place / "aside")
            with ts.Checkpointer(spec, "run") as ckpt:
                assert all(alike(was, ckpt.load(step=step)) for step, was in enumerate(truth))
            shutil.rmtree(other, ignore_errors=True)
            aside.rename(other)


def test_what_the_packs_have_in_part_is_told_and_made_only_if_that_is_said(place: Path) -> None:
    spec = two(place)
    truth = saved(spec)
    lose_all(place, "nvme")
    objects(place, "nvme", "packs")[1].unlink()
    cut = objects(place, "nvme", "packs")[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    with ts.Checkpointer(spec, "run") as ckpt:
        found = ckpt.rebuild("nvme")
        assert not found.ok
        assert [(v.seq, v.rebuilt) for v in found.versions] == [(3, False), (1, True)]
        assert found.versions[0].why == f"the packs have {found.versions[0].found} of {found.versions[0].chunks} chunks"
        assert list(found.unread) == [f"packs/run/{cut.name}"]
        part = ckpt.rebuild("nvme", partial=True)
        assert part.ok
        assert [(v.seq, v.found < v.chunks) for v in part.versions] == [(3, True)]
        assert ckpt.info(step=2).partial == ("nvme",)
        assert [bad.seq for bad in ckpt.verify(data=True).lost] == []
        assert all(alike(was, ckpt.load(step=step)) for step, was in enumerate(truth))
        with pytest.raises(ts.NotFound, match="no tier 'tape'"):
            ckpt.rebuild("tape")


def test_a_record_of_a_newer_program_is_not_lost(place: Path) -> None:
    spec = two(place)
    saved(spec, 1)
    (path,) = objects(place, "nvme", "versions")
    data = bytearray(path.read_bytes())
    data[8] = 9  # the format's number
    data[-16:] = checksum(bytes(data[:-16]))
    path.write_bytes(data)
    with ts.Checkpointer(spec, "run") as ckpt:
        found = ckpt.rebuild("nvme")
        assert not found.ok
        assert "not for this program" in found.versions[0].why
    assert path.read_bytes() == data
    assert len(objects(place, "nvme", "versions")) == 1


def test_without_any_record_the_copy_in_the_packs_says_what_a_version_was(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)})
    state = tensors(*STATE)
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            state["b"] += step % 2  # the third save writes nothing
            ckpt.save(state, step=step, metadata={"n": step}).wait()
    before = Log(opened(spec, "nvme"), "run")
    ids = [before.read(seq).version.id for seq in (1, 2)]
    lose_all(place, "nvme")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [v.id for v in ckpt.rebuild("nvme").versions] == ids[::-1]
        assert [v.id for v in ckpt.versions()] == ids
        assert ckpt.info().metadata == {"n": 1}
        assert alike(state, ckpt.load())
        assert ckpt.verify(deep=True).ok


def test_a_dropped_version_is_not_brought_back(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place, keep={"last": 2}), "file": tier("file", place)})
    truth = saved(spec, 5)  # the first pack stays, since later versions use it
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.rebuild("nvme").versions == []
        lose(objects(place, "nvme", "versions")[0], "flip")
        assert [v.seq for v in ckpt.rebuild("nvme").versions] == [4]
        lose_all(place, "nvme")
        assert [v.seq for v in ckpt.rebuild("nvme").versions] == [5, 4]
        assert alike(truth[4], ckpt.load())


def test_files_of_other_kinds_say_nothing_and_that_is_told(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place, format="safetensors"), "file": tier("file", place)})
    saved(spec, 1)
    lose(objects(place, "nvme", "versions")[0], "cut")
    with ts.Checkpointer(spec, "run") as ckpt:
        found = ckpt.rebuild("nvme")
    assert [(v.seq, v.rebuilt) for v in found.versions] == [(1, False)]
    assert [why for key, why in found.unread.items() if key.endswith(".safetensors")] != []


@settings(max_examples=15)
@given(damaged=st.lists(st.booleans(), min_size=1, max_size=4), first=st.integers(0, 2))
def test_the_log_reads_the_newest_generation_that_can_be_read(damaged: list[bool], first: int) -> None:
    with scratch() as place:
        spec = policy({"nvme": tier("nvme", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(100), step=0).wait()
        log = Log(opened(spec, "nvme"), "run")
        record = log.read(1)
        log.forget(1)
        for n, bad in enumerate(damaged, first):
            log.commit(record, n)
            if bad:
                lose(place / "nvme" / log.key(1, n), "flip")
        if all(damaged):
            with pytest.raises(ts.FormatError, match="not what was written"):
                log.read(1)
        else:
            assert log.read(1).version.id == record.version.id
        found: Any = log.look(1)
        assert (found.record is None) == all(damaged)


def test_what_was_repacked_can_be_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a version that lay in an emptied pack goes into the new one."""
    monkeypatch.setitem(repack.__kwdefaults__, "win", 0)
    with scratch() as place:
        spec = policy({"nvme": tier("nvme", place)}, rules=[{"match": "big", "keep": {"last": 1}}])
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in (1, 2, 3):
                ckpt.save({"w": torch.full((5_000,), float(step)), "big": torch.rand(200_000)}, step=step).wait()
            (report,) = ckpt.prune(grace=0).tiers
            assert report.repacked.versions == (1, 2)
            ckpt.prune(grace=0)
        for path in place.rglob("versions/run/00000000000[12]*"):
            path.unlink()
        with ts.Checkpointer(spec, "run") as ckpt:
            assert [(v.seq, v.rebuilt) for v in ckpt.rebuild("nvme", partial=True).versions] == [(2, True), (1, True)]
            for step in (1, 2):
                assert torch.equal(ckpt.load(step=step, only=["w"])["w"], torch.full((5_000,), float(step)))


def test_what_a_fork_of_a_fork_is_rebuilt_from_stays(place: Path) -> None:
    """The first run has saved the same later, in packs that no pin keeps for the last one."""

    def spec(**keys: Any) -> ts.Policy:
        return policy({name: {"type": "nvme", "path": str(place / name), **keys} for name in ("a", "b")})

    states = [{**tensors(9000, seed=step), "frozen": tensors(5000)["a"]} for step in range(6)]

    def saves(run: str, *steps: int, **keys: Any) -> None:
        with ts.Checkpointer(spec(**keys), run) as ckpt:
            for step in steps:
                ckpt.save(states[step], step=step).wait("b")

    saves("one", 1)
    for run, new in (("one", "two"), ("two", "three")):
        with ts.Checkpointer(spec(), run) as ckpt:
            ckpt.fork(new, 1)
    saves("one", 2)
    saves("three", 2)
    tier = opened(spec(), "a")
    tier.discard(names(tier, "packs/three/"))
    Log(tier, "three").forget(Log(tier, "three").seqs()[-1])
    with ts.Checkpointer(spec(), "three") as ckpt:
        assert ckpt.rebuild("a").versions == []
        assert ckpt.info(step=2).tiers == ("b",)
        assert [(repair.kind, repair.tier) for repair in ckpt.doctor(apply=True).repairs] == [("copy", "a")]
    Log(tier, "three").forget(1)
    with ts.Checkpointer(spec(), "three") as ckpt:
        assert [version.rebuilt for version in ckpt.rebuild("a").versions] == [True], "of what its pin keeps"
    saves("one", 4, 5, keep={"last": 1})
    with ts.Checkpointer(spec(keep={"last": 1}), "one") as ckpt:
        ckpt.prune(grace=0)
    with ts.Checkpointer(spec(), "three") as ckpt:
        assert ckpt.verify(data=True).problems == []
        assert alike(ckpt.load(step=2), states[2])
