"""HDF5 datasets and groups, out of and into open files: any shape, type and layout, in any pieces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from h5py import h5t
from hypothesis import given, settings
from hypothesis import strategies as st
from support.equality import same
from support.transfer import again, feed, restore, stream, transfer

import tierstate as ts
from tierstate.manifest.chunk import as_buffer, empty_buffer, to_bytes
from tierstate.manifest.errors import CaptureError, StateMismatch
from tierstate.manifest.format.leaf import Leaf
from tierstate.providers.hdf5 import DatasetProvider, odd_numbers
from tierstate.providers.registry import Registry
from tierstate.providers.tensors.arrays import ArrayProvider
from tierstate.providers.tree.flatten import flatten
from tierstate.providers.tree.flatten_cache import FlattenCache

DTYPES = ["|b1", "|i1", "<i2", ">u4", "<u8", "<f2", "<f4", ">f8", "<c8", ">c16", "|S5", "|V3"]
FIELDS = [
    np.dtype([("a", "<i2"), ("b", ">f8", (2,))]),
    np.dtype({"names": ["x", "y"], "formats": ["u1", "<f4"], "offsets": [5, 1], "itemsize": 9}),
    np.dtype([("n", [("p", "<i4"), ("q", "S3")]), ("r", "?")], align=True),
    np.dtype(("<i4", (3,))),
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"chunks": True},
    {"chunks": True, "compression": "gzip", "shuffle": True},
    {"chunks": True, "fletcher32": True},
    {"chunks": True, "compression": "lzf"},
]


ZFP = 32013
"""Number of a filter that rounds, and that is not there; being optional, it is left out then."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[h5py.File]:
    with h5py.File(tmp_path / "state.h5", "w") as opened:
        yield opened


def memory() -> h5py.File:
    """A file that is nowhere but in memory."""
    return h5py.File(f"{np.random.default_rng().integers(1 << 60)}.h5", "w", driver="core", backing_store=False)


def dataset(group: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], layout: dict[str, Any]) -> Any:
    layout = layout if shape and 0 not in shape else {}
    if layout and len(shape) > 1:  # blocks that no row ends with
        layout = {**layout, "chunks": tuple(max(1, n - 1) for n in shape)}
    return group.create_dataset(name, shape, dtype, **layout)


def fill(data: Any, seed: int) -> bytes:
    """Give a dataset any bytes that its type has; what they are."""
    top = 2 if data.dtype.kind in "bVS" else 256
    bits = np.random.default_rng(seed).integers(0, top, data.size * data.dtype.itemsize, np.uint8).tobytes()
    feed(DatasetProvider(data), bits)
    return bits


@given(
    st.sampled_from([*map(np.dtype, DTYPES), *FIELDS]),
    st.lists(st.sampled_from([3, 1, 2, 7, 5, 0]), max_size=4).map(tuple),
    st.sampled_from(LAYOUTS),
    st.integers(1, 5),
    st.integers(1, 90),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=150)
def test_any_dataset_comes_back(
    dtype: np.dtype[Any], shape: tuple[int, ...], layout: dict[str, Any], grains: int, piece: int, seed: int
) -> None:
    with memory() as opened:
        source = dataset(opened, "source", dtype, shape, layout)
        right = fill(source, seed)
        provider = DatasetProvider(source)
        assert stream(provider, 16 * grains) == right
        spec = again(Leaf((), provider.spec)).spec
        # As an array, where there is no file
        fresh = ArrayProvider.fresh(spec)
        feed(fresh, right, piece, seed)
        made = fresh.done()
        assert made.tobytes() == right
        if dtype.names is None and dtype.kind != "b" and shape:
            assert source[()].tobytes() == right, "h5py reads the same"
        # Into another dataset, in pieces that end anywhere
        target = dataset(opened, "target", dtype, shape, LAYOUTS[seed % len(LAYOUTS)])
        sink = DatasetProvider(target)
        assert sink.mismatch(spec) == ""
        feed(sink, right, piece, seed)
        assert sink.done() is target
        assert stream(DatasetProvider(target)) == right


