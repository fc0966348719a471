"""Folders that hold only a reference to a version: whole or absent, also after a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tierstate as ts
from tierstate.integrations.version_folders import (
    REFERENCE,
    is_torn,
    numbered_folders,
    read_reference,
    write_reference,
)

INFO: Any = SimpleNamespace(run="gpt", id="abc", step=3, seq=3)


def test_every_beginning_of_a_reference_is_torn(tmp_path: Path) -> None:
    assert not is_torn(tmp_path)
    (tmp_path / ".made.part").mkdir()  # a crash has left it
    write_reference(tmp_path / "made", INFO)
    whole = (tmp_path / "made" / REFERENCE).read_bytes()
    found = read_reference(tmp_path / "made")
    assert found is not None
    assert found.version == "abc"
    assert not is_torn(tmp_path / "made")
    for length in range(len(whole) - 2):  # without its brace, and the end of the line
        for text in (whole[:length], whole[:length].ljust(len(whole), b"\0")):
            (tmp_path / REFERENCE).write_bytes(text)
            assert is_torn(tmp_path)
            assert read_reference(tmp_path) is None


@pytest.mark.parametrize("text", ['{"tier": 1}', "[]", "hello", '{"run": "a"}', "\x00{}"])
def test_something_else_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / REFERENCE).write_text(text)
    assert not is_torn(tmp_path)
    with pytest.raises(ts.StateMismatch, match="should name a version of a run, and does not"):
        read_reference(tmp_path)


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_what_is_renamed_is_on_stable_storage(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = tmp_path / "checkpoint-3", list[tuple[str, str]]()
    if there:
        folder.mkdir()
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        assert os.fstat(descriptor).st_size, "what was written is still in this process"
        sync(descriptor)

    def replaced(old: Any, new: Any) -> None:
        calls.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_reference(folder, INFO)
    if there:
        assert calls == [("sync", f".{REFERENCE}.part"), ("rename", REFERENCE), ("sync", "checkpoint-3")]
    else:
        part, parent = ".checkpoint-3.part", tmp_path.name
        assert calls == [("sync", REFERENCE), ("sync", part), ("rename", "checkpoint-3"), ("sync", parent)]


def test_numbered_folders_are_those_with_a_number_and_a_reference(tmp_path: Path) -> None:
    for name in ("c-10", "c-9", "c-best", "c-", "c-9-copy", "d-1", "c-٣"):
        write_reference(tmp_path / name, INFO)
    (tmp_path / "c-1").mkdir()
    (tmp_path / "c-2").mkdir()
    (tmp_path / "c-2" / REFERENCE).write_text("[]")
    (tmp_path / "c-3").mkdir()
    (tmp_path / "c-3" / REFERENCE).touch()
    assert [folder.name for folder, _ in numbered_folders(tmp_path, "c-")] == ["c-9", "c-10"]
