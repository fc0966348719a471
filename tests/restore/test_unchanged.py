"""Unchanged chunks: they are neither copied nor written again, and every version is still what was saved."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import alike, arena_of, faulty, names, policy, scratch, tier, unreferenced, wrapped

import tierstate as ts
from tierstate.engine.capture import capture
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault
from tierstate.tiers.testing.faulty import FaultyCall

pytestmark = pytest.mark.slow

MIB = 1 << 20


def big_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Leaves of whole chunks of 1 MiB, of some and a rest, and a small one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": 3 * MIB, "b": MIB, "c": MIB + 40_000, "d": 5000}
    return {name: torch.randint(0, 255, (n,), dtype=torch.uint8, generator=generator) for name, n in sizes.items()}


def clone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy out of the state's memory."""
    found: list[int] = []
    memmove = capture.memmove

    def counting(target: int, source: int, nbytes: int) -> Any:
        found.append(nbytes)
        return memmove(target, source, nbytes)

    monkeypatch.setattr(capture, "memmove", counting)
    return found


def settle(ckpt: ts.Checkpointer) -> None:
    """Wait until the tier queues have nothing to do: only then is it known what need not be copied."""
    # Retention follows each save in the same thread, when the save itself does not count as lag any more.
    while any(queue.waiting or queue._busy for queue in ckpt._pipeline.queues.values()):
        time.sleep(0.001)


def test_only_what_has_changed_is_copied_and_written(place: Path, copied: list[int]) -> None:
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "16MiB"})
    state = big_state()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait("nvme")
        stored = ckpt.stats().tiers["nvme"].stored
        for step in (1, 2):
            settle(ckpt)
            copied.clear()
            save = ckpt.save(state, step=step)
            save.wait("nvme")
            save.wait("host")
            assert max(copied) < MIB, "small chunks are copied, big ones not"
            assert ckpt.stats().tiers["nvme"].stored == stored
            assert ckpt.stats().tiers["host"].raw == (step + 1) * sum(map(len, state.values()))
        state["a"][MIB + 77] ^= 1
        settle(ckpt)
        copied.clear()
        ckpt.save(state, step=3).wait("nvme")
        assert [n for n in copied if n >= MIB] == [MIB]
        assert MIB <= ckpt.stats().tiers["nvme"].stored - stored < MIB + 100
        assert alike(state, ckpt.load())
        assert arena_of(ckpt).in_flight == 0
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(state, ckpt.load())


def test_a_leaf_that_grows_or_shrinks_by_chunks_is_saved_whole(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "16MiB"})
    state = big_state()
    with ts.Checkpointer(spec, "run") as ckpt:
        for step, chunks in enumerate([1, 3, 4, 2]):
            state["b"] = torch.arange(chunks * MIB // 8).view(torch.uint8)
            settle(ckpt)
            ckpt.save(state, step=step).wait("nvme")
            assert alike(state, ckpt.load(step=step))


@pytest.mark.parametrize("format", ["native", "safetensors"])
@pytest.mark.parametrize("operation", ["writer", "append", "close", "put"])
def test_nothing_is_unchanged_since_a_save_that_failed(place: Path, operation: FaultyCall, format: str) -> None:
    """What only the failed save wrote is gone with it: the next save of the same state writes that again."""
    with wrapped(Memory()) as keys:
        tiers = {"bad": {**keys, "format": format}, "nvme": tier("nvme", place)}
        rules = [{"match": "**", "tiers": ["bad"]}]
        spec = policy(tiers, chunk="1MiB", arena={"size": "96MiB"}, rules=rules, durable="nvme")
        state = big_state()
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=0).wait("bad")
            settle(ckpt)
            state["a"][MIB + 77] ^= 1
            state["d"][5] ^= 1
            faulty(keys).add(Fault(operation, 0, ts.TierFull("no room")))
            with pytest.raises(ts.TierFull):
                ckpt.save(state, step=1).wait("bad")
            faulty(keys).heal()
            settle(ckpt)
            assert unreferenced(faulty(keys).inner, "run") == set()
            ckpt.save(state, step=2).wait("bad")
        with ts.Checkpointer(spec, "run") as ckpt:
            assert alike(state, ckpt.load())
            assert ckpt.verify(deep=True).ok


