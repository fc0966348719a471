"""Text that is not UTF-8, and names that no file can have: errors that name the file, wherever text is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tierstate as ts
from tierstate.files.importing import open_source


def refused(path: Path, match: str) -> None:
    with pytest.raises(ts.FormatError, match=match) as caught, open_source(path):
        raise AssertionError("it was believed")
    assert path.name in str(caught.value)


def test_headers_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((20).to_bytes(8, "little") + b"\xff" * 20 + bytes(10))
    refused(path, "is not JSON")


@pytest.mark.parametrize("name", ["\ud800.safetensors", "\0.safetensors", "x" * 3000, "nowhere.safetensors", 5, "../x"])
def test_names_in_an_index_of_safetensors(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "a.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}), "ascii")
    refused(path, r"beside")
    path.write_bytes(b'{"weight_map": {"\xff": "a"}}')
    refused(path, "is not JSON")


def test_metadata_of_dcp(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(b"\x80\x02X\x02\x00\x00\x00\xff\xfe.")
    refused(tmp_path / "d", "UnicodeDecodeError")


def test_files_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for data in (b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", b"PK\x03\x04" + b"\xff" * 100, b"\x80"):
        path.write_bytes(data)
        refused(path, r"cannot be read as a file of torch\.save")


def test_policies(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"version: 1\n# \xff")
    with pytest.raises(ts.PolicyError, match=r"p\.yaml: is not UTF-8 at byte 13"):
        ts.Policy.load(path)


def test_names_of_files_that_are_not_utf_8(place: Path) -> None:
    odd = place / os.fsdecode(b"\xff")
    with ts.Checkpointer(ts.Policy.default(odd), "run") as ckpt:
        ckpt.save({"a": 1}, 1, {"from": str(odd)}).wait()
        assert ckpt.load() == {"a": 1}
    (odd / "versions" / "run" / os.fsdecode(b"\xfe")).write_bytes(b"x")
    (odd / "tags").mkdir()
    (odd / "tags" / os.fsdecode(b"\xfe")).write_bytes(b"x")
    with ts.Checkpointer(ts.Policy.default(odd), "run") as ckpt:
        assert [info.metadata for info in ckpt.versions()] == [{"from": str(odd)}]
        assert ckpt.verify(deep=True).ok
