"""Copies: a version in another tier of its policy, and in the tiers of another policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, opened, policy, scratch, tensors, tier
from support.damage import objects, saved, two
from support.equality import difference
from support.leaks import temporary
from support.state_strategies import states

import tierstate as ts
from tierstate.engine.packs.pack import PackWriter
from tierstate.manifest.errors import TierError
from tierstate.manifest.history.log import Log


def test_a_version_comes_to_a_tier_that_does_not_have_it(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place), "file": tier("file", place, codec="small", every=100)})
    truth = saved(spec, 3)
    read: list[int] = []
    with ts.Checkpointer(spec, "run") as ckpt:
        before = {v.step: v.id for v in ckpt.versions()}
        assert ckpt.info(step=1).tiers == ("nvme",)
        found = ckpt.copy(step=1, to="file", progress=read.append)
        assert (found.version.id, found.version.tiers, found.tiers) == (before[1], ("nvme", "file"), ("file",))
        assert 0 < sum(read) < 4 * 5000 + 20_000, "what the tier has by its newest record is not read"
        again = ckpt.copy(step=1, to="file", progress=read.clear)  # type: ignore[arg-type]
        assert (again.version, again.tiers) == (found.version, ())
        assert ckpt.copy(to="nvme").tiers == ()
        truth.append({**truth[-1], "a": truth[-1]["a"] + 1})
        ckpt.save(truth[-1], step=3).wait()
        assert ckpt.verify(deep=True).ok
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(truth[1], ckpt.load(step=1))
        assert alike(truth[1], ckpt.load()), "the number says which is the newest"


@pytest.mark.slow
def test_a_copy_keeps_to_rules_and_formats_and_passes_damage_by(place: Path) -> None:
    tiers = {
        "nvme": tier("nvme", place), "file": tier("file", place),
        "h5": {"type": "nvme", "path": str(place / "h5"), "format": "hdf5", "every": 9},
        "none": {"type": "nvme", "path": str(place / "none")},
    }  # fmt: skip
    rules = [{"match": "b", "tiers": ["nvme", "file"]}, {"match": "**", "tiers": ["nvme", "file", "h5"]}]
    spec = policy(tiers, rules=rules)
    state = tensors(9000, 500, 2_000_000)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait("h5")
        state["a"][3] = 5
        ckpt.save(state, step=1).wait("file")
        for pack in objects(place, "nvme", "packs"):
            pack.write_bytes(bytes(pack.stat().st_size))
        info = ckpt.copy(step=1, to="h5").version
        assert info.partial == ("h5",)
        assert [p for p in (place / "h5/packs").rglob("*.h5")]
        with pytest.raises(ts.NotFound, match="no rule"):
            ckpt.copy(step=1, to="none")
        with pytest.raises(ts.NotFound, match="no tier 'tape'; it has nvme, file, h5, none"):
            ckpt.copy(step=1, to="tape")
        for how in ({}, {"to": "h5", "into": spec}, {"to": "h5", "run": "x"}):
            with pytest.raises(ValueError, match=r"into="):
                ckpt.copy(step=1, **how)  # type: ignore[arg-type]
        record = Log(opened(spec, "h5"), "run").read(2)
        Log(opened(spec, "h5"), "run").forget(2)
        next((place / "h5").rglob("*.h5")).with_name("000000000001").touch()
        (place / "h5/versions/run/000000000002").write_bytes(b"damaged")
        with pytest.raises(ts.AlreadyExists, match="damaged"):
            ckpt.copy(step=1, to="h5")
        assert record.version.id == info.id


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate])
@given(state=states(), chunk=st.sampled_from([4096, 8192]), codec=st.sampled_from(["raw", "small"]))
def test_any_state_is_the_same_in_another_policy(state: Any, chunk: int, codec: str) -> None:
    with scratch() as place:
        spec = policy({"nvme": tier("nvme", place)}, rules=[{"match": "**", "pickle": True}])
        there = policy(
            {"host": tier("host", place), "file": tier("file", place, codec=codec, every=1000)},
            chunk=chunk,
            rules=[{"match": "**", "pickle": True}],
        )
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save({"s": state}, step=5, metadata={"loss": 1.5}).wait()
            ckpt.save({"s": state, "t": 1}, step=7).wait()
            one = ckpt.copy(step=5, into=there, run="other")
            assert (one.version.run, one.version.seq, one.version.step) == ("other", 1, 5)
            assert one.version.metadata == {"loss": 1.5}
            assert set(one.tiers) == {"host", "file"}
            newest = ckpt.copy(into=there, run="other")
            assert (newest.version.seq, set(newest.tiers)) == (2, {"host", "file"}), "whatever `every` says"
            again = ckpt.copy(step=5, into=there, run="other")
            assert (again.tiers, again.version.seq) == ((), 1)
            was = Log(opened(spec, "nvme"), "run").read(1).version
        made = Log(opened(there, "file"), "other").read(1).version
        assert [(leaf.name, leaf.spec) for leaf in made.leaves] == [(leaf.name, leaf.spec) for leaf in was.leaves]
        assert chunk != 4096 or np.array_equal(made.digests, was.digests)
        with ts.Checkpointer(spec, "run") as ckpt, ts.Checkpointer(there, "other") as other:
            assert difference(ckpt.load(step=5), other.load(version=one.version.id)) == ""


@pytest.mark.parametrize(("chunk", "into_chunk"), [(8192, 4096), (12_288, 8192), (4096, 12_288)])
def test_chunks_are_cut_anew_for_a_policy_with_another_chunk_length(place: Path, chunk: int, into_chunk: int) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk=chunk)
    there = policy({"file": tier("file", place)}, chunk=into_chunk)
    state = tensors(30_000, 100)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=1).wait()
        ckpt.copy(into=there)
    with ts.Checkpointer(there, "run") as ckpt:
        assert alike(state, ckpt.load())


def test_another_version_of_the_same_step_is_not_taken_for_the_copy(place: Path) -> None:
    spec, there = policy({"nvme": tier("nvme", place)}), policy({"file": tier("file", place)})
    state = tensors(9000, 100)
    with ts.Checkpointer(there, "run") as ckpt:
        ckpt.save(tensors(9000, 100, seed=1), step=5).wait()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=5).wait()
        assert ckpt.copy(into=there).tiers == ("file",)
        assert ckpt.copy(into=there).tiers == ()
    with ts.Checkpointer(there, "run") as ckpt:
        assert alike(state, ckpt.load())


@pytest.mark.slow
@settings(max_examples=16)
@given(
    cut=st.sampled_from([{"chunk": 8192}, {"chunk": 12_288}, {"digest": "sha256"}, {"chunk": 4096}]),
    change=st.one_of(st.none(), st.integers(0, 30_099)),
)
def test_what_is_there_is_known_by_its_bytes_however_it_is_cut(cut: dict[str, Any], change: int | None) -> None:
    """A version of the same step that differs in one byte is another one."""
    with scratch() as place:
        spec, there = policy({"nvme": tier("nvme", place)}), policy({"file": tier("file", place)}, **cut)
        state = tensors(30_000, 100)
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=1).wait()
            first = ckpt.copy(into=there)
            assert first.tiers == ("file",)
            assert (ckpt.copy(into=there).tiers, ckpt.copy(into=there).version.id) == ((), first.version.id)
        if change is not None:
            leaf, at = ("a", change) if change < 30_000 else ("b", change - 30_000)
            state[leaf].view(torch.uint8)[at] ^= 1
        shutil.rmtree(place / "nvme")
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=1).wait()
            assert ckpt.copy(into=there).tiers == (() if change is None else ("file",))
        with ts.Checkpointer(there, "run") as ckpt:
            assert len(ckpt.versions()) == (1 if change is None else 2)
            assert alike(state, ckpt.load())


def test_a_copy_into_a_policy_file_reads_from_whatever_is_whole(place: Path) -> None:
    spec = two(place)
    truth = saved(spec, 2)
    file = place / "other.yaml"
    file.write_text(f"version: 1\nchunk: 4KiB\ntiers: {{a: {{type: nvme, path: {place}/a}}}}\narena: {{size: 64KiB}}\n")
    for pack in objects(place, "nvme", "packs"):
        pack.write_bytes(bytes(pack.stat().st_size))
    read: list[int] = []
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.copy(into=file, progress=read.append)
        assert sum(read) == sum(t.nbytes for t in truth[1].values())
        for pack in objects(place, "file", "packs"):
            pack.unlink()
        with pytest.raises(ts.Damaged, match="whole in no tier"):
            ckpt.copy(step=0, into=file)
    with ts.Checkpointer(file, "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [1]
        assert alike(truth[1], ckpt.load())


def test_a_copy_into_another_policy_that_was_interrupted_goes_on(place: Path) -> None:
    """One of its tiers has the version, others not yet, by the rules with other leaves; or the tier is a new one."""
    source = policy({"nvme": tier("nvme", place)})
    state = tensors(9000, 500, 20_000)
    rules = [{"match": "b", "tiers": ["x", "z"]}, {"match": "c", "tiers": ["y"]}]

    def into(*names: str) -> ts.Policy:
        tiers = {name: {"type": "nvme", "path": str(place / name)} for name in names}
        mine = [{**rule, "tiers": [name for name in rule["tiers"] if name in names]} for rule in rules]
        return policy(tiers, rules=[rule for rule in mine if rule["tiers"]])

    with ts.Checkpointer(source, "run") as ckpt:
        ckpt.save(state, step=1).wait()
        first = ckpt.copy(into=into("x"))
        again = ckpt.copy(into=into("x", "y", "z"))
        assert (again.version.id, again.version.tiers, again.tiers) == (first.version.id, ("x", "y", "z"), ("y", "z"))
        assert ckpt.copy(into=into("x", "y", "z")).tiers == ()
    for name, leaves in (("y", ["a", "c"]), ("z", ["a", "b"])):
        with ts.Checkpointer(into(name), "run") as ckpt:
            assert alike({leaf: state[leaf] for leaf in leaves}, ckpt.load(only=leaves))
            assert ckpt.verify(data=True).problems == []


def test_a_copy_of_what_retention_has_dropped_a_part_of_says_so(place: Path) -> None:
    tiers = {name: {"type": "nvme", "path": str(place / name)} for name in ("x", "y", "z")}
    rules = [{"match": "b", "keep": {"last": 1}, "tiers": ["x", "y"]}]
    spec = policy(
        {n: {**t, "keep": {"last": 5}, "every": None if n == "x" else 9} for n, t in tiers.items()}, rules=rules
    )
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(1, 4):
            ckpt.save(tensors(9000, 500, seed=step), step=step).wait("x")
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.StateMismatch, match=r"leaf b of step 2 .*`keep` has dropped leaves of it \(b from x\)"):
            ckpt.copy(step=2, to="y")
        assert ckpt.copy(step=2, to="z").version.tiers == ("x", "z"), "its rules send no such leaf there"
        assert Log(opened(spec, "y"), "run").seqs() == [1]


def test_a_copy_that_was_dropped_or_removed_there_does_not_come_back_by_the_same_copy(place: Path) -> None:
    source = policy({"nvme": tier("nvme", place)})
    tiers = {name: {"type": "nvme", "path": str(place / name)} for name in ("x", "y", "z")}
    there = policy({**tiers, "y": {**tiers["y"], "keep": {"last": 1}}})
    with ts.Checkpointer(source, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(tensors(9000, seed=step), step=step).wait()
            ckpt.copy(into=there)
        with ts.Checkpointer(there, "run") as other:
            assert other.info(step=1).tiers == ("x", "z")
            other.remove(step=1, tier="z")
        again = ckpt.copy(step=1, into=there)
        assert (again.version.tiers, again.tiers) == (("x",), ())


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_a_tier_that_has_a_record_and_not_the_packs_gets_what_was_in_them(place: Path, into: bool, cut: bool) -> None:
    """Both policies have tiers of the same names."""
    spec = two(place)
    truth = saved(spec, 3)
    other = two(place / "other") if into else spec
    where = {"into": other} if into else {"to": "file"}
    root = place / "other" if into else place
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3) if into else ():
            ckpt.copy(step=step, **where)
        assert ckpt.copy(step=1, **where).tiers == ()
        pack = objects(root, "file", "packs")[0]  # the first version's, which the others use
        data = pack.read_bytes()
        pack.unlink()
        if cut:
            pack.write_bytes(data[:9000])
        assert ckpt.copy(step=1, **where).tiers == ("file",)
    (root / "nvme").rename(root / "away")
    with ts.Checkpointer(policy({"file": tier("file", root)}), "run") as ckpt:
        assert alike(truth[1], ckpt.load(step=1))
    (root / "away").rename(root / "nvme")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.copy(step=1, **where).tiers == (), "now it is there"


def test_what_cannot_be_written_to_such_a_tier_is_told(place: Path) -> None:
    spec = two(place)
    saved(spec, 1)
    (pack,) = objects(place, "file", "packs")
    pack.unlink()
    with ts.Checkpointer(spec, "run") as ckpt, pytest.MonkeyPatch.context() as patch:
        real = PackWriter.add

        def add(writer: PackWriter, *about: Any) -> Any:
            if writer._tier.name == "file":
                raise ts.TierFull("no room", tier="file")
            return real(writer, *about)

        patch.setattr(PackWriter, "add", add)
        with pytest.raises(TierError, match=r"file has not all of step 0, and it could not be written there: .*packs/"):
            ckpt.copy(to="file")
        for pack in objects(place, "nvme", "packs"):
            pack.unlink()
        with pytest.raises(ts.Damaged, match="whole in no tier"):
            ckpt.copy(to="file")


def test_a_copy_that_cannot_have_all_leaves_no_file_half_written(place: Path) -> None:
    """The first chunks of a pack are whole elsewhere, the others are in no tier."""
    spec = two(place)
    saved(spec, 1)
    (pack,) = objects(place, "file", "packs")
    pack.unlink()
    (pack,) = objects(place, "nvme", "packs")
    data = pack.read_bytes()
    pack.write_bytes(data[: len(data) // 2])
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.Damaged, match="whole in no tier"):
            ckpt.copy(to="file")
        assert temporary(place) == []
        assert objects(place, "file", "packs"), "what was found is kept"
