"""Imports of HDF5 files of others: nothing beyond the file is read, and no memory taken for what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.cli_calls import Call

import tierstate as ts
from tierstate.files.importing import open_source


@pytest.mark.slow
def test_an_hdf5_file_of_others(call: Call, policy: Path) -> None:
    path = policy.parent / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("layers/0/w", data=np.random.randn(50, 40), chunks=(8, 8), compression="gzip")
        file["big"] = np.arange(3, dtype=">i4")
        file["names"] = ["a", "bé"]
        file["points"] = np.ones(2, [("a", "<i4")])
        file["same"] = file["layers/0/w"]
        file["layers"].attrs["kind"] = "dense"
        right = file["layers/0/w"][:]
    assert call("import", "-p", policy, "-r", "h5", path).status == 0
    with ts.Checkpointer(policy, "h5") as ckpt:
        found = ckpt.load()
    assert torch.equal(found["layers"]["0"]["w"], torch.from_numpy(right))
    assert found["same"] is found["layers"]["0"]["w"]
    assert (found["big"].dtype, found["big"].tolist()) == (np.dtype(">i4"), [0, 1, 2])
    assert found["names"] == ["a", "bé"]
    assert found["points"]["a"].tolist() == [1, 1]
    assert found["layers"]["/attrs"] == {".": {"kind": "dense"}}
    assert call("import", "-p", policy, "-r", "h5", path, "--skip-values", "--step", "1").status == 0
    with ts.Checkpointer(policy, "h5") as ckpt:
        assert set(ckpt.load(step=1)) == {"layers", "big", "points", "same"}
    with h5py.File(path, "a") as file:
        file["ref"] = np.array([file["big"].ref], h5py.ref_dtype)
    answer = call("import", "-p", policy, "-r", "h5", path)
    assert answer.status == 2
    assert "dataset /ref in" in answer.err


def test_integers_that_do_not_fill_their_bytes_are_refused(call: Call, policy: Path) -> None:
    """As those that the N-bit filter packs: -1 in 12 bits would be 4095."""
    path, twelve = policy.parent / "twelve.h5", h5py.h5t.NATIVE_INT16.copy()
    twelve.set_precision(12)
    with h5py.File(path, "w") as file:
        h5py.h5d.create(file.id, b"x", twelve, h5py.h5s.create_simple((2,)))
        file["x"][:] = [-1, 5]
    answer = call("import", "-p", policy, "-r", "h5", path)
    assert answer.status == 2
    assert "dataset /x in" in answer.err
    assert "holds integers of 12 bits in 2 bytes" in answer.err
    assert "write it anew as int16" in answer.err


# What would reach beyond the file


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file of somebody else, which no import may read."""
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["d"] = np.arange(5)
    return path


def with_external_storage(file: h5py.File, other: Path) -> None:
    file.create_dataset("x", (24,), "u1", external=[(str(other), 0, 24)])


def with_a_virtual_dataset(file: h5py.File, other: Path) -> None:
    layout = h5py.VirtualLayout((5,), "i8")
    layout[:] = h5py.VirtualSource(str(other), "d", (5,))
    file.create_virtual_dataset("x", layout)


def with_a_way_through_a_link(file: h5py.File, other: Path) -> None:
    file.create_group("__tierstate__")["q"] = h5py.ExternalLink(str(other), "/")
    file["x"] = h5py.SoftLink("/__tierstate__/q/d")


def with_its_own_group_elsewhere(file: h5py.File, other: Path) -> None:
    file["__tierstate__"] = h5py.ExternalLink(str(other), "/")


def with_metadata_elsewhere(file: h5py.File, other: Path) -> None:
    with h5py.File(other, "a") as found:
        found["text"] = np.bytes_(json.dumps({"secret": 1}))
    own = file.create_group("__tierstate__")
    own["q"] = h5py.ExternalLink(str(other), "/")
    own["metadata"] = h5py.SoftLink("/__tierstate__/q/text")


BEYOND = [
    with_external_storage,
    with_a_virtual_dataset,
    with_a_way_through_a_link,
    with_its_own_group_elsewhere,
    with_metadata_elsewhere,
]


@pytest.mark.parametrize("make", BEYOND)
def test_no_other_file_is_read_through_hdf5(tmp_path: Path, other: Path, make: Any) -> None:
    path = tmp_path / "evil.h5"
    with h5py.File(path, "w") as file:
        make(file, other)
    with pytest.raises(ts.CaptureError, match=r"in other files|into another file"), open_source(path):
        raise AssertionError("it was believed")


def test_a_group_within_itself_is_told(tmp_path: Path) -> None:
    path = tmp_path / "round.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("a")
        group["b"] = group
        file["twice"] = file.create_group("fine")
    with pytest.raises(ts.FormatError, match=r"group /a/b lies in itself"), open_source(path):
        raise AssertionError("it was believed")
    with h5py.File(path, "a") as file:
        del file["a"]
    with open_source(path) as found:
        assert found.state == {"fine": {}, "twice": {}}


def test_memory_is_not_taken_for_what_nobody_wrote(tmp_path: Path) -> None:
    path = tmp_path / "hollow.h5"
    views = {"path": '["y"]', "kind": "tied", "dtype": "float32", "itemsize": 4, "shape": [1]}
    views["attrs"] = {"to": '["x"]', "offset": 0, "strides": [1]}
    storage = {"path": '["x"]', "kind": "storage", "shape": [1 << 42], "name": ["x"]}
    listed = {"tierstate": {"format": 1, "leaves": [{"path": "[]", "kind": "dict"}, storage, views]}}
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 42,), "u1", chunks=(1 << 20,))
        file.create_dataset("__tierstate__/metadata", data=np.bytes_(json.dumps(listed)))
        file.create_dataset("text/x", (1 << 40,), h5py.string_dtype(), chunks=(1 << 10,))
    with pytest.raises(ts.FormatError, match=r"4398046511104 bytes has 0 in the file"), open_source(path):
        raise AssertionError("it was believed")
    with h5py.File(path, "a") as file:
        del file["__tierstate__"], file["x"]
    with pytest.raises(ts.FormatError, match=r"/text/x has 1099511627776 texts"), open_source(path):
        raise AssertionError("it was believed")
