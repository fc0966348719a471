"""Transfers to a server with injected faults: real sockets, real signatures."""

import base64
import hashlib
import re
import signal
import ssl
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from email.utils import formatdate
from functools import partial
from pathlib import Path
from threading import Event, Semaphore, Thread, main_thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from support.servers.scripted import KEY, SECRET, WHOLE, Answer, Handler, Server, fail, hang_up, options, serving

from tierstate.manifest.chunk import as_buffer, empty_buffer, to_bytes
from tierstate.manifest.errors import AccessDenied, Damaged, NotFound, TierError, TierFull, TierUnavailable
from tierstate.tiers.base import Range
from tierstate.tiers.latch import Latch
from tierstate.tiers.object.s3 import multipart
from tierstate.tiers.object.s3.checksums import CHECKSUMS
from tierstate.tiers.object.s3.client import S3Client
from tierstate.tiers.object.s3.multipart import IN_FLIGHT, S3Upload
from tierstate.tiers.object.s3.retry import MAX_USELESS, GaveUp
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.testing import Lease, random_bytes


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def store(server: Server) -> Iterator[S3Client]:
    one = S3Client("s3://bucket/ckpt", options(server), deadline=20)
    one.session._patience._draw = lambda: 0.0
    yield one
    one.close()


def fetch(store: S3Client, *spans: tuple[int, int]) -> None:
    """Read these spans, and look that every byte is right."""
    ranges = [Range(first, empty_buffer(last - first)) for first, last in spans]
    store.fill("a", ranges)
    for offset, out in ranges:
        assert bytes(out.numpy()) == WHOLE[offset : offset + len(out)]


@pytest.mark.parametrize("cut", [0, 1, 99_999])
def test_a_body_that_breaks_off_is_continued_where_it_ended(server: Server, store: S3Client, cut: int) -> None:
    server.script = [lambda one: one.give(WHOLE, cut), lambda one: one.give(WHOLE, cut)]
    fetch(store, (10, 250_010))
    asked = [one.headers["Range"] for one in server.seen]
    assert asked == [f"bytes={10 + n * cut}-250009" for n in range(3)]


def test_a_range_with_gaps_is_continued_too(server: Server, store: S3Client) -> None:
    server.script = [lambda one: one.give(WHOLE, 15_000)]
    fetch(store, (0, 10_000), (20_000, 30_000), (30_000, 40_000))
    # What broke off in the gap is asked for again from there.
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    "trouble",
    [hang_up, fail(503, "SlowDown"), fail(500, "InternalError"), fail(429, "x")],
    ids=["hang_up", "503", "500", "429"],
)
def test_passing_trouble_is_waited_out(server: Server, store: S3Client, trouble: Answer) -> None:
    server.script = [trouble] * 3
    fetch(store, (0, 5))
    part = {"Bucket": "bucket", "Key": "ckpt/a", "UploadId": "u"}
    server.script = [trouble] * 3
    done = store.session.transfers.send_part(part, 7, [memoryview(b"abc"), memoryview(b"de")], CHECKSUMS["none"])
    assert done == {"PartNumber": 7, "ETag": f'"{hashlib.md5(b"abcde").hexdigest()}"'}
    assert server.seen[-1].body == b"abcde"


def test_connections_are_used_again_and_dead_ones_are_not(server: Server, store: S3Client) -> None:
    for _ in range(3):
        fetch(store, (0, 5))
    assert len({one.client_address for one in server.seen}) == 1

    def give_and_hang_up(one: Handler) -> None:
        one.give(WHOLE)
        one.close_connection = True

    server.script = [give_and_hang_up]
    fetch(store, (0, 5))
    server.seen[-1].connection.close()
    fetch(store, (0, 5))
    assert len({one.client_address for one in server.seen}) == 2


