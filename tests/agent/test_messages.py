"""Messages between a trainer and an agent, and errors in them."""

from __future__ import annotations

import os
import resource
import socket
import struct
import tempfile
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agents import pair

from tierstate.agent.messages import ConnectionLost, MessageSocket, decode_error, encode_error
from tierstate.manifest import errors


@given(st.lists(st.binary(max_size=3000), max_size=8), st.dictionaries(st.text(max_size=9), st.integers(), max_size=5))
def test_messages_arrive_as_they_were_sent(blobs: list[bytes], head: dict[str, int]) -> None:
    one, other = pair()
    one.send(head, blobs)
    found = other.receive()
    assert found.head == head
    assert [bytes(blob) for blob in found.blobs] == blobs
    one.close()
    other.close()


@given(st.binary(max_size=400) | st.builds(lambda n, d: struct.pack("<I", n) + d, st.integers(0, 99), st.binary()))
def test_whatever_comes_is_a_message_or_the_end_of_the_connection(data: bytes) -> None:
    wire, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other = MessageSocket(there)
    wire.sendall(data)
    wire.close()
    with suppress(ConnectionLost):
        while True:
            assert isinstance(other.receive().head, dict)
    other.close()


def test_a_message_whose_descriptors_do_not_fit_into_this_process_is_not_taken() -> None:
    """The kernel leaves out those for which there is no number: a restore goes on with the next tier then."""
    one, other = pair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(one), closing(other), tempfile.TemporaryFile() as file:
        one.send({"kind": "answer"}, (), [file.fileno()])
        os.close(lowest := os.dup(file.fileno()))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
            with pytest.raises(ConnectionLost, match="no file descriptor left"):
                other.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_message_of_impossible_length_takes_no_memory() -> None:
    wire, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other = MessageSocket(there)
    wire.sendall(struct.pack("<IQQ", 2, 10, 1 << 60))
    with pytest.raises(ConnectionLost, match="bytes"):
        other.receive()
    wire.close()
    other.close()


@pytest.mark.parametrize(
    "error",
    [
        errors.TierFull("no room", tier="a", key="k"),
        errors.Damaged("bytes"),
        errors.WrongTier("another", tier="b"),
        errors.CommitUnknown("?"),
    ],
)
def test_errors_come_as_what_they_are(error: errors.TierstateError) -> None:
    error.add_note("a note")
    found = decode_error(encode_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.__notes__ == ["a note"]
    assert getattr(found, "tier", None) == getattr(error, "tier", None)


def test_other_errors_are_told_by_name() -> None:
    assert str(decode_error(encode_error(ZeroDivisionError("x")))) == "ZeroDivisionError: x"
    assert type(decode_error({"class": "os", "text": "x"})) is errors.TierstateError
