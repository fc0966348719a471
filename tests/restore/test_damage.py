"""Damage: whatever is changed, cut, lost or swapped in a tier is found, read from another tier and repaired."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, faulty, opened, policy, scratch, tensors, tier, wrapped
from support.damage import FOLDER, STATE, objects, saved, touches, two
from support.equality import difference

import tierstate as ts
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

HOW = st.sampled_from(["flip", "truncate", "delete", "swap", "grow"])


def damage(path: Path, how: str, where: float, others: list[Path]) -> None:
    """Damage an object; ``where`` is a share of its length."""
    data = bytearray(path.read_bytes())
    at = min(int(where * len(data)), len(data) - 1)
    if how == "delete":
        path.unlink()
        return
    if how == "flip" and not data:
        return  # all of it has been cut off before
    if how == "flip":
        data[at] ^= 0x10
    elif how == "truncate":
        del data[at:]
    elif how == "grow":
        data += b"\0"
    else:
        data = bytearray(next((p for p in others if p != path), path).read_bytes())
    path.write_bytes(data)


def all_restore(spec: ts.Policy, truth: list[dict[str, torch.Tensor]]) -> None:
    """Every version loads, and restores in place, as it was."""
    with ts.Checkpointer(spec, "run") as ckpt:
        for step, was in enumerate(truth):
            assert alike(was, ckpt.load(step=step))
            into = {name: torch.zeros_like(t) for name, t in was.items()}
            assert ckpt.restore(into=into, step=step) is into
            assert alike(was, into)


# Falling through, and mending


@pytest.mark.slow
@given(hits=st.lists(st.tuples(st.integers(0, 9), HOW, st.floats(0, 1)), min_size=1, max_size=3), codec=st.booleans())
def test_damaged_packs_of_the_nearest_tier_are_passed_by_and_mended(hits: list[Any], codec: bool) -> None:
    with scratch() as place:
        spec = two(place, codec="small" if codec else "raw")
        truth = saved(spec)
        for which, how, where in hits:
            packs = objects(place, "nvme", "packs")
            if packs:
                damage(packs[which % len(packs)], how, where, packs)
        all_restore(spec, truth)
        with ts.Checkpointer(spec, "run") as ckpt:
            problems = ckpt.verify(data=True).problems
            # A pack that has lost its footer alone, or grown, has the wrong length, but nothing of it was lost.
            assert all(p.tier == "nvme" and not p.leaf and "are right" in p.what for p in problems)
        shutil.rmtree(place / "object")
        all_restore(spec, truth)
        with ts.Checkpointer(spec, "run") as ckpt:
            truth.append({**truth[-1], "b": truth[-1]["b"] * 2})
            ckpt.save(truth[-1], step=len(truth) - 1)
        shutil.rmtree(place / "object")
        all_restore(spec, truth)


@pytest.mark.slow
@given(which=st.integers(0, 9), how=HOW, where=st.floats(0, 1), name=st.sampled_from(["nvme", "file"]))
def test_a_damaged_record_is_passed_by_and_found(which: int, how: str, where: float, name: str) -> None:
    with scratch() as place:
        spec = two(place)
        truth = saved(spec)
        records = objects(place, name, "versions")
        damage(records[which % 3], how, where, records[1:])
        all_restore(spec, truth)
        with ts.Checkpointer(spec, "run") as ckpt:
            unread = [v.step for v in ckpt.versions() if name not in v.tiers]
            problems = ckpt.verify().problems
            assert len(unread) == (0 if records[which % 3] == records[1] and how == "swap" else 1) or how == "swap"
            assert [p.tier for p in problems] == ([] if how == "delete" else [name] * len(unread))
            # A new process must not take the damaged number again, nor build on what it cannot read.
            truth.append({**truth[-1], "d": truth[-1]["d"] - 1})
            ckpt.save(truth[-1], step=3)
        all_restore(spec, truth)


@pytest.mark.slow
@given(which=st.integers(0, 9), how=HOW, where=st.floats(0, 1), name=st.sampled_from(["nvme", "file"]))
def test_verify_finds_damage_in_any_chunk_of_any_tier(which: int, how: str, where: float, name: str) -> None:
    with scratch() as place:
        spec = two(place)
        saved(spec)
        packs = objects(place, name, "packs")
        path = packs[which % len(packs)]
        before = path.read_bytes()
        damage(path, how, where, packs)
        hit = not path.exists() or touches(spec, name, path, before)
        with ts.Checkpointer(spec, "run") as ckpt:
            report = ckpt.verify(data=True)
            assert report.ok != hit
            assert {p.tier for p in report.problems} == ({name} if hit else set())
            if not path.exists() or path.stat().st_size != len(before):
                assert not ckpt.verify().ok, "a look at lengths is enough"


def test_a_mended_tier_is_built_on_by_the_same_process_too(place):
    spec = two(place)
    truth = saved(spec, 1)
    with ts.Checkpointer(spec, "run") as ckpt:
        (pack,) = objects(place, "nvme", "packs")
        damage(pack, "flip", 0.1, [])
        assert difference(truth[0], ckpt.load()) == ""
        mends = [p for p in objects(place, "nvme", "packs") if p != pack]
        assert len(mends) == 1
        assert mends[0].stat().st_size < 6000, "only the damaged chunk is written"
        ckpt.save(truth[0], step=1).wait("file")
        # The rest of the damaged pack is not relied upon any more.
        record = Log(opened(spec, "nvme"), "run").read(2)
        assert str(pack.relative_to(place / "nvme")) not in record.layout.objects
        assert difference(truth[0], ckpt.load()) == ""
    shutil.rmtree(place / "object")
    pack.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert difference(truth[0], ckpt.load(step=1)) == ""


def test_a_tier_that_cannot_be_mended_hinders_nothing(place):
    with wrapped(Memory()) as keys:
        spec = policy({"bad": keys, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(*STATE), step=0).wait("file")
            inner = faulty(keys).inner
            (key,) = inner.list("packs/")
            inner.delete(key)
            faulty(keys).add(Fault("writer", 0, ts.AccessDenied("read-only")))
            assert difference(tensors(*STATE), ckpt.load()) == ""
            faulty(keys).heal()
            faulty(keys).add(Fault("close", 0, ts.TierFull("full")))
            assert difference(tensors(*STATE), ckpt.load()) == ""
            faulty(keys).heal()
            assert difference(tensors(*STATE), ckpt.load()) == ""
            assert ckpt.verify(deep=True).ok


@pytest.mark.parametrize(
    "error", [ts.TierUnavailable("gone"), ts.TierError("odd"), ts.AccessDenied("no"), ts.NotFound("?")]
)
def test_a_tier_that_cannot_be_read_is_passed_by(place, error):
    with wrapped(Memory()) as keys:
        spec = policy({"bad": keys, "file": tier("file", place)})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(tensors(*STATE), step=0).wait("file")
            faulty(keys).add(Fault("read", 0, error))
            assert difference(tensors(*STATE), ckpt.load()) == ""
            faulty(keys).add(Fault("list", 0, error))
            assert difference(tensors(*STATE), ckpt.load()) == ""
            assert not ckpt.verify().ok


# Nothing left to fall through to


def test_damage_in_every_tier_names_leaf_version_and_tiers(place):
    spec = two(place)
    saved(spec, 2)
    for name in FOLDER:
        shutil.rmtree(place / FOLDER[name] / "packs")
    with ts.Checkpointer(spec, "run") as ckpt:
        into = tensors(*STATE, seed=5)
        with pytest.raises(ts.Damaged) as caught:
            ckpt.restore(into=into)
        text = str(caught.value)
        assert re.search(r"leaf [a-z] of version 2 \(step 1, ", text), text
        assert "nvme: " in text
        assert "file: " in text
        assert caught.value.__notes__ == ["the given state may be overwritten in part: do not train on from it"]
        with pytest.raises(ts.Damaged) as caught:
            ckpt.load()
        assert not hasattr(caught.value, "__notes__"), "a fresh state was nobody's yet"
        into = tensors(*STATE, seed=5)
        with pytest.raises(ts.Damaged, match=r"no whole version: version 2 .*version 1 ") as caught:
            ckpt.restore(into=into, on_damage="older")
        assert len(caught.value.__notes__) == 1


def test_on_damage_older_goes_back_to_the_newest_whole_version(place):
    spec = policy({"nvme": tier("nvme", place)})
    truth = []
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(4):
            truth.append(tensors(*STATE, seed=step))
            ckpt.save(truth[-1], step=step)
    packs = objects(place, "nvme", "packs")
    damage(packs[3], "flip", 0.5, [])
    damage(packs[2], "delete", 0, [])
    records = objects(place, "nvme", "versions")
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.Damaged):
            ckpt.load()
        into = tensors(*STATE, seed=9)
        assert difference(truth[1], ckpt.restore(into=into, on_damage="older")) == ""
        assert ckpt.restored is not None
        assert ckpt.restored.step == 1
        assert difference(truth[1], ckpt.load(step=3, on_damage="older")) == ""
        records[3].write_bytes(b"not a record")
        with pytest.raises(ts.Damaged, match="version 4 is the newest, and its record cannot be read"):
            ckpt.load()
        assert difference(truth[1], ckpt.load(on_damage="older")) == ""
        assert difference(truth[0], ckpt.load(step=0)) == ""
        with pytest.raises(ts.Damaged, match="no whole version of step 3"):
            ckpt.load(step=3)


def test_an_older_version_that_does_not_fit_says_that_the_state_was_touched(place):
    spec = policy({"nvme": tier("nvme", place)})
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save({"other": torch.ones(3)}, step=0)
        ckpt.save(tensors(*STATE), step=1).wait()
        damage(objects(place, "nvme", "packs")[1], "truncate", 0.5, [])
        with pytest.raises(ts.StateMismatch) as caught:
            ckpt.restore(into=tensors(*STATE, seed=1), on_damage="older")
        assert "overwritten in part" in caught.value.__notes__[0]