def test_parts_of_a_dataset_are_read_and_written_alone(file: h5py.File) -> None:
    data = file.create_dataset("x", data=np.arange(5 * 7 * 3, dtype="<i4").reshape(5, 7, 3), chunks=(2, 3, 2))
    right = bytearray(data[()].tobytes())
    for start, stop in [(0, 1), (3, 5), (7, 200), (12, 12 * 7), (0, 420), (13, 14), (419, 420), (80, 260)]:
        out = empty_buffer(stop - start)
        DatasetProvider(data).read(start, out)
        assert to_bytes(out) == right[start:stop]
        new = bytes(range(1, 1 + stop - start)) if stop - start < 200 else bytes(stop - start)
        DatasetProvider(data).load(start, as_buffer(new))
        right[start:stop] = new
        assert data[()].tobytes() == bytes(right)


def test_bits_that_no_conversion_keeps(file: h5py.File) -> None:
    payload = np.array([0x7FA00001, 0xFFC12345, 0x80000000, 1], "<u4").view("<f4")
    for name, dtype in (("little", "<f4"), ("big", ">f4")):
        data = file.create_dataset(name, (4,), dtype)
        DatasetProvider(data).load(0, as_buffer(payload.tobytes()))
        assert stream(DatasetProvider(data)) == payload.tobytes()


# Groups


def tree_of(group: Any) -> Any:
    """A file with everything a group can hold that can be saved."""
    group["w"] = np.arange(12, dtype=">f4").reshape(3, 4)
    group.create_dataset("z", data=np.arange(100.0).reshape(10, 10), chunks=(3, 3), compression="gzip")
    inner = group.create_group("layers").create_group("0")
    inner["scale"] = np.float16(1.5)
    inner["same"] = group["w"]
    inner["soft"] = h5py.SoftLink(group.name.rstrip("/") + "/z")
    group.create_group("nothing")
    group.attrs["step"] = 7
    group.attrs["name"] = "run é"
    group["w"].attrs["unit"] = np.bytes_(b"m")
    group["w"].attrs["range"] = np.array([0.5, 2.5], "<f4")
    inner.attrs["names"] = ["a", "bcd"]
    inner.attrs["flag"] = True
    inner.attrs["point"] = np.array((1, 2.5), [("i", "<i4"), ("f", "<f8")])
    return group


def test_a_group_loads_as_a_dict_of_arrays(file: h5py.File) -> None:
    leaves, data = transfer(flatten({"data": tree_of(file), "step": 7}))
    assert {leaf.name: leaf.spec.kind for leaf in leaves if leaf.spec.has_bytes and "attrs" not in leaf.name} == {
        "data.layers.\"0\".same": "array", "data.layers.\"0\".scale": "array", "data.layers.\"0\".soft": "array",
        "step": "value",
    }, "links to one dataset are saved once"  # fmt: skip
    found = restore(leaves, data)["data"]
    assert list(found) == ["layers", "nothing", "w", "z", "/attrs"]
    assert same(found["w"], np.arange(12, dtype=">f4").reshape(3, 4))
    assert found["layers"]["0"]["same"] is found["w"]
    assert found["layers"]["0"]["soft"] is found["z"]
    assert same(found["z"], np.arange(100.0).reshape(10, 10))
    assert found["layers"]["0"]["scale"].dtype == np.float16
    assert found["nothing"] == {}
    assert found["/attrs"]["."] == {"name": "run é", "step": 7}
    assert found["/attrs"]["w"]["unit"] == b"m"
    assert found["/attrs"]["w"]["range"].dtype == np.float32
    own = found["layers"]["0"]["/attrs"]["."]
    assert (own["names"], own["flag"], own["point"]["f"]) == (["a", "bcd"], True, 2.5)


