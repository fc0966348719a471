"""Deltas in whole tiers: every version that is kept comes back, whatever was dropped, lost or damaged around it."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alone, opened, policy, scratch, tier, unreferenced
from support.damage import FOLDER, objects

import tierstate as ts
from tierstate.engine.codecs import codecs
from tierstate.engine.packs.pack import read_footer
from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.format.version import Version
from tierstate.manifest.history.log import Log
from tierstate.tiers import base

State = dict[str, torch.Tensor]
LEAVES = {"a": 3000, "b": 9001, "c": 500}
"""Elements of each leaf: several chunks, one of them short, and too few for a delta."""


def state(seed: int = 0) -> State:
    """Weights in bf16, and others in fp32."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(n, generator=generator) for name, n in LEAVES.items()}
    return {**found, "b": found["b"].bfloat16()}


fewer = settings(max_examples=max(8, settings().max_examples // 5))
"""For examples that are many saves each."""


def alike(one: State, other: State) -> bool:
    """Whether two states are the same bit for bit."""
    return list(one) == list(other) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def step(now: State, name: str, share: float, seed: int) -> None:
    """Change a share of a leaf's numbers a little."""
    generator, leaf = torch.Generator().manual_seed(seed), now[name]
    hit = torch.rand(leaf.shape, generator=generator) < share
    leaf[hit] = (leaf[hit] * 1.01).to(leaf.dtype)


def history(spec: ts.Policy, count: int, share: float = 0.02) -> list[State]:
    """Save so many versions of a state that changes a little each time; what they were."""
    now, truth = state(), []
    with ts.Checkpointer(spec, "run") as ckpt:
        for i in range(count):
            ckpt.save(now, step=i)
            truth.append({name: t.clone() for name, t in now.items()})
            for name in now:
                step(now, name, share, i)
    return truth


def layouts(spec: ts.Policy, name: str) -> list[tuple[Version, Layout]]:
    """What the records of a tier say."""
    log = Log(opened(spec, name), "run")
    return [(r.version, r.layout) for r in map(log.read, log.seqs())]


def bases(spec: ts.Policy, name: str) -> int:
    """How many chunks of the newest version are deltas; checks that all bases are what they are said to be."""
    handle = opened(spec, name)
    found = 0
    for version, layout in layouts(spec, name):
        alone = {row.place[:4]: row for key in layout.objects for row in read_footer(handle, key)}
        found = 0
        for row in np.flatnonzero(layout.present).tolist():
            place, base = layout.place(row), layout.base(row)
            assert alone[place[:4]].digest == version.digests[row].tobytes()
            assert alone[place[:4]].base == (base.digest if base else b"")
            if base is not None:
                found += 1
                assert alone[base[:4]].digest == base.digest
                assert not alone[base[:4]].base, "a base is a delta itself"
                assert alone[base[:4]].nbytes == version.chunk_nbytes[row]
    return found


@pytest.mark.slow
@fewer
@given(
    moves=st.lists(
        st.tuples(st.sampled_from([*LEAVES, "none"]), st.sampled_from([0.001, 0.05, 1.0]), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    last=st.integers(1, 3),
    kind=st.sampled_from(["nvme", "file", "lustre"]),
)
def test_every_kept_version_of_a_chain_comes_back(moves: list[Any], last: int, kind: str) -> None:
    """Partial changes, other processes in between, and retention that drops the versions of the anchors."""
    with scratch() as place:
        spec = alone(kind, place, codec="delta", keep={"last": last})
        now, truth = state(), []
        ckpt = ts.Checkpointer(spec, "run")
        try:
            for i, (name, share, again) in enumerate(moves):
                if name in now:
                    step(now, name, share, i)
                ckpt.save(now, step=i).wait("only")
                truth.append({n: t.clone() for n, t in now.items()})
                if again:
                    ckpt.close()
                    ckpt = ts.Checkpointer(spec, "run")
        finally:
            ckpt.close()
        bases(spec, "only")
        assert not unreferenced(opened(spec, "only"), "run")
        with ts.Checkpointer(spec, "run") as ckpt:
            kept = [v.step for v in ckpt.versions()]
            assert kept == list(range(len(moves)))[-last:]
            assert ckpt.verify(deep=True).ok
            for i in kept:
                assert alike(truth[i], ckpt.load(step=i))
                into = {name: torch.zeros_like(t) for name, t in truth[i].items()}
                assert alike(truth[i], ckpt.restore(into=into, step=i))


def test_a_base_outlives_the_version_it_was_written_for(place: Path) -> None:
    spec = alone("nvme", place, codec="delta", keep={"last": 1})
    truth = history(spec, 4)
    assert bases(spec, "only") == 6, "all but those that are too short"
    ((_, layout),) = layouts(spec, "only")
    packs = {p.name.split("-")[0] for p in (place / "nvme" / "packs").rglob("*-*")}
    assert packs == {f"{1:012d}", f"{4:012d}"}
    assert layout.bases is not None
    assert {layout.base(row).uses for row in range(len(layout.object)) if layout.base(row)} == {3}
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(truth[3], ckpt.load())
        (info,) = ckpt.versions()
        assert info.stored["only"] == layout.stored_nbytes > info.nbytes * 0.7, "bases are counted"


def test_a_prune_leaves_packs_of_which_only_bases_are_needed(place: Path) -> None:
    truth = history(alone("nvme", place, codec="delta"), 4)
    spec = alone("nvme", place, codec="delta", keep={"last": 1})
    first, second, third, fourth = opened(spec, "only").list("packs/")
    with ts.Checkpointer(spec, "run") as ckpt:
        for gone in ([second, third], []):
            assert list(ckpt.prune(grace=0, dry_run=True).tiers[0].packs) == gone
            report = ckpt.prune(grace=0)
            assert report.ok
            assert list(report.tiers[0].packs) == gone
        ((_, layout),) = layouts(spec, "only")
        assert set(layout.objects) == {first, fourth}
        assert {layout.objects[number] for number in layout.object.tolist()} == {fourth}, "in the first one lie bases"
        assert ckpt.verify(deep=True).ok
        assert alike(truth[3], ckpt.load())


def test_an_unchanged_delta_is_not_written_again(place: Path) -> None:
    spec = alone("nvme", place, codec="delta")
    now = history(spec, 3)[-1]
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(now, step=3).wait("only")
        assert ckpt.stats().tiers["only"].stored == 0
        ckpt.save({**now, "more": torch.arange(10)}, step=4).wait("only")
        assert ckpt.stats().tiers["only"].stored == 80
    (_, then), (_, same), (_, more) = layouts(spec, "only")[2:]
    places = [then.place(row) for row in range(len(then.object))]
    assert [same.place(row) for row in range(len(same.object))] == places
    assert {more.place(row) for row in range(len(more.object))} > set(places)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(now, ckpt.load(step=3))


def test_only_the_leaves_of_a_rule_are_deltas(place: Path) -> None:
    rules = [{"match": "b", "codec": "delta"}]
    spec = policy({"nvme": tier("nvme", place, codec="small")}, rules=rules)
    truth = history(spec, 3)
    for version, layout in layouts(spec, "nvme")[1:]:
        based = {version.leaves[int(version.chunk_leaf[r])].name for r in range(len(layout.object)) if layout.base(r)}
        assert based == {"b"}
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(truth[2], ckpt.load())


def test_each_tier_has_deltas_of_its_own(place: Path) -> None:
    """Raw in the fast tier, deltas where bandwidth is scarce, and for other versions than those next to them."""
    spec = policy({"nvme": tier("nvme", place, keep={"last": 1}), "file": tier("file", place, codec="delta", every=2)})
    truth = history(spec, 7)
    assert bases(spec, "nvme") == 0
    assert bases(spec, "file") == 6
    shutil.rmtree(place / "nvme")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert [v.step for v in ckpt.versions()] == [0, 2, 4, 6]
        for i in (0, 2, 4, 6):
            assert alike(truth[i], ckpt.load(step=i))


def two(place: Path) -> ts.Policy:
    """Deltas in both of two tiers of files."""
    return policy({"nvme": tier("nvme", place, codec="delta"), "file": tier("file", place, codec="delta")})


@pytest.mark.slow
@fewer
@given(
    hits=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["flip", "cut", "delete"]), st.floats(0, 0.99)),
        min_size=1,
        max_size=3,
    )
)
def test_damaged_deltas_and_bases_are_found_passed_by_and_mended(hits: list[Any]) -> None:
    with scratch() as place:
        spec = two(place)
        truth = history(spec, 3)
        for which, how, where in hits:
            packs = objects(place, "nvme", "packs")
            path = packs[which % len(packs)]
            content = bytearray(path.read_bytes())
            path.unlink()
            if how == "flip" and content:
                content[int(where * len(content))] ^= 1
            if how != "delete":
                path.write_bytes(content[: int(where * len(content))] if how == "cut" else content)
            if not objects(place, "nvme", "packs"):
                break
        for _ in range(2):
            with ts.Checkpointer(spec, "run") as ckpt:
                for i, was in enumerate(truth):
                    assert alike(was, ckpt.load(step=i))
            # By now all that was damaged is mended: the nearest tier does without the other one.
            shutil.rmtree(place / FOLDER["file"], ignore_errors=True)
        with ts.Checkpointer(spec, "run") as ckpt:
            problems = ckpt.verify(data=True).problems
            assert all(not p.leaf and "are right" in p.what for p in problems), problems
            truth.append({name: t * 1 for name, t in truth[-1].items()})
            step(truth[-1], "a", 0.5, 3)
            ckpt.save(truth[-1], step=3).wait("nvme")
            assert alike(truth[-1], ckpt.load(step=3))


def test_a_damaged_base_is_damage_of_every_delta_and_says_so(place: Path) -> None:
    spec = alone("nvme", place, codec="delta")
    truth = history(spec, 3)
    pack = min((place / "nvme" / "packs").rglob("*-*"))
    content = bytearray(pack.read_bytes())
    content[40] ^= 1
    pack.write_bytes(content)
    with ts.Checkpointer(spec, "run") as ckpt:
        report = ckpt.verify(deep=True)
        assert {p.step for p in report.problems} == {0, 1, 2}
        assert all(str(pack.name) in p.what for p in report.problems)
        assert {p.leaf for p in report.problems} == {"a"}
        with pytest.raises(ts.Damaged, match=f"{pack.name} at byte 0, which a delta is made against: the chunk's dig"):
            ckpt.load()
        # What is saved from now on does not build on it.
        ckpt.save(truth[-1], step=3).wait("only")
        assert alike(truth[-1], ckpt.load(step=3))
    assert not any(pack.name in key for key in layouts(spec, "only")[-1][1].objects)
    pack.unlink()
    with ts.Checkpointer(spec, "run") as ckpt:
        assert {p.step for p in ckpt.verify().problems} == {0, 1, 2}
        assert alike(truth[-1], ckpt.load())


@pytest.mark.slow
def test_restoring_deltas_takes_few_chunks_of_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each that is under way, besides the slabs: see `tiers.deltas.read_chunk`."""
    size, chunks, workers = 64 << 10, 40, 8
    spec = alone("nvme", place, chunk=size, codec="delta")
    now: State = {"a": torch.randn(chunks * size // 4, generator=torch.Generator().manual_seed(0))}
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(now, step=0).wait("only")
        step(now, "a", 0.01, 0)
        ckpt.save(now, step=1).wait("only")
    assert all(layouts(spec, "only")[1][1].base(row) for row in range(chunks))
    live: list[int] = []
    peak: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        live.append(nbytes)
        peak.append(sum(live))
        found = empty_buffer(nbytes)
        weakref.finalize(found.untyped_storage(), live.remove, nbytes)
        return found

    monkeypatch.setattr(base, "empty_buffer", counted)
    monkeypatch.setattr(codecs, "empty_buffer", counted)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(now, ckpt.restore(into={"a": torch.zeros_like(now["a"])}))
    assert len(peak) >= 2 * chunks
    assert max(peak) <= 3 * workers * size
