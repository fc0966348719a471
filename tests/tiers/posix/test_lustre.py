"""The Lustre tier: the bytes of a layout, and a folder that is on no Lustre. It has not run on a real one here."""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import has_uring

import tierstate as ts
from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AccessDenied, TierError, TierFull, TierUnavailable
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.pages import map_pages
from tierstate.tiers.posix import lustre
from tierstate.tiers.posix.direct import stripe_cuts
from tierstate.tiers.posix.io_engine import Engine, Transfer
from tierstate.tiers.posix.lustre import ALL_STRIPES, LUSTRE, Lustre, compare_layouts, pack_layout
from tierstate.tiers.posix.mounts import filesystem_type
from tierstate.tiers.testing import TierContract, random_bytes


class TestLustreContract(TierContract):
    examples = 5

    def make(self, tmp_path: Path) -> Tier:
        return Lustre(path=tmp_path, stripe_count=8, stripe_size=16 << 20)

    def reopen(self, tier: Tier) -> Tier:
        return Lustre(path=Path(tier.traits.failure_domain.removeprefix("site:")))


def test_layout_of_version_1() -> None:
    assert pack_layout(8, 16 << 20).hex(" ", 4) == (
        "d00bd10b 01000000"  # magic, pattern RAID 0
        " 00000000 00000000 00000000 00000000"  # object id and group
        " 00000001 0800ffff"  # stripe size, stripe count, any first target
    )


def test_layout_with_a_pool() -> None:
    assert pack_layout(ALL_STRIPES, 64 << 10, "flash").hex(" ", 4) == (
        "d00bd30b 01000000 00000000 00000000 00000000 00000000 00000100 ffffffff"
        f" {b'flash'.ljust(16, bytes(1)).hex(' ', 4)}"
    )


@given(st.integers(-1, 0xFFFE), st.integers(0, 0xFFFF), st.text("abc0_", max_size=15))
def test_layouts_read_back(count: int, grains: int, pool: str) -> None:
    """The fields stand where the kernel's struct has them, and a layout does not differ from itself."""

    class Md(ctypes.LittleEndianStructure):
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = (
            ("magic", ctypes.c_uint32),
            ("pattern", ctypes.c_uint32),
            ("oi", ctypes.c_uint8 * 16),
            ("size", ctypes.c_uint32),
            ("count", ctypes.c_uint16),
            ("first", ctypes.c_uint16),
            ("pool", ctypes.c_char * 16),
        )

    packed = pack_layout(count, grains << 16, pool)
    assert len(packed) == (48 if pool else 32)
    md = Md.from_buffer_copy(packed.ljust(48, b"\0"))
    assert (md.magic, md.pattern, bytes(md.oi)) == (0x0BD30BD0 if pool else 0x0BD10BD0, 1, bytes(16))
    assert (md.size, md.count, md.first, md.pool) == (grains << 16, count % (1 << 16), 0xFFFF, pool.encode())
    assert compare_layouts(packed, packed) == ""


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"stripe_count": -2}, "stripe_count: -2 is not a count"),
        ({"stripe_count": 0xFFFF}, "stripe_count: 65535 is not a count"),
        ({"stripe_size": 65535}, "stripe_size: 65535B is not a multiple of 64KiB"),
        ({"stripe_size": 4 << 30}, "stripe_size: 4GiB is not a multiple of 64KiB below 4GiB"),
        ({"pool": "p" * 16}, "is not a pool's name"),
    ],
)
def test_what_no_lustre_takes_is_refused_at_once(tmp_path: Path, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Lustre(path=tmp_path, **options)


def test_differences_are_said() -> None:
    wished = pack_layout(8, 16 << 20)
    assert (
        compare_layouts(wished, pack_layout(4, 1 << 20))
        == "stripe size is 1MiB, not 16MiB and stripe count is 4, not 8"
    )
    assert compare_layouts(pack_layout(-1, 0), pack_layout(2, 1 << 20)) == "stripe count is 2, not all"
    pooled = pack_layout(0, 0, "flash")
    assert compare_layouts(pooled, pack_layout(2, 1 << 20)) == "pool is none, not flash"
    assert compare_layouts(pooled, pack_layout(2, 1 << 20, "disk")) == "pool is disk, not flash"
    assert compare_layouts(pooled, pack_layout(2, 1 << 20, "flash")) == ""
    assert compare_layouts(wished, pack_layout(8, 16 << 20, "disk")) == "", "no pool was wished for"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (b"", "has 0 bytes, not 32"),
        (pack_layout(8, 16 << 20)[:31], "has 31 bytes, not 32"),
        (pack_layout(8, 16 << 20, "flash")[:47], "has 47 bytes, not 48"),
        (struct.pack("<I", 0x0BD60BD0) + bytes(200), "is composite"),
        (bytes(64), "has the magic number 0x00000000"),
    ],
)
def test_what_cannot_be_checked_is_said(found: bytes, why: str) -> None:
    wished = pack_layout(8, 16 << 20, "flash")
    assert compare_layouts(wished, found) == f"the striping that was read back {why}: it cannot be checked"