def test_a_group_is_restored_in_place(file: h5py.File) -> None:
    group = tree_of(file.create_group("top"))
    leaves, data = transfer(flatten(group))
    before = {name: group["w"].attrs.get_id(name).dtype for name in group["w"].attrs}
    group["w"][:] = 0
    group["z"][2:5] = -1
    group["layers/0/scale"][()] = 9
    group["layers/0"].attrs["names"] = ["q"]
    group["w"].attrs["unit"] = np.bytes_(b"x")
    group["w"].attrs["more"] = 1
    del group.attrs["step"]
    assert restore(leaves, data, into=group, piece=33) is group
    assert np.array_equal(group["w"][:], np.arange(12).reshape(3, 4))
    assert np.array_equal(group["z"][:], np.arange(100).reshape(10, 10))
    assert group["layers/0/scale"][()] == 1.5
    assert group.attrs["step"] == 7
    assert group["layers/0"].attrs["names"].tolist() == ["a", "bcd"]
    assert {name: group["w"].attrs.get_id(name).dtype for name in group["w"].attrs} == before
    file.flush()
    again_leaves, again_data = transfer(flatten(group))
    assert ([again(leaf) for leaf in leaves], data) == (again_leaves, again_data)


def test_arrays_go_into_datasets_and_back(file: h5py.File) -> None:
    file["x"] = np.zeros(5, "<i8")
    leaves, data = transfer(flatten({"x": np.arange(5)}))
    restore(leaves, data, into=file)
    assert file["x"][:].tolist() == [0, 1, 2, 3, 4]
    leaves, data = transfer(flatten(file))
    target = {"x": np.zeros(5, "<i8")}
    restore(leaves, data, into=target)
    assert target["x"].tolist() == [0, 1, 2, 3, 4]


def test_what_differs_is_listed_and_nothing_is_touched(tmp_path: Path, file: h5py.File) -> None:
    leaves, data = transfer(flatten(tree_of(file)))
    with h5py.File(tmp_path / "other.h5", "w") as other:
        tree_of(other)
        del other["w"], other["z"]
        other["w"] = np.zeros((3, 4), "<f4")
        other["z"] = np.zeros((10, 9))
        other["extra"] = 1
        before = other["z"][:].tobytes(), other.attrs["step"]
        with pytest.raises(StateMismatch) as caught:
            restore(leaves, data, into=other)
        for line in ("w: has dtype <f4 here, >f4", "z: has shape (10, 9) here, (10, 10)", "  extra"):
            assert line in str(caught.value)
        assert before == (other["z"][:].tobytes(), other.attrs["step"])
    with h5py.File(tmp_path / "other.h5", "r") as other, pytest.raises(StateMismatch, match="open it with mode 'r\\+'"):
        restore(*transfer(flatten(other)), into=other)
    fields = file.create_dataset("f", (2,), [("a", "<i4")])
    spec = ArrayProvider(np.zeros(2, [("b", "<i4")])).spec
    assert "fields" in DatasetProvider(fields).mismatch(spec)


@pytest.mark.parametrize(("dtype", "filters"), [("<f8", {"scaleoffset": 2}), ("<i8", {"scaleoffset": 4}), ("<f8", {})])
def test_nothing_is_written_through_a_filter_that_rounds(file: h5py.File, dtype: str, filters: dict[str, Any]) -> None:
    file["x"] = np.arange(1000, 2000, dtype=dtype)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if not filters:
        plist.set_chunk((1000,))
        plist.set_filter(ZFP, h5py.h5z.FLAG_OPTIONAL)
        filters = {"dcpl": plist}
    target = file.create_dataset("y", (1000,), dtype, **filters)
    with pytest.raises(StateMismatch, match="may round"):
        restore(*transfer(flatten({"x": file["x"]})), into={"x": target})
    assert not target[:].any()


def test_integers_are_written_through_a_filter_that_finds_their_bits(file: h5py.File) -> None:
    file["x"] = np.array([5, -(2**63), 2**63 - 1, 0, -1] * 10)
    file.create_dataset("y", (50,), "<i8", chunks=(7,), scaleoffset=0)
    restore(*transfer(flatten({"x": file["x"]})), into={"x": file["y"]})
    file.flush()
    file["y"].refresh()
    assert file["y"][:].tolist() == file["x"][:].tolist()