LOST = [hang_up, fail(500, "InternalError")]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", LOST, ids=["hang_up", "500"])
@pytest.mark.parametrize("there", [b"abcde", b"abcdX", b"abcdef", b"", None], ids=str)
def test_a_create_without_an_answer_is_settled_by_the_object(
    server: Server, store: S3Client, trouble: Answer, there: bytes | None
) -> None:
    """The same bytes are ours, other ones another's; where there is none it is sent again."""
    look = fail(404, "NoSuchKey") if there is None else lambda one: one.say(200, there, ETag='"x"')
    server.script = [trouble, hang_up, look]
    create = partial(store.create_whole, "a", [memoryview(b"abc"), memoryview(b"de")], {})
    if there in (b"abcde", None):
        create()
    else:
        with pytest.raises(FileExistsError, match="an object with other bytes is there"):
            create()
    sent = ["PUT", "GET", "GET"] + ["PUT"] * (there is None)
    assert [command for command, _ in server.asked] == sent
    assert all(one.headers["If-None-Match"] == "*" for one in server.seen if one.command == "PUT")


def test_a_conflict_after_a_lost_answer_may_be_with_itself(server: Server, store: S3Client) -> None:
    """The first request can take effect as late as between the look and the second one."""
    absent, conflict = fail(404, "NoSuchKey"), fail(412, "PreconditionFailed")
    server.script = [hang_up, absent, conflict, lambda one: one.say(200, b"abc", ETag='"x"')]
    store.create_whole("a", [memoryview(b"abc")], {})
    assert [command for command, _ in server.asked] == ["PUT", "GET", "PUT", "GET"]


@pytest.mark.parametrize("there", [b"abc", None], ids=str)
def test_a_create_whose_answer_proves_nothing_is_looked_at(
    server: Server, store: S3Client, there: bytes | None
) -> None:
    """A 200 that says no ETag may come from anybody."""
    look = fail(404, "NoSuchKey") if there is None else lambda one: one.say(200, there, ETag='"x"')
    server.script = [lambda one: one.say(200, b""), look]
    store.create_whole("a", [memoryview(b"abc")], {})
    assert [command for command, _ in server.asked] == ["PUT", "GET"] + ["PUT"] * (there is None)


def test_an_etag_that_is_no_digest_is_compared_with_a_head(server: Server, store: S3Client) -> None:
    """As where the store encrypts with keys of its own."""
    kms = {"x_amz_server_side_encryption": "aws:kms", "ETag": '"no digest"'}
    head = {**kms, "Last_Modified": "Sun, 13 Dec 2015 09:00:00 GMT"}
    server.script = [lambda one: one.say(200, b"", **kms), lambda one: one.say(200, b"", 3, **head)]
    store.create_whole("a", [memoryview(b"abc")], {})
    assert [command for command, _ in server.asked] == ["PUT", "HEAD"]


def test_a_not_found_that_is_not_said_by_s3_is_none(server: Server, store: S3Client) -> None:
    """A page of a gateway; also for a HEAD, which has no body, so that a GET is asked."""

    def gateway(one: Handler) -> None:
        one.send_response(404)
        one.send_header("Content-Length", "0")
        one.end_headers()

    server.script = [gateway, gateway, gateway, fail(404, "NoSuchKey")]
    with pytest.raises(Exception, match="NoSuchKey"):
        store.size("a")
    assert [command for command, _ in server.asked] == ["HEAD", "GET", "HEAD", "GET"]


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("chunked", [False, True])
def test_ranges_come_in_every_dialect(server: Server, store: S3Client, status: int, chunked: bool) -> None:
    """With either status, if the range is right; and in chunks, without a length."""

    def give(one: Handler) -> None:
        body = WHOLE[10:50_010]
        one.send_response(status)
        one.send_header("Content-Range", f"bytes 10-50009/{len(WHOLE)}")
        one.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(body)))))
        one.end_headers()
        pieces = [b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:999], body[999:], b"")] if chunked else [body]
        one.wfile.write(b"".join(pieces))

    server.script = [give, give]
    for _ in range(2):
        fetch(store, (10, 50_010))
    assert len(server.seen) == 2


@pytest.mark.slow
def test_a_create_of_unknown_fate_is_never_called_denied(server: Server) -> None:
    """Who may not read cannot tell what became of it; that is not the same as that it was not done."""
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=20)
    tier._inner._ready = True  # type: ignore[attr-defined]
    server.script = [hang_up, *[fail(403, "AccessDenied")] * 100]
    with pytest.raises(TierUnavailable, match=r"the object cannot be read: .*\(AccessDenied\)"):
        tier.put("a", random_bytes(5))
    tier.close()
    assert len(server.seen) < 10


