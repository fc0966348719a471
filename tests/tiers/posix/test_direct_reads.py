"""Direct reads: what a file system asks for, and ranges of every length and address, many at once."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.checkpointer_worlds import has_uring

from tierstate.manifest.errors import Damaged
from tierstate.tiers.base import IoAlignment, Range
from tierstate.tiers.memory.pages import PAGE, map_pages
from tierstate.tiers.posix.direct import DIRECT_MIN, SAFE_ALIGNMENT, DirectIo, direct_alignment, parse_statx
from tierstate.tiers.posix.directory import Directory
from tierstate.tiers.posix.files import open_file
from tierstate.tiers.posix.io_engine import ThreadEngine, Transfer, transfers_done
from tierstate.tiers.testing import random_bytes

SIZE = 5 * DIRECT_MIN + 777


@pytest.fixture
def nvme(tmp_path: Path, request: pytest.FixtureRequest):
    io = getattr(request, "param", "auto")
    if io == "uring" and not has_uring():
        pytest.skip("io_uring is forbidden here")
    with closing(Directory(tmp_path, io=io)) as made:
        made.name = "nvme"
        made.put("key", random_bytes(SIZE))
        yield made


def statx(mask: int, memory: int, offset: int) -> bytes:
    """A ``struct statx`` as the kernel fills it."""
    found = bytearray(256)
    for at, number in ((0x00, mask), (0x98, memory), (0x9C, offset)):
        found[at : at + 4] = number.to_bytes(4, "little")
    return bytes(found)


def test_what_the_kernel_says_is_taken() -> None:
    assert parse_statx(statx(0x2000, 4, 512)) == IoAlignment(512, 4)
    assert parse_statx(statx(0x27FF, 512, 4096)) == IoAlignment(4096, 512)
    assert parse_statx(statx(0x7FF, 512, 4096)) == SAFE_ALIGNMENT == IoAlignment(PAGE, PAGE), "it does not say"
    assert parse_statx(statx(0x2000, 0, 0)) is None, "this file takes no direct I/O"
    assert parse_statx(statx(0x2000, 512, 65536)) is None, "whole pages would not do"


def test_a_file_is_asked_and_the_tier_tells(tmp_path: Path, nvme: Directory) -> None:
    assert nvme.traits.memory_alignment == PAGE, "not known before the first read"
    nvme.get("key")
    with closing(open_file(tmp_path / "key")) as file:
        found = direct_alignment(file.descriptor)
    assert nvme.traits.memory_alignment == (found or IoAlignment()).memory
    with closing(Directory(tmp_path, io="buffered")) as other:
        other.get("key")
        assert other.traits.memory_alignment == 1
    assert direct_alignment(os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)) in (None, SAFE_ALIGNMENT)


@pytest.mark.parametrize("nvme", ["auto", "uring", "threads", "buffered"], indirect=True)
def test_many_ranges_of_any_address_length_and_order(nvme: Directory) -> None:
    truth, memory = nvme.get("key"), map_pages(16 * DIRECT_MIN)
    grain = max(nvme.traits.memory_alignment, 512)
    wanted, at = [], 0
    for offset, length, shift in [
        (4 * DIRECT_MIN, DIRECT_MIN + 777, 0),
        (0, 2 * DIRECT_MIN, grain),
        (DIRECT_MIN, DIRECT_MIN + 1, 0),
        (8192, DIRECT_MIN, 64),
        (512, DIRECT_MIN, 0),
        (77, 100, 5),
        (PAGE, SIZE - PAGE, 0),
    ]:
        wanted.append(Range(offset, memory[at + shift : at + shift + length]))
        at += -(-(shift + length) // PAGE) * PAGE
    nvme.read("key", wanted)
    for offset, out in wanted:
        assert torch.equal(out, truth[offset : offset + out.numel()])
    assert ("direct" in nvme.traits.io) == (nvme._io.io != "buffered")


def test_a_file_that_ends_early_is_damaged_and_nothing_is_under_way_any_more(nvme: Directory) -> None:
    memory = map_pages(2 * DIRECT_MIN)
    with pytest.raises(Damaged):
        nvme.read("key", [Range(0, memory[:DIRECT_MIN]), Range(SIZE - DIRECT_MIN + 1, memory[DIRECT_MIN:])])


def test_an_error_comes_when_all_is_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    memory = map_pages(8 * PAGE)
    memory.fill_(1)
    with closing(ThreadEngine(2)) as engine, closing(open_file(path)) as file:
        good = [Transfer(False, file.descriptor, memory[i * PAGE : (i + 1) * PAGE], i * PAGE) for i in range(7)]
        bad = Transfer(False, file.descriptor, memory[7 * PAGE :], 100 * PAGE)
        with pytest.raises(OSError, match="ended") as caught, transfers_done(engine, [bad, *good]):
            pass
        assert caught.value.errno == errno.EIO
        assert not memory[: 7 * PAGE].any(), "those that were begun were finished"
        with pytest.raises(ZeroDivisionError), transfers_done(engine, good):
            raise ZeroDivisionError
        assert all(transfer.moved == PAGE for transfer in good)


def test_a_tail_that_is_missing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(DIRECT_MIN))
    io = DirectIo("threads")
    with closing(io), closing(open_file(path)) as file, pytest.raises((OSError, Damaged), match="ends"):
        io.read(path, file, [Range(0, map_pages(DIRECT_MIN + 5))])
