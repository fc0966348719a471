"""The object tier over a real S3 server."""

import faulthandler
import os
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from support.servers.swift import SECRET, Swift

from tierstate.cluster import check
from tierstate.cluster.advice import advise
from tierstate.manifest.chunk import empty_buffer, to_bytes
from tierstate.manifest.errors import AccessDenied, AlreadyExists, Damaged, NotFound, TierUnavailable
from tierstate.tiers.base import Range
from tierstate.tiers.object.s3 import bucket, multipart, transfers
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.testing import Lease, random_bytes


def open_s3(server: Swift, prefix: str, checksum: Any = "auto", **options: Any) -> ObjectStore:
    tier = ObjectStore(url=f"s3://bucket/{prefix}", options={**server.options(), **options}, checksum=checksum)
    tier.name = "s3"
    return tier


@pytest.fixture
def s3(swift: Swift) -> Iterator[ObjectStore]:
    tier = open_s3(swift, uuid.uuid4().hex)
    yield tier
    tier.close()


def uploads(server: Swift) -> list[Any]:
    """Multipart uploads that were begun and neither completed nor aborted."""
    import s3fs

    fs = s3fs.S3FileSystem(**server.options(), skip_instance_cache=True)
    found = fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
    fs.close_session(fs.loop, fs._s3)
    return list(found)


def test_the_probe_tells_what_the_server_does(s3: ObjectStore) -> None:
    """Swift answers a second create with 412, and mostly lets several of those win that come at once.

    What is known of it counts more than a race that had one winner by chance.
    """
    assert s3.traits.conditional_create is None
    s3.put("a", empty_buffer(1))
    race, checksum = s3.traits.notes
    assert ("several winners" in race, "one winner" in race) in ((True, False), (False, True))
    assert s3.traits.conditional_create is False
    assert "racing writers of one key may both succeed" in race
    assert "crc32, a wrong one is refused" in checksum
    assert list(s3.list("")) == ["a"]


@pytest.mark.parametrize("checksum", ["auto", pytest.param("md5", marks=pytest.mark.soak)])
def test_long_objects_go_in_parts(swift: Swift, monkeypatch: pytest.MonkeyPatch, checksum: Any) -> None:
    monkeypatch.setattr(multipart, "PART_SIZE", multipart.MIN_PART)
    monkeypatch.setattr(transfers, "REQUEST_SIZE", 1 << 20)
    monkeypatch.setattr(bucket, "SINGLE", 7 << 20)
    s3 = open_s3(swift, uuid.uuid4().hex, checksum)
    data = random_bytes((12 << 20) + 12_345)
    leases = [Lease(data[at : at + (6 << 20)]) for at in range(0, data.numel(), 6 << 20)]
    with s3.writer("lent") as writer:
        for lease in leases:
            writer.append(lease.buffer, lease.release)
        assert uploads(swift)
        assert list(s3.list("")) == []
    assert [lease.releases for lease in leases] == [1] * len(leases)
    with s3.writer("copied") as writer:
        for at in range(0, data.numel(), 3 << 20):
            writer.append(data[at : at + (3 << 20)])
    s3.put("put", data)
    for key in ("lent", "copied", "put"):
        assert torch.equal(s3.get(key), data)
    assert not uploads(swift)
    s3.close()


