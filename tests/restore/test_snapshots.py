"""Snapshots and rollback: a state is captured within a device's memory at once, and comes back from there; on the host,
where all of it but the streams is the same.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import memmove
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.checkpointer_worlds import (
    alike,
    arena_of,
    engine_threads,
    gpu_of,
    policy,
    scratch,
    tensors,
    tier,
    unreferenced,
)
from support.equality import difference
from support.mutate_state import flip
from support.outcomes import until
from support.state_strategies import states

import tierstate as ts
from tierstate.engine.capture import capture
from tierstate.engine.restore import restore
from tierstate.manifest.errors import CaptureError, Damaged, TierError
from tierstate.manifest.format.leaf import Spec
from tierstate.tiers.base import Range
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.block_sums import SUM_BLOCK
from tierstate.tiers.memory.gpu import DeviceObject, Gpu

SIZES = (30_000, 500, 8192, 60)


def ring(place: Path, keep: int = 2, capacity: str | None = None, **keys: Any) -> ts.Policy:
    """A policy of a gpu tier on the host, before one of files."""
    gpu = {"type": "gpu", "device": "cpu", "keep": {"last": keep}} | ({"capacity": capacity} if capacity else {})
    return policy({"gpu": gpu, "nvme": tier("nvme", place, **keys)})


def packs(ckpt: ts.Checkpointer) -> list[str]:
    """Keys of snapshots that the gpu tier holds."""
    return [key for key in gpu_of(ckpt).list("packs/run/") if isinstance(gpu_of(ckpt)._objects[key], DeviceObject)]


class Gate:
    """Holds back the host's capture: no slab is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        acquire = Arena.acquire

        def gated(arena: Arena, *args: Any, **keys: Any) -> Any:
            if threading.current_thread().name == "tierstate-capture":
                assert self.open.wait(60)
            return acquire(arena, *args, **keys)

        monkeypatch.setattr(Arena, "acquire", gated)
        monkeypatch.setattr(Arena, "try_acquire", lambda _: None)


