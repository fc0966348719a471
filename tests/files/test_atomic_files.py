"""Files that are written whole: they take no name that is not a file's, and say it before anything is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli_calls import Call, call, state

import tierstate as ts
from tierstate.files.atomic_files import AtomicFiles

__all__ = ["call"]

CHECKS = """
from pathlib import Path
from tierstate.files.atomic_files import AtomicFiles
AtomicFiles(force=True).check(Path("/dev/stdout"))
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(f"tiers:\n  nvme: {{type: nvme, path: {tmp_path}/nvme}}\n")
    with ts.Checkpointer(path, "gpt") as ckpt:
        ckpt.save(state(1), step=1)
    return path


PLAN = ("--state", "1MiB", "--step", "1s", "--speed", "nvme=1GiB/s", "--for", "1min", "-o")
COMMANDS = {
    "plan": lambda policy, to: ("plan", "-p", policy, *PLAN, to),
    "report": lambda policy, to: ("report", "-p", policy, "-r", "gpt", "-o", to),
    "restore": lambda policy, to: ("restore", "-p", policy, "-r", "gpt", to, "--force"),
    "export": lambda policy, to: ("export", "-p", policy, "-r", "gpt", to, "--force", "--skip-values"),
    "init": lambda policy, to: ("policy", "init", policy.parent, "-o", to, "--force"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_or_a_device_is_not_replaced(call: Call, policy: Path, name: str) -> None:
    pipe, device = policy.parent / "pipe.safetensors", policy.parent / "device.safetensors"
    os.mkfifo(pipe)
    device.symlink_to("/dev/null")
    for to in (pipe, device):
        answer = call(*COMMANDS[name](policy, to))
        assert answer.status == 2
        assert f"{to} is a device, a pipe" in answer.err
    assert pipe.is_fifo()
    assert device.is_symlink()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_folder_is_named(call: Call, policy: Path, name: str) -> None:
    folder = policy.parent / "none"
    answer = call(*COMMANDS[name](policy, folder / "out.safetensors"))
    assert (answer.status, answer.err) == (
        2,
        f"tierstate: [Errno 2] out.safetensors has no folder to be in; make it first: '{folder}'\n",
    )


def test_the_name_of_a_standard_stream_is_none_of_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", CHECKS]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert "/dev/stdout is a device, a pipe, a socket or a standard stream" in done.stderr


def test_a_file_takes_the_place_of_a_file_or_of_a_link_to_one(tmp_path: Path) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_bytes(b"old")
    link.symlink_to(old)
    for path in (tmp_path / "new", old, link):
        with AtomicFiles(force=True) as files:
            files.create(path, 0)
            files.commit()
        assert path.read_bytes() == b""
    assert not link.is_symlink()


def test_a_name_that_is_taken_in_the_last_moment_is_not_replaced(tmp_path: Path) -> None:
    """After the last look, too; and of a set of files none is left then, not even those whose names were free."""
    ours, index = tmp_path / "ours", tmp_path / "index"

    class LateToSee(AtomicFiles):
        def check(self, path: Path) -> None:
            """Looks a moment before another process makes the file."""

    with LateToSee() as files:
        for path in (ours, index):
            files.create(path, 3)
        index.write_bytes(b"other")
        with pytest.raises(ts.AlreadyExists, match="index exists; name another file"):
            files.commit()
    assert index.read_bytes() == b"other"
    assert os.listdir(tmp_path) == ["index"]
