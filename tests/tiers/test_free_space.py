"""How much may still be put into a tier, as far as it can tell."""

import shutil
from pathlib import Path

import pytest

from tierstate.manifest.errors import NotFound, TierError
from tierstate.tiers.memory.host import Host, Memory
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.posix.directory import Nvme
from tierstate.tiers.posix.lustre import Lustre
from tierstate.tiers.testing import Faulty, random_bytes


def test_what_a_capacity_leaves() -> None:
    for tier in (Memory(capacity=1000), Host(capacity=1000), Faulty(Memory(capacity=1000))):
        tier.put("a", random_bytes(300))
        assert tier.room() == 700
    assert Memory().room() is None
    assert Host().room() is None


def test_what_a_file_system_leaves(tmp_path: Path) -> None:
    disk = shutil.disk_usage(tmp_path)
    for tier in (
        Nvme(path=tmp_path / "not" / "made" / "yet"),
        Lustre(path=tmp_path),
        ObjectStore(url=f"file://{tmp_path}/store"),
    ):
        room = tier.room()
        assert room is not None
        assert 0 <= room <= disk.total
    bounded = Nvme(path=tmp_path / "bounded", capacity=1000)
    bounded.put("a", random_bytes(300))
    assert bounded.room() == min(700, shutil.disk_usage(tmp_path).free)
    assert not (tmp_path / "not").exists(), "looking makes nothing"


def test_a_store_knows_its_capacity_alone(tmp_path: Path) -> None:
    store = ObjectStore(url=f"memory://{tmp_path.name}", capacity=1000)
    store.put("a", random_bytes(300))
    assert store.room() == 700
    assert ObjectStore(url=f"memory://{tmp_path.name}-other").room() is None
    store.close()


def test_a_path_that_cannot_be_looked_at_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises((TierError, NotFound)):
        Nvme(path=tmp_path / ("n" * 300)).room()
