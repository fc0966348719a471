"""Codecs in whole saves: what is encoded beside the writes comes back, whatever fails, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import (
    arena_of,
    engine_threads,
    faulty,
    opened,
    policy,
    scratch,
    tensors,
    tier,
    wrapped,
)

import tierstate as ts
from tierstate.engine.codecs import codecs
from tierstate.engine.publish import encode as encode_module
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.format.layout import Layout
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

pytestmark = pytest.mark.slow

CHUNK, SMALL_ARENA = 256 << 10, {"size": "1MiB"}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights, twins among them, what does not compress, and small leaves."""
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(1 << 20, generator=generator).bfloat16()
    noise = torch.randint(0, 256, (700_001,), dtype=torch.uint8, generator=generator)
    small = torch.randn(500, generator=generator)
    return {"w": big, "twin": big.clone(), "m": big.float(), "noise": noise, "zero": torch.zeros(300_000), "b": small}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two such states are alike bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


def layout_of(spec: ts.Policy, name: str, seq: int = 1) -> Layout:
    """Where a version lies in a tier."""
    where = opened(spec, name)
    try:
        return Log(where, "run").read(seq).layout
    finally:
        where.close()


def spec_of(place: Path, *, rules: list[dict[str, Any]] | None = None, **keys: Any) -> ts.Policy:
    """A policy of one tier, with an arena of few chunks."""
    return policy({"nvme": tier("nvme", place, **keys)}, chunk=CHUNK, arena=SMALL_ARENA, rules=rules or [])


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("bandwidth", [None, "20MiB/s"])
def test_a_state_comes_back_by_every_codec(codec: str, bandwidth: str | None) -> None:
    with scratch() as place:
        limit = {"bandwidth": bandwidth} if bandwidth else {}
        spec = spec_of(place, codec=codec, **limit)
        with ts.Checkpointer(spec, "run") as ckpt:
            for step in range(2):
                ckpt.save(state(step), step=step).wait()
            stored = ckpt.stats().tiers["nvme"].stored
            assert same(ckpt.load(step=0), state(0))
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []
        with ts.Checkpointer(spec_of(place), "run") as other:
            assert same(other.load(), state(1)), "who reads need not know how it was written"
        raw = sum(t.numel() * t.element_size() for name, t in state().items() if name != "twin") * 2
        used = {layout_of(spec, "nvme").codecs[i] for i in layout_of(spec, "nvme").codec.tolist()}
        if codec == "raw" or (codec == "auto" and not bandwidth):
            assert used == {"raw"}, "nobody knows yet how fast the tier is"
        else:
            assert used == {"raw", codecs.BLOSC}
            assert stored < 0.9 * raw


def test_rules_name_the_codec_of_some_leaves_and_auto_decides_about_the_others() -> None:
    rules = [{"match": "m", "codec": "raw"}, {"match": "noise", "codec": "small"}, {"match": "twin", "codec": "fast"}]
    with scratch() as place:
        spec = spec_of(place, rules=rules, codec="auto", bandwidth="20MiB/s")
        with ts.Checkpointer(spec, "run") as ckpt:
            # Twins of other codecs are stored once all the same: as whoever comes first is.
            ckpt.save(state(), step=0).wait()
            assert same(ckpt.load(), state())
        layout = layout_of(spec, "nvme")
        where = opened(spec, "nvme")
        leaves = Log(where, "run").read(1).version
        where.close()
        by_leaf = {
            leaf.name: {layout.codecs[layout.codec[row]] for row in (leaves.chunk_leaf == number).nonzero()[0]}
            for number, leaf in enumerate(leaves.leaves)
            if leaf.name
        }
        assert by_leaf["m"] == by_leaf["noise"] == by_leaf["b"] == {"raw"}
        assert codecs.BLOSC in by_leaf["w"]
        assert by_leaf["w"] == by_leaf["twin"]
        assert by_leaf["zero"] >= {codecs.BLOSC}


