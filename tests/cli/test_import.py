"""Imports: other programs' files as versions of a run, without running their code or trusting their bytes."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import subprocess
import sys
import warnings
from collections import OrderedDict
from contextlib import suppress
from enum import Enum
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointer_worlds import scratch
from support.cli_calls import Call, odd
from support.equality import difference
from support.state_strategies import states
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import tierstate as ts
from tierstate.engine.packs.formats import FileInfo, FileLeaf, format_of
from tierstate.files.dcp import _disjoint
from tierstate.files.export import export
from tierstate.files.importing import import_version, open_source
from tierstate.files.stored import FileValue
from tierstate.manifest.boxes import Box
from tierstate.manifest.format.leaf import Leaf, Spec
from tierstate.providers.tree.flatten import flatten

POLICY = "chunk: 4KiB\narena: {{size: 64KiB}}\ntiers: {{nvme: {{type: nvme, path: {place}/nvme}}}}\n"


@pytest.mark.slow
@given(states(), st.sampled_from(["safetensors", "h5"]), st.sampled_from([None, 16, 100]))
@settings(deadline=None, max_examples=40)
def test_what_is_exported_is_imported_bit_for_bit(state: Any, kind: str, shard: int | None) -> None:
    with scratch() as place, ts.Checkpointer(ts.Policy.parse(POLICY.format(place=place)), "run") as ckpt:
        ckpt.save(state, step=5, metadata={"loss": 1}).wait()
        to = place / f"out.{kind}"
        try:
            done = export(ckpt, to, max_shard=shard)
        except ts.StateMismatch:
            # Types that the format lacks: all else comes back as it was.
            done = export(ckpt, to, max_shard=shard, skip_values=True)
            if not done.tensors:
                return
            import_version(ckpt, done.files[-1], step=6)
            assert not [d.name for d in ckpt.diff(5, 6) if d.change == "added" and not d.name.endswith("storage")]
            return
        info = import_version(ckpt, done.files[-1])
        assert (info.step, info.metadata) == (5, {"loss": 1})
        assert difference(ckpt.load(version=done.version.id), ckpt.load(version=info.id)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["safetensors", "h5"])
def test_the_whole_way_on_the_command_line(call: Call, policy: Path, ending: str) -> None:
    with ts.Checkpointer(policy, "odd") as ckpt:
        ckpt.save(odd(), step=7, metadata={"loss": 0.5})
    to = policy.parent / f"out.{ending}"
    assert call("export", "-p", policy, "-r", "odd", to).status == 0
    answer = call("import", "-p", policy, "-r", "copy", to)
    assert answer.status == 0, answer
    assert "as step 7 of run copy" in answer.out
    found = call("import", "-p", policy, "-r", "copy", to, "--step", "9", "--json").json
    assert (found["step"], found["metadata"], found["source"]) == (9, {"loss": 0.5}, str(to))
    with ts.Checkpointer(policy, "copy") as ckpt:
        loaded = ckpt.load(step=7)
    assert difference(odd(), loaded) == ""
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]


NAMES = {
    "keys like paths": {"a/b": torch.ones(1), "": torch.zeros(2), "..": torch.zeros(1), ".": torch.zeros(3), "a": {}},
    "names that are taken": {"__tierstate__": torch.ones(1), "__metadata__": torch.ones(2), "é\ud800": torch.ones(4)},
    "keys of any type": {0: torch.ones(1), "0": torch.ones(2), (1, 0.5): {None: torch.ones(3), b"x": True}},
    "values alone": {"step": 5, "rng": (3, tuple(range(600)), None), "nan": float("nan"), "big": 1 << 100},
    "a tensor alone": torch.arange(3),
    "a value alone": 5,
    "nothing": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["safetensors", "h5"])
@pytest.mark.parametrize("name", NAMES)
def test_states_that_files_have_no_words_for(policy: Path, name: str, ending: str) -> None:
    to = policy.parent / f"out.{ending}"
    with ts.Checkpointer(policy, "odd") as ckpt:
        ckpt.save(NAMES[name], step=1).wait()
        export(ckpt, to)
        import_version(ckpt, to, step=2)
        assert difference(NAMES[name], ckpt.load(step=2)) == ""


def test_parts_come_back_as_parts(policy: Path) -> None:
    with ts.Checkpointer(policy, "odd") as ckpt:
        ckpt.save(odd(), step=7).wait()
        to = policy.parent / "part.safetensors"
        export(ckpt, to, only=['model."head.weight"', "seen.2", "seen.0"])
        import_version(ckpt, to, step=8)
        found = ckpt.load(step=8)
    right = odd()
    wanted = {
        "model": {"head.weight": right["model"]["head.weight"]},
        "seen": {0: right["seen"][0], 2: right["seen"][2]},
    }
    assert difference(wanted, found) == ""


# Files of others


def test_a_model_of_safetensors_is_restored_into_a_module(call: Call, policy: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    path = policy.parent / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path, {"format": "pt", "metadata": "mine"})
    assert call("import", "-p", policy, "-r", "hf", path, "--under", "net.model").status == 0
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    with ts.Checkpointer(policy, "hf") as ckpt:
        ckpt.restore(into={"net": {"model": other}})
        assert ckpt.info().step == 0
    assert difference(dict(model.state_dict()), dict(other.state_dict())) == ""


def test_every_type_of_safetensors(policy: Path) -> None:
    names = ["bool", "uint8", "int8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "int64"]
    names += ["uint64", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"]
    right = {n: torch.arange(5).to(torch.float32).to(getattr(torch, n)) for n in names}
    path = policy.parent / "types.safetensors"
    safetensors.torch.save_file(right, path)
    with ts.Checkpointer(policy, "types") as ckpt:
        import_version(ckpt, path)
        found = ckpt.load()
    assert sorted(found) == sorted(right)
    assert all(difference(right[n], found[n]) == "" for n in names)


@pytest.mark.slow
def test_a_folder_of_safetensors_with_an_index(call: Call, policy: Path) -> None:
    folder = policy.parent / "hf"
    folder.mkdir()
    right = {"a.w": torch.randn(7), "b.w": torch.randn(5, 3)}
    for i, (name, tensor) in enumerate(right.items()):
        safetensors.torch.save_file({name: tensor}, folder / f"model-{i}.safetensors")
    assert "name a .safetensors" in call("import", "-p", policy, "-r", "hf", folder).err
    weights = {name: f"model-{i}.safetensors" for i, name in enumerate(right)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 88}, "weight_map": weights}))
    assert call("import", "-p", policy, "-r", "hf", folder).status == 0
    with ts.Checkpointer(policy, "hf") as ckpt:
        assert difference(right, ckpt.load()) == ""
    for weight_map in ({"a.w": "../model-0.safetensors"}, {"c": "model-0.safetensors"}, {"a.w": 5}, ["a.w"]):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert call("import", "-p", policy, "-r", "hf", index).status == 2


def test_a_file_of_torch_save(call: Call, policy: Path) -> None:
    weight = torch.randn(300, 20)
    right = {
        "model": OrderedDict(w=weight, tied=weight, row=torch.randn(3)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "epoch": 3,
    }
    path = policy.parent / "out.pt"
    for old in (False, True):
        torch.save(right, path, _use_new_zipfile_serialization=not old)
        assert call("import", "-p", policy, "-r", "pt", path, "--step", int(old)).status == 0
        with ts.Checkpointer(policy, "pt") as ckpt:
            assert difference(right, ckpt.load(step=int(old))) == ""


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place / "exploded"),)


def test_no_code_is_run(call: Call, policy: Path) -> None:
    path, place = policy.parent / "bad.pt", policy.parent
    torch.save({"w": Bomb(place)}, path)
    answer = call("import", "-p", policy, "-r", "bad", path)
    assert answer.status == 2
    assert "would run its code" in answer.err
    folder = place / "dcp"
    save_dcp({"w": torch.ones(2), "bomb": Bomb(place)}, folder)
    (place / "exploded").rmdir() if (place / "exploded").exists() else None
    answer = call("import", "-p", policy, "-r", "bad", folder)
    assert answer.status == 2
    assert "would run code" in answer.err
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(place)))
    answer = call("import", "-p", policy, "-r", "bad", folder)
    assert answer.status == 2
    assert ".metadata: the metadata names posix.mkdir" in answer.err
    assert not (place / "exploded").exists()


def save_dcp(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.slow
def test_a_folder_of_dcp(call: Call, policy: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "step": 5, "rng": torch.get_rng_state(),
             "half": torch.randn(70, 50).to(torch.bfloat16), "one": torch.tensor(1.5)}  # fmt: skip
    folder = policy.parent / "dcp"
    save_dcp(state, folder)
    answer = call("import", "-p", policy, "-r", "dcp", folder, "--step", "5")
    assert answer.status == 0, answer
    with ts.Checkpointer(policy, "dcp") as ckpt:
        found = ckpt.load(step=5)
    assert found["step"] == 5
    assert difference({k: v.detach() for k, v in state["model"].items()}, found["model"]) == ""
    assert torch.equal(found["half"].view(torch.int16), state["half"].view(torch.int16))
    assert torch.equal(found["rng"], state["rng"])
    assert found["one"].item() == 1.5
    assert found["opt"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert torch.equal(found["opt"]["state"]["0"]["exp_avg"], state["opt"]["state"][0]["exp_avg"])
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-900])
    assert "is truncated" in call("import", "-p", policy, "-r", "dcp", folder).err


class EnumsByGetattr(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does, which Debian 12 has."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class EnumsByValue(pickle.Pickler):
    """Pickles members of enums as Python 3.11.4 and later do."""

    def reducer_override(self, value: Any) -> Any:
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


def test_a_folder_of_dcp_that_an_earlier_python_wrote(call: Call, policy: Path) -> None:
    folder = policy.parent / "dcp"
    save_dcp({"w": torch.arange(9.0)}, folder)
    metadata, data = pickle.loads((folder / ".metadata").read_bytes()), io.BytesIO()
    EnumsByGetattr(data).dump(metadata)
    assert b"getattr" in data.getvalue()
    (folder / ".metadata").write_bytes(data.getvalue())
    assert call("import", "-p", policy, "-r", "dcp", folder, "--step", "5").status == 0
    with ts.Checkpointer(policy, "dcp") as ckpt:
        assert torch.equal(ckpt.load(step=5)["w"], torch.arange(9.0))


def test_a_folder_of_dcp_that_python_3_13_wrote(call: Call, policy: Path) -> None:
    """Only there the paths in the metadata are of the module `pathlib._local`."""
    folder = policy.parent / "dcp"
    save_dcp({"w": torch.arange(9.0)}, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    written = io.BytesIO()
    EnumsByValue(written, protocol=2).dump(metadata)
    data = written.getvalue().replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")
    assert b"cpathlib._local\nPosixPath\n" in data
    (folder / ".metadata").write_bytes(data)
    answer = call("import", "-p", policy, "-r", "dcp", folder, "--step", "5")
    assert answer.status == 0, answer
    with ts.Checkpointer(policy, "dcp") as ckpt:
        assert torch.equal(ckpt.load(step=5)["w"], torch.arange(9.0))


@pytest.mark.parametrize("name", ["os", "Path", "PosixPath.unlink"])
def test_nothing_but_paths_is_taken_from_the_module_of_python_3_13(tmp_path: Path, name: str) -> None:
    module, named = b"\x8c\x0epathlib._local", b"\x8c" + bytes([len(name)]) + name.encode()
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + module + named + b"\x93.")
    with pytest.raises(ts.Unsafe, match=rf"the metadata names pathlib\._local\.{name}, "), open_source(tmp_path):
        raise AssertionError("it was believed")


ASKED = [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "x")]


@pytest.mark.parametrize("asked", ASKED)
def test_getattr_in_metadata_gives_members_of_enums_and_nothing_else(
    call: Call, policy: Path, asked: tuple[Any, str]
) -> None:
    folder = policy.parent / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(ByGetattr(*asked)))
    answer = call("import", "-p", policy, "-r", "dcp", folder)
    assert answer.status == 2
    assert "asks for the attribute" in answer.err


class ByGetattr:
    """Pickled as an attribute of something."""

    def __init__(self, of: Any, name: str) -> None:
        self.asked = of, name

    def __reduce__(self) -> Any:
        return getattr, self.asked


SHARDS = """
import sys, warnings, torch, torch.distributed as dist
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
rows, columns = torch.arange(35.0).view(7, 5), torch.arange(12).view(3, 4)
state = {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "columns": distribute_tensor(columns, mesh, [Shard(1)])}
dcp.save(state, checkpoint_id=folder)
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_what_two_ranks_wrote_with_dcp_is_joined(policy: Path) -> None:
    folder = policy.parent / "sharded"
    ranks = [subprocess.Popen([sys.executable, "-c", SHARDS, str(rank), str(folder)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    with ts.Checkpointer(policy, "sharded") as ckpt:
        import_version(ckpt, folder)
        found = ckpt.load()
    assert difference({"rows": torch.arange(35.0).view(7, 5), "columns": torch.arange(12).view(3, 4)}, found) == ""


def by_hand(folder: Path, tensor: torch.Tensor, boxes: list[tuple[int, int]], **changed: Any) -> None:
    """A folder as DCP makes it of the rows that each rank has."""
    folder.mkdir()
    places, chunks = {}, []
    with (folder / "__0_0.distcp").open("wb") as file:
        for first, stop in boxes:
            offset, start = torch.Size([first, *(0 for _ in tensor.shape[1:])]), file.tell()
            torch.save(tensor[first:stop].clone(), file)
            place = {"relative_path": "__0_0.distcp", "offset": start, "length": file.tell() - start, **changed}
            places[MetadataIndex("w", offset)] = _StorageInfo(**place)
            chunks.append(ChunkStorageMetadata(offset, torch.Size([stop - first, *tensor.shape[1:]])))
    about = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": about}, {"w": ("model", "w")}, places)))


def test_sharded_tensors_of_dcp_are_joined(policy: Path) -> None:
    tensor = torch.randn(7, 500)
    by_hand(policy.parent / "sharded", tensor, [(4, 7), (0, 1), (1, 4)])
    with ts.Checkpointer(policy, "sharded") as ckpt:
        import_version(ckpt, policy.parent / "sharded")
        assert difference({"model": {"w": tensor}}, ckpt.load()) == ""


DCP_LIES: dict[str, tuple[list[tuple[int, int]], dict[str, Any], str]] = {
    "a part is missing": ([(0, 3)], {}, "are not the whole of"),
    "twice": ([(0, 4), (1, 4)], {}, "are not the whole of"),
    "outside": ([(0, 4)], {"relative_path": "../policy.yaml"}, "lies outside of the folder"),
    "absolute": ([(0, 4)], {"relative_path": "/etc/passwd"}, "lies outside of the folder"),
    "less than all": ([(0, 4)], {"length": 20}, "has fewer in its files"),
    "beyond the end": ([(0, 4)], {"offset": 1 << 40}, "is truncated"),
    "extended": ([(0, 4)], {"transform_descriptors": ["zstd"]}, "through an extension"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DCP_LIES)
def test_lies_of_dcp_are_found(call: Call, policy: Path, name: str) -> None:
    boxes, changed, expected = DCP_LIES[name]
    by_hand(policy.parent / "dcp", torch.randn(4, 30), boxes, **changed)
    answer = call("import", "-p", policy, "-r", "dcp", policy.parent / "dcp")
    assert answer.status == 2
    assert expected in answer.err


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


@pytest.mark.parametrize("name", ["safetensors", "hdf5"])
def test_a_pack_is_imported_by_its_paths(policy: Path, name: str) -> None:
    form = format_of(name)
    assert form is not None
    values = {("model", 0, "w"): torch.arange(4.0), ("model", "a.b"): torch.arange(3).to(torch.bfloat16)}
    items = [FileLeaf(Leaf(p, Spec("tensor", str(t.dtype)[6:], t.itemsize, tuple(t.shape)))) for p, t in values.items()]
    plan = form.lay_out(items, FileInfo("gpt", 3, 30, 0.0, '{"loss": 2}'))
    data = bytearray(plan.size)
    data[: len(plan.head)] = plan.head
    for offset, tensor in zip(plan.offsets, values.values(), strict=True):
        raw = tensor.view(torch.uint8).numpy().tobytes()
        data[offset : offset + len(raw)] = raw
    path = policy.parent / f"pack{form.suffix}"
    path.write_bytes(data)
    with ts.Checkpointer(policy, "pack") as ckpt:
        assert import_version(ckpt, path).step == 30
        found = ckpt.load()
    assert difference(values["model", 0, "w"], found["model"][0]["w"]) == ""
    assert difference(values["model", "a.b"], found["model"]["a.b"]) == ""


# Bytes from anybody


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def outline(leaves: Any, form: int = 1) -> dict[str, Any]:
    text = json.dumps({"tierstate": {"format": form, "leaves": leaves}})
    return {"__metadata__": {"metadata": text, "tierstate.paths": "{}"}}


W = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
ROOT = {"path": "[]", "kind": "dict"}
LEAF = {"path": '["w"]', "kind": "tensor", "dtype": "float32", "itemsize": 4, "shape": [2], "name": ["w"]}
LIES = {
    "nothing": b"",
    "short": b"\1\0",
    "too long a header": header(W, bytes(8), 1 << 40),
    "a header beyond the end": header(W, b"", 5000),
    "no JSON": header(b"{nonsense}"),
    "deep JSON": header(b"[" * 100_000),
    "no object": header([1]),
    "truncated": header(W, bytes(7)),
    "unknown type": header({"w": {**W["w"], "dtype": "F4"}}, bytes(8)),
    "wrong size": header({"w": {**W["w"], "shape": [3]}}, bytes(8)),
    "a type that is no name": header({"w": {**W["w"], "dtype": ["F32"]}}, bytes(8)),
    "offsets that are no numbers": header({"w": {**W["w"], "data_offsets": ["0", "8"]}}, bytes(8)),
    "too many axes": header({"w": {**W["w"], "shape": [10**9] * 10**5}}, bytes(8)),
    "a name twice": header(f'{{{json.dumps(W)[1:-1]}, {json.dumps(W)[1:-1]}}}'.encode(), bytes(8)),
    "negative": header({"w": {**W["w"], "shape": [-2], "data_offsets": [8, 0]}}, bytes(8)),
    "no offsets": header({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "metadata of another kind": header({"__metadata__": 5, **W}, bytes(8)),
    "metadata no JSON": header({"__metadata__": {"metadata": "{", "tierstate.paths": "{}"}, **W}, bytes(8)),
    "paths no paths": header({"__metadata__": {"tierstate.paths": '{"w": "x"}'}, **W}, bytes(8)),
    "two tensors at one path": header(
        {"__metadata__": {"tierstate.paths": json.dumps({"v": '["w"]'})}, **W, "v": W["w"]}, bytes(8)
    ),
    "newer outline": header({**outline([], 2), **W}, bytes(8)),
    "no leaves": header({**outline("x"), **W}, bytes(8)),
    "no root": header({**outline([LEAF]), **W}, bytes(8)),
    "no such tensor": header({**outline([ROOT, {**LEAF, "name": ["v"]}]), **W}, bytes(8)),
    "another type": header({**outline([ROOT, {**LEAF, "dtype": "int32"}]), **W}, bytes(8)),
    "another shape": header({**outline([ROOT, {**LEAF, "shape": [1 << 50]}]), **W}, bytes(8)),
    "a pickle": header({**outline([ROOT, {**LEAF, "kind": "object"}]), **W}, bytes(8)),
    "no value": header({**outline([ROOT, {"path": '["w"]', "kind": "value"}]), **W}, bytes(8)),
    "a broken value": header({**outline([ROOT, {"path": '["w"]', "kind": "value", "value": "AAAA"}]), **W}, bytes(8)),
    "tied to nothing": header({**outline([ROOT, {**LEAF, "kind": "tied", "attrs": {"to": "[]"}}]), **W}, bytes(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies_are_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lie.safetensors"
    path.write_bytes(LIES[name])
    with pytest.raises(ts.FormatError) as caught, open_source(path):
        raise AssertionError("it was believed")
    assert str(path) in str(caught.value)
    assert "Error(" not in str(caught.value), "in words"


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.safetensors").write_bytes(header(W, bytes([value] * 8)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "one.safetensors", "w": "two.safetensors"}}')
    with pytest.raises(ts.FormatError, match="the name 'w' is there twice"), open_source(index):
        raise AssertionError("it was believed")


def test_a_file_that_shrinks_while_it_is_imported_fails_the_save(policy: Path) -> None:
    path = policy.parent / "w.safetensors"
    path.write_bytes(header(W, bytes(8)))
    with ts.Checkpointer(policy, "w") as ckpt:
        with open_source(path) as found:
            os.truncate(path, 20)
            with pytest.raises(ts.TierstateError, match="w"):
                ckpt.save(found.state, step=1)
        assert ckpt.versions() == []


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_state_or_one_of_our_errors(data: st.DataObject) -> None:
    sound = data.draw(st.sampled_from(sorted(LIES)))
    raw = bytearray(header({**outline([ROOT, LEAF]), **W}, bytes(8)) if data.draw(st.booleans()) else LIES[sound])
    for _ in range(data.draw(st.integers(0, 4)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with scratch() as place:
        path = place / "any.safetensors"
        path.write_bytes(raw)
        with suppress(ts.TierstateError), open_source(path) as found:
            flatten(found.state)


ODD = {
    "missing": (None, "does not exist"),
    "text": (b"hello, world", "of no kind that can be imported"),
    "half a zip": (b"PK\x03\x04xxxx", "cannot be read as a file of torch.save"),
    "half a pickle": (b"\x80\x02}", "bad."),
    "half an HDF5": (b"\x89HDF\r\n\x1a\n", "cannot be read as HDF5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_file_of_these_kinds(call: Call, policy: Path, name: str) -> None:
    data, expected = ODD[name]
    path = policy.parent / "bad.bin"
    if data is not None:
        path.write_bytes(data)
    answer = call("import", "-p", policy, "-r", "gpt", path)
    assert answer.status == 2, answer
    assert expected in answer.err
    assert answer.err.startswith("tierstate: ")


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
    listed = {"tierstate": {"format": 1, "leaves": [ROOT, storage, views]}}
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


def test_metadata_of_dcp_changes_no_class(tmp_path: Path) -> None:
    # PurePosixPath.is_absolute = OrderedDict
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x02cpathlib\nPurePosixPath\nN}X\x0b\0\0\0is_absoluteccollections\nOrderedDict\ns\x86b."
    )
    before = PurePosixPath.is_absolute
    try:
        with (
            pytest.raises(ts.Unsafe, match=r"sets attributes of <class 'pathlib\.(_local\.)?PurePosixPath'>"),
            open_source(tmp_path),
        ):
            raise AssertionError("it was believed")
        assert PurePosixPath.is_absolute is before
    finally:
        PurePosixPath.is_absolute = before  # type: ignore[method-assign]


BOMBS = {"memo": b"\x80\x02Nr\x00\x5a\x62\x02.", "bytearray": b"\x80\x05\x96" + (1 << 30).to_bytes(8, "little") + b"."}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_not_taken_for_what_dcp_says(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ts.FormatError), open_source(tmp_path):
        raise AssertionError("it was believed")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("data", [b"\x80\x02.", b"\x80\x02]a.", b"\x80\x02K\x01K\x02\x85s.", b"\x80"])
def test_bytes_that_torch_stumbles_over_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "some.pt").write_bytes(data)
    with pytest.raises((ts.FormatError, ts.Unsafe), match=r"some\.pt"), open_source(tmp_path / "some.pt"):
        raise AssertionError("it was believed")
    save_dcp({"x": "text"}, tmp_path / "dcp")
    (path,) = (tmp_path / "dcp").glob("*.distcp")
    path.write_bytes(data.ljust(path.stat().st_size, b"."))
    with pytest.raises((ts.FormatError, ts.Unsafe), match="distcp"), open_source(tmp_path / "dcp"):
        raise AssertionError("it was believed")


def test_lengths_of_dcp_are_compared_with_the_file(tmp_path: Path) -> None:
    """One that is sparse in the metadata only: said to have a PiB, in shards that are all the same bytes."""
    by_hand(tmp_path / "long", torch.zeros(4), [(0, 4)], length=1 << 50)
    with pytest.raises(ts.FormatError, match="is truncated"), open_source(tmp_path / "long"):
        raise AssertionError("it was believed")
    by_hand(tmp_path / "same", torch.zeros(4000), [(i, i + 1) for i in range(4)], offset=0)
    path = tmp_path / "same/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([4])
    size = (tmp_path / "same/__0_0.distcp").stat().st_size
    for i, chunk in enumerate(metadata.state_dict_metadata["w"].chunks):
        chunk.offsets, chunk.sizes = torch.Size([i * size]), torch.Size([size])
        metadata.storage_data[MetadataIndex("w", chunk.offsets)] = _StorageInfo("__0_0.distcp", 0, size)
    metadata.state_dict_metadata["w"].size = torch.Size([4 * size])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ts.FormatError, match="has fewer in its files"), open_source(tmp_path / "same"):
        raise AssertionError("it was believed")


@pytest.mark.parametrize("boxes", [[(0, 2), (1, 3)], [(0, 2), (0, 2)], [(0, 0), (2, 4), (1, 3)]])
def test_shards_of_dcp_that_overlap_leave_holes(tmp_path: Path, boxes: list[tuple[int, int]]) -> None:
    """As many elements as there are, and yet some twice and some not at all."""
    by_hand(tmp_path / "dcp", torch.randn(4), boxes)
    with pytest.raises(ts.FormatError, match="are not the whole of"), open_source(tmp_path / "dcp"):
        raise AssertionError("it was believed")


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=5))
def test_boxes_are_apart_or_not(corners: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((a, b), (c + 1, d + 1)) for a, b, c, d in corners]
    assert _disjoint(boxes) == (not any(one.intersect(other) for one, other in combinations(boxes, 2)))


def test_dimensions_that_no_version_can_have_are_refused(call: Call, policy: Path) -> None:
    path = policy.parent / "wide.safetensors"
    path.write_bytes(header({"a": {"dtype": "F32", "shape": [1 << 80, 0], "data_offsets": [0, 0]}}))
    answer = call("import", "-p", policy, "-r", "wide", path)
    assert answer.status == 2
    assert "is not a shape of at most" in answer.err


def test_a_version_that_cannot_be_written_down_fails_its_save_and_no_other(place: Path) -> None:
    def read_nothing(start: int, out: torch.Tensor) -> None:
        raise AssertionError(f"{start} of no bytes, into {out.numel()}")

    endless = FileValue(Spec("tensor", "float32", 4, (1 << 80, 0)), read_nothing)
    with ts.Checkpointer(ts.Policy.parse(POLICY.format(place=place)), "wide") as ckpt:
        with pytest.raises(ts.FormatError, match="an axis longer than 64 bits"):
            ckpt.save({"a": endless}, step=7).wait(timeout=60)
        ckpt.save({"a": torch.ones(1)}, step=9).wait(timeout=60)
        assert ckpt.info().step == 9


def test_one_place_of_two_types_is_no_tie(policy: Path) -> None:
    path = policy.parent / "both.safetensors"
    both = {"i": {**W["w"], "dtype": "I32"}, "j": {**W["w"], "dtype": "I32"}}
    path.write_bytes(header({**W, **both}, bytes(8)))
    with ts.Checkpointer(policy, "both") as ckpt:
        import_version(ckpt, path)
        found = ckpt.load()
    assert [str(found[name].dtype) for name in "wij"] == ["torch.float32", "torch.int32", "torch.int32"]
    assert found["i"] is found["j"]


@pytest.mark.parametrize("name", ["pipe.h5", "pipe.safetensors"])
def test_a_pipe_is_not_waited_for(call: Call, policy: Path, name: str) -> None:
    os.mkfifo(policy.parent / name)
    answer = call("import", "-p", policy, "-r", "gpt", policy.parent / name)
    assert answer.status == 2
    assert "not a regular file" in answer.err


@pytest.mark.parametrize(("step", "said"), [("-1", "0"), (str(1 << 63), "9223372036854775807")])
def test_a_step_that_no_version_can_have_is_refused(call: Call, policy: Path, step: str, said: str) -> None:
    path = policy.parent / "w.safetensors"
    path.write_bytes(header(W, bytes(8)))
    answer = call("import", "-p", policy, "-r", "gpt", path, "--step", step)
    assert answer.status == 2
    assert "--step" in answer.err
    assert said in answer.err