def test_what_is_found_damaged_while_a_save_relies_on_it_fails_that_save(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not copied, since it was in the tier when the capture looked; when it is to be published it is not."""
    monkeypatch.setattr(Arena, "has_ready", lambda *_: False)  # so that what has changed is published first
    with wrapped(Memory()) as keys:
        tiers = {"bad": keys, "nvme": tier("nvme", place)}
        rules = [{"match": "**", "tiers": ["bad"]}]
        spec = policy(tiers, chunk="1MiB", arena={"size": "16MiB"}, rules=rules, durable="nvme")
        state = {"changed": torch.zeros(2 * MIB, dtype=torch.uint8), **big_state()}
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=0).wait("bad")
            settle(ckpt)
            inner = faulty(keys).inner
            gate = faulty(keys).shut("append")
            state["changed"] += 1
            save = ckpt.save(state, step=1)
            for pack in names(inner, "packs/"):
                inner.delete(pack)
            assert not ckpt.verify(deep=True).ok
            gate.set()
            with pytest.raises(ts.Damaged, match="found damaged meanwhile"):
                save.wait("bad")
            assert [v.step for v in ckpt.versions()] == [0]
            ckpt.save(state, step=2).wait("bad")
            assert alike(state, ckpt.load())


OPERATIONS = st.lists(
    st.tuples(
        st.sets(st.tuples(st.sampled_from("abcd"), st.integers(0, 3 * MIB), st.booleans()), max_size=3),
        st.sampled_from(["wait", "wait", "go on", "fail"]),
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=15)
@given(OPERATIONS, st.integers(1, 3))
def test_every_kept_version_is_what_was_saved(operations: list[tuple[Any, str]], last: int) -> None:
    with scratch() as place, wrapped(Memory()) as keys:
        tiers = {"bad": {**keys, "keep": {"last": last}}, "nvme": tier("nvme", place, keep={"last": last})}
        # A tier that keeps leases, and does not tell the arena so, needs room for all that it keeps.
        spec = policy(tiers, chunk="1MiB", arena={"size": "96MiB"}, durable="nvme")
        state, truth, saves = big_state(), {}, []
        with contextlib.suppress(ts.TierUnavailable), ts.Checkpointer(spec, "run") as ckpt:
            for step, (changes, then) in enumerate(operations):
                for name, at, back in changes:
                    # There and back again: what an older version has is not what the newest one has.
                    state[name][at % len(state[name])] = 0 if back else 255
                if then == "fail":
                    faulty(keys).add(Fault("append", 0, ts.TierUnavailable("gone")))
                with contextlib.suppress(ts.TierUnavailable):  # an earlier save that reached no tier is told
                    save = ckpt.save(state, step=step)
                    truth[step] = clone(state)
                    saves.append(save)
                    if then != "go on":
                        save.wait("nvme")
                faulty(keys).heal()
            for save in saves:
                with contextlib.suppress(ts.TierUnavailable):
                    save.wait("nvme")
            settle(ckpt)  # until then versions are still dropped
            good = [save.step for save in saves if save.done("nvme")]
            assert {v.step for v in ckpt.versions()} >= set(good[-last:])
            for version in ckpt.versions():
                assert alike(truth[version.step], ckpt.load(step=version.step))
            assert ckpt.verify(deep=True).ok
            assert arena_of(ckpt).in_flight == 0
        if good:
            with ts.Checkpointer(spec, "run") as ckpt:
                assert alike(truth[good[-1]], ckpt.load(step=good[-1]))


def test_a_tier_that_was_damaged_gets_the_chunk_again(place: Path) -> None:
    spec = policy({"host": tier("host", place), "nvme": tier("nvme", place)}, chunk="1MiB", arena={"size": "16MiB"})
    state = big_state()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait("nvme")
        for pack in (place / "nvme" / "packs" / "run").iterdir():
            pack.unlink()
        ckpt.verify(deep=True)
        ckpt.save(state, step=1).wait("nvme")
        (place / "nvme" / "versions" / "run" / f"{1:012d}").unlink(missing_ok=True)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert alike(state, ckpt.load())
        assert [v.step for v in ckpt.versions()][-1] == 1
