"""Restores straight into tensors: whatever their alignment and the engine, also where the bytes turn out damaged."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpointer_worlds import policy, tier
from support.leaks import resident

import tierstate as ts
from tierstate.tiers.memory.pages import map_pages

MIB = 1 << 20


def truth(seed: int = 0) -> dict[str, Any]:
    """A state of long and short leaves, most of them tensors."""
    g = torch.Generator().manual_seed(seed)
    model = {f"w{i}": torch.randn(rows, 512, generator=g) for i, rows in enumerate((2048, 700, 513, 1, 1024))}
    model["turned"] = torch.randn(600, 700, generator=g).T
    model["half"] = torch.randn(1 << 20, generator=g).bfloat16()
    small = [torch.randn(n, generator=g) for n in range(50)]
    return {"model": model, "small": small, "array": np.arange(400_000.0), "text": "x" * 3000, "step": seed}


def empty_like(state: Any, shift: int) -> Any:
    """The same state with other content, its contiguous tensors so many bytes behind a page's beginning."""
    if isinstance(state, dict):
        return {key: empty_like(value, shift) for key, value in state.items()}
    if isinstance(state, list):
        return [empty_like(value, shift) for value in state]
    if isinstance(state, np.ndarray):
        return np.zeros_like(state)
    if not isinstance(state, torch.Tensor):
        return type(state)()
    if not state.is_contiguous() or not state.numel():
        return torch.zeros_like(state)
    nbytes = state.numel() * state.element_size()
    memory = map_pages(nbytes + 4096)[shift : shift + nbytes]
    return memory.view(state.dtype).view(state.shape)


def same(one: Any, other: Any) -> bool:
    """Whether two such states are equal bit for bit; `strategies.difference` looks closer, and takes long at it."""
    if isinstance(one, (dict, list)):
        pairs = one.items() if isinstance(one, dict) else enumerate(one)
        return len(one) == len(other) and all(same(value, other[key]) for key, value in pairs)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(type(one) is type(other) and one == other)


def two(place: Path, io: str = "auto", **keys: Any) -> ts.Policy:
    tiers = {"nvme": tier("nvme", place, io=io), "file": tier("file", place)}
    return policy(tiers, **{"chunk": "1MiB", "arena": {"size": "8MiB"}, **keys})


def saved(spec: ts.Policy) -> dict[str, Any]:
    state = truth()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=1).wait("file")
    return state


def hurt(folder: Path) -> None:
    """Turn one bit in each 700 KiB of a tier's packs."""
    for path in (folder / "packs").rglob("*-*"):
        data = bytearray(path.read_bytes())
        for at in range(5000, len(data), 700 << 10):
            data[at] ^= 1
        path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("io", ["auto", "uring", "threads", "buffered"])
@pytest.mark.parametrize("shift", [0, 64, 512])
def test_in_place_and_fresh_by_every_engine(tmp_path: Path, io: str, shift: int) -> None:
    spec = two(tmp_path, io)
    state = saved(spec)
    into = empty_like(state, shift)
    addresses = [t.data_ptr() for t in into["model"].values()]
    with ts.Checkpointer(spec, "run") as ckpt:
        assert ckpt.restore(into=into) is into
        assert same(state, into)
        assert [t.data_ptr() for t in into["model"].values()] == addresses
        assert same(state, ckpt.load())
        assert ckpt.stats().arena_peak <= 8 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 64])
def test_what_is_damaged_after_it_was_read_in_place_is_healed_and_mended(tmp_path: Path, shift: int) -> None:
    spec = two(tmp_path)
    state = saved(spec)
    hurt(tmp_path / "nvme")
    into = empty_like(state, shift)
    with ts.Checkpointer(spec, "run") as ckpt:
        assert same(state, ckpt.restore(into=into))
        assert same(state, ckpt.load())
    hurt(tmp_path / "object")
    with ts.Checkpointer(spec, "run") as ckpt:
        assert same(state, ckpt.restore(into=empty_like(state, shift))), "it was mended"


@pytest.mark.slow
def test_damage_that_nobody_heals_is_told_with_what_it_means_for_the_given_state(tmp_path: Path) -> None:
    spec = two(tmp_path)
    state = saved(spec)
    hurt(tmp_path / "nvme")
    hurt(tmp_path / "object")
    into = empty_like(state, 0)
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.Damaged, match="whole in no tier") as caught:
            ckpt.restore(into=into)
        assert caught.value.__notes__ == ["the given state may be overwritten in part: do not train on from it"]
        with pytest.raises(ts.Damaged, match="whole in no tier"):
            ckpt.load()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shift", [0, 64])
def test_the_smallest_arena_and_chunks_of_an_earlier_policy(tmp_path: Path, shift: int) -> None:
    state = saved(two(tmp_path))
    spec = two(tmp_path, chunk="64KiB", arena={"size": "128KiB"})
    with ts.Checkpointer(spec, "run") as ckpt:
        assert same(state, ckpt.restore(into=empty_like(state, shift)))
        assert same(state, ckpt.load())
        assert ckpt.stats().arena_peak <= 128 << 10


@pytest.mark.slow
def test_loaded_leaves_have_storages_of_their_own_and_give_their_memory_back(tmp_path: Path) -> None:
    spec = policy({"nvme": tier("nvme", tmp_path)}, chunk="16MiB", arena={"size": "64MiB"})
    g = torch.Generator().manual_seed(0)
    state = {part: {f"w{i}": torch.randn(40 << 18, generator=g) for i in range(3)} for part in ("model", "optimizer")}
    state["model"]["bias"] = torch.nn.Parameter(torch.ones(7))
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=1).wait()
        loaded = ckpt.load()
    assert same(state, loaded)
    leaves = [t for part in loaded.values() for t in part.values()]
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in leaves)
    assert len({t.untyped_storage().data_ptr() for t in leaves}) == len(leaves)
    assert all(t.data_ptr() % 4096 == 0 for t in leaves if t.numel() > MIB)
    file = io.BytesIO()
    torch.save(loaded["model"]["bias"], file)
    assert len(file.getvalue()) < 4096
    loaded["model"]["bias"].sum().backward()
    with torch.no_grad():
        loaded["model"]["w0"].add_(1)
    assert torch.equal(loaded["model"]["w1"], state["model"]["w1"])
    before = resident()
    del leaves, loaded["optimizer"]
    gc.collect()
    assert before - resident() >= 80 * MIB, "120 MiB, less what shares a block with the model"
    assert torch.equal(loaded["model"]["w2"], state["model"]["w2"])