def opened_and_closed(place: Path) -> Any:
    with h5py.File(place / "closed.h5", "w") as closed:
        closed["x"] = 1
        return closed["x"]


REFUSED = {
    "text": (lambda f, _: f.create_dataset("x", data=["a", "bcd"]), "asstr"),
    "ragged": (lambda f, _: f.create_dataset("x", (2,), h5py.vlen_dtype(np.int32)), "sequences of any length"),
    "references": (lambda f, _: f.create_dataset("x", (2,), h5py.ref_dtype), "references"),
    "fields of text": (lambda f, _: f.create_dataset("x", (2,), [("a", h5py.string_dtype())]), "fixed size"),
    "empty": (lambda f, _: f.create_dataset("x", data=h5py.Empty("f4")), "no dataspace"),
    "closed": (lambda _, place: opened_and_closed(place), "closed"),
    "wide": (lambda f, _: f.create_dataset("x", (1,), "V70000"), "too long"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_with_a_remedy(file: h5py.File, tmp_path: Path, name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(CaptureError, match=expected) as caught:
        flatten({"a": make(file, tmp_path)})
    assert str(caught.value).startswith("a: ")


def test_elements_of_a_type_that_numpy_lacks_are_refused(file: h5py.File) -> None:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)  # bfloat16
    made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((3,)))
    assert made.id
    with pytest.raises(CaptureError, match="elements of 2 bytes"):
        flatten(file)


ATOMS = [h5t.STD_I8LE, h5t.STD_I16BE, h5t.STD_U32LE, h5t.STD_I64LE, h5t.IEEE_F16LE, h5t.IEEE_F32BE, h5t.IEEE_F64LE]


@st.composite
def numbers(draw: st.DrawFn) -> h5t.TypeID:
    """A type of numbers: with all its bits or some, of any form, alone or in an enum, an array or a compound."""
    found = draw(st.sampled_from(ATOMS)).copy()
    if isinstance(found, h5t.TypeIntegerID) and draw(st.booleans()):
        bits = draw(st.integers(4 * found.get_size() + 1, 8 * found.get_size()))  # HDF5 makes none with fewer
        found.set_precision(bits)
        found.set_offset(draw(st.integers(0, 8 * found.get_size() - bits)))
    elif isinstance(found, h5t.TypeFloatID) and draw(st.booleans()):
        *_, exponent, _, mantissa = found.get_fields()
        found.set_fields(0, mantissa + 1, exponent, 1, mantissa)  # the sign in the lowest bit
    kind, size = draw(st.sampled_from(["alone", "enum", "array", "compound", "complex"])), found.get_size()
    if kind == "enum" and isinstance(found, h5t.TypeIntegerID):
        found = h5t.enum_create(found)
        found.enum_insert(b"none", 0)
        return found
    if kind == "array":
        return h5t.array_create(found, (2,))
    if kind in ("compound", "complex"):
        names = (b"r", b"i") if kind == "complex" else (b"x", b"y")
        places = draw(st.sampled_from([(0, size), (size, 0)]))
        compound = h5t.create(h5t.COMPOUND, 2 * size)
        for name, place in zip(names, places, strict=True):
            compound.insert(name, place, found)
        return compound
    return found


@given(numbers(), st.binary(min_size=96, max_size=96))
def test_numbers_are_those_that_hdf5_reads_or_are_refused(kind: h5t.TypeID, data: bytes) -> None:
    with memory() as file:
        created = h5py.h5d.create(file.id, b"data", kind, h5py.h5s.create_simple((3,)))
        created.write(h5py.h5s.ALL, h5py.h5s.ALL, np.frombuffer(data, np.uint8)[: 3 * kind.get_size()].copy(), kind)
        if odd_numbers(kind):
            with pytest.raises(CaptureError, match="whose bytes would be other numbers to NumPy; write it anew as"):
                DatasetProvider(file["data"])
            plain = file.create_dataset("plain", (3,), file["data"].dtype)
            assert plain.id.get_type() != kind, "what h5py itself makes of this type is taken"
            return
        provider = DatasetProvider(file["data"])
        loaded = ArrayProvider.fresh(provider.spec)
        feed(loaded, stream(provider))
        assert same(loaded.done(), file["data"][:])


def test_links_and_attributes_that_cannot_be_saved(file: h5py.File) -> None:
    file["gone"] = h5py.SoftLink("/nowhere")
    with pytest.raises(CaptureError, match=r"/gone in .* is a link to nothing"):
        flatten(file)
    del file["gone"]
    file["far"] = h5py.ExternalLink("other.h5", "/x")
    with pytest.raises(CaptureError, match=r"/far in .* is a link into another file"):
        flatten(file)
    del file["far"]
    file["x"] = 1
    for value in (h5py.Empty("f4"), file["x"].ref):
        file["x"].attrs["odd"] = value
        with pytest.raises(CaptureError, match="attribute 'odd' of /x in "):
            flatten(file)
    del file["x"].attrs["odd"]
    file["loop"] = file["/"]
    with pytest.raises(CaptureError, match="nested deeper"):
        flatten(file)


def test_a_provider_of_the_users_own_wins(file: h5py.File) -> None:
    class Mine(DatasetProvider):
        kind = "mine"

    registry = Registry()
    registry.register(h5py.Dataset, Mine)
    file["x"] = 1
    assert [type(node.provider) for node in flatten(file, registry=registry).nodes] == [type(None), Mine]


def test_a_state_that_is_saved_again_is_recalled(file: h5py.File) -> None:
    recall, group = FlattenCache(), tree_of(file)
    first = transfer(recall.flatten({"data": group}))
    assert transfer(recall.flatten({"data": group})) == first
    group["w"][0, 0] = 5
    group.attrs["step"] = 8
    leaves, data = transfer(recall.flatten({"data": group}))
    assert restore(leaves, data)["data"]["w"][0, 0] == 5
    assert restore(leaves, data)["data"]["/attrs"]["."]["step"] == 8


# The whole way


def test_a_file_goes_through_tiers_and_back(place: Path, file: h5py.File) -> None:
    rows = file.create_dataset("rows", (400, 300), "<f4", chunks=(64, 64), compression="lzf")
    rows[:] = np.random.default_rng(0).normal(size=(400, 300)).astype("<f4")
    right, policy = rows[:], ts.Policy.parse(f"chunk: 16KiB\ntiers: {{nvme: {{type: nvme, path: {place}/nvme}}}}")
    with ts.Checkpointer(policy, "h5") as ckpt:
        ckpt.save({"data": file, "w": torch.ones(3)}, step=1).wait()
        rows[10:200] = 0
        ckpt.save({"data": file, "w": torch.ones(3)}, step=2).wait()
        ckpt.restore(into={"data": file, "w": torch.zeros(3)}, step=1)
        assert np.array_equal(rows[:], right)
        assert not ckpt.load(step=2)["data"]["rows"][10:200].any()
        part = {"rows": rows}
        rows[:] = 1
        ckpt.restore(into={"data": part, "w": None}, only=["data.**"], step=1)
        assert np.array_equal(rows[:], right), "a dataset alone takes what a group gave"


@pytest.mark.slow
def test_a_version_of_a_file_loads_without_h5py(place: Path, file: h5py.File) -> None:
    policy = place / "policy.yaml"
    policy.write_text(f"version: 1\ntiers: {{nvme: {{type: nvme, path: {place}/nvme}}}}")
    with ts.Checkpointer(policy, "h5") as ckpt:
        ckpt.save(tree_of(file), step=1).wait()
    code = (
        "import sys; sys.modules['h5py'] = None\n"
        "import tierstate as ts\n"
        f"with ts.Checkpointer({str(policy)!r}, 'h5') as ckpt: print(ckpt.load()['w'].sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("66.0", "")