def test_a_create_that_certainly_did_not_happen_is_sent_again(server: Server, store: S3Client) -> None:
    server.script = [fail(503, "SlowDown"), fail(400, "BadDigest")]
    store.create_whole("a", [memoryview(b"abc")], {})
    assert len(server.seen) == 3


def test_requests_are_signed_in_their_headers_and_not_digested(server: Server, store: S3Client) -> None:
    """A URL is no secret, so it may be in the log of the server."""
    body = [memoryview(b"abc"), memoryview(b"def")]
    for name in ("crc32", "md5", "none"):
        store.create_whole("a", body, CHECKSUMS[name].of(body))
    crc = base64.b64encode(zlib.crc32(b"abcdef").to_bytes(4, "big")).decode()
    md5 = base64.b64encode(hashlib.md5(b"abcdef").digest()).decode()
    assert [one.headers["x-amz-checksum-crc32"] for one in server.seen] == [crc, None, None]
    assert [one.headers["Content-MD5"] for one in server.seen] == [None, md5, None]
    for one, summed in zip(server.seen, ("x-amz-checksum-crc32", "content-md5", ""), strict=True):
        assert one.path == "/bucket/ckpt/a"
        signed = re.search("SignedHeaders=([^,]*)", one.headers["Authorization"])
        assert signed is not None
        assert {"host", "if-none-match", summed} - {""} <= set(signed[1].split(";"))
        assert "/eu-west-7/s3/" in one.headers["Authorization"]
        assert one.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert one.headers["Host"] == f"127.0.0.1:{server.server_address[1]}"


def test_anonymous_requests_are_not_signed(server: Server) -> None:
    store = S3Client("s3://bucket/ckpt", options(server, anon=True, key=None, secret=None), deadline=20)
    fetch(store, (0, 5))
    store.close()
    assert urlsplit(server.seen[0].path).query == ""
    assert "Authorization" not in server.seen[0].headers


def test_what_s3fs_adds_to_requests_is_added(server: Server) -> None:
    more = {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}, "requester_pays": True}
    store = S3Client("s3://bucket/ckpt", options(server, **more), deadline=20)
    store.create_whole("a", [memoryview(b"x")], {})
    fetch(store, (0, 5))
    store.close()
    put, get = (one.headers for one in server.seen)
    assert (put["x-amz-server-side-encryption"], put["x-amz-request-payer"]) == ("aws:kms", "requester")
    assert (get["x-amz-server-side-encryption"], get["x-amz-request-payer"]) == (None, "requester")


def test_a_proxy_of_the_environment_is_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = server.server_address[:2]
    monkeypatch.setenv("http_proxy", f"http://me:pass%21@{host}:{port}")
    where = {"endpoint_url": "http://s3.example:81", "client_kwargs": {"region_name": "x"}}
    store = S3Client("s3://bucket/ckpt", options(server, **where), deadline=20)
    fetch(store, (0, 5))
    store.close()
    (one,) = server.seen
    assert one.path == "http://s3.example:81/bucket/ckpt/a"
    assert one.headers["Host"] == "s3.example:81"
    assert base64.b64decode(one.headers["Proxy-Authorization"].removeprefix("Basic ")) == b"me:pass!"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "error", "told"),
    [
        (fail(403, "AccessDenied"), AccessDenied, "check the credentials"),
        (fail(403, "RequestTimeTooSkewed"), AccessDenied, "the clock of this host"),
        (fail(404, "NoSuchBucket"), NotFound, "there is no such bucket: create it"),
        (fail(404, "NoSuchKey"), NotFound, "there is no such object"),
        (fail(307, "TemporaryRedirect"), TierUnavailable, "can be reached from this host"),
        (fail(403, "QuotaExceeded"), TierFull, "the quota of the bucket"),
        (fail(416, "InvalidRange"), Damaged, "ends before the range"),
        (lambda one: one.give(WHOLE[:20]), Damaged, "ends before the range"),
    ],
    ids=["denied", "clock", "no bucket", "no key", "moved", "quota", "range", "short"],
)
def test_refusals_say_what_would_help(server: Server, trouble: Answer, error: Any, told: str) -> None:
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=60)
    server.script = [trouble] * 50
    with pytest.raises(error, match=told) as found:
        tier.read("a", [Range(0, empty_buffer(50))])
    tier.close()
    chain: BaseException | None = found.value
    while chain is not None:
        assert not any(secret in str(chain) for secret in (KEY, SECRET, "Signature="))
        chain = chain.__cause__ or chain.__context__


