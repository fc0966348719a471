"""Whatever a store says to whatever request: an error of ours, which says where and what would help, and no secrets."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.servers.scripted import KEY, SECRET, Answer, Handler, Server, hang_up, options, serving

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    Damaged,
    NotFound,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
)
from tierstate.tiers.base import Range
from tierstate.tiers.object.s3 import bucket, multipart
from tierstate.tiers.object.tier import ObjectStore
from tierstate.tiers.testing import random_bytes

CODES = [
    "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "BadDigest", "BucketAlreadyExists",
    "ConditionalRequestConflict", "EntityTooLarge", "EntityTooSmall", "ExpiredToken", "IncompleteBody", "InternalError",
    "InvalidAccessKeyId", "InvalidArgument", "InvalidPart", "InvalidPartOrder", "InvalidRange", "InvalidRequest",
    "InvalidToken", "KMS.DisabledException", "KeyTooLongError", "MalformedXML", "MethodNotAllowed", "NoSuchBucket",
    "NoSuchKey", "NoSuchUpload", "NotImplemented", "OperationAborted", "PermanentRedirect", "PreconditionFailed",
    "QuotaExceeded", "RequestTimeTooSkewed", "RequestTimeout", "ServiceUnavailable", "SignatureDoesNotMatch",
    "SlowDown", "TemporaryRedirect", "TooManyRequests", "XMinioStorageFull", "", "Neverheard",
]  # fmt: skip

STATUSES = [300, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 404, 405, 407, 408, 409, 410, 411, 412, 413, 415,
            416, 417, 421, 422, 423, 429, 431, 451, 500, 501, 502, 503, 504, 505, 507, 509, 511, 599]  # fmt: skip


class World:
    """A tier whose server gives one answer to some requests, and goes on after it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # The bucket itself: around it nothing is asked any more soon after a store has not answered.
        self.tier: Any = ObjectStore(url="s3://bucket/ckpt", options=options(server), deadline=5)._inner
        self.tier.name = "archive"
        self.tier._ready = True
        session = self.tier._s3.session
        for patience in (session._patience, session._brief):
            # A pause of nothing, and then one beyond the deadline: the second attempt is the last one.
            patience._draw = itertools.cycle([0.0, 1000.0]).__next__

    def write(self) -> None:
        """An object in three parts."""
        with self.tier.writer("key") as writer:
            for _ in range(3):
                writer.append(random_bytes(20))


CALLS: dict[str, Callable[[World], object]] = {
    "list": lambda world: list(world.tier.list("key")),
    "size": lambda world: world.tier.size("key"),
    "age": lambda world: world.tier.age("key"),
    "read": lambda world: world.tier.read("key", [Range(3, empty_buffer(5))]),
    "put": lambda world: world.tier.put("key", random_bytes(5)),
    "write": World.write,
    "delete": lambda world: world.tier.delete("key"),
    "discard": lambda world: world.tier.discard(["key", "other"]),
    "begin": lambda world: world.tier.upload("key"),
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    small = pytest.MonkeyPatch()
    for name, value in (("MIN_PART", 5), ("PART_SIZE", 16), ("MAX_LENT_PART", 64)):
        small.setattr(multipart, name, value)
    small.setattr(bucket, "HOLD", 0.0)
    with serving() as server:
        one = World(server)
        yield one
        one.tier.close()
    small.undo()


def saying(status: int, code: str, headers: dict[str, str]) -> Answer:
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{KEY} of {SECRET}</Message></Error>" if code else ""
    )
    return lambda one: one.say(status, body.encode(), **headers)


ANSWERS = st.just(hang_up) | st.builds(
    saying,
    st.sampled_from(STATUSES),
    st.sampled_from(CODES),
    st.sampled_from([{}, {"x_amz_bucket_region": "ap-east-9"}, {"Location": "http://127.0.0.1:9/"}]),
)


@pytest.mark.slow
@settings(max_examples=60)
@example(name="delete", answer=saying(303, "", {"Location": "http://127.0.0.1:9/"}), skip=0)
@given(name=st.sampled_from(sorted(CALLS)), answer=ANSWERS, skip=st.integers(0, 4))
def test_every_error_of_every_request_is_told_as_ours(world: World, name: str, answer: Answer, skip: int) -> None:
    world.server.script = [*[lambda one: one.right_for()(one)] * skip, *[answer] * 400]
    failure: BaseException | None = None
    try:
        CALLS[name](world)
    except TierstateError as error:
        failure = error
    finally:
        world.server.script = []
    if failure is None:
        return
    assert isinstance(failure, TierError | Damaged)
    told = str(failure)
    assert told.startswith("archive: ")
    if not isinstance(failure, AlreadyExists):
        assert f"http://127.0.0.1:{world.server.server_address[1]}" in told
        assert "s3://bucket/ckpt/" in told
        assert isinstance(failure, Damaged) or "; " in told
    assert name == "discard" or "key" in told
    one = failure
    while one is not None:
        assert not any(secret in str(one) for secret in (KEY, SECRET, "Signature="))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


@pytest.mark.parametrize(
    ("status", "code", "wanted", "told"),
    [
        (403, "QuotaExceeded", TierFull, "the quota of the bucket or of its user is used up: raise it"),
        (507, "", TierFull, "make room in the store"),
        (409, "OperationAborted", TierUnavailable, "can be reached"),
        (404, "NoSuchBucket", NotFound, "create it, or correct the tier's 'url'"),
        (403, "AccessDenied", AccessDenied, "check the credentials"),
        (501, "NotImplemented", TierError, "whether the store supports this request"),
    ],
)
def test_the_beginning_of_an_upload_fails_as_ours(
    world: World, status: int, code: str, wanted: type[TierError], told: str
) -> None:
    def begin(one: Handler) -> None:
        (saying(status, code, {}) if one.command == "POST" else one.right_for())(one)

    world.server.script = [begin] * 50
    with pytest.raises(wanted, match=rf"^archive: key: cannot begin an upload of s3://bucket/ckpt/key at .*{told}"):
        world.write()
    world.server.script = []
