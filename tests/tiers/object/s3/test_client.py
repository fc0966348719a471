"""What the client of botocore brings: redirects, credentials that change, keys of customers, and its connections."""

import base64
import hashlib
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.servers.scripted import WHOLE, Answer, Handler, Server, fail, hang_up, options, serving

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AccessDenied, TierUnavailable
from tierstate.tiers.base import Range
from tierstate.tiers.object.s3 import client
from tierstate.tiers.object.s3.checksums import CHECKSUMS
from tierstate.tiers.object.s3.client import S3Client
from tierstate.tiers.object.s3.http_session import Body
from tierstate.tiers.object.tier import ObjectStore

BODY = [memoryview(b"abc"), memoryview(b"def")]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def store(server: Server) -> Iterator[S3Client]:
    yield from opened(options(server))


def opened(options: dict[str, Any]) -> Iterator[S3Client]:
    one = S3Client("s3://bucket/ckpt", options, deadline=20)
    one.session._patience._draw = lambda: 0.0
    yield one
    one.close()


def fetch(store: S3Client) -> None:
    out = empty_buffer(5)
    store.fill("a", [Range(3, out)])
    assert bytes(out.numpy()) == WHOLE[3:8]


def put_part(store: S3Client) -> None:
    part = {"Bucket": "bucket", "Key": "ckpt/a", "UploadId": "u"}
    store.session.transfers.send_part(part, 1, BODY, CHECKSUMS["none"])


REQUESTS = {
    "get": fetch,
    "put": lambda store: store.create_whole("a", BODY, {}),
    "part": put_part,
    "delete": lambda store: store.remove("a"),
}


def signed_for(one: Handler) -> str:
    """The region in the signature of a request."""
    found = re.search("Credential=[^/]*/[^/]*/([^/]*)/s3", one.headers["Authorization"])
    assert found is not None
    return found[1]


# Regions


MOVED: dict[str, Answer] = {
    "301": fail(301, "PermanentRedirect", x_amz_bucket_region="ap-east-9"),
    "307": fail(307, "TemporaryRedirect", x_amz_bucket_region="ap-east-9"),
    "400": lambda one: one.say(
        400,
        b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong region</Message>"
        b"<Region>ap-east-9</Region></Error>",
    ),
}


@pytest.mark.parametrize("moved", MOVED)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_bucket_in_another_region_is_asked_there(server: Server, store: S3Client, name: str, moved: str) -> None:
    """With the whole body again; and what comes next goes to the right region at once."""
    server.script = [MOVED[moved]]
    REQUESTS[name](store)
    assert [signed_for(one) for one in server.seen] == ["eu-west-7", "ap-east-9"]
    REQUESTS[name](store)
    assert [signed_for(one) for one in server.seen[2:]] == ["ap-east-9"]
    if name in ("put", "part"):
        assert [one.body for one in server.seen[1:]] == [b"abcdef"] * 2


def test_a_redirect_to_nowhere_passes_or_is_told(server: Server) -> None:
    """As after a bucket was made, until every name server knows it."""
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=60)
    server.script = [fail(307, "TemporaryRedirect")] * 100
    with pytest.raises(TierUnavailable, match="redirects every request, and names no region"):
        tier.read("a", [Range(0, empty_buffer(5))])
    tier.close()


# Credentials


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of credentials, as an agent writes it that renews them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    write_keys(path, "OLDKEY")
    return path


def write_keys(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-{key}\n")


def deny_old(answer: Answer, one: Handler) -> None:
    (answer if "OLDKEY" in one.headers["Authorization"] else Handler.right_for(one))(one)


DENIED = {
    "expired": fail(400, "ExpiredToken"),
    "unknown": fail(403, "InvalidAccessKeyId"),
    "denied": fail(403, "AccessDenied"),
}


@pytest.mark.parametrize("denied", DENIED)
@pytest.mark.parametrize("name", REQUESTS)
def test_credentials_are_looked_up_again_after_a_refusal(server: Server, keys: Path, name: str, denied: str) -> None:
    for store in opened(options(server, key=None, secret=None)):
        REQUESTS[name](store)
        write_keys(keys, "NEWKEY")
        server.script = [partial(deny_old, DENIED[denied])] * 2
        before = len(server.seen)
        REQUESTS[name](store)
        used = [re.search("Credential=([^/]*)", one.headers["Authorization"])[1] for one in server.seen[before:]]
        assert used == ["OLDKEY", "NEWKEY"]


def test_the_same_credentials_are_not_tried_twice(server: Server, keys: Path) -> None:
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server, key=None, secret=None), deadline=20)
    server.script = [fail(403, "AccessDenied")] * 5
    with pytest.raises(AccessDenied):
        tier.size("a")
    tier.close()
    assert len(server.seen) == 1


