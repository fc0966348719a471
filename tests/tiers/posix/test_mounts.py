"""Where a directory lies: through links, bind mounts and names with blanks."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstate.tiers.base import Place
from tierstate.tiers.posix.mounts import Mount, mount_of, place_of, read_mounts

TEXT = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw - proc proc rw
40 22 8:2 /data /with\040blank rw - xfs /dev/sdb rw
41 40 8:3 / /with\040blank/in\134ner rw - xfs /dev/sdc rw
42 22 8:4 / /with\040blank rw - xfs /dev/sdd rw
short line
"""


def test_the_kernels_list_is_read():
    mounts = read_mounts(TEXT)
    assert mounts[2] == Mount("8:2", "/data", "/with blank", "xfs", "rw")
    assert mounts[3].point == r"/with blank/in\ner"
    assert mount_of("/with blank/x", mounts) == Mount("8:4", "/", "/with blank", "xfs", "rw"), (
        "the last one covers the one before"
    )
    assert mount_of("/with blanks", mounts) == mounts[0]
    assert mount_of("/anything", []) is None


def test_a_directory_and_a_link_to_it_are_one_place(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    one, other = place_of(tmp_path / "a" / "b"), place_of(tmp_path / "link" / "b")
    assert one == other
    assert one.overlaps(place_of(tmp_path / "a"))
    assert place_of(tmp_path).overlaps(one)
    assert not one.overlaps(place_of(tmp_path / "a" / "bc"))


def test_what_is_not_there_yet_has_a_place_and_another_state_later(tmp_path):
    before = place_of(tmp_path / "new" / "tier")
    (tmp_path / "new" / "tier").mkdir(parents=True)
    after = place_of(tmp_path / "new" / "tier")
    assert before.paths == after.paths
    assert before.state != after.state
    (tmp_path / "new").rename(tmp_path / "old")
    (tmp_path / "new" / "tier").mkdir(parents=True)
    assert place_of(tmp_path / "new" / "tier").state != after.state


@pytest.mark.root
def test_a_mount_is_another_state_and_a_bind_mount_the_same_place(tmp_path):
    point, folder = tmp_path / "point", tmp_path / "folder"
    point.mkdir()
    (folder / "in").mkdir(parents=True)
    before = place_of(point)
    done = subprocess.run(["mount", "--bind", folder, point], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no bind mounts here")
    try:
        assert place_of(point).state != before.state
        assert place_of(point).mount == os.path.realpath(point)
        assert place_of(point / "in").overlaps(place_of(folder / "in"))
        assert place_of(folder).overlaps(place_of(point / "in"))
        assert not place_of(folder).overlaps(place_of(tmp_path / "other"))
    finally:
        subprocess.run(["umount", point], check=True)
    assert place_of(point) == before


PATHS = st.lists(st.lists(st.sampled_from("ab"), max_size=3).map(tuple), min_size=1, max_size=2).map(tuple)


@given(PATHS, PATHS)
def test_overlap_goes_both_ways(one, other):
    expected = any(a[: len(b)] == b or b[: len(a)] == a for a in one for b in other)
    assert Place(one).overlaps(Place(other)) == Place(other).overlaps(Place(one)) == expected
