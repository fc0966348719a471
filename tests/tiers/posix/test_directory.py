"""The directory tiers: the recipe, what it leaves, and what it leaves alone."""

import errno
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaks import files, open_files

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, Damaged, NotFound, TierUnavailable
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.posix.directory import Directory, Nvme
from tierstate.tiers.testing import TierContract, random_bytes
from tierstate.tiers.wrappers.retry import Retried


class TestNvmeContract(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return Nvme(path=tmp_path / "made" / "when needed")

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, Nvme)
        return Nvme(path=tier.path)


class TestNvmeWithCapacityContract(TierContract):
    def make(self, tmp_path: Path) -> Tier:
        return Nvme(path=tmp_path, capacity=64 << 20)


@pytest.fixture
def tier(tmp_path: Path) -> Nvme:
    tier = Nvme(path=tmp_path / "tier")
    tier.name = "nvme"
    return tier


# The recipe


def test_the_order_of_a_commit(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, synced, linked, folder synced, temporary name removed; and every new folder synced in the one above."""
    calls: list[tuple[str, str]] = []

    def record(name: str, where: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, where(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def of_fd(fd: int, *_: Any) -> str:
        return shown(os.readlink(f"/proc/self/fd/{fd}"))

    def shown(path: Any, *_: Any) -> str:
        text = os.path.relpath(path, tier.path.parent)
        return "TEMP" if ".tmp-" in text else text

    for name in ("pwrite", "fdatasync", "fsync"):
        record(name, of_fd)
    for name in ("mkdir", "unlink"):
        record(name, shown)
    record("link", lambda source, target: shown(target))

    tier.put("packs/run/a", random_bytes(10))
    assert [call for call in calls if call != ("unlink", "TEMP")] == [
        ("mkdir", "tier"),
        ("fsync", "."),
        ("mkdir", "tier/packs"),
        ("fsync", "tier"),
        ("mkdir", "tier/packs/run"),
        ("fsync", "tier/packs"),
        ("pwrite", "TEMP"),
        ("fdatasync", "TEMP"),
        ("link", "tier/packs/run/a"),
        ("fsync", "tier/packs/run"),
    ]
    assert calls[-1] == ("unlink", "TEMP")
    calls.clear()
    tier.put("packs/run/b", random_bytes(10))
    assert [name for name, _ in calls] == ["pwrite", "fdatasync", "link", "fsync", "unlink"]
    calls.clear()
    tier.delete("packs/run/b")
    assert calls == [("unlink", "tier/packs/run/b"), ("fsync", "tier/packs/run")]


def test_folders_that_others_made_are_synced_too(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have made a folder and died before it synced the one above."""
    tier.put("packs/a", empty_buffer(1))
    synced: list[str] = []
    real = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    Nvme(path=tier.path).put("packs/b", empty_buffer(1))
    assert str(tier.path) in synced


def test_a_failed_sync_of_the_folder_takes_the_name_back(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("a", empty_buffer(1))
    writer = tier.writer("b")
    writer.append(random_bytes(100))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(TierUnavailable, match=r"nvme: b: cannot write .*tier/b.*EIO"):
            writer.close()
    assert files(tier.path) == ["a"]


def failing_once(real: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """A system call that answers EIO the first time: before it does anything, or, as a network may, after it."""
    calls = count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(calls) == 1
        result = None if first and not after else real(*args, **kwargs)
        if first:
            raise OSError(errno.EIO, "Input/output error")
        return result

    return call


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are synced."""
    paths: list[str] = []
    real = os.fsync

    def note(fd: int) -> None:
        real(fd)
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", note)
    return paths


def test_a_name_that_cannot_be_taken_back_now_is_before_it_is_read(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is away for two calls: its folder is not synced, so who reads the object back must not find it."""
    tier.put("a", empty_buffer(1))
    with monkeypatch.context() as patch:
        for call in ("fsync", "unlink"):
            patch.setattr(os, call, failing_once(getattr(os, call)))
        with pytest.raises(TierUnavailable, match=r"nvme: b: cannot write .*tier/b.*EIO"):
            tier.put("b", random_bytes(100))
    assert "b" in files(tier.path)
    with pytest.raises(NotFound):
        tier.size("b")
    assert "b" not in files(tier.path)
    tier.put("b", random_bytes(200))
    assert torch.equal(tier.get("b"), random_bytes(200))


def test_a_put_that_is_repeated_is_durable(tier: Nvme, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("a", empty_buffer(1))
    synced.clear()
    for call in ("fsync", "unlink"):
        monkeypatch.setattr(os, call, failing_once(getattr(os, call)))
    Retried(tier, 2).put("b", random_bytes(100))
    assert synced == [str(tier.path)]
    assert torch.equal(Nvme(path=tier.path).get("b"), random_bytes(100))


def test_a_link_whose_answer_is_lost_is_synced(tier: Nvme, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("a", empty_buffer(1))
    synced.clear()
    monkeypatch.setattr(os, "link", failing_once(os.link, after=True))
    tier.put("b", random_bytes(100))
    assert synced == [str(tier.path)]
    assert files(tier.path) == ["a", "b"]


@pytest.mark.parametrize(("call", "after"), [("fsync", False), ("unlink", True)])
def test_a_delete_that_is_repeated_is_durable(
    tier: Nvme, synced: list[str], monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    tier.put("packs/a", empty_buffer(1))
    synced.clear()
    monkeypatch.setattr(os, call, failing_once(getattr(os, call), after=after))
    Retried(tier, 2).delete("packs/a")
    assert files(tier.path) == []
    assert synced == [str(tier.path / "packs")]


def test_a_name_taken_by_our_own_link_is_no_conflict(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network the first answer may get lost, and the repeated link finds the name taken."""
    real = os.link

    def twice(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", twice)
    tier.put("a", random_bytes(5))
    assert torch.equal(tier.get("a"), random_bytes(5))
    assert files(tier.path) == ["a"]


def test_short_writes_and_reads_go_on_where_they_stopped(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real_read(fd, [buffers[0][:777]], at))
    data = random_bytes(10_001)
    with tier.writer("a") as writer:
        writer.append(data[:5001])
        writer.append(data[5001:])
    assert torch.equal(tier.get("a"), data)


def test_a_file_that_shrinks_under_a_read_is_damaged(tier: Nvme, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("a", random_bytes(100))
    real = os.preadv

    def cut(fd: int, buffers: Any, at: int) -> int:
        os.truncate(tier.path / "a", 50)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(Damaged, match="the file ends at 50, 50 bytes before it should"):
        tier.get("a")


# Links and other strange files


def test_links_lead_nowhere(tier: Nvme, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    tier.put("a", empty_buffer(1))
    (tier.path / "folder").symlink_to(outside)
    (tier.path / "file").symlink_to(outside / "secret")
    assert list(tier.list("")) == ["a"]
    assert list(tier.list("file")) == []
    for key in ("folder/secret", "file"):
        for call in (tier.size, tier.get):
            with pytest.raises(AccessDenied):
                call(key)
    with pytest.raises(AccessDenied, match="is a link"):
        list(tier.list("folder/"))
    with pytest.raises(AccessDenied, match="is a link"):
        tier.put("folder/new", empty_buffer(1))
    with pytest.raises(AccessDenied, match="is a link"):
        tier.delete("folder/secret")
    with pytest.raises(AlreadyExists):
        tier.put("file", empty_buffer(1))
    tier.delete("file")
    assert files(outside) == ["secret"]
    assert (outside / "secret").read_text() == "secret"


def test_files_that_are_none_of_ours(tier: Nvme) -> None:
    tier.put("a", empty_buffer(1))
    os.mkfifo(tier.path / "pipe")
    (tier.path / "with space").write_text("")
    (tier.path / ".hidden").write_text("")
    (tier.path / ".folder").mkdir()
    (tier.path / ".folder" / "x").write_text("")
    assert list(tier.list("")) == ["a"]
    with pytest.raises(NotFound):
        tier.read("pipe", [Range(0, empty_buffer(0))])
    with pytest.raises(NotFound):
        tier.size("pipe")


def test_relative_paths_do_not_follow_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tier = Directory(Path("ckpt"))
    monkeypatch.chdir("/")
    tier.put("a", empty_buffer(1))
    assert files(tmp_path) == ["ckpt/a"]


def test_descriptors_are_closed(tier: Nvme) -> None:
    tier.put("a", empty_buffer(100))
    tier.put("folder/a", empty_buffer(100))
    before = open_files()
    for n in range(5):
        tier.put(f"b{n}", empty_buffer(10))
        tier.get("a")
        list(tier.list(""))
        writer = tier.writer(f"c{n}")
        writer.abort()
        with pytest.raises(AlreadyExists):
            tier.put("a", empty_buffer(1))
        with pytest.raises(Damaged):
            tier.read("a", [Range(100, empty_buffer(1))])
        with pytest.raises(NotFound):
            tier.read("folder", [Range(0, empty_buffer(1))])
    assert not open_files() - before


def test_traits(tier: Nvme) -> None:
    traits = tier.traits
    assert (traits.persistent, traits.shared, traits.alignment, traits.conditional_create) == (True, "host", 4096, True)
    assert traits.failure_domain == f"host:{os.uname().nodename}"
    assert Nvme.persistent is True