@contextmanager
def no_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads nothing of a pack by way of the host."""

    def refused(tier: Gpu, key: str, ranges: list[Range]) -> None:
        if key.startswith("packs/"):
            raise TierError("nothing may be read")
        read(tier, key, ranges)

    read = Gpu.read
    with monkeypatch.context() as patch:
        patch.setattr(Gpu, "read", refused)
        patch.setattr(restore.Fetch, "_one", lambda *_: pytest.fail("something was read by way of the host"))
        yield


@settings(max_examples=25)
@given(state=states())
def test_versions_are_the_state_at_the_call_whatever_happens_to_it_right_after(state: Any) -> None:
    with scratch() as place:
        with ts.Checkpointer(ring(place, keep=4), "run") as ckpt:
            saves = []
            for step in range(3):
                saves.append(ckpt.save(state, step=step))
                saves[-1].wait_captured()
                flip(state)
            for save in saves:
                save.wait("gpu")
                save.wait()
            assert difference(state, ckpt.load(step=1)) == ""
            flip(state)
            assert difference(state, ckpt.load(step=0)) == ""
            assert difference(state, ckpt.load(step=2)) == ""
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []


def test_save_returns_before_the_host_has_read_anything(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, state, truth = Gate(monkeypatch), tensors(*SIZES), []
    with ts.Checkpointer(ring(place), "run") as ckpt:
        saves = []
        for step in range(3):
            truth.append(copy.deepcopy(state))
            saves.append(ckpt.save({**state, "step": step}, step=step))
            saves[-1].wait_captured(timeout=0)
            assert not saves[-1].done("gpu")
            for tensor in state.values():
                tensor.mul_(-2)
        gate.open.set()
        for step, save in enumerate(saves):
            save.wait()
            save.wait("gpu")
            loaded = ckpt.load(step=step)
            assert loaded.pop("step") == step
            assert alike(loaded, truth[step])


def test_the_copy_is_what_the_tier_keeps_and_nothing_is_written_to_it(place: Path) -> None:
    state = tensors(*SIZES)
    with ts.Checkpointer(ring(place, capacity="1MiB"), "run") as ckpt:
        ckpt.save(state, step=1).wait("gpu")
        (key,) = packs(ckpt)
        assert [k for k in gpu_of(ckpt).list("packs/")] == [key]
        nbytes = sum(SIZES)
        assert ckpt.stats().tiers["gpu"].stored == nbytes
        assert ckpt.stats().tiers["gpu"].raw == nbytes
        assert gpu_of(ckpt).used < 2 * SUM_BLOCK


@pytest.mark.slow
def test_the_ring_keeps_the_newest_versions_within_its_capacity(place: Path) -> None:
    state, truth = tensors(100_000, 300), {}
    with ts.Checkpointer(ring(place, keep=3, capacity="420KiB"), "run") as ckpt:
        for step in range(12):
            state["a"][step] = step
            truth[step] = copy.deepcopy(state)
            save = ckpt.save(state, step=step)
            save.wait("gpu")
            save.wait()
            assert gpu_of(ckpt).used <= 420 << 10
        assert [info.step for info in ckpt.versions() if "gpu" in info.tiers] == [9, 10, 11]
        assert len(packs(ckpt)) == 3
        assert unreferenced(gpu_of(ckpt), "run") == set()
        for step in (9, 11, 10, 4):
            ckpt.restore(state, step=step)
            assert alike(state, truth[step])
        assert ckpt.verify(deep=True).ok


def test_a_slow_tier_does_not_hold_on_to_the_ring(place: Path) -> None:
    """What has yet to go on is read from the tier of files: the ring turns."""
    spec = policy(
        {
            "gpu": {"type": "gpu", "device": "cpu", "keep": {"last": 1}},
            "nvme": tier("nvme", place),
            "file": tier("file", place),
        }
    )
    state = tensors(*SIZES)
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(5):
            state["a"] += 1
            ckpt.save(state, step=step).wait("gpu")
        assert [info.step for info in ckpt.versions() if "gpu" in info.tiers] == [4]
    with ts.Checkpointer(policy({"file": tier("file", place)}), "run") as ckpt:
        assert len(ckpt.versions()) == 5
        assert alike(ckpt.load(), state)


def test_a_state_that_does_not_fit_is_saved_by_way_of_the_host_and_that_is_told(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tensors(100_000, 300)
    with ts.Checkpointer(ring(place, capacity="100KiB"), "run") as ckpt:
        save = ckpt.save(state, step=7)
        save.wait()
        with pytest.raises(ts.TierFull, match=r"gpu: .* of the capacity of 100KiB are in use"):
            save.wait("gpu")
        assert alike(ckpt.load(), state)
        assert gpu_of(ckpt).used == 0
    assert "step 7 is captured by way of the host, and not within gpu: gpu: packs/run/" in caplog.text


def test_two_saves_under_way_at_once_share_the_ring_as_far_as_it_goes(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one finds no room, since the first is still being read: it waits for its turn, and arrives."""
    gate, state = Gate(monkeypatch), tensors(100_000, 300)
    with ts.Checkpointer(ring(place, keep=1, capacity="300KiB"), "run") as ckpt:
        for step in range(2):
            ckpt.save(state, step=step).wait_captured(timeout=0)
            state["a"] += 1
        truth = copy.deepcopy(state)

        def let_go() -> None:
            until(lambda: "step 2 is captured by way of the host" in caplog.text)
            gate.open.set()

        threading.Thread(target=let_go).start()
        save = ckpt.save(state, step=2)
        assert gate.open.is_set(), "it is captured by way of the host, after those before it"
        state["a"] += 1
        save.wait()
        assert alike(ckpt.load(step=2), truth)
        save = ckpt.save(state, step=3)
        save.wait("gpu")
        assert alike(ckpt.load(), state)