def test_another_file_system_is_left_alone(tmp_path: Path) -> None:
    tier = Lustre(path=tmp_path / "new", stripe_count=8)
    assert tier.traits.notes == ()
    tier.put("packs/a", empty_buffer(1))
    tier.put("other/a", empty_buffer(1))
    (note,) = tier.traits.notes
    assert f"{tmp_path}/new is not on a Lustre file system" in note
    assert "striping left alone" in note
    assert f"{filesystem_type(tmp_path):#x}" in note


def test_no_wish_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lustre, "filesystem_type", lambda path: pytest.fail("looked"))
    Lustre(path=tmp_path).put("packs/a", empty_buffer(1))


def test_type_of_a_file_system() -> None:
    assert filesystem_type(Path("/proc")) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        filesystem_type(Path("/nowhere/at/all"))


class Pretence:
    """A file system that says it is Lustre, and keeps one extended attribute per folder.

    Args:
        answer: what is read back in place of what was set, or why it cannot be set.
        unread: why it cannot be read back.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: bytes | OSError | None = None, unread: OSError | None = None
    ) -> None:
        self.set: dict[str, bytes] = {}
        self.answer, self.unread = answer, unread
        monkeypatch.setattr(lustre, "filesystem_type", lambda path: LUSTRE)
        monkeypatch.setattr(os, "setxattr", self.setxattr)
        monkeypatch.setattr(os, "getxattr", self.getxattr)

    def setxattr(self, path: Path, name: str, value: bytes) -> None:
        assert name == "lustre.lov"
        assert not list(path.iterdir()), "a layout is set before anything is in the folder"
        if isinstance(self.answer, OSError):
            raise self.answer
        self.set[str(path)] = value

    def getxattr(self, path: Path, name: str) -> bytes:
        assert name == "lustre.lov"
        if self.unread is not None:
            raise self.unread
        found = self.answer or self.set.get(str(path))
        if found is None:
            raise OSError(errno.ENODATA, "No data available")
        assert isinstance(found, bytes)
        return found


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_new_folders_get_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretence = Pretence(monkeypatch)
    tier = Lustre(path=tmp_path / "root", stripe_count=4, stripe_size=1 << 20, pool="flash")
    (tmp_path / "root").mkdir(mode=0o700)
    (tmp_path / "root" / "old").mkdir()
    tier.put("packs/run/a", empty_buffer(1))
    tier.put("packs/run/b", empty_buffer(1))
    layout = pack_layout(4, 1 << 20, "flash")
    assert pretence.set == {f"{tmp_path}/root/packs": layout, f"{tmp_path}/root/packs/run": layout}
    assert tier.traits.notes == ()
    assert list(tier.list("")) == ["packs/run/a", "packs/run/b"]


def test_folders_of_an_earlier_run_keep_their_layout_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretence = Pretence(monkeypatch)
    Lustre(path=tmp_path, stripe_count=4).put("packs/run/a", empty_buffer(1))
    before = dict(pretence.set)
    same = Lustre(path=tmp_path, stripe_count=4)
    same.put("packs/run/b", empty_buffer(1))
    other = Lustre(path=tmp_path, stripe_count=8)
    other.put("packs/run/c", empty_buffer(1))
    assert pretence.set == before
    assert same.traits.notes == ()
    assert set(other.traits.notes) == {
        f"{tmp_path}/packs: stripe count is 4, not 8",
        f"{tmp_path}/packs/run: stripe count is 4, not 8",
    }


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (pack_layout(1, 1 << 20), "stripe count is 1, not 4"),
        (pack_layout(4, 4 << 20), "stripe size is 4MiB, not 1MiB"),
        (struct.pack("<I", 0x0BD60BD0) + bytes(124), "the striping that was read back is composite"),
    ],
)
def test_a_site_that_ignores_the_wish_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bytes, note: str
) -> None:
    Pretence(monkeypatch, found)
    tier = Lustre(path=tmp_path / "a", stripe_count=4, stripe_size=1 << 20)
    tier.put("x", empty_buffer(1))
    (said,) = tier.traits.notes
    assert said.startswith(f"{tmp_path}/a: {note}")
    assert list(tier.list("")) == ["x"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODATA])
def test_a_site_that_refuses_keeps_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    Pretence(monkeypatch, failing(number))
    tier = Lustre(path=tmp_path / "set", stripe_count=4)
    tier.put("x", empty_buffer(1))
    assert tier.traits.notes == (
        f"{tmp_path}/set: striping could not be set ({os.strerror(number)}): the site's default holds",
    )
    Pretence(monkeypatch, None, failing(number))
    tier = Lustre(path=tmp_path / "read", stripe_count=4)
    tier.put("x", empty_buffer(1))
    assert tier.traits.notes == (
        f"{tmp_path}/read: striping could not be read back ({os.strerror(number)}): it cannot be checked",
    )


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, TierUnavailable), (errno.ENOSPC, TierFull), (errno.EROFS, AccessDenied)]
)
def test_what_is_not_about_striping_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TierError]
) -> None:
    pretence = Pretence(monkeypatch, failing(number))
    tier = Lustre(path=tmp_path / "set", stripe_count=4)
    with pytest.raises(kind, match=errno.errorcode[number]):
        tier.put("x", empty_buffer(1))
    pretence.answer = None
    tier.put("x", empty_buffer(1))
    assert list(tier.list("")) == ["x"]


def test_without_a_wish_no_attribute_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretence = Pretence(monkeypatch, failing(errno.EIO), failing(errno.EIO))
    Lustre(path=tmp_path / "a").put("packs/x", empty_buffer(1))
    assert pretence.set == {}


# Stripes and requests


@given(st.integers(0, 1 << 26), st.integers(1, 1 << 26), st.sampled_from([0, 4096, 1 << 16, 1 << 20, 5 << 16]))
def test_cuts_leave_whole_stripes_in_the_middle(offset: int, nbytes: int, part: int) -> None:
    cuts = stripe_cuts(offset, nbytes, part)
    assert (cuts[0], cuts[-1]) == (0, nbytes)
    assert cuts == sorted(set(cuts))
    assert len(cuts) <= 4
    assert all((offset + cut) % part == 0 for cut in cuts[1:-1]) if part else len(cuts) == 2
    if part and len(cuts) == 2:
        # In one piece only where it is whole stripes itself, or lies in one.
        first, last = offset // part, (offset + nbytes - 1) // part
        assert (offset % part == 0 and (offset + nbytes) % part == 0) or first == last


@pytest.mark.parametrize("io", ["threads", "uring"])
def test_long_writes_go_by_stripes(place: Path, monkeypatch: pytest.MonkeyPatch, io: str) -> None:
    """What is submitted to the engine covers whole stripes but for the ends, and each lease is released once."""
    if io == "uring" and not has_uring():
        pytest.skip("io_uring is forbidden here")
    sent: list[tuple[int, int]] = []
    real = Engine.submit

    def submit(engine: Engine, transfer: Transfer) -> None:
        sent.append((transfer.offset, transfer.offset + transfer.buffer.numel()))
        real(engine, transfer)

    monkeypatch.setattr(Engine, "submit", submit)
    stripe, tier = 1 << 20, Lustre(path=place, stripe_size=1 << 20, io=io)
    data = map_pages(7 * stripe)
    data.copy_(random_bytes(7 * stripe))
    leases = []
    with tier.writer("a") as writer:
        for start, stop in ((0, 12288), (12288, 5 * stripe), (5 * stripe, 7 * stripe)):
            leases.append(0)

            def release(which: int = len(leases) - 1) -> None:
                leases[which] += 1

            writer.append(data[start:stop], release)
    assert leases == [1, 1, 1]
    assert torch.equal(tier.get("a"), data)
    long = [(start, stop) for start, stop in sent if stop - start >= stripe]
    assert long, "bytes went past the page cache"
    assert all(start % stripe == 0 and stop % stripe == 0 for start, stop in long)
    assert tier.traits.part_size == stripe
    tier.close()


def test_a_free_lock_does_not_prove_a_writer_of_another_host_dead(tmp_path: Path) -> None:
    young, old = tmp_path / ".tmp-young", tmp_path / ".tmp-old"
    for path in (young, old):
        path.write_text("half")
    os.utime(old, (os.stat(old).st_mtime - 4000,) * 2)
    Lustre(path=tmp_path).put("a", empty_buffer(1))
    assert (young.exists(), old.exists()) == (True, False)


def test_traits(tmp_path: Path) -> None:
    traits = Lustre(path=tmp_path).traits
    assert (traits.persistent, traits.shared, traits.failure_domain) == (True, "site", f"site:{tmp_path}")


def test_deadline_in_a_policy(tmp_path: Path) -> None:
    def parsed(deadline: str) -> ts.Policy:
        return ts.Policy.parse(f"tiers: {{shared: {{type: lustre, path: {tmp_path}, deadline: {deadline}}}}}")

    assert parsed("90s").tiers[0].options["deadline"] == 90.0
    for wrong in ("0", "never", "-1s"):
        with pytest.raises(ts.PolicyError, match=r"tiers\.shared\.deadline"):
            parsed(wrong)
