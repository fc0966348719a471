"""Packs that are files of another kind: every version comes back bit for bit, and lies in files others can open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpointer_worlds import (
    alike,
    alone,
    arena_of,
    faulty,
    opened,
    policy,
    scratch,
    tier,
    unreferenced,
    wrapped,
)
from support.equality import difference
from support.slow_values import Fill
from support.state_strategies import scrambled, states

import tierstate as ts
from tierstate.engine.capture import capture
from tierstate.engine.publish import leaf_files
from tierstate.manifest.errors import Damaged
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log
from tierstate.tiers.memory.host import Memory
from tierstate.tiers.testing import Fault

pytestmark = pytest.mark.slow

FORMATS = {"safetensors": ".safetensors", "hdf5": ".h5"}
MIB = 1 << 20
SIZES = {"a": MIB, "b": MIB + 4096, "c": 2 * MIB + 8, "d": 3 * MIB - 8192, "e": 5000, "f": 48, "g": 4, "h": MIB + 4}
"""Bytes: whole blocks and not, long and short."""


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n // 4, generator=generator) for name, n in SIZES.items()}


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    """A file's tensors, as the programs it is made for read them."""
    if path.suffix == ".safetensors":
        found: dict[str, torch.Tensor] = load_file(path)
        return found
    with h5py.File(path) as file:
        return {name: torch.from_numpy(file[name][()]) for name in file if name != "__tierstate__"}


def check_files(folder: Path, record: Record, state: dict[str, torch.Tensor], suffix: str) -> None:
    """Every leaf of the version lies whole in one file, in which it has its name."""
    version, layout = record.version, record.layout
    files = {key: read(folder / key) for key in layout.objects}
    for number, leaf in enumerate(version.leaves):
        rows = version.rows_of([number])
        if not len(rows):
            continue
        objects = {layout.objects[i] for i in layout.object[rows].tolist()}
        assert len(objects) == 1
        (key,) = objects
        assert key.endswith(suffix)
        (name,) = leaf.path
        assert torch.equal(files[key][name], state[name])


def record_of(spec: ts.Policy, name: str, seq: int) -> Record:
    return Log(opened(spec, name), "run").read(seq)


# Any state, any tier