def test_credentials_of_the_options_are_never_replaced(server: Server, keys: Path) -> None:
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=20)
    server.script = [fail(403, "InvalidAccessKeyId")] * 5
    with pytest.raises(AccessDenied):
        tier.size("a")
    tier.close()
    assert len(server.seen) == 1


def test_no_credentials_anywhere_are_an_error_of_ours(server: Server, keys: Path) -> None:
    keys.unlink()
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server, key=None, secret=None), deadline=20)
    with pytest.raises(AccessDenied, match="check the credentials"):
        tier.size("a")
    tier.close()


def test_a_profile_that_is_not_there(server: Server, keys: Path) -> None:
    tier = ObjectStore(url="s3://bucket/ckpt", options=options(server, key=None, secret=None, profile="nobody"))
    with pytest.raises(AccessDenied, match="nobody"):
        tier.size("a")
    tier.close()


# Directory buckets


SESSION = b"""<CreateSessionResult><Credentials><SessionToken>token-of-session</SessionToken>
<SecretAccessKey>secret-of-session</SecretAccessKey><AccessKeyId>KEYOFSESSION</AccessKeyId>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"""


LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated>%s</ListBucketResult>"


def test_a_directory_bucket_has_sessions(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """S3 Express One Zone: one session for many requests, which are signed by it; nothing of it is in a log."""
    caplog.set_level(logging.DEBUG)
    store = S3Client("s3://fast--use1-az4--x-s3/ckpt", options(server), deadline=20)
    server.script = [lambda one: one.say(200, SESSION)]
    store.create_whole("a", BODY, CHECKSUMS["md5"].of(BODY))
    fetch(store)
    store.remove("a")
    store.close()
    opening, *others = server.seen
    assert opening.path == "/fast--use1-az4--x-s3?session"
    assert [one.command for one in others] == ["PUT", "GET", "DELETE"]
    for one in others:
        assert re.search("Credential=KEYOFSESSION/[^/]*/eu-west-7/s3express/", one.headers["Authorization"])
        assert one.headers["x-amz-s3session-token"] == "token-of-session"
    assert "CreateSession" in caplog.text
    assert not re.findall("(?:token|secret)-of-session", caplog.text)


def test_a_directory_bucket_lists_what_is_below_a_slash(server: Server) -> None:
    """It refuses every other prefix, and has no order."""
    store = S3Client("s3://fast--use1-az4--x-s3/ckpt", options(server), deadline=20)
    names = ["runs/b1", "runs/a2", "runs/b0", "other/b"]
    entries = b"".join(b"<Contents><Key>ckpt/%s</Key><Size>3</Size></Contents>" % name.encode() for name in names)
    server.script = [lambda one: one.say(200, SESSION), *[lambda one: one.say(200, LISTING % entries)] * 3]
    assert store.names("runs/b") == ["runs/b1", "runs/b0"]
    assert store.names("") == names
    assert store.total() == 12
    store.close()
    asked = [parse_qs(urlsplit(one.path).query)["prefix"] for one in server.seen[1:]]
    assert asked == [["ckpt/runs/"], ["ckpt/"], ["ckpt/"]]


# Encryption


def test_keys_of_customers_are_sent_with_every_request_for_data(server: Server) -> None:
    key = "0123456789abcdef" * 2
    extra = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
    for store in opened(options(server, s3_additional_kwargs=extra)):
        for request in REQUESTS.values():
            request(store)
    digest = base64.b64encode(hashlib.md5(key.encode()).digest()).decode()
    for one in server.seen:
        wanted = None if one.command == "DELETE" else base64.b64encode(key.encode()).decode()
        assert one.headers["x-amz-server-side-encryption-customer-key"] == wanted
        assert one.headers["x-amz-server-side-encryption-customer-key-MD5"] == (digest if wanted else None)


# Connections


def test_a_long_body_waits_until_the_server_wants_it(
    server: Server, store: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "UNASKED_BODY", 5)
    put_part(store)
    store.create_whole("a", BODY, CHECKSUMS["md5"].of(BODY))
    store.create_whole("a", BODY[:1], {})
    assert [one.headers["Expect"] for one in server.seen] == ["100-continue", "100-continue", None]


def test_a_server_that_does_not_say_whether_it_wants_a_body_is_asked_once(
    server: Server, store: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question costs a second. What is refused in the end could have been refused at once."""
    monkeypatch.setattr(client, "UNASKED_BODY", 5)
    monkeypatch.setattr(Handler, "handle_expect_100", lambda _: True)
    server.script = [fail(503, "SlowDown")]
    for _ in range(3):
        put_part(store)
    assert [one.headers["Expect"] for one in server.seen] == ["100-continue", "100-continue", None, None]


def test_a_connection_that_was_refused_a_body_is_not_used_again(server: Server, store: S3Client) -> None:
    """The server may take the next request for the body that it did not get."""
    server.script = [fail(503, "SlowDown")]
    put_part(store)
    assert len({one.client_address for one in server.seen}) == 2


def test_a_listing_may_have_many_pages(server: Server, store: S3Client) -> None:
    pages = [("a", "b"), ("c",), ()]

    def give(n: int, one: Handler) -> None:
        names = "".join(f"<Contents><Key>ckpt/{name}</Key><Size>1</Size></Contents>" for name in pages[n])
        more = n + 1 < len(pages)
        follows = f"<NextContinuationToken>t{n}</NextContinuationToken>" if more else ""
        told = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{follows}{names}</ListBucketResult>"
        one.say(200, told.encode())

    server.script = [partial(give, 0), hang_up, partial(give, 1), partial(give, 2)]
    assert store.names("") == ["a", "b", "c"]
    assert ["continuation-token=t1" in path for _, path in server.asked] == [False, False, False, True]
    server.script = [partial(give, n) for n in range(3)]
    assert store.total() == 3


def listing(*, more: bool, follows: str = "") -> Answer:
    """A page with one name."""
    told = (
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{follows}<Contents><Key>ckpt/a</Key><Size>7</Size></Contents>"
    )
    return lambda one: one.say(200, f"<ListBucketResult>{told}</ListBucketResult>".encode())


@pytest.mark.parametrize("follows", ["", "<NextContinuationToken>t</NextContinuationToken>"])
def test_a_listing_that_does_not_go_on_is_no_listing(server: Server, store: S3Client, follows: str) -> None:
    server.script = [listing(more=True, follows=follows)] * 50
    with pytest.raises(ConnectionError, match="has no end"):
        store.names("")


def test_a_head_without_a_length_is_completed_by_a_listing(server: Server, store: S3Client) -> None:
    def head(one: Handler) -> None:
        one.send_response(200)
        for name, value in (("ETag", '"x"'), ("Last-Modified", "Sun, 13 Dec 2015 09:00:00 GMT")):
            one.send_header(name, value)
        one.send_header("Transfer-Encoding", "chunked")
        one.end_headers()

    server.script = [head, listing(more=False)]
    assert store.size("a") == 7
    assert [command for command, _ in server.asked] == ["HEAD", "GET"]


def test_bodies_are_handed_out_whole_from_any_place() -> None:
    body = Body([memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")])
    assert len(body) == body.seek(0, 2) == 6
    for at in range(7):
        assert body.seek(at) == body.tell() == at
        pieces = []
        while piece := body.read(1):
            pieces.append(bytes(piece))
        assert b"".join(pieces) == b"abcdef"[at:]
