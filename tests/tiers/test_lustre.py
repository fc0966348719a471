"""The Lustre tier: the bytes of a layout, and a folder that is on no Lustre. It has not run on a real one here."""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.manifest.chunk import empty_buffer
from tierstate.tiers import lustre
from tierstate.tiers.base import Tier
from tierstate.tiers.lustre import ALL_STRIPES, LUSTRE, Lustre, compare_layouts, filesystem_type, pack_layout
from tierstate.tiers.testing import TierContract


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
    assert compare_layouts(pack_layout(0, 0, "x"), pack_layout(2, 1 << 20)) == ""
    assert "cannot be checked" in compare_layouts(wished, wished[:31])


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
    """A file system that says it is Lustre, and keeps one extended attribute per folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bytes | OSError | None) -> None:
        self.set: dict[str, bytes] = {}
        self.answer = answer
        monkeypatch.setattr(lustre, "filesystem_type", lambda path: LUSTRE)
        monkeypatch.setattr(os, "setxattr", self.setxattr)
        monkeypatch.setattr(os, "getxattr", lambda path, name: self.answer or self.set[str(path)])

    def setxattr(self, path: Path, name: str, value: bytes) -> None:
        assert name == "lustre.lov"
        assert not list(path.iterdir()), "a layout is set before anything is in the folder"
        if isinstance(self.answer, OSError):
            raise self.answer
        self.set[str(path)] = value


def test_new_folders_get_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretence = Pretence(monkeypatch, None)
    tier = Lustre(path=tmp_path / "root", stripe_count=4, stripe_size=1 << 20, pool="flash")
    (tmp_path / "root" / "old").mkdir(parents=True)
    tier.put("packs/run/a", empty_buffer(1))
    tier.put("old/a", empty_buffer(1))
    layout = pack_layout(4, 1 << 20, "flash")
    assert pretence.set == {f"{tmp_path}/root/packs": layout, f"{tmp_path}/root/packs/run": layout}
    assert tier.traits.notes == ()


def test_a_site_that_refuses_or_ignores_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pretence(monkeypatch, struct.pack("<IIQQIHH", 0x0BD10BD0, 1, 0, 0, 1 << 20, 1, 0))
    tier = Lustre(path=tmp_path / "a", stripe_count=4)
    tier.put("x", empty_buffer(1))
    assert tier.traits.notes == (f"{tmp_path}/a: stripe count is 1, not 4",)
    Pretence(monkeypatch, OSError(errno.EPERM, "Operation not permitted"))
    tier = Lustre(path=tmp_path / "b", stripe_count=4)
    tier.put("x", empty_buffer(1))
    (note,) = tier.traits.notes
    assert "the site's default holds" in note


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
