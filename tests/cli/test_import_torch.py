"""Imports of torch's own files and of folders of its distributed checkpoints: no pickle runs code or is believed."""

from __future__ import annotations

import io
import os
import pickle
import resource
import subprocess
import sys
import warnings
from collections import OrderedDict
from enum import Enum
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.cli_calls import Call
from support.equality import difference
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
from tierstate.files.importing import import_version, open_source
from tierstate.files.readers.dcp import _disjoint
from tierstate.manifest.boxes import Box


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


def test_what_of_a_file_is_no_plain_value_is_told_in_one_line(tmp_path: Path) -> None:
    """Without what torch says first: in bold letters, how to load it nevertheless."""
    torch.save({"at": Path("x")}, tmp_path / "some.pt")
    with pytest.raises(ts.Unsafe) as caught, open_source(tmp_path / "some.pt"):
        raise AssertionError("it was believed")
    told = str(caught.value)
    assert "save it anew with those alone (Unsupported " in told
    assert "pathlib" in told
    assert told.isprintable()
    assert "weights_only" not in told


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
