"""Invalid requests to a keeper: it goes on serving, and allocates no memory for them."""

import json
import math
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpointer_worlds import scratch
from support.peer_hosts import SECRET, Hosts

from tierstate.manifest.chunk import empty_buffer
from tierstate.manifest.errors import AlreadyExists, Damaged, FormatError, NotFound, TierError, TierUnavailable
from tierstate.tiers.base import Range
from tierstate.tiers.connections.channel import HELLO, connect
from tierstate.tiers.connections.secret import JobSecret
from tierstate.tiers.peer.client import RemoteMemory
from tierstate.tiers.peer.members import (
    HostReport,
    Member,
    Membership,
    decode_member,
    decode_membership,
    encode_membership,
    read_member,
)
from tierstate.tiers.peer.protocol import (
    LENGTH,
    MAX_BODY,
    MAX_READ,
    NO_LIMIT,
    SETTINGS,
    SPAN,
    Connection,
    RequestKind,
)
from tierstate.tiers.testing import random_bytes

KEEPERS = SECRET.child("peer memory")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch, scratch() as place:
        patch.setenv("TIERSTATE_ADDRESS", "127.0.0.1")
        with Hosts(place, 1) as found:
            found.tiers[0].put("a/b", random_bytes(1000))
            yield found


@pytest.fixture
def member(hosts: Hosts) -> Member:
    found = read_member(hosts.path(0))
    assert found is not None
    return found


def plug(member: Member) -> socket.socket:
    return socket.create_connection((member.address, member.port), 20)


def admitted(member: Member) -> Connection:
    return Connection(connect(member.address, member.port, KEEPERS, member.service, seconds=20))


def far(member: Member, secret: JobSecret = KEEPERS) -> RemoteMemory:
    return RemoteMemory(member, lambda: secret, 20, lambda: "test")


def works(member: Member) -> None:
    with closing(far(member)) as memory:
        assert memory.size("a/b") == 1000


def is_closed(wire: socket.socket) -> bool:
    wire.settimeout(20)
    try:
        while wire.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@given(st.binary(max_size=300))
def test_noise_before_the_proof(hosts: Hosts, noise: bytes) -> None:
    member = read_member(hosts.path(0))
    assert member is not None
    with plug(member) as wire:
        wire.sendall(noise + bytes(HELLO))
        assert is_closed(wire)
    works(member)


@given(st.binary(min_size=20, max_size=300))
def test_noise_after_the_proof(hosts: Hosts, noise: bytes) -> None:
    member = read_member(hosts.path(0))
    assert member is not None
    with admitted(member) as line:
        line.channel.wire.sendall(noise)
        with suppress(OSError):  # closed at the other end already
            line.channel.wire.shutdown(socket.SHUT_WR)
        assert is_closed(line.channel.wire)
    works(member)


@given(st.binary(max_size=300))
def test_messages_that_are_no_request(hosts: Hosts, noise: bytes) -> None:
    """From one who knows the secret: an error or the end of the connection, and never of the keeper."""
    member = read_member(hosts.path(0))
    assert member is not None
    if noise[:1] in (bytes([RequestKind.STOP]), bytes([RequestKind.TERMS]), bytes([RequestKind.DELETE])):
        noise = b"\xff" + noise
    with admitted(member) as line:
        line.channel.send(noise)
        with suppress(Exception):
            line.reply()
    works(member)


def test_a_wrong_secret_opens_nothing(member: Member) -> None:
    with pytest.raises(TierUnavailable, match=r"does not answer.*another secret") as caught:
        far(member, JobSecret.random()).size("a/b")
    assert KEEPERS.reveal().hex() not in str(caught.value) + repr(member) + repr(KEEPERS)
    works(member)


def test_a_huge_length_is_refused_before_any_memory_is_had(member: Member) -> None:
    with admitted(member) as line:
        tracemalloc.start()
        try:
            line.channel.send(struct.pack("!BH", RequestKind.PIECE, 0xFFFF))
            assert is_closed(line.channel.wire)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
    works(member)