@pytest.mark.parametrize(("name", "kind"), [("safetensors", "host"), ("safetensors", "file"), ("hdf5", "nvme")])
@given(state=states(), chunk=st.sampled_from([4096, 65536]))
@settings(max_examples=max(6, settings().max_examples // 10))
def test_any_state_comes_back(name: str, kind: str, state: Any, chunk: int) -> None:
    with scratch() as place:
        spec = alone(kind, place, chunk=chunk, format=name)
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=1).wait("only")
            ckpt.save(state, step=2).wait("only")
            assert difference(state, ckpt.load(step=1)) == ""
            into = scrambled(state)
            assert difference(state, ckpt.restore(into=into)) == ""
            assert ckpt.verify(deep=True).ok


# Histories

STEPS = st.lists(
    st.tuples(st.sets(st.sampled_from(list(SIZES))), st.sampled_from(["first", "last", "all"]), st.booleans()),
    min_size=2,
    max_size=5,
)


def change(tensor: torch.Tensor, where: str) -> None:
    if where == "all":
        tensor += 1.0
    else:
        tensor[0 if where == "first" else -1] += 1.0


@pytest.mark.parametrize("name", FORMATS)
@given(steps=STEPS, keep=st.sampled_from([None, 1, 2]), chunk=st.sampled_from(["256KiB", "1MiB", "2MiB"]))
@settings(max_examples=max(5, settings().max_examples // 10))
def test_versions_that_share_leaves(name: str, steps: list[Any], keep: int | None, chunk: str) -> None:
    with scratch() as place:
        kept = {} if keep is None else {"keep": {"last": keep}}
        tiers = {"nvme": tier("nvme", place, format=name, **kept), "file": tier("file", place, format=name)}
        spec = policy(tiers, chunk=chunk, arena={"size": "4MiB"})
        state, truth = state_of(), []
        with closing_at_last(spec) as open_again:
            ckpt = open_again()
            for step, (names, where, fresh) in enumerate(steps):
                for key in names:
                    change(state[key], where)
                ckpt.save(state, step=step).wait("file")
                truth.append(copied(state))
                for folder, tier_name in (("nvme", "nvme"), ("object", "file")):
                    check_files(place / folder, record_of(spec, tier_name, step + 1), state, FORMATS[name])
                if fresh:
                    ckpt = open_again()
            assert ckpt.verify(deep=True).ok
            for step, was in enumerate(truth):
                assert alike(was, ckpt.load(step=step))
        for tier_name in ("nvme", "file"):
            assert not unreferenced(opened(spec, tier_name), "run")


@contextmanager
def closing_at_last(spec: ts.Policy) -> Iterator[Any]:
    """Opens Checkpointers, one after the other."""
    made: list[ts.Checkpointer] = []

    def open_again() -> ts.Checkpointer:
        for ckpt in made:
            ckpt.close()
        made[:] = [ts.Checkpointer(spec, "run")]
        return made[0]

    try:
        yield open_again
    finally:
        for ckpt in made:
            ckpt.close()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_frozen_is_written_once(place: Path, name: str) -> None:
    spec = policy({"nvme": tier("nvme", place, format=name)}, chunk="1MiB", arena={"size": "8MiB"})
    state = {"base": torch.randn(MIB), "head": torch.randn(MIB // 2), "n": torch.zeros(1)}
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(5):
            state["head"] += 1.0
            state["n"] += 1
            ckpt.save(state, step=step).wait()
    written = [p.stat().st_size for p in sorted((place / "nvme" / "packs" / "run").iterdir())]
    assert [n > 5 * MIB for n in written] == [True, True, False, False, False]
    assert len(record_of(spec, "nvme", 5).layout.objects) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_new_is_no_new_file(place: Path, name: str) -> None:
    spec = policy({"nvme": tier("nvme", place, format=name)}, chunk="1MiB", arena={"size": "8MiB"})
    state = state_of()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait()
        for step in (1, 2):
            ckpt.save(state, step=step).wait()
    assert len(list((place / "nvme" / "packs" / "run").iterdir())) == 1
    with ts.Checkpointer(spec, "run") as ckpt:
        state["d"][-1] += 1.0
        ckpt.save(state, step=3).wait()
        assert alike(state, ckpt.load())
    check_files(place / "nvme", record_of(spec, "nvme", 4), state, FORMATS[name])


def test_a_change_of_format_moves_everything(place: Path) -> None:
    state = {"w": torch.randn(MIB)}
    for step, name in enumerate(["native", "hdf5", "safetensors", "native"]):
        spec = policy({"nvme": tier("nvme", place, format=name)}, chunk="1MiB", arena={"size": "8MiB"})
        with ts.Checkpointer(spec, "run") as ckpt:
            ckpt.save(state, step=step).wait()
            assert alike(state, ckpt.load(step=step))
        (key,) = record_of(spec, "nvme", step + 1).layout.objects
        # Native packs take chunks from wherever they lie.
        assert Path(key).suffix == FORMATS.get(name, ".safetensors" if step else "")


# Order


@pytest.mark.parametrize("name", FORMATS)
def test_slabs_that_overtake_each_other_wait(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "usable_cores", lambda: 4)
    monkeypatch.setattr(capture, "WORTH_A_THREAD", 1)
    tiers = {"host": tier("host", place, format=name), "nvme": tier("nvme", place, format=name)}
    for size in ("512KiB", "1280KiB"):
        spec = policy({**tiers, "file": tier("file", place, format=name)}, chunk="256KiB", arena={"size": size})
        state = state_of()
        with ts.Checkpointer(spec, size) as ckpt:
            for step in range(3):
                for key in list(state)[2 * step :]:
                    change(state[key], "last")
                ckpt.save(state, step=step).wait("file")
                assert alike(state, ckpt.load())
            assert arena_of(ckpt).in_flight <= arena_of(ckpt).slots


def test_each_part_of_a_capture_has_its_own_file(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place, format="safetensors")}, chunk="1MiB", arena={"size": "8MiB"})
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    strided = torch.randn(900, 600).T
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.guard(optimizer)
        for step in range(3):
            model(torch.randn(2, 700)).sum().backward()
            optimizer.step()
            state = {"model": model, "optimizer": optimizer, "x": torch.randn(MIB), "strided": strided, "n": step}
            save = ckpt.save(state, step=step)
            save.wait()
            found = ckpt.load()
            assert torch.equal(found["model"]["weight"], model.weight)
            assert torch.equal(found["strided"], strided)
            assert torch.equal(found["x"], state["x"])
    files = [load_file(p) for p in (place / "nvme" / "packs" / "run").glob("*.safetensors")]
    assert any("model.weight" in file and "x" not in file for file in files)
    assert any(set(file) == {"strided"} for file in files)
    with safe_open(next((place / "nvme" / "packs" / "run").glob("000000000003-*.safetensors")), "pt") as file:
        assert file.metadata()["step"] == "2"


def test_digests_of_an_hdf5_file_are_those_of_the_version(place: Path) -> None:
    spec = policy({"nvme": tier("nvme", place, format="hdf5")}, chunk="1MiB", arena={"size": "8MiB"})
    state = state_of()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=3, metadata={"loss": 2.5}).wait()
    version = record_of(spec, "nvme", 1).version
    (path,) = (place / "nvme" / "packs" / "run").iterdir()
    with h5py.File(path) as file:
        assert (file.attrs["run"], file.attrs["step"], file.attrs["digest"]) == ("run", 3, "xxh3-128")
        assert json.loads(file["__tierstate__/metadata"][()]) == {"loss": 2.5}
        table = file["__tierstate__/digests"][:]
        for number, leaf in enumerate(version.leaves):
            rows = version.rows_of([number])
            if len(rows):
                first, count = file[leaf.path[0]].attrs["digests"]
                assert np.array_equal(table[first : first + count], version.digests[rows])


# Trouble


@pytest.mark.parametrize("name", FORMATS)
def test_a_frozen_leaf_that_is_damaged_is_written_again(place: Path, name: str) -> None:
    spec = policy({"nvme": tier("nvme", place, format=name)}, chunk="1MiB", arena={"size": "8MiB"})
    state = {"base": torch.randn(MIB), "w": torch.randn(1000)}
    with ts.Checkpointer(spec, "run") as ckpt:
        for step in range(2):
            ckpt.save(state, step=step).wait()
    (path,) = (place / "nvme" / "packs" / "run").iterdir()
    data = bytearray(path.read_bytes())
    at = data.index(state["base"].numpy().tobytes()[:64])
    data[at + 5] ^= 1
    path.write_bytes(data)
    with ts.Checkpointer(spec, "run") as ckpt:
        # Its end changes: its beginning, which is damaged, is needed again.
        state["base"][-1] += 1.0
        with pytest.raises(Damaged, match="this save relies on it"):
            ckpt.save(state, step=2).wait()
        ckpt.save(state, step=3).wait()
        assert alike(state, ckpt.load())
        assert {problem.leaf for problem in ckpt.verify(deep=True).problems} == {"base"}
    assert len(list((place / "nvme" / "packs" / "run").iterdir())) == 2, "the save that failed left nothing"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("operation", ["writer", "append", "close", "put"])
def test_a_tier_that_fails_keeps_nothing(place: Path, name: str, operation: str) -> None:
    with wrapped(Memory()) as keys:
        spec = policy({"bad": {**keys, "format": name}}, chunk="1MiB", arena={"size": "8MiB"})
        state = state_of()
        with ts.Checkpointer(spec, "run") as ckpt:
            faulty(keys).add(Fault(operation, 0, ts.TierFull("full")))
            with pytest.raises(ts.TierFull):
                ckpt.save(state, step=0).wait()
            assert list(faulty(keys).inner.list("packs/")) == []
            faulty(keys).heal()
            ckpt.save(state, step=1).wait()
            assert alike(state, ckpt.load())
            assert not unreferenced(faulty(keys).inner, "run")
            state["a"] += 1.0
            ckpt.save(state, step=2).wait()
            assert arena_of(ckpt).in_flight == 0


def test_a_provider_that_fails_leaves_nothing(place: Path) -> None:
    def fail(_out: Any) -> None:
        raise RuntimeError("no bytes")

    spec = policy({"nvme": tier("nvme", place, format="safetensors")}, chunk="1MiB", arena={"size": "8MiB"})
    with ts.Checkpointer(spec, "run") as ckpt:
        with pytest.raises(ts.CaptureError, match="no bytes"):
            ckpt.save({**state_of(), "bad": Fill(10, fail)}, step=0).wait()
        ckpt.save(state_of(), step=1).wait()
        assert arena_of(ckpt).in_flight == 0
    assert len(list((place / "nvme" / "packs" / "run").iterdir())) == 1


def test_files_are_cut_at_leaves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_files, "MAX_FILE", 2 * MIB)
    monkeypatch.setattr(leaf_files, "MAX_LEAVES", 3)
    spec = policy({"nvme": tier("nvme", place, format="safetensors")}, chunk="256KiB", arena={"size": "1MiB"})
    state = state_of()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait()
        assert alike(state, ckpt.load())
    record = record_of(spec, "nvme", 1)
    assert len(record.layout.objects) >= 5
    check_files(place / "nvme", record, state, ".safetensors")


def test_rules_send_only_some_leaves_there(place: Path) -> None:
    tiers = {"nvme": tier("nvme", place), "file": tier("file", place, format="safetensors")}
    rules = [{"match": "a", "tiers": ["nvme"]}, {"match": "e", "codec": "small"}]
    spec = policy(tiers, rules=rules, chunk="256KiB", arena={"size": "2MiB"})
    state = state_of()
    with ts.Checkpointer(spec, "run") as ckpt:
        ckpt.save(state, step=0).wait("file")
        assert alike(state, ckpt.load())
    (path,) = (place / "object" / "packs" / "run").iterdir()
    assert sorted(load_file(path)) == sorted(set(state) - {"a"})
