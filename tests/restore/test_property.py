"""The properties of the whole: what was saved comes back bit for bit, and what did not change is not written again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import ELSEWHERE, KINDS, alike, alone, names, opened, policy, scratch, tensors, tier
from support.equality import difference
from support.mutate_state import flip
from support.state_strategies import Point, scrambled, states

import tierstate as ts
from tierstate.manifest.history.log import Log

CHUNKS = st.sampled_from([4096, 4112, 8192, 65536])
CODECS = st.sampled_from(["raw", "fast", "small", "delta", "auto"])
DIGESTS = st.sampled_from(["xxh3-128", "blake3"])


@st.composite
def larger(draw: st.DrawFn) -> Any:
    """Any state, beside tensors long enough to be cut into many chunks: random, of one value, and smooth."""
    sizes = draw(st.lists(st.integers(0, 20_000), min_size=1, max_size=2))
    makers = [lambda n, g: torch.randn(n // 4, generator=g), lambda n, _: torch.ones(n), lambda n, _: torch.arange(n)]
    made = [draw(st.sampled_from(makers))(n, torch.Generator().manual_seed(draw(st.integers(0, 9)))) for n in sizes]
    return {"any": draw(states()), "big": made, "view": made[0][1::3], "tied": made[-1]}


ANY = st.one_of(states(), larger())


def reopened(kind: str, spec: ts.Policy, ckpt: ts.Checkpointer) -> Iterator[ts.Checkpointer]:
    """The Checkpointer itself, and, where the tier outlives it, a new one."""
    yield ckpt
    if kind not in ELSEWHERE:
        with ts.Checkpointer(spec, "run") as fresh:
            yield fresh


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(state=ANY, chunk=CHUNKS, codec=CODECS, digest=DIGESTS)
@settings(max_examples=max(10, settings().max_examples // 2))
def test_any_state_comes_back_from_any_tier(kind: str, state: Any, chunk: int, codec: str, digest: str) -> None:
    with scratch() as place:
        spec = alone(kind, place, chunk=chunk, digest=digest, codec=codec)
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=1).wait("only")
            for reader in reopened(kind, spec, ckpt):
                assert difference(state, reader.load()) == ""
                into = scrambled(state)
                out = reader.restore(into=into)
                assert difference(state, out) == ""
                if type(state) is dict:
                    assert out is into
                assert reader.verify(deep=True).ok


@given(state=ANY, chunk=CHUNKS, kind=st.sampled_from(KINDS))
def test_what_changes_after_save_returned_is_not_in_the_version(state: Any, chunk: int, kind: str) -> None:
    with scratch() as place:
        spec = alone(kind, place, chunk=chunk)
        with ts.Checkpointer(spec, "run") as ckpt:
            save = ckpt.save(state, step=1)
            flip(state)
            save.wait("only")
            flip(state)
            assert difference(state, ckpt.load()) == ""
            event(f"bytes: {ckpt.info().nbytes > 0}")


@pytest.mark.slow
@given(state=ANY, chunk=CHUNKS, codec=CODECS, kind=st.sampled_from(KINDS))
def test_an_unchanged_state_is_not_written_again(state: Any, chunk: int, codec: str, kind: str) -> None:
    with scratch() as place:
        spec = alone(kind, place, chunk=chunk, codec=codec)
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=1).wait("only")
            handle = ckpt._tier_runs[0].tier
            packs, stored = names(handle, "packs/"), ckpt.stats().tiers["only"].stored
            ckpt.save(state, step=2).wait("only")
            for reader in reopened(kind, spec, ckpt):
                reader.save(state, step=3).wait("only")
                assert reader.stats().tiers["only"].stored == (stored if reader is ckpt else 0)
                assert names(handle, "packs/") == packs
                assert difference(state, reader.load(step=3)) == ""


@given(
    sizes=st.lists(st.integers(1, 40_000).map(lambda n: 4 * n), min_size=1, max_size=6),
    which=st.integers(0, 5),
    at=st.floats(0, 1, exclude_max=True),
    chunk=CHUNKS,
)
def test_only_the_chunk_that_changed_is_written(sizes: list[int], which: int, at: float, chunk: int) -> None:
    with scratch() as place:
        spec = alone("nvme", place, chunk=chunk)
        state = tensors(*sizes)
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=1).wait("only")
            before = ckpt.stats().tiers["only"].stored
            leaf = state[chr(97 + which % len(sizes))]
            index = int(at * leaf.numel())
            leaf[index] += 1.0
            ckpt.save(state, step=2).wait("only")
            written = ckpt.stats().tiers["only"].stored - before
            start = index * 4 // chunk * chunk
            assert written == min(chunk, leaf.nbytes - start)
            assert [d.change for d in ckpt.diff(1, 2)].count("changed") == 1
            assert difference(state, ckpt.load()) == ""


def test_only_the_leaf_that_changed_is_written_and_its_bytes_are_what_lies_in_the_new_pack(place) -> None:
    spec = alone("nvme", place)
    state = tensors(10_000, 12_000, 400)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=1).wait("only")
        state["b"] += 1.0
        ckpt.save(state, step=2).wait("only")
        log = Log(opened(spec, "only"), "run")
        first, second = log.read(1).layout, log.read(2).layout
        new = set(second.objects) - set(first.objects)
        (key,) = new
        rows = [row for row in range(len(second.object)) if second.place(row).object == key]
        assert {log.read(2).version.leaves[log.read(2).version.chunk_leaf[row]].name for row in rows} == {"b"}
        assert opened(spec, "only").get(key)[:12_000].numpy().tobytes() == state["b"].numpy().tobytes()
        assert ckpt.stats().tiers["only"].stored == 22_400 + 12_000


def test_ties_and_equal_chunks_are_written_once(place) -> None:
    weight = torch.randn(5000)
    state = {"one": weight, "again": weight, "part": weight[10:20], "equal": weight.clone(), "zeros": torch.zeros(8192)}
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        ckpt.save(state, step=1).wait("only")
        assert ckpt.stats().tiers["only"].stored == 20_000 + 4096
        out = ckpt.load()
        assert out["again"].data_ptr() == out["one"].data_ptr()
        assert out["equal"].data_ptr() != out["one"].data_ptr()
        assert difference(state, out) == ""


@pytest.mark.slow
@given(
    history=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=6),
    chunks=st.lists(CHUNKS, min_size=2, max_size=6),
    kinds=st.lists(st.sampled_from(["nvme", "file", "lustre"]), min_size=1, max_size=3, unique=True),
)
def test_any_history_of_saves_restores_every_version(
    history: list[tuple[int, int]], chunks: list[int], kinds: list[str]
) -> None:
    """Leaves change, chunk lengths change from one process to the next, and tiers lag: every version is as it was."""
    with scratch() as place:
        state, truth = tensors(10_000, 8192, 100, 20_000), []
        tiers = {kind: tier(kind, place, codec="auto") for kind in kinds}
        for i, (leaf, seed) in enumerate(history):
            state[chr(97 + leaf)].copy_(tensors(*[t.nbytes for t in state.values()], seed=seed)[chr(97 + leaf)])
            truth.append({name: t.clone() for name, t in state.items()})
            chunk = chunks[i % len(chunks)]
            with ts.Checkpointer(policy(tiers, chunk=chunk, arena={"size": 4 * chunk}), "run") as ckpt:
                ckpt.save(state, step=i)
        with ts.Checkpointer(policy(tiers), "run") as ckpt:
            assert [v.tiers for v in ckpt.versions()] == [tuple(kinds)] * len(history)
            assert ckpt.verify(deep=True).ok
            for i, was in enumerate(truth):
                assert alike(was, ckpt.load(step=i))


def test_a_point_of_a_state_is_one(place) -> None:
    """Guards the guard: a difference would be seen."""
    with ts.Checkpointer(alone("nvme", place), "run") as ckpt:
        ckpt.save({"p": Point(torch.ones(3), 1)}, step=1).wait("only")
        assert difference({"p": Point(torch.ones(3), 2)}, ckpt.load()) != ""
        assert difference({"p": Point(torch.ones(3, dtype=torch.float64), 1)}, ckpt.load()) != ""