def test_an_answer_to_another_question_is_not_taken(server: Server) -> None:
    store = S3Client("s3://bucket/ckpt", options(server), deadline=60)
    server.script = [lambda one: one.say(206, b"abcde", Content_Range="bytes 1-5/10")] * 1000
    with pytest.raises(ConnectionError, match="bytes 0 to 5 were asked for, the answer is status 206"):
        fetch(store, (0, 5))
    store.close()


@pytest.mark.slow
def test_a_server_that_hangs_is_unavailable_after_the_deadline(server: Server) -> None:
    done = Event()
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=0.5)
    server.script = [lambda one: (done.wait(60), hang_up(one))[1]] * 100  # type: ignore[func-returns-value]
    with pytest.raises(TierUnavailable, match="time"):
        tier.read("a", [Range(0, empty_buffer(50))])
    done.set()
    tier.close()


@pytest.mark.slow
def test_a_body_that_drips_is_unavailable_after_the_deadline(server: Server) -> None:
    """Bytes that come one by one are no answer, though each of them is in time."""
    done = Event()

    def drip(one: Handler) -> None:
        one.say(206, b"", 50, Content_Range=f"bytes 0-49/{len(WHOLE)}")
        try:
            while not done.wait(0.05):
                one.wfile.write(b"x")
        except OSError:
            one.close_connection = True

    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=0.5)
    server.script = [drip] * 100
    with pytest.raises(TierUnavailable, match="time"):
        tier.read("a", [Range(0, empty_buffer(50))])
    done.set()
    tier.close()


@pytest.mark.slow
def test_a_store_that_truncates_everything_is_given_up_soon(server: Server) -> None:
    """A restore has other tiers to ask; a deadline of an hour is for stores that may come back."""
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=3600)
    server.script = [lambda one: one.give(WHOLE, 20)] + [lambda one: one.give(WHOLE, 0)] * 100
    with pytest.raises(TierUnavailable, match=f"the last of {1 + MAX_USELESS} attempts"):
        tier.read("a", [Range(0, empty_buffer(50))])
    tier.close()


@pytest.mark.slow
def test_notes_have_no_secrets(server: Server) -> None:
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=20)
    body = f"<Error><Code>AccessDenied</Code><Message>{KEY} and {SECRET} are not it</Message></Error>".encode()
    server.script = [lambda one: one.say(403, body)]
    note = tier._inner._orphans()  # type: ignore[attr-defined]
    assert "were not looked for" in note
    assert not any(secret in note for secret in (KEY, SECRET))
    tier.close()


def test_orphans_are_judged_by_the_clock_of_the_store(server: Server) -> None:
    """Its answers say what time it is there: ten years ago, in which an upload of then is young."""
    then = 1_450_000_000
    begun = "2015-12-13T09:00:00.000Z"  # 46 minutes before
    listing = (
        "<ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><IsTruncated>false</IsTruncated>"
        f"<Upload><Key>ckpt/a</Key><UploadId>u</UploadId><Initiated>{begun}</Initiated></Upload>"
        "</ListMultipartUploadsResult>"
    ).encode()

    def give(one: Handler) -> None:
        one.date_time_string = lambda *_: formatdate(then, usegmt=True)  # type: ignore[method-assign]
        one.say(200, listing)

    for age, found in ((3600, "1 that may be under way"), (60, "1 begun more than")):
        tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=20, orphan_age=age)
        server.script = [give]
        assert found in tier._inner._orphans()  # type: ignore[attr-defined]
        tier.close()
    assert [command for command, _ in server.asked] == ["GET", "GET", "DELETE"]
    assert "uploadId=u" in server.asked[-1][1]


def test_a_session_of_the_users_is_refused(server: Server) -> None:
    import aiobotocore.session

    with pytest.raises(ValueError, match="a 'session' cannot be used here"):
        S3Client("s3://bucket/ckpt", options(server, session=aiobotocore.session.AioSession()), deadline=1)


