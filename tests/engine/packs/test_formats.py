"""Files of other kinds: laid out before their data is known, they open in the programs they are made for."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.checkpointer_worlds import scratch
from support.equality import bits
from support.state_strategies import DTYPES, KEYS, make

from tierstate.engine.packs import formats
from tierstate.engine.packs.formats import (
    PATHS_KEY,
    FileInfo,
    FileLayout,
    FileLeaf,
    dotted_names,
    element_type,
    format_of,
    group_names,
    is_plain,
)
from tierstate.engine.packs.slab_layout import BIG, BLOCK
from tierstate.manifest.errors import FormatError
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.manifest.format.leaf_path import decode_path, encode_path
from tierstate.providers.tensors.dtypes import torch_dtype, torch_name

ABOUT = FileInfo("run", 7, 1200, 1.75e9 + 0.123, '{"loss": 2.5, "name": "ü"}', 4096, "xxh3-128")
KINDS = ("safetensors", "hdf5")
PATH = st.lists(KEYS, max_size=3).map(tuple)


def unique(paths: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list({encode_path(path): path for path in paths}.values())


def leaf_of(path: tuple[Any, ...], tensor: torch.Tensor) -> Leaf:
    return Leaf(path, Spec("tensor", torch_name(tensor.dtype), tensor.element_size(), tuple(tensor.shape)))


def laid_out(kind: str, leaves: list[Leaf], about: FileInfo = ABOUT, digests: int = 0) -> FileLayout:
    found = format_of(kind)
    assert found is not None
    blueprint = found.lay_out([FileLeaf(leaf, digests) for leaf in leaves], about)
    at = len(blueprint.head)
    for leaf, offset in zip(leaves, blueprint.offsets, strict=True):
        if leaf.spec.nbytes:
            assert offset >= at
            at = offset + leaf.spec.nbytes
    if blueprint.digests >= 0:
        assert blueprint.digests >= at
        at = blueprint.digests + 16 * digests * len(leaves)
    assert at == blueprint.size
    return blueprint


def write(path: Path, blueprint: FileLayout, data: list[bytes], table: bytes = b"") -> None:
    """The file, as its writer makes it."""
    with path.open("wb") as file:
        file.write(blueprint.head)
        for offset, piece in zip(blueprint.offsets, data, strict=True):
            file.write(bytes(offset - file.tell()) if piece else b"")
            file.write(piece)
        file.write(bytes(blueprint.size - len(table) - file.tell()) + table)
        assert file.tell() == blueprint.size


def raw_of(dataset: h5py.Dataset) -> bytes:
    """A dataset's bytes as they are stored, without a conversion."""
    kind = dataset.id.get_type()
    out = np.zeros(dataset.shape, f"V{kind.get_size()}")
    if out.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, kind)
    return out.tobytes()


# Names


@given(st.lists(PATH, max_size=12).map(unique))
def test_no_two_paths_have_one_name(paths: list[tuple[Any, ...]]) -> None:
    flat = dotted_names(paths, ["__metadata__"])
    assert len(set(flat)) == len(paths)
    assert "__metadata__" not in flat
    json.dumps(flat, ensure_ascii=False).encode()
    trees = group_names(paths, ["__tierstate__"])
    for path, names in zip(paths, trees, strict=True):
        assert len(names) == max(1, len(path))
        assert names[0] != "__tierstate__"
        for name in names:
            assert name.encode() not in (b"", b".", b"..")
            assert not {"/", "\0"} & set(name)
    prefixes = {names: encode_path(path) for path, names in zip(paths, trees, strict=True) if path}
    for i, one in enumerate(paths):
        for j, other in enumerate(paths):
            if one and other and trees[i][: len(trees[j])] == trees[j]:
                assert encode_path(one[: len(other)]) == prefixes[trees[j]]


def test_names_are_those_that_people_expect() -> None:
    paths = [("model", "layers.0.weight"), ("model", "layers", "0", "weight"), ("opt", 0), ("opt", "0"), ()]
    assert dotted_names(paths) == [
        "model.layers.0.weight",
        'model.layers."0".weight',
        "opt.0",
        'opt."0"',
        "value",
    ]
    assert group_names([*paths, ("a/b", "."), ("a%2Fb", "")]) == [
        ("model", "layers.0.weight"), ("model", "layers", "0", "weight"), ("opt", "0"), ("opt", '"0"'), ("value",),
        ("a%2Fb", "(.)"), ('"a%2Fb"', "()"),
    ]  # fmt: skip
    assert is_plain(("a", "b"), ["a", "b"])
    assert not is_plain(("a", 0), ["a", "0"])