def test_parts_that_are_given_up_leave_nothing(s3: ObjectStore, swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART_SIZE", multipart.MIN_PART)
    leases = [Lease(random_bytes(6 << 20)) for _ in range(4)]
    aborted, late = s3.writer("a"), s3.writer("b")
    for writer, lease in zip((aborted, aborted, late, late), leases, strict=True):
        writer.append(lease.buffer, lease.release)
    aborted.abort()
    assert [lease.releases for lease in leases[:2]] == [1, 1]
    s3.put("b", random_bytes(3))
    # Some servers ignore the condition here, so the request must not even be sent.
    monkeypatch.setattr(multipart.S3Upload, "complete", lambda *_: pytest.fail("completed"))
    with pytest.raises(AlreadyExists):
        late.close()
    assert [lease.releases for lease in leases] == [1] * 4
    assert (list(s3.list("")), s3.size("b")) == (["b"], 3)
    assert not uploads(swift)


def test_a_lost_answer_to_the_last_request_is_settled_by_the_object(
    s3: ObjectStore, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object has the ETag of this upload: it is ours, however often the request is sent again."""
    monkeypatch.setattr(multipart, "PART_SIZE", multipart.MIN_PART)
    session = s3._inner._s3.session  # type: ignore[attr-defined]
    once, sent = session.once, []

    def lose(method: str, **params: Any) -> Any:
        answer = once(method, **params)
        if method == "complete_multipart_upload":
            sent.append(method)
            raise ConnectionResetError("the answer was lost")
        return answer

    monkeypatch.setattr(session, "once", lose)
    data = random_bytes(6 << 20)
    with s3.writer("a") as writer:
        writer.append(data)
    assert torch.equal(s3.get("a"), data)
    assert len(sent) == 1
    assert not uploads(swift)


def test_a_lost_answer_does_not_make_the_object_of_another_writer_ours(
    s3: ObjectStore, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART_SIZE", multipart.MIN_PART)
    session = s3._inner._s3.session  # type: ignore[attr-defined]
    once, theirs = session.once, random_bytes(9, 1)

    def come_second(method: str, **params: Any) -> Any:
        if method != "complete_multipart_upload":
            return once(method, **params)
        s3.put("a", theirs)
        raise ConnectionResetError("the request was lost")

    monkeypatch.setattr(session, "once", come_second)
    with pytest.raises(AlreadyExists), s3.writer("a") as writer:
        writer.append(random_bytes(6 << 20))
    assert torch.equal(s3.get("a"), theirs)
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


@pytest.mark.slow
def test_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k" * 8, "secret": "s" * 8}
    tier = ObjectStore(url="s3://bucket/ckpt", options=options, deadline=0.5)
    calls = (
        lambda: tier.put("a", empty_buffer(1)),
        lambda: list(tier.list("")),
        lambda: tier.read("a", [Range(0, empty_buffer(1))]),
    )
    for call in calls:
        with pytest.raises(TierUnavailable, match=r"(?i)connect"):
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


def test_ranges_behind_the_end(s3: ObjectStore) -> None:
    s3.put("a", random_bytes(100))
    for offset in (60, 100, 1000):
        with pytest.raises(Damaged, match="ends before"):
            s3.read("a", [Range(offset, empty_buffer(50))])


def test_a_forked_child_opens_its_own(s3: ObjectStore) -> None:
    """It shares no connection with its parent, and neither is disturbed."""
    data = random_bytes(3 << 20)
    s3.put("a", data)
    assert torch.equal(s3.get("a"), data)
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(30, exit=True)
        try:
            s3.put("b", data)
            # Not torch.equal: its threads are the parent's.
            os._exit(0 if to_bytes(s3.get("a")) == to_bytes(data) else 3)
        finally:
            os._exit(4)
    for _ in range(5):
        assert torch.equal(s3.get("a"), data)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(s3.get("b"), data)


def test_credentials_come_from_the_environment_too(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    options = swift.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("key"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret"))
    tier = ObjectStore(url=f"s3://bucket/{uuid.uuid4().hex}", options=options)
    tier.put("a", random_bytes(10))
    assert torch.equal(tier.get("a"), random_bytes(10))
    tier.close()


@pytest.mark.soak
def test_a_live_check_tells_what_the_server_honours(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    # The contract tries all of them.
    some = {"what is put is read", "one winner of a race"}
    monkeypatch.setattr(check, "PROMISES", [promise for promise in check.PROMISES if promise[0] in some])
    url = f"s3://bucket/{uuid.uuid4().hex}"
    tiers = {"s3": {"type": "object", "url": url, "options": swift.options(), "capacity": "40MiB"}}
    policy = Policy.parse(yaml.safe_dump({"tiers": tiers}))
    found = check.check_tier(policy.tier("s3"))
    advise(policy, [found])
    assert (found.error, found.broken, found.problems) == ("", {}, [])
    assert found.write
    assert found.read
    probed = found.traits["conditional_create"]
    assert probed is not None
    assert any("racing writers" in note for note in found.notes) == (not probed)
    assert SECRET not in str(found)
    again = open_s3(swift, url.rpartition("/")[2])
    assert list(again.list("")) == []
    again.close()
