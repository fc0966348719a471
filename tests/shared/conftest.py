"""A CephFS for the whole run, and two mounts of it, each of a client of its own, as two hosts would have."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.servers.cephfs import CephFs, install_all
from support.servers.packages import NotInstallable


class Mounts(NamedTuple):
    """The file system, and a new folder in it as either client sees it."""

    fs: CephFs
    here: Path
    there: Path


@pytest.fixture(scope="session")
def cephfs_once(root: None) -> Iterator[CephFs]:
    """The file system; its programs are installed where they are missing and can be."""
    try:
        install_all()
    except NotInstallable as reason:
        pytest.skip(str(reason))
    folder = Path(tempfile.mkdtemp(prefix="tierstate-cephfs-"))
    (folder / "ceph").mkdir()
    fs = CephFs(folder / "ceph")
    try:
        fs.create()
        yield fs
    finally:
        fs.stop()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def mounted_once(cephfs_once: CephFs) -> tuple[Path, Path]:
    """Two mounts that tests share which let the servers live."""
    folder = cephfs_once.folder.parent
    return cephfs_once.mount(folder / "here"), cephfs_once.mount(folder / "there")


@pytest.fixture
def mounts(cephfs_once: CephFs, mounted_once: tuple[Path, Path]) -> Mounts:
    """The shared mounts."""
    name = uuid.uuid4().hex
    return Mounts(cephfs_once, *(path / name for path in mounted_once))


@pytest.fixture
def own_mounts(cephfs_once: CephFs) -> Iterator[Mounts]:
    """Mounts of this test alone, whose servers may die; afterwards all servers live again."""
    name = uuid.uuid4().hex
    paths = [cephfs_once.folder.parent / f"{name}-{i}" for i in range(2)]
    try:
        here, there = (cephfs_once.mount(path) for path in paths)
        yield Mounts(cephfs_once, here / name, there / name)
    finally:
        cephfs_once.resume()
        cephfs_once.start()
        for path in paths:
            cephfs_once.unmount(path)
        cephfs_once.wait_active()
