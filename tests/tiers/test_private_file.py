"""Private files: which ones are read, by all that read secrets alike, and that each refusal says how to mend it."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.leaks import open_files

from tierstate.manifest.errors import PolicyError
from tierstate.tiers import private_file
from tierstate.tiers.connections.secret import SecretError, read_private
from tierstate.tiers.keys import MAX_KEY_TEXT, read_key
from tierstate.tiers.private_file import read_private_file

ME = os.geteuid()

STRANGER = 54_321

TEXT = "5a" * 32

CALLERS: dict[type[Exception], Callable[[Path], object]] = {
    SecretError: lambda path: read_private(path, MAX_KEY_TEXT),
    PolicyError: read_key,
}
"""What reads or checks private files, by the error that it raises."""

KINDS = ["file", "link", "hanging link", "folder", "pipe", "socket", "nothing"]

OWNERS = st.just(ME) if ME else st.sampled_from([ME, ME, STRANGER, 1])
"""Only root can give a file to another user."""

MODES = st.integers(0, 0o7777) | st.sampled_from([0o600, 0o400, 0o700, 0o640, 0o440, 0o604, 0o610, 0o602])


def make(path: Path, kind: str, owner: int = ME, mode: int = 0o600, text: str = TEXT) -> Path:
    """What may be at the path of a secret."""
    if kind == "file":
        path.write_text(text)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as listening:
            listening.bind(str(path))
    elif kind != "nothing":
        path.symlink_to("secret" if kind == "hanging link" else make(path.with_name("target"), "file"))
    if kind in ("file", "folder", "pipe", "socket"):
        os.chown(path, owner, -1)
        path.chmod(mode)
    return path


def refusals(path: Path) -> dict[type[Exception], str]:
    """What each caller says of a path: empty where it takes it."""
    found = {}
    for error, call in CALLERS.items():
        found[error] = ""
        try:
            call(path)
        except error as problem:
            found[error] = str(problem)
    return found


@given(kind=st.sampled_from(["file", "file", *KINDS]), owner=OWNERS, mode=MODES)
def test_all_callers_take_private_files_and_nothing_else(kind: str, owner: int, mode: int) -> None:
    before = open_files()
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder) / "key", kind, owner, mode)
        said = refusals(path)
        if kind == "folder":
            path.chmod(0o700)
    private = kind == "file" and owner == ME and stat.S_IMODE(mode) & 0o077 == 0 and (ME == 0 or mode & 0o400 != 0)
    assert {error.__name__: text == "" for error, text in said.items()} == dict.fromkeys(
        ("SecretError", "PolicyError"), private
    ), said
    for text in said.values():
        assert private or f" regular file of user {ME} with mode 0600: " in text
        assert TEXT not in text
    assert not open_files() - before, "each one is closed"


@pytest.mark.timeout(60)  # an open that waits for the writer of the pipe
@pytest.mark.parametrize(
    ("kind", "mode", "found", "mend"),
    [
        ("file", 0o640, r"others have access to it \(mode 0640\)", "chmod 600 .*/key"),
        ("link", 0o600, r"cannot be opened \(Too many levels", "is not a link"),
        ("nothing", 0o600, r"cannot be opened \(No such file", "is there"),
        ("folder", 0o700, "is a folder", "give the path of a file"),
        ("pipe", 0o600, "is a pipe", "give the path of a file"),
        ("socket", 0o600, "cannot be opened", "is there"),
    ],
)
def test_each_refusal_says_what_was_found_and_how_to_mend_it(
    kind: str, mode: int, found: str, mend: str, tmp_path: Path
) -> None:
    with pytest.raises(SecretError, match=rf"key: .*{found}.*; the secret of a job is read from .*: .*{mend}"):
        read_private(make(tmp_path / "key", kind, mode=mode), 99)


def test_a_file_that_others_could_replace_is_refused_and_the_remedy_is_one_of_files(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "private").mkdir(mode=0o700)
    path = make(tmp_path / "open" / "private" / "key", "file")
    (tmp_path / "link").symlink_to("open/private")
    for mode, found in (
        (0o777, "every user can write to .*/open .mode 0777.*; .*chmod o-w or chmod .t it"),
        (0o700, ""),
    ):
        (tmp_path / "open").chmod(mode)
        for place in (path, tmp_path / "link" / "key", tmp_path / "link" / ".." / "private" / "key"):
            for text in refusals(place).values():
                assert re.search(found, text) if found else text == ""
                assert "policy" not in text
    (tmp_path / "open").chmod(0o1777)
    assert set(refusals(path).values()) == {""}, "sticky"


@pytest.mark.root
@pytest.mark.parametrize("what", ["folder", "link", "group"])
def test_a_way_of_another_user_is_refused(what: str, tmp_path: Path) -> None:
    """Of this user, who is not root: root is led into volumes of users."""
    code = (
        "import os, sys; from pathlib import Path; from tierstate.tiers.private_file import read_private_file\n"
        f"os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
        "print(read_private_file(Path(sys.argv[1]), 99, 'a key', SystemExit))"
    )
    with tempfile.TemporaryDirectory() as text:
        top = Path(text)
        top.chmod(0o755)
        folder = top / "folder"
        folder.mkdir(mode=0o755)
        path = make(folder / "key", "file", STRANGER)
        if what == "link":
            (top / "link").symlink_to("folder")
            os.lchown(top / "link", 1, 1)
            path = top / "link" / "key"
        elif what == "folder":
            os.chown(folder, 1, 1)
        else:
            os.chown(folder, STRANGER, 1)
            folder.chmod(0o770)
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    found = {"group": "the group .* can write to .*/folder", "link": "/link belongs to", "folder": "/folder belongs to"}
    assert re.search(found[what], done.stderr), done
    assert done.stdout == ""


@pytest.mark.root
def test_a_file_of_root_that_this_user_may_read_is_refused() -> None:
    """As schedulers hand out files; a secret of a group is none of this user."""
    code = (
        "import os, sys; from tierstate.tiers.private_file import read_private_file\n"
        f"os.setgroups([]); os.setgid(0); os.setuid({STRANGER})\n"
        "assert open(sys.argv[1]).read()\n"
        "read_private_file(sys.argv[1], 99, 'a key', SystemExit)"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = make(Path(folder) / "key", "file", mode=0o440)
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert f"it belongs to user 0; a key is read from a regular file of user {STRANGER}" in done.stderr


@given(st.integers(0, 3 * 17), st.integers(1, 40), st.integers(1, 7))
def test_all_of_a_file_is_read_however_little_a_read_gives_and_never_more_than_the_limit(
    size: int, limit: int, part: int
) -> None:
    given_out = 0

    def read(descriptor: int, count: int) -> bytes:
        nonlocal given_out
        data = os_read(descriptor, min(count, part))
        given_out += len(data)
        return data

    os_read = os.read
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = make(Path(folder) / "key", "file", text="x" * size)
        patch.setattr(private_file.os, "read", read)
        if size <= limit:
            assert read_private_file(path, limit, "a key", ValueError) == b"x" * size
        else:
            with pytest.raises(ValueError, match=f"longer than {limit} bytes"):
                read_private_file(path, limit, "a key", ValueError)
    assert given_out == min(size, limit + 1)


def test_a_file_that_cannot_be_read_is_told() -> None:
    """A file of /proc whose owner may open it, and whose read fails."""
    with pytest.raises(SecretError, match=r"/proc/self/mem: the secret of a job cannot be read from it: Input/output"):
        read_private(Path("/proc/self/mem"), 99)
