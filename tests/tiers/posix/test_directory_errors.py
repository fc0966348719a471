"""Directory tiers on file systems that are full, read-only, failing, or not what they should be."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.filesystems import fuse
from support.leaks import files

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    MediaError,
    NotFound,
    TierError,
    TierFull,
    TierUnavailable,
    cannot_be_asked,
)
from tierstate.tiers.posix import naming
from tierstate.tiers.posix.directory import Directory, Nvme
from tierstate.tiers.posix.files import translate_os_error
from tierstate.tiers.testing import Lease, random_bytes

needs_root = pytest.mark.root


@pytest.fixture
def tier(tmp_path: Path) -> Nvme:
    tier = Nvme(path=tmp_path / "tier")
    tier.name = "nvme"
    return tier


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with the given options, and unmounts it."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no mounts here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, TierFull),
        (errno.EDQUOT, TierFull),
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.EIO, TierUnavailable),
        (errno.ESTALE, TierUnavailable),
        (errno.ETIMEDOUT, TierUnavailable),
        (errno.EHOSTDOWN, TierUnavailable),
        (errno.EXDEV, TierError),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "link"])
def test_each_errno_has_its_class(
    tier: Nvme, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TierError], call: str
) -> None:
    lease = Lease(random_bytes(100))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    def write() -> None:
        with tier.writer("run/a") as writer:
            writer.append(lease.buffer, lease.release)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if call == "link":  # what is done where there are no hard links fails too
            patch.setattr(os, "rename", fail)
            patch.setattr(naming, "_rename_no_replace", fail)
        with pytest.raises(TierError) as found:
            write()
    assert type(found.value) is kind
    assert (found.value.tier, found.value.key) == ("nvme", "run/a")
    assert str(found.value).startswith("nvme: run/a: cannot write ")
    assert str(tier.path) in str(found.value)
    assert errno.errorcode[number] in str(found.value)
    assert isinstance(found.value.__cause__, OSError)
    assert files(tier.path) == []
    assert lease.releases == 1


@needs_root
def test_a_full_file_system(mount: Callable[[str], Path]) -> None:
    tier = Nvme(path=mount("size=1m") / "ckpt")
    tier.put("small", random_bytes(1000))
    with pytest.raises(TierFull, match="ENOSPC"):
        tier.put("big", random_bytes(2 << 20))
    assert files(tier.path) == ["small"]
    tier.put("other", random_bytes(500_000))
    assert torch.equal(tier.get("small"), random_bytes(1000))


@needs_root
def test_a_close_that_fails_says_nothing_of_an_object_that_is_synced(tmp_path: Path) -> None:
    """As with NFS, and where a quota is used up."""
    with fuse(tmp_path, "closes") as disk:
        tier = Nvme(path=disk.path / "tier")
        tier.put("a", random_bytes(2 << 20))
        assert torch.equal(tier.get("a"), random_bytes(2 << 20))
        with pytest.raises(AlreadyExists):
            tier.put("a", random_bytes(1))
        tier.put("b", random_bytes(1))
        tier.delete("a")
        assert list(Nvme(path=tier.path).list("")) == ["b"]


@needs_root
def test_a_read_only_file_system_can_be_read(mount: Callable[[str], Path]) -> None:
    path = mount("size=1m")
    Nvme(path=path).put("a", random_bytes(10))
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
    tier = Nvme(path=path)
    assert (list(tier.list("")), tier.size("a")) == (["a"], 10)
    assert torch.equal(tier.get("a"), random_bytes(10))
    with pytest.raises(AccessDenied, match="EROFS"):
        tier.put("b", empty_buffer(1))
    with pytest.raises(AccessDenied, match="EROFS"):
        tier.delete("a")


def test_a_missing_root_is_empty_and_made_by_the_first_write(tmp_path: Path) -> None:
    tier = Nvme(path=tmp_path / "not" / "there")
    assert list(tier.list("")) == []
    tier.delete("a")
    for call in (tier.size, tier.get):
        with pytest.raises(NotFound):
            call("a")
    assert files(tmp_path) == []
    assert not tier.path.exists()
    tier.put("a", empty_buffer(1))
    assert files(tmp_path) == ["not/there/a"]


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("something")
    tier = Nvme(path=path)
    for call in (lambda: list(tier.list("")), lambda: tier.put("a", empty_buffer(1))):
        with pytest.raises(TierError, match="is not a folder; give a folder"):
            call()
    assert path.read_text() == "something"


def test_a_folder_that_vanishes_is_made_again(tier: Nvme) -> None:
    tier.put("run/a", empty_buffer(1))
    os.unlink(tier.path / "run" / "a")
    os.rmdir(tier.path / "run")
    tier.put("run/a", random_bytes(3))
    assert torch.equal(tier.get("run/a"), random_bytes(3))


def test_an_object_is_no_folder(tier: Nvme) -> None:
    tier.put("a", empty_buffer(1))
    tier.put("b/c", empty_buffer(1))
    for key in ("a/b", "b"):
        with pytest.raises(AlreadyExists):
            tier.put(key, empty_buffer(1))
        with pytest.raises(NotFound):
            tier.get(key)
    assert list(tier.list("")) == ["a", "b/c"]


def test_names_longer_than_file_systems_allow(tier: Nvme) -> None:
    tier.put("n" * 255, empty_buffer(1))
    with pytest.raises(ValueError, match="255 characters at most"):
        tier.put("n" * 256, empty_buffer(1))


UNIQUE = {AlreadyExists: {"EEXIST"}, NotFound: {"ENOENT", "EISDIR"}}
PASSING = {"EIO", "EAGAIN", "EBUSY", "EINTR", "ESTALE", "ETIMEDOUT", "ENOMEM", "EMFILE", "EUCLEAN", "EBADMSG"}
LASTING = {"ENAMETOOLONG", "EINVAL", "EXDEV", "ENOSYS", "EOPNOTSUPP", "EBADF", "EFAULT", "ENOTEMPTY", "ETXTBSY"}


@given(st.sampled_from(sorted(errno.errorcode)), st.sampled_from(["read", "write", "list", "delete", "look at"]))
def test_every_errno_has_the_class_that_says_what_may_help(number: int, doing: str) -> None:
    """Against rules, and not the table: what is taken, absent, full, denied and passing are different things."""
    name, path = errno.errorcode[number], Path("/nowhere/at/all/a/b")
    found = translate_os_error(OSError(number, os.strerror(number)), doing, "nvme", "a/b", path)
    assert name in str(found)
    assert (found.tier, found.key) == ("nvme", "a/b")
    for kind, names in UNIQUE.items():
        if number != errno.ENOTDIR:
            assert isinstance(found, kind) is (name in names)
    assert isinstance(found, TierFull) is (name in {"ENOSPC", "EDQUOT", "EFBIG", "EMLINK"})
    assert ("ulimit -f" in str(found)) is (name == "EFBIG")
    if name in PASSING:
        assert found.transient
    if name in LASTING or isinstance(found, (TierFull, AccessDenied, AlreadyExists, NotFound)):
        assert not found.transient
    assert isinstance(found, MediaError) is (doing == "read" and name in {"EIO", "EUCLEAN", "EBADMSG"})
    assert found.transient is isinstance(found, TierUnavailable)


CALLS: dict[str, Callable[[Directory, str], object]] = {
    "get": lambda tier, key: tier.get(key),
    "size": lambda tier, key: tier.size(key),
    "put": lambda tier, key: tier.put(key, empty_buffer(1)),
    "delete": lambda tier, key: tier.delete(key),
    "list": lambda tier, key: list(tier.list("")),
    "age": lambda tier, key: tier.age(key),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize("opened", [False, True])
def test_a_tier_whose_place_became_a_file_is_neither_empty_nor_taken(
    tmp_path: Path, call: str, above: int, opened: bool
) -> None:
    """Its folder, or one above it, is a file: what it has cannot be said, so nothing is absent and no name taken."""
    tier = Directory(tmp_path / "mount" / "team" / "ckpt")
    tier.name = "nvme"
    if opened:
        tier.put("run/a", empty_buffer(1))
    lost = [tier.path, *tier.path.parents][above]
    shutil.rmtree(tmp_path / "mount", ignore_errors=True)
    lost.parent.mkdir(parents=True, exist_ok=True)
    lost.write_text("a file")
    with pytest.raises(TierError, match="is not a folder") as found:
        CALLS[call](tier, "run/a")
    assert not isinstance(found.value, (AlreadyExists, NotFound))
    assert cannot_be_asked(found.value)
    assert lost.read_text() == "a file"
