"""Answers that are not those of an S3 server, at every request: nothing is told durable, absent or taken by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.outcomes import is_there, tried, write
from support.servers.buckets import BUCKET, Server, fresh_prefix, open_tier
from support.servers.ceph import SECRET, Ceph
from support.servers.faults import Fault, Kind
from support.servers.proxy import Proxy

from tierstate.manifest.errors import AlreadyExists, Damaged, NotFound, TierUnavailable
from tierstate.tiers.base import Tier
from tierstate.tiers.testing import random_bytes

SMALL, LONG = random_bytes((1 << 20) + 1, 1), random_bytes((18 << 20) + 12_345, 2)
HTML = "Content-Type: text/html\r\n"
PAGE = b"<!DOCTYPE html><html><body><h1>Welcome</h1><br>Log in to go on</body></html>"
ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>later</Message></Error>'

ANSWERS: dict[str, dict[str, Any]] = {
    "empty": {"status": 200},
    "page": {"status": 200, "head": HTML, "body": PAGE},
    "well formed page": {"status": 200, "head": HTML, "body": b"<html><body>Welcome</body></html>"},
    "json": {"status": 200, "head": "Content-Type: application/json\r\n", "body": b"{}"},
    "error": {"status": 200, "head": "Content-Type: application/xml\r\n", "body": ERROR},
    "no content": {"status": 204},
    "no such page": {"status": 404, "head": HTML, "body": PAGE},
    "no such page, nothing said": {"status": 404},
    "gateway": {"status": 412, "head": HTML, "body": PAGE},
    "range": {"status": 416, "head": HTML, "body": PAGE},
    "login": {"status": 302, "head": "Location: http://login.example/\r\n"},
    "moved": {"status": 307, "head": "Location: http://login.example/\r\n", "body": PAGE},
    "bad gateway": {"status": 502, "head": HTML, "body": PAGE},
}


class World:
    """A tier behind a proxy, with one object of each length in it, and a client that meets no faults."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self.proxy, self.prefix = proxy, fresh_prefix()
        # The bucket itself: around it nothing is asked any more soon after a store has not answered.
        self.tier = open_tier(proxy, self.prefix, deadline="5s")._inner
        self.observer = open_tier(server, self.prefix)
        self.tier.put("small", SMALL)
        write(self.tier, "long", LONG)

    def close(self) -> None:
        """Close the tiers."""
        self.tier.close()
        self.observer.close()


@pytest.fixture(scope="module")
def world_once(ceph_once: Ceph) -> Iterator[World]:
    ceph_once.start()
    with Proxy(ceph_once) as proxy:
        world = World(ceph_once, proxy)
        yield world
        world.close()


def check_get(tier: Tier, key: str) -> None:
    assert tier.get(key).equal({"small": SMALL, "long": LONG}[key])


def check_size(tier: Tier, key: str) -> None:
    assert tier.size(key) == {"small": SMALL, "long": LONG}[key].numel()


def check_age(tier: Tier, key: str) -> None:
    assert tier.age(key) is not None


def check_list(tier: Tier, key: str) -> None:
    assert {"small", "long"} <= set(tier.list(""))


class Operation(NamedTuple):
    """What is asked of the tier, with the key: one that is there, or a new one with these bytes."""

    do: Callable[[Tier, str], None]
    key: str = ""
    data: torch.Tensor | None = None


OPERATIONS = {
    "get": Operation(check_get, "small"),
    "get long": Operation(check_get, "long"),
    "size": Operation(check_size, "small"),
    "age": Operation(check_age, "small"),
    "list": Operation(check_list),
    "put": Operation(lambda tier, key: tier.put(key, SMALL), data=SMALL),
    "put short": Operation(lambda tier, key: tier.put(key, SMALL[:9]), data=SMALL[:9]),
    "write": Operation(lambda tier, key: write(tier, key, LONG), data=LONG),
    "delete": Operation(lambda tier, key: tier.delete(key)),
}


@pytest.mark.timeout(600)
@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(OPERATIONS)),
    answer=st.sampled_from(sorted(ANSWERS)),
    kind=st.sampled_from(["say", "garble"]),
    skip=st.integers(0, 6),
    count=st.sampled_from([1, 2, None]),
)
def test_an_answer_that_is_no_answer_is_not_believed(
    world_once: World, name: str, answer: str, kind: Kind, skip: int, count: int | None
) -> None:
    """What was said to be done is done, as another client sees; what was not is an error that says where."""
    assume((name, answer) != ("delete", "no content"))  # the answer of S3 itself: nothing more can be seen in it
    world, operation = world_once, OPERATIONS[name]
    key = operation.key or f"new-{fresh_prefix()}"
    if name == "delete":
        world.observer.put(key, SMALL)
    world.proxy.add(Fault(kind, target=world.prefix, skip=skip, count=count, **ANSWERS[answer]))
    try:
        failure = tried(lambda: operation.do(world.tier, key))
    finally:
        world.proxy.mend()
    if failure is None:
        if operation.data is not None:
            assert is_there(world.observer, key, operation.data)
        if name == "delete":
            assert not is_there(world.observer, key, SMALL)
        return
    assert not isinstance(failure, (NotFound, AlreadyExists, Damaged))
    said = str(failure)
    assert world.proxy.endpoint in said
    assert f"s3://{BUCKET}/{world.prefix}/" in said
    assert key in said or name == "list"
    assert SECRET not in said
    if operation.data is not None:
        is_there(world.observer, key, operation.data)  # all of it, or nothing
        if count is not None:
            world.observer.delete(key)


@pytest.mark.parametrize("answer", ["empty", "page", "error", "no content"])
@pytest.mark.parametrize(
    ("name", "method", "target"),
    [
        ("put", "PUT", ""),
        ("write", "POST", r"[?&]uploads"),
        ("write", "PUT", "partNumber="),
        ("write", "POST", r"\?(?!.*partNumber).*uploadId="),
    ],
    ids=["record", "begin", "part", "completion"],
)
def test_a_write_that_is_always_answered_so_is_never_told_done(
    world_once: World, name: str, method: str, target: str, answer: str
) -> None:
    world, operation, key = world_once, OPERATIONS[name], f"new-{fresh_prefix()}"
    fault = world.proxy.add(Fault("say", method, f"{key}.*{target}", count=None, **ANSWERS[answer]))
    failure = tried(lambda: operation.do(world.tier, key))
    world.proxy.mend()
    assert fault.hits
    assert isinstance(failure, TierUnavailable)
    assert operation.data is not None
    assert not is_there(world.observer, key, operation.data)


def test_a_proof_costs_at_most_one_request(world_once: World) -> None:
    """For a record none: the ETag in the answer is its MD5; for a pack one HEAD where the answer has no ETag."""
    world, seen = world_once, world_once.proxy.seen
    record, pack = f"new-{fresh_prefix()}", f"new-{fresh_prefix()}"
    world.tier.put(record, SMALL[:1000])
    assert [one.request.method for one in seen if record in one.request.target] == ["PUT"]
    write(world.tier, pack, LONG)
    after = [one.request.method for one in seen if pack in one.request.target]
    assert after[after.index("POST", after.index("PUT")) :] in (["POST"], ["POST", "HEAD"])
