"""The servers as fixtures: each is started once per test run, on first use, and repaired between tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import pytest
from support.servers import ceph as ceph_server
from support.servers.buckets import Server, make_bucket
from support.servers.ceph import Ceph
from support.servers.packages import NotInstallable
from support.servers.proxy import Proxy
from support.servers.rclone import NoRclone, Rclone
from support.servers.swift import Swift, find_python

Started = TypeVar("Started", Ceph, Swift, Rclone)


@pytest.fixture(scope="session")
def ceph_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    """Ceph, for the whole run; its programs are installed where they are missing and can be."""
    try:
        ceph_server.install()
    except NotInstallable as reason:
        pytest.skip(str(reason))
    server = Ceph(tmp_path_factory.mktemp("ceph"))
    yield from _serve(server)


@pytest.fixture(scope="session")
def swift_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """Swift, for the whole run."""
    yield from _serve(Swift(tmp_path_factory.mktemp("swift"), find_python()))


@pytest.fixture(scope="session")
def rclone_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """rclone's server, for the whole run."""
    yield from _serve(_rclone(tmp_path_factory, tls=False))


@pytest.fixture(scope="session")
def rclone_tls_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """The same behind TLS, for the whole run."""
    yield from _serve(_rclone(tmp_path_factory, tls=True))


def _rclone(places: pytest.TempPathFactory, *, tls: bool) -> Rclone:
    try:
        return Rclone(places.mktemp("rclone"), tls=tls)
    except NoRclone as reason:
        pytest.skip(str(reason))


def _serve(server: Started) -> Iterator[Started]:
    try:
        server.create()
        make_bucket(server)
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def ceph(ceph_once: Ceph) -> Ceph:
    """Ceph's S3 gateway, all of whose parts run."""
    ceph_once.start()
    return ceph_once


@pytest.fixture
def swift(swift_once: Swift) -> Swift:
    """Swift's S3 interface, all of whose parts run."""
    swift_once.start()
    return swift_once


@pytest.fixture
def rclone(rclone_once: Rclone) -> Rclone:
    """rclone's S3 server, which runs."""
    rclone_once.start()
    return rclone_once


@pytest.fixture
def rclone_tls(rclone_tls_once: Rclone) -> Rclone:
    """rclone's S3 server behind TLS, which runs."""
    rclone_tls_once.start()
    return rclone_tls_once


@pytest.fixture(params=["ceph", pytest.param("swift", marks=pytest.mark.soak)])
def server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn; the second one in long runs only."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def proxy(ceph: Ceph) -> Iterator[Proxy]:
    """A proxy without faults in front of Ceph."""
    with Proxy(ceph) as proxy:
        yield proxy


@pytest.fixture
def proxy_to() -> Iterator[Callable[[Server], Proxy]]:
    """Makes proxies in front of servers, which end with the test."""
    with ExitStack() as proxies:
        yield lambda server: proxies.enter_context(Proxy(server))