def test_buffers_of_any_kind_are_read_into(server: Server, store: S3Client) -> None:
    """Also such as begin at odd addresses."""
    memory = as_buffer(bytearray(1000))
    store.fill("a", [Range(3, memory[1:778])])
    assert torch.equal(memory[1:778], as_buffer(WHOLE[3:780]))
    assert not memory[778:].any()


# Writers


@pytest.fixture
def tier(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A tier that takes bytes for megabytes, and does not look what this server can do."""
    for name, value in (("MIN_PART", 5), ("PART_SIZE", 16), ("MAX_LENT_PART", 64)):
        monkeypatch.setattr(multipart, name, value)
    one = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=20)
    one._inner._ready = True  # type: ignore[attr-defined]
    yield one
    one.close()


def asked(server: Server, method: str) -> int:
    return sum(one == method for one, _ in server.asked)


def test_parts_are_sent_and_completed(server: Server, tier: ObjectStore) -> None:
    leases = [Lease(random_bytes(n)) for n in (20, 3, 150, 7)]
    whole = b"".join(to_bytes(lease.buffer) for lease in leases)
    with tier.writer("a") as writer:
        for lease in leases:
            writer.append(lease.buffer, lease.release)
    sent = {
        int(parse_qs(urlsplit(one.path).query)["partNumber"][0]): one.body
        for one in server.seen
        if one.command == "PUT"
    }
    assert b"".join(sent[number] for number in sorted(sent)) == whole
    assert [lease.releases for lease in leases] == [1, 1, 1, 1]
    assert (asked(server, "POST"), asked(server, "DELETE")) == (2, 0)


@pytest.mark.parametrize("whose", ["ours", "another's", "unknown"])
def test_a_completion_whose_answer_was_lost_and_whose_etag_is_no_digest(server: Server, whose: str) -> None:
    """The object's metadata say whose it is; they stand beside those that the options give to each object."""
    given = options(server, s3_additional_kwargs={"Metadata": {"team": "red"}})
    store = S3Client("s3://bucket/ckpt", given, deadline=4 if whose == "unknown" else 60)  # what is unknown stays so
    upload = S3Upload(store.session, store.where("a"), CHECKSUMS["none"])
    part = upload.send(1, [memoryview(b"abc")], Latch(), lambda _: None).result()
    begun = server.seen[0].headers
    assert begun["x-amz-meta-team"] == "red"
    mark = {"ours": begun["x-amz-meta-tierstate-upload"], "another's": "f" * 32}.get(whose)
    more = {"X-Amz-Meta-Tierstate-Upload": mark} if mark else {}
    head = {"ETag": '"opaque"', "x_amz_server_side_encryption": "aws:kms", "Last_Modified": formatdate(usegmt=True)}
    server.script = [hang_up, *[lambda one: one.say(200, b"", 3, **head, **more)] * 10]
    failure = {"another's": FileExistsError, "unknown": GaveUp}.get(whose)
    with pytest.raises(failure) if failure else nullcontext():
        upload.complete([part], 3)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("when", range(4))
def test_a_part_that_is_refused_gives_the_object_up(server: Server, tier: ObjectStore, when: int) -> None:
    refuse = fail(403, "AccessDenied")

    def put(one: Handler) -> None:
        (refuse if "partNumber=" + str(when + 1) in one.path else Handler.take)(one)

    Handler.part = put
    leases = [Lease(random_bytes(20)) for _ in range(4)]

    def write() -> None:
        with tier.writer("a") as writer:
            for lease in leases:
                writer.append(lease.buffer, lease.release)

    try:
        with pytest.raises(AccessDenied, match="check the credentials"):
            write()
    finally:
        Handler.part = None
    handed = len(leases)
    while handed and not leases[handed - 1].releases:
        handed -= 1  # appends after the failure was noticed were not made
    assert handed > when
    assert [lease.releases for lease in leases[:handed]] == [1] * handed
    assert asked(server, "DELETE") == 1
    assert asked(server, "POST") == 1


def test_parts_in_flight_are_bounded(server: Server, tier: ObjectStore) -> None:
    """No more buffers are taken than are being sent; nobody has to come back for the others."""
    go, arrived = Event(), Semaphore(0)

    def put(one: Handler) -> None:
        arrived.release()
        go.wait(60)
        one.take()

    Handler.part = put
    leases, taken = [Lease(random_bytes(20)) for _ in range(IN_FLIGHT + 4)], []

    def write() -> None:
        with tier.writer("a") as writer:
            for lease in leases:
                writer.append(lease.buffer, lease.release)
                taken.append(lease)

    thread = Thread(target=write)
    thread.start()
    try:
        for _ in range(IN_FLIGHT):
            assert arrived.acquire(timeout=60)
        assert len(taken) <= IN_FLIGHT
        assert not any(lease.releases for lease in leases)
    finally:
        go.set()
        thread.join()
        Handler.part = None
    assert [lease.releases for lease in leases] == [1] * len(leases)
    assert asked(server, "PUT") == len(leases)


@contextmanager
def one_interrupt(ready: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """As Ctrl-C in the block once, when ``ready`` has returned; then ``after`` is called."""
    interrupted = Event()

    def interrupt() -> None:
        ready()
        while not interrupted.wait(0.2):
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)
        after()

    def first(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    before, thread = signal.signal(signal.SIGINT, first), Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, IN_FLIGHT + 1], ids=["in-close", "in-append"])