def test_a_cascade_encodes_in_workers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    real = encode_module.compress

    def encode(codec: str, data: Buffer, itemsize: int) -> tuple[str, Buffer]:
        threads.add(threading.current_thread().name.rpartition("-")[0])
        return real(codec, data, itemsize)

    monkeypatch.setattr(encode_module, "compress", encode)
    with scratch() as place:
        tiers = {"nvme": tier("nvme", place), "file": tier("file", place, codec="small")}
        spec = policy(tiers, chunk=CHUNK, arena={"size": "512KiB"})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state(), step=0).wait("file")
            assert same(ckpt.load(), state())
        assert threads == {"tierstate-encode"}
        assert codecs.BLOSC in layout_of(spec, "file").codecs
        assert engine_threads() == []


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_encoder_that_fails_fails_the_save_and_no_other(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    calls: list[int] = []
    real = encode_module.compress

    def encode(codec: str, data: Buffer, itemsize: int) -> tuple[str, Buffer]:
        calls.append(len(data))
        if len(calls) == at + 1:
            raise MemoryError("no room for what is encoded")
        return real(codec, data, itemsize)

    monkeypatch.setattr(encode_module, "compress", encode)
    with scratch() as place:
        spec = spec_of(place, codec="fast")
        ckpt = ts.Checkpointer(spec, "run")
        with pytest.raises(MemoryError, match="no room for what is encoded"):
            ckpt.save(state(), step=0).wait()
        assert arena_of(ckpt).in_flight == 0
        assert list(opened(spec, "nvme").list("packs/")) == []
        ckpt.save(state(1), step=1).wait()
        assert same(ckpt.load(), state(1))
        ckpt.close()
        assert engine_threads() == []


@pytest.mark.parametrize("operation", ["writer", "append", "close"])
@pytest.mark.parametrize("codec", ["fast", "auto"])
def test_a_tier_that_fails_amid_encoded_chunks_keeps_nothing(operation: str, codec: str) -> None:
    with wrapped(Memory()) as keys:
        spec = policy(
            {"bad": {**keys, "codec": codec, "bandwidth": "100MiB/s"}},
            chunk=CHUNK,
            arena=SMALL_ARENA,
        )
        with ts.Checkpointer(spec, "run") as ckpt:
            faulty(keys).add(Fault(operation, 3 if operation == "append" else 0, ts.TierUnavailable("gone")))
            with pytest.raises(ts.TierUnavailable):
                ckpt.save(state(), step=0).wait()
            faulty(keys).heal()
            ckpt.save(state(1), step=1).wait()
            assert same(ckpt.load(), state(1))
            assert arena_of(ckpt).in_flight == 0
        assert engine_threads() == []


def test_closing_amid_an_encoding_that_takes_long_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    real = encode_module.compress

    def encode(codec: str, data: Buffer, itemsize: int) -> tuple[str, Buffer]:
        begun.set()
        assert gate.wait(30)
        return real(codec, data, itemsize)

    monkeypatch.setattr(encode_module, "compress", encode)
    with scratch() as place:
        ckpt = ts.Checkpointer(spec_of(place, codec="fast"), "run")
        ckpt.save(tensors(CHUNK, CHUNK), step=0)
        assert begun.wait(30)
        with pytest.raises(ts.TierUnavailable, match="still under way"):
            ckpt.close(timeout=0.05)
        gate.set()
        end = time.monotonic() + 30
        while engine_threads() and time.monotonic() < end:
            time.sleep(0.01)
        assert engine_threads() == []
        assert arena_of(ckpt).in_flight == 0


def test_what_auto_leaves_raw_goes_out_in_runs_as_with_raw() -> None:
    calls = {}
    for codec in ("raw", "auto"):
        with scratch() as place, ts.Checkpointer(spec_of(place, codec=codec), "run") as ckpt:
            ckpt.save(state(), step=0).wait()
            calls[codec] = ckpt.stats().tiers["nvme"].operations["append"].calls
    assert calls["auto"] == calls["raw"]
