"""HDF5 files that were made to cost much, or to have code loaded, when they are imported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import tierstate as ts
from tierstate.files.importing import open_source
from tierstate.files.readers import hdf5
from tierstate.manifest.chunk import empty_buffer


def read(value: Any, size: int = 4096) -> bytes:
    """All bytes of a lazy value, in slices as a save reads them."""
    found = bytearray()
    for start in range(0, value.spec.nbytes, size):
        out = empty_buffer(min(size, value.spec.nbytes - start))
        value.read(start, out)
        found += out.numpy().tobytes()
    return bytes(found)


def caches(monkeypatch: pytest.MonkeyPatch) -> list[h5py.Dataset]:
    """The compressed datasets that are opened for reading from now on."""
    opened, before = [], hdf5._Chunking.open

    def noted(self: Any, file: h5py.File, name: str) -> h5py.Dataset:
        opened.append(before(self, file, name))
        return opened[-1]

    monkeypatch.setattr(hdf5._Chunking, "open", noted)
    return opened


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(512, 64), (4, 64), (100, 7), (1, 1)])
def test_every_chunk_is_decompressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: Any) -> None:
    data = np.arange(512.0 * 64).reshape(512, 64)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", data=data, chunks=chunks, compression="gzip", shuffle=True)
        file.create_dataset("b", data=data + 1, chunks=chunks, compression="lzf", fletcher32=True)
    opened = caches(monkeypatch)
    with open_source(tmp_path / "x.h5") as found:
        assert read(found.state["a"]) == data.tobytes()
        assert read(found.state["b"]) == (data + 1).tobytes()
        assert len(opened) == 2
        slots, nbytes, _ = opened[-1].id.get_access_plist().get_chunk_cache()
        row = -(-64 // chunks[1])
        # All chunks of one row have room, so that none is dropped before it was read to its end.
        assert nbytes >= row * math.prod(chunks) * 8
        assert slots > row
        assert opened[-1].id.valid
        assert not opened[0].id.valid or opened[0].name == "/a"


def test_a_chunk_that_is_longer_than_the_usual_cache_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(64, dtype="u1").repeat(1 << 18).reshape(64, 1 << 18)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        usual = file.id.get_access_plist().get_cache()[2]
        file.create_dataset("a", data=data, chunks=data.shape, compression="gzip", compression_opts=1)
    opened = caches(monkeypatch)
    with open_source(tmp_path / "x.h5") as found:
        assert read(found.state["a"], 1 << 20) == data.tobytes()
        assert len(opened) == 1
        assert usual < data.nbytes < opened[0].id.get_access_plist().get_chunk_cache()[1]


def test_what_would_be_decompressed_again_and_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "MAX_CHUNK_CACHE", 1 << 20)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("tall", (1 << 14, 1 << 10), "u1", chunks=(1 << 14, 1), compression="gzip")[0, 0] = 1
    with (
        pytest.raises(ts.FormatError, match=r"dataset /tall lie in compressed chunks .* h5repack"),
        open_source(tmp_path / "x.h5"),
    ):
        raise AssertionError("it was believed")


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "bomb.h5", "w") as file:
        for name in "abc":  # each is small enough by itself
            file.create_dataset(name, (1 << 29,), "u1", chunks=(1 << 20,), compression="gzip")
    with (
        pytest.raises(ts.FormatError, match=r"dataset /c of 536870912 bytes has 0 in the file"),
        open_source(tmp_path / "bomb.h5"),
    ):
        raise AssertionError("it was believed")
    with h5py.File(tmp_path / "many.h5", "w") as file:
        file.create_dataset("x", (1 << 26,), "u1", chunks=(1,))
    with pytest.raises(ts.FormatError, match=r"which cannot be all of it"), open_source(tmp_path / "many.h5"):
        raise AssertionError("it was believed")


def test_what_was_never_written_is_zeros_as_long_as_it_is_small(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (1000,), "f4", chunks=(100,), compression="gzip")
    with open_source(tmp_path / "x.h5") as found:
        assert read(found.state["x"]) == bytes(4000)


def test_no_plug_in_is_loaded(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((10,))
        made.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))  # zstd, which HDF5 has not built in
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((100,)), made)
    with (
        pytest.raises(ts.FormatError, match=r"dataset /x needs the HDF5 filter plug-in 32015"),
        open_source(tmp_path / "x.h5"),
    ):
        raise AssertionError("it was believed")


def test_texts_that_are_the_same_bytes_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "MAX_METADATA", 1 << 16)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("fine", data=[["a", "ö"], ["", "b"]], dtype=h5py.string_dtype())
        file.create_dataset("long", data=["x" * 5000] * 20, dtype=h5py.string_dtype())
    with pytest.raises(ts.FormatError, match=r"/long has more than 65536 letters"), open_source(tmp_path / "x.h5"):
        raise AssertionError("it was believed")
    with h5py.File(tmp_path / "x.h5", "a") as file:
        del file["long"]
    with open_source(tmp_path / "x.h5") as found:
        assert found.state == {"fine": [["a", "ö"], ["", "b"]]}


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=[b"\xff\xfe"], dtype=h5py.string_dtype())
    with (
        pytest.raises(ts.FormatError, match=r"x\.h5 cannot be read: UnicodeDecodeError"),
        open_source(tmp_path / "x.h5"),
    ):
        raise AssertionError("it was believed")