def test_a_rollback_reads_nothing_by_way_of_the_host(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, odd = tensors(40_000, 300, 8192), torch.arange(12_000.0).view(100, 120)
    state |= {"odd": odd.t()[::2], "empty": torch.zeros(0)}
    with ts.Checkpointer(ring(place), "run") as ckpt:
        truth = {}
        for step in range(2):
            truth[step] = copy.deepcopy(state)
            ckpt.save(state, step=step).wait("gpu")
            flip({**state, "odd": odd})
        with no_host(monkeypatch):
            for step in (1, 0, 1):
                ckpt.restore(state, step=step)
                assert difference(truth[step], state) == ""
            assert difference(truth[0], ckpt.load(step=0)) == ""
            assert difference({"b": truth[0]["b"]}, ckpt.load(step=0, only=["b"])) == ""
        assert ckpt.restored is not None
        assert ckpt.restored.step == 0


@pytest.mark.slow
def test_values_and_modules_come_back_from_the_ring_too(place: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(4)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        for step in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            state = {"model": model, "optimizer": optimizer, "rng": generator, "step": step, "note": "x" * step}
            truth = copy.deepcopy((model.state_dict(), optimizer.state_dict(), generator.get_state()))
            ckpt.save(state, step=step).wait("gpu")
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        torch.randn(3, generator=generator)
        again = ckpt.restore({**state, "step": 0, "note": ""})
        assert difference(truth, (model.state_dict(), optimizer.state_dict(), generator.get_state())) == ""
        assert (again["step"], again["note"]) == (2, "xx")


def test_memory_that_has_changed_is_not_restored_but_read_elsewhere_and_mended(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tensors(200_000, 300)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        truth = copy.deepcopy(state)
        save = ckpt.save(state, step=1)
        save.wait()
        save.wait("gpu")
        held = gpu_of(ckpt)._objects[packs(ckpt)[0]]
        held.pieces[0].buffer[100_000] ^= 1
        flip(state)
        with caplog.at_level(logging.WARNING, "tierstate"):
            ckpt.restore(state)
        assert alike(state, truth)
        assert "chunks are not what was copied there; they are read by way of the host" in caplog.text
        assert "gpu: 1 damaged chunks were mended" in caplog.text


def test_damage_that_no_tier_can_make_good_is_told(place: Path) -> None:
    state = tensors(200_000, 300)
    spec = ring(place, every=100)
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait()
        truth = copy.deepcopy(state)
        state["a"] += 1
        ckpt.save(state, step=1).wait("gpu")
        gpu_of(ckpt)._objects[packs(ckpt)[-1]].pieces[0].buffer[5] ^= 128
        with pytest.raises(Damaged, match=r"leaf a of version 2 .* is whole in no tier that has a record of it: gpu: "):
            ckpt.restore(state)
        ckpt.restore(state, on_damage="older")
        assert alike(state, truth)


def test_leaves_that_rules_keep_from_the_ring_are_captured_as_ever(place: Path) -> None:
    spec = policy(
        {"gpu": {"type": "gpu", "device": "cpu", "keep": {"last": 2}}, "nvme": tier("nvme", place)},
        rules=[{"match": "b", "tiers": ["nvme"]}, {"match": "c", "codec": "fast"}],
    )
    state, truth = tensors(30_000, 20_000, 40_000, 10), {}
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(3):
            truth[step] = copy.deepcopy(state)
            save = ckpt.save(state, step=step)
            save.wait_captured()
            flip(state)
        save.wait("gpu")
        save.wait()
        assert save.errors() == {}
        for step, was in truth.items():
            ckpt.restore(state, step=step)
            assert alike(state, was)
        (info,) = [i for i in ckpt.versions() if i.step == 2]
        assert (info.tiers, info.partial) == (("gpu", "nvme"), ("gpu",))
        assert len(packs(ckpt)) == 2


def test_what_is_not_copied_is_captured_first_and_the_copy_when_save_has_returned(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = policy(
        {"gpu": {"type": "gpu", "device": "cpu"}, "nvme": tier("nvme", place)},
        rules=[{"match": "b", "tiers": ["nvme"]}],
    )
    state, opened = tensors(30_000, 20_000), threading.Event()
    live = range(state["b"].data_ptr(), state["b"].data_ptr() + 20_000)

    def gated(target: int, source: int, nbytes: int) -> Any:
        assert source in live or opened.wait(60)
        return memmove(target, source, nbytes)

    monkeypatch.setattr(capture, "memmove", gated)
    with ts.Checkpointer(spec, "run") as ckpt:
        save = ckpt.save(state, step=1)
        save.wait_captured(timeout=0)
        assert not save.done("gpu")
        flip(state)
        opened.set()
        save.wait()
        loaded = ckpt.load()
        flip(state)
        assert alike(loaded, state)


def test_a_guarded_step_does_not_wait_for_the_host(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, model = Gate(monkeypatch), torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        ckpt.guard(optimizer)
        truth = copy.deepcopy(model.state_dict())
        save = ckpt.save({"model": model, "optimizer": optimizer}, step=1)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        assert not save.done("gpu")
        gate.open.set()
        save.wait()
        assert difference(truth, ckpt.load()["model"]) == ""


class Odd:
    """A value whose provider fails when its bytes are asked for."""

    def __state_provider__(self) -> ts.Provider:
        return OddProvider(self)


class OddProvider(ts.Provider):
    kind = "odd-snapshot"

    def __init__(self, value: Odd) -> None:
        pass

    @property
    def spec(self) -> Any:
        return Spec("odd-snapshot", shape=(100,))

    def chunks(self, size: int) -> Any:
        raise RuntimeError("no bytes today")

    @classmethod
    def fresh(cls, spec: Any, device: Any = None) -> Any:
        return cls(Odd())

    def load(self, start: int, data: Any) -> None:
        raise NotImplementedError

    def done(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_memory_of_a_device_is_free_as_soon_as_the_tier_frees_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for Python to collect reference cycles: a device may be full before that."""
    state, made, reserve = tensors(*SIZES), [], Gpu.reserve

    def noted(tier: Gpu, nbytes: int, key: str) -> Any:
        memory = reserve(tier, nbytes, key)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(Gpu, "reserve", noted)
    monkeypatch.setattr(Gpu, "give_back", lambda tier, memory: tier._gauge.give_back(memory.numel()))
    with ts.Checkpointer(ring(place), "run") as ckpt:
        for step in range(4):
            save = ckpt.save(state, step=step)
            save.wait("gpu")
            save.wait()
        del save
        assert [ref() is not None for ref in made] == [False, False, True, True]
    assert all(ref() is None for ref in made)


def test_what_cannot_be_read_fails_the_save_as_ever_and_keeps_no_memory(place: Path) -> None:
    state = tensors(*SIZES)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        with pytest.raises(CaptureError, match="leaf odd: its provider failed: RuntimeError"):
            ckpt.save({**state, "odd": Odd()}, step=1)
        assert [len(m) for m in gpu_of(ckpt)._spare] == [gpu_of(ckpt).used]
        ckpt.save(state, step=2).wait("gpu")
        assert alike(ckpt.load(), state)


def test_an_interrupted_save_keeps_no_memory_and_the_next_one_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tensors(*SIZES)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with ts.Checkpointer(ring(place), "run") as ckpt:
        for name in ("_copy", "_rows", "_from"):
            with monkeypatch.context() as patch:
                patch.setattr(f"tierstate.engine.capture.snapshot.{name}", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ckpt.save(state, step=1)
        save = ckpt.save(state, step=2)
        save.wait("gpu")
        save.wait()
        (info,) = ckpt.versions()
        assert (info.step, len(packs(ckpt))) == (2, 1)
        assert gpu_of(ckpt).used < 4 * SUM_BLOCK
        assert arena_of(ckpt).in_flight == 0


def test_a_tier_that_refuses_the_record_gives_the_copy_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, put = tensors(*SIZES), Gpu.put

    def full(tier: Gpu, key: str, data: Any) -> None:
        if key.startswith("versions/"):
            raise ts.TierFull("no room for a record")
        put(tier, key, data)

    with ts.Checkpointer(ring(place), "run") as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(Gpu, "put", full)
            save = ckpt.save(state, step=1)
            with pytest.raises(ts.TierFull, match="no room for a record"):
                save.wait("gpu")
            save.wait()
        assert list(gpu_of(ckpt).list("")) == []
        ckpt.save(state, step=2).wait("gpu")
        assert len(packs(ckpt)) == 1
        assert alike(ckpt.load(), state)


def test_a_capture_that_fails_after_save_has_returned_is_told_by_every_tier(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tensors(*SIZES)
    with ts.Checkpointer(ring(place), "run") as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "acquire", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "memory fell out")))
            save = ckpt.save(state, step=1)
            save.wait_captured(timeout=0)
            for name in ("gpu", "nvme"):
                with pytest.raises(CaptureError, match="memory fell out"):
                    save.wait(name)
        assert all(stats.healthy for stats in ckpt.stats().tiers.values())
        ckpt.save(state, step=2).wait("gpu")
        assert alike(ckpt.load(), state)
        assert len(packs(ckpt)) == 1


def test_with_a_host_tier_and_one_of_files_each_has_its_own_ring(place: Path) -> None:
    spec = policy(
        {
            "gpu": {"type": "gpu", "device": "cpu", "keep": {"last": 1}},
            "host": {"type": "host", "keep": {"last": 2}},
            "nvme": tier("nvme", place, keep={"last": 3}),
        }
    )
    state, truth = tensors(*SIZES), {}
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(5):
            state["abcd"[step % 4]] += 1
            truth[step] = copy.deepcopy(state)
            save = ckpt.save(state, step=step)
            for name in spec.tiers:
                save.wait(name.name)
        # The tiers retire after they have committed.
        ckpt._pipeline.close()
        assert {i.step: i.tiers for i in ckpt.versions()} == {
            2: ("nvme",),
            3: ("host", "nvme"),
            4: ("gpu", "host", "nvme"),
        }
        for step in (2, 3, 4):
            flip(state)
            ckpt.restore(state, step=step)
            assert alike(state, truth[step])


def test_a_snapshot_is_dropped_by_close_even_when_tiers_lag(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, state = Gate(monkeypatch), tensors(*SIZES)
    ckpt = ts.Checkpointer(ring(place), "run")
    ckpt.save(state, step=1)
    with pytest.raises(ts.TierUnavailable, match="step 1 to gpu, step 1 to nvme"):
        ckpt.close(timeout=0.01)
    gate.open.set()
    until(lambda: engine_threads() == [])
    assert gpu_of(ckpt).used == 0
