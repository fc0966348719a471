"""The object tier over a real S3 server."""

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AccessDenied, AlreadyExists, Damaged, NotFound, TierUnavailable
from tierstate.tiers import bucket, multipart, stores
from tierstate.tiers.base import Range, Tier
from tierstate.tiers.object import ObjectStore
from tierstate.tiers.testing import Lease, TierContract, random_bytes

from .swift_server import Swift, find_python


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    server = Swift(tmp_path_factory.mktemp("swift"), find_python())
    try:
        server.start()
        make_bucket(server)
        yield server
    finally:
        server.stop()


def make_bucket(server: Swift) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(**server.options(), skip_instance_cache=True)
    fs.mkdir("bucket")
    fs.close_session(fs.loop, fs._s3)


def open_s3(server: Swift, prefix: str, **options: Any) -> ObjectStore:
    tier = ObjectStore(url=f"s3://bucket/{prefix}", options={**server.options(), **options})
    tier.name = "s3"
    return tier


@pytest.fixture
def s3(swift: Swift) -> Iterator[ObjectStore]:
    tier = open_s3(swift, uuid.uuid4().hex)
    yield tier
    tier.close()


class TestS3Contract(TierContract):
    """The promises hold on a real server, but for races, of which the probe finds that it lets several win."""

    examples = 2
    steps = 12

    @pytest.fixture(autouse=True)
    def _server(self, swift: Swift) -> None:
        self.swift = swift
        self.prefix = uuid.uuid4().hex

    def make(self, tmp_path: Path) -> Tier:
        return open_s3(self.swift, self.prefix)

    def reopen(self, tier: Tier) -> Tier:
        return open_s3(self.swift, self.prefix)


def uploads(server: Swift) -> list[Any]:
    """Multipart uploads that were begun and neither completed nor aborted."""
    import s3fs

    fs = s3fs.S3FileSystem(**server.options(), skip_instance_cache=True)
    found = fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
    fs.close_session(fs.loop, fs._s3)
    return list(found)


def test_the_probe_tells_what_the_server_does(s3: ObjectStore) -> None:
    """Swift answers a second create with 412, and lets several of those win that come at once."""
    assert s3.traits.conditional_create is None
    s3.put("a", empty_buffer(1))
    assert s3.traits.conditional_create is False
    (note,) = s3.traits.notes
    assert "several winners" in note
    assert list(s3.list("")) == ["a"]


def test_long_objects_go_in_parts(s3: ObjectStore, swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART", 5 << 20)
    monkeypatch.setattr(bucket, "READ_PART", 1 << 20)
    monkeypatch.setattr(bucket, "SINGLE", 7 << 20)
    data = random_bytes((11 << 20) + 12_345)
    lease = Lease(data)
    with s3.writer("written") as writer:
        for at in range(0, data.numel(), 3 << 20):
            writer.append(data[at : at + (3 << 20)])
        assert uploads(swift)
        assert list(s3.list("")) == []
    s3.put("put", data)
    for key in ("written", "put"):
        assert torch.equal(s3.get(key), data)
    assert torch.equal(s3.get("put"), lease.buffer)
    assert not uploads(swift)


def test_parts_that_are_given_up_leave_nothing(s3: ObjectStore, swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART", 5 << 20)
    data = random_bytes(11 << 20)
    aborted, late = s3.writer("a"), s3.writer("b")
    for writer in (aborted, late):
        writer.append(data)
    aborted.abort()
    s3.put("b", random_bytes(3))
    # Some servers ignore the condition here, so the request must not even be sent.
    monkeypatch.setattr(stores.Upload, "complete", lambda *_: pytest.fail("completed"))
    with pytest.raises(AlreadyExists):
        late.close()
    assert (list(s3.list("")), s3.size("b")) == (["b"], 3)
    assert not uploads(swift)


def test_a_failed_part_gives_the_object_up(s3: ObjectStore, swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART", 5 << 20)
    writer = s3.writer("a")

    def fail(*_: Any) -> None:
        raise ConnectionResetError("connection lost")

    monkeypatch.setattr(stores.Upload, "part", fail)
    lease = Lease(random_bytes(11 << 20))
    with pytest.raises(TierUnavailable, match="connection lost"):
        writer.append(lease.buffer, lease.release)
    with pytest.raises(TierUnavailable, match="connection lost"):
        writer.close()
    assert lease.releases == 1
    assert list(s3.list("")) == []
    assert not uploads(swift)


def test_a_bucket_that_is_not_there(swift: Swift) -> None:
    tier = ObjectStore(url="s3://no-such-bucket/ckpt", options=swift.options())
    for call in (lambda: tier.put("a", empty_buffer(1)), lambda: list(tier.list("")), lambda: tier.get("a")):
        with pytest.raises(NotFound, match="no such bucket"):
            call()
    tier.close()


def test_wrong_credentials_are_denied_and_not_shown(swift: Swift) -> None:
    tier = open_s3(swift, "denied", secret="not-the-secret")
    for call in (lambda: tier.put("a", empty_buffer(1)), lambda: list(tier.list("")), lambda: tier.get("a")):
        with pytest.raises(AccessDenied, match="check the credentials") as found:
            call()
        shown = str(found.value) + str(found.value.__cause__)
        assert "not-the-secret" not in shown
        assert "test:tester" not in shown
    assert "secret" not in repr(tier)
    tier.close()


def test_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    retries = {"retries": {"total_max_attempts": 1}}
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k" * 8, "secret": "s" * 8, "config_kwargs": retries}
    tier = ObjectStore(url="s3://bucket/ckpt", options=options)
    for call in (lambda: tier.put("a", empty_buffer(1)), lambda: list(tier.list("")), lambda: tier.get("a")):
        with pytest.raises(TierUnavailable, match="Could not connect"):
            call()
    tier.close()


def test_what_another_handle_wrote_is_seen_at_once(s3: ObjectStore, swift: Swift) -> None:
    """Nothing is answered from a cache of listings."""
    prefix = uuid.uuid4().hex
    one, two = open_s3(swift, prefix), open_s3(swift, prefix)
    for n in range(3):
        assert list(two.list("")) == [f"{i}" for i in range(n)]
        with pytest.raises(NotFound):
            two.size(f"{n}")
        one.put(f"{n}", random_bytes(n))
        assert two.size(f"{n}") == n
    one.delete("1")
    assert list(two.list("")) == ["0", "2"]
    with pytest.raises(NotFound):
        two.get("1")
    for tier in (one, two):
        tier.close()


def test_a_store_that_sends_too_little(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put("a", random_bytes(100))
    out = empty_buffer(50)
    monkeypatch.setattr(stores.Store, "fetch", lambda *_: [b"short"])
    with pytest.raises(TierUnavailable, match="the store sent 5 bytes from 10, 50 were asked for"):
        s3.read("a", [Range(10, out)])
    with pytest.raises(Damaged):
        s3.read("a", [Range(60, out)])


def test_credentials_come_from_the_environment_too(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    options = swift.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("key"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret"))
    tier = ObjectStore(url=f"s3://bucket/{uuid.uuid4().hex}", options=options)
    tier.put("a", random_bytes(10))
    assert torch.equal(tier.get("a"), random_bytes(10))
    tier.close()