# Files


@st.composite
def leaves_of(draw: st.DrawFn) -> list[Leaf]:
    """Leaves of any type and shape, a few of them long."""
    found = []
    for path in unique(draw(st.lists(PATH, min_size=1, max_size=8))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        dtype = draw(st.sampled_from(DTYPES))
        if draw(st.integers(0, 9)) == 0:
            shape = (BIG // dtype.itemsize + draw(st.sampled_from([0, 512, 1, BLOCK])),)
        found.append(Leaf(path, Spec("tensor", torch_name(dtype), dtype.itemsize, shape)))
    return found


def expressed(kind: str, leaves: list[Leaf]) -> tuple[list[Leaf], list[bytes]]:
    """Those that a format knows, and bytes for them."""
    found = format_of(kind)
    assert found is not None
    kept = [leaf for leaf in leaves if found.expresses(leaf)]
    return kept, [bits(make(torch_dtype(leaf.spec.dtype), leaf.spec.shape, i)) for i, leaf in enumerate(kept)]


@given(leaves_of())
@settings(max_examples=max(20, settings().max_examples // 2))
def test_a_safetensors_file_opens_and_has_every_bit(leaves: list[Leaf]) -> None:
    leaves, content = expressed("safetensors", leaves)
    blueprint = laid_out("safetensors", leaves)
    with scratch() as place:
        write(place / "x.safetensors", blueprint, content)
        with safe_open(place / "x.safetensors", "pt") as file:
            said = file.metadata()
            assert (said["format"], said["run"], said["seq"], said["step"]) == ("pt", "run", "7", "1200")
            assert float(said["time"]) == ABOUT.time
            assert json.loads(said["metadata"]) == json.loads(ABOUT.metadata)
            paths = json.loads(said[PATHS_KEY])
            names = list(file.keys())
            assert sorted(paths[n] if n in paths else encode_path(tuple(n.split("."))) for n in names) == sorted(
                encode_path(leaf.path) for leaf in leaves
            )
            named = dotted_names([leaf.path for leaf in leaves], ["__metadata__"])
            for name, leaf, data in zip(named, leaves, content, strict=True):
                tensor = file.get_tensor(name)
                assert (torch_name(tensor.dtype), tuple(tensor.shape)) == (leaf.spec.dtype, leaf.spec.shape)
                assert bits(tensor) == data
    big = [o for leaf, o in zip(leaves, blueprint.offsets, strict=True) if leaf.spec.nbytes >= BIG]
    assert all(offset % BLOCK == 0 for offset in big[:1])


@given(leaves_of(), st.integers(0, 2))
@settings(max_examples=max(20, settings().max_examples // 2))
def test_an_hdf5_file_opens_and_has_every_bit(leaves: list[Leaf], rows: int) -> None:
    leaves, content = expressed("hdf5", leaves)
    blueprint = laid_out("hdf5", leaves, digests=rows)
    table = np.arange(2 * rows * len(leaves), dtype="<u8").reshape(-1, 2)
    with scratch() as place:
        write(place / "x.h5", blueprint, content, table.tobytes())
        with h5py.File(place / "x.h5") as file:
            assert (file.attrs["run"], file.attrs["seq"], file.attrs["step"]) == ("run", 7, 1200)
            assert file.attrs["time"] == ABOUT.time
            assert json.loads(file["__tierstate__/metadata"][()]) == json.loads(ABOUT.metadata)
            named = group_names([leaf.path for leaf in leaves], ["__tierstate__"])
            for i, (names, leaf, data) in enumerate(zip(named, leaves, content, strict=True)):
                dataset = file["/".join(names)]
                assert dataset.shape == leaf.spec.shape
                assert raw_of(dataset) == data
                path = dataset.attrs["path"].decode() if "path" in dataset.attrs else encode_path(names)
                assert path == encode_path(leaf.path)
                if rows:
                    first, count = dataset.attrs["digests"]
                    assert (first, count) == (i * rows, rows)
                    assert np.array_equal(file["__tierstate__/digests"][first : first + count], table[first:][:count])
    sizes = zip(leaves, blueprint.offsets, strict=True)
    assert all(offset % BLOCK == 0 for leaf, offset in sizes if leaf.spec.nbytes >= BIG)


def test_numbers_mean_the_same_in_an_hdf5_file(tmp_path: Path) -> None:
    tensors = [torch.tensor([1.5, -2.0, 3e4, math.inf]).to(t) for t in (torch.bfloat16, torch.float8_e5m2)]
    tensors += [torch.tensor([1, -2, 3, 4]).to(t) for t in (torch.float16, torch.float64, torch.int8, torch.complex64)]
    tensors += [torch.tensor([True, False]), torch.tensor(2.5)]
    leaves = [leaf_of((f"x{i}",), t) for i, t in enumerate(tensors)]
    leaves.append(Leaf(("big endian",), Spec("array", ">f4", 4, (3,))))
    data = [bits(t) for t in tensors] + [np.array([1, 2, 3], ">f4").tobytes()]
    write(tmp_path / "x.h5", laid_out("hdf5", leaves), data)
    with h5py.File(tmp_path / "x.h5") as file:
        for i, tensor in enumerate(tensors):
            wide = tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float8_e5m2) else tensor
            assert np.array_equal(file[f"x{i}"][()], wide.numpy())
        assert file["x0"].attrs["dtype"] == b"bfloat16"
        assert file["big endian"][:].tolist() == [1, 2, 3]


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not installed (hdf5-tools)")
def test_h5dump_reads_it(tmp_path: Path) -> None:
    tensor = torch.tensor([0.5, 1.5, -2.0], dtype=torch.bfloat16)
    leaves = [leaf_of(("model", "a.b"), tensor), leaf_of(("model", 0), torch.zeros(2, 3))]
    write(tmp_path / "x.h5", laid_out("hdf5", leaves, digests=1), [bits(tensor), bytes(24)], bytes(32))
    told = subprocess.run(["h5dump", str(tmp_path / "x.h5")], capture_output=True, text=True, check=True)
    assert "0.5, 1.5, -2" in told.stdout
    assert 'GROUP "model"' in told.stdout
    assert "(0): 1200" in told.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_terabytes_is_laid_out_in_no_memory(kind: str) -> None:
    leaves = [Leaf(("w", str(i)), Spec("tensor", "bfloat16", 2, (1 << 20, 1 << 12))) for i in range(128)]
    began = time.monotonic()
    blueprint = laid_out(kind, leaves)
    assert blueprint.size > 1 << 40
    assert len(blueprint.head) < 1 << 20
    assert all(offset % BLOCK == 0 for offset in blueprint.offsets)
    assert time.monotonic() - began < 60


def test_saves_of_the_same_leaves_differ_in_what_they_say_of_themselves(tmp_path: Path) -> None:
    leaves = [leaf_of(("a",), torch.zeros(3))]
    for about in (
        ABOUT,
        FileInfo("run", 8, -5, 0.0, "{}"),
        FileInfo("run", 9, 2**62, 1e300, json.dumps({"x": "y" * 9000})),
    ):
        write(tmp_path / "x.h5", laid_out("hdf5", leaves, about), [bytes(12)])
        with h5py.File(tmp_path / "x.h5") as file:
            assert (file.attrs["seq"], file.attrs["step"], file.attrs["time"]) == about[1:4]
            assert json.loads(file["__tierstate__/metadata"][()]) == json.loads(about.metadata)


def test_what_a_format_has_no_type_for_is_not_expressed() -> None:
    specs = {
        "value": Spec("value"),
        "c128": Spec("tensor", "complex128", 16, (1,)),
        "bits8": Spec("tensor", "bits8", 1, (1,)),
        "text": Spec("array", "<U3", 12, (1,)),
        "big": Spec("array", ">f4", 4, (1,)),
        "f4": Spec("array", "<f4", 4, (1,)),
        "fields": Spec("array", "|V4", 4, (1,), {"fields": {}}),
        "dict": Spec("dict"),
        "e4m3": Spec("tensor", "float8_e4m3fn"),
        "deep": Spec("tensor", "float32", 4, (1,) * 40),
    }
    expected = {"safetensors": {"f4", "e4m3", "deep"}, "hdf5": {"c128", "big", "f4", "e4m3"}}
    for name, told in expected.items():
        kind = format_of(name)
        assert kind is not None
        assert {key for key, spec in specs.items() if kind.expresses(Leaf((key,), spec))} == told
    assert format_of("native") is None
    assert element_type(Leaf(("x",), specs["big"])) == ">float32"
    assert decode_path(encode_path(("x", 0))) == ("x", 0)


def test_a_header_that_no_reader_would_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_HEADER", 100)
    with pytest.raises(FormatError, match="header of"):
        laid_out("safetensors", [leaf_of(("a" * 200,), torch.zeros(3))])