@pytest.mark.parametrize(
    ("ask", "key", "body", "error"),
    [
        (RequestKind.SIZE, "../../etc/passwd", b"", TierError),
        (RequestKind.READ, "a/b", SPAN.pack(-1, 2), Damaged),
        (RequestKind.READ, "a/b", SPAN.pack(999, 2), Damaged),
        (RequestKind.READ, "a/b", SPAN.pack(0, 1 << 60), TierError),
        (RequestKind.READ, "a/c", SPAN.pack(0, 1), NotFound),
        (RequestKind.DELETE, "", b"../x", TierError),
        (RequestKind.STAGE, "a/x", b"short", TierError),
        (RequestKind.STAGE, "a/b", LENGTH.pack(1), AlreadyExists),
        (RequestKind.PIECE, "a/x", b"unasked", TierError),
        (RequestKind.COMMIT, "a/x", b"", TierError),
        (RequestKind.UNDO, "a/x", b"", TierError),
        (RequestKind.STAGE, "a/x", LENGTH.pack((1 << 64) - 1), TierError),
        (RequestKind.TERMS, "", b"", TierError),
        (RequestKind.TERMS, "", SETTINGS.pack(0, 60.0), TierError),
        (RequestKind.TERMS, "", SETTINGS.pack(1 << 63, 60.0), TierError),
        (RequestKind.TERMS, "", SETTINGS.pack(NO_LIMIT, math.inf), TierError),
        (RequestKind.TERMS, "", SETTINGS.pack(NO_LIMIT, math.nan), TierError),
        (RequestKind.TERMS, "", SETTINGS.pack(NO_LIMIT, -1.0), TierError),
        (RequestKind.TERMS, "", SETTINGS.pack(NO_LIMIT, 0.0), TierError),
    ],
)
def test_what_cannot_be_done_is_answered(
    hosts: Hosts, member: Member, ask: RequestKind, key: str, body: bytes, error: type[Exception]
) -> None:
    with admitted(member) as line:
        with pytest.raises(error):
            line.ask(ask, key, body)
        assert line.ask(RequestKind.SIZE, "a/b") == LENGTH.pack(1000)
    assert list(hosts.tiers[0].list("")) == ["a/b"]


@pytest.mark.parametrize("sent", [b"ab", b"abcdef"])
def test_another_length_than_announced_makes_no_object(hosts: Hosts, member: Member, sent: bytes) -> None:
    with admitted(member) as line:
        line.ask(RequestKind.STAGE, "a/x", LENGTH.pack(4))
        if len(sent) < 4:
            line.ask(RequestKind.PIECE, "a/x", sent)
            sent = b""
        with pytest.raises(TierError, match="announced"):
            line.ask(RequestKind.PIECE if sent else RequestKind.COMMIT, "a/x", sent)
    assert list(hosts.tiers[0].list("")) == ["a/b"]


_JSON = st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists, max_leaves=4)
_KEYS = st.sampled_from(["id", "port", "address", "domain", "written", "confirmed", "members", "group"])


@given(st.binary(max_size=200) | st.dictionaries(_KEYS, _JSON).map(json.dumps).map(str.encode))
def test_members_that_are_none(data: bytes) -> None:
    for decode in (decode_member, decode_membership, HostReport.decode):
        try:
            found = decode(data)
        except FormatError:
            continue
        assert isinstance(found, Membership)  # one of nobody, which may be
        assert found.members == ()


def test_members_come_back(member: Member) -> None:
    assert decode_member(encode_membership(member)) == member
    said = HostReport(member, trouble="none")
    assert HostReport.decode(said.encode()) == said


def test_reads_longer_than_a_message(hosts: Hosts, member: Member) -> None:
    data = random_bytes(MAX_READ + MAX_BODY + 12345)
    hosts.tiers[0].put("long", data)
    out = empty_buffer(data.numel())
    with closing(far(member)) as memory:
        memory.read("long", [Range(5, out[: MAX_BODY + 7]), Range(0, out[MAX_BODY + 7 :])])
    assert out[: MAX_BODY + 7].equal(data[5 : MAX_BODY + 12])
    assert out[MAX_BODY + 7 :].equal(data[: MAX_READ + 12338])
    hosts.tiers[0].delete("long")