def test_an_interrupt_from_the_keyboard_ends_all_leases_once(server: Server, tier: ObjectStore, count: int) -> None:
    """Nobody's memory is let go while it is still being sent, and nothing becomes visible."""
    go, arrived = Event(), Semaphore(0)
    leases = [Lease(random_bytes(20)) for _ in range(count)]
    held: list[int] = []

    def put(one: Handler) -> None:
        arrived.release()
        go.wait(60)
        held.extend(lease.releases for lease in leases)
        one.take()

    def ready() -> None:
        for _ in range(min(count, IN_FLIGHT)):
            arrived.acquire()

    def write() -> None:
        for lease in leases:
            writer.append(lease.buffer, lease.release)
        writer.close()

    Handler.part = put
    writer = tier.writer("a")
    try:
        with one_interrupt(ready, go.set), pytest.raises(KeyboardInterrupt):
            write()
    finally:
        Handler.part = None
    writer.abort()
    assert [lease.releases for lease in leases] == [1] * count
    assert held[0] == 0
    assert (asked(server, "DELETE"), asked(server, "POST")) == (1, 1)
    with pytest.raises(TierError, match="interrupted"):
        writer.close()


def test_an_abort_ends_all_leases(server: Server, tier: ObjectStore) -> None:
    leases = [Lease(random_bytes(20)) for _ in range(5)]
    writer = tier.writer("a")
    for lease in leases:
        writer.append(lease.buffer, lease.release)
    writer.abort()
    writer.abort()
    assert [lease.releases for lease in leases] == [1] * 5
    assert (asked(server, "DELETE"), asked(server, "POST")) == (1, 1)


# TLS


@pytest.fixture
def certificate(server: Server, tmp_path: Path) -> Path:
    """The server speaks TLS, by the word of an authority that nobody knows."""
    place = tmp_path / "cert.pem"
    curve = ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", *curve, *names]
    subprocess.run([*command, "-keyout", place, "-out", tmp_path / "only.pem"], check=True, capture_output=True)
    place.write_text(place.read_text() + (tmp_path / "only.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return tmp_path / "only.pem"


@pytest.mark.slow
def test_certificates_are_believed_as_s3fs_would(server: Server, certificate: Path) -> None:
    where = f"https://127.0.0.1:{server.server_address[1]}"
    for verify in (str(certificate), False):
        more = {"endpoint_url": where, "client_kwargs": {"region_name": "x", "verify": verify}}
        store = S3Client("s3://bucket/ckpt", options(server, **more), deadline=20)
        fetch(store, (0, 200_000))
        fetch(store, (5, 10))
        store.close()
    assert len({one.client_address for one in server.seen}) == 2


def test_a_certificate_of_nobody_known_is_refused(server: Server, certificate: Path) -> None:
    tier = ObjectStore(
        url="s3://bucket/ckpt",
        options=options(server, endpoint_url=f"https://127.0.0.1:{server.server_address[1]}"),
        deadline=3600,
    )
    with pytest.raises(AccessDenied, match="give the authority that signed the store's certificate"):
        tier.read("a", [Range(0, empty_buffer(5))])
    tier.close()
    assert not server.seen
