"""Attacks on the connections of a job, by one who does not know its secret but has the network in hand."""

import secrets
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.relays import Relay, flipped_at

from tierstate.tiers.connections.channel import (
    HELLO,
    MAGIC,
    MAX_RECORD,
    NONCE,
    PIECE,
    PROOF,
    TAG,
    Channel,
    ChannelError,
    connect,
)
from tierstate.tiers.connections.listener import Limits, Listener
from tierstate.tiers.connections.secret import JobSecret

SECRET = JobSecret.random()
OPEN = JobSecret.random(authenticated=False)
SERVICE = "test/1"


class Server:
    """Lets through those who know the secret, and gives each channel to a function, in a thread."""

    def __init__(self, serve: Callable[[Channel], None], secret: JobSecret = SECRET, **keys: object) -> None:
        self.listener = Listener("127.0.0.1", 0, lambda: secret, SERVICE, seconds=20.0, **keys)  # type: ignore[arg-type]
        self.port: int = self.listener.port
        self.errors: list[BaseException] = []
        self._serve, self._ended = serve, False
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        while not self._ended:
            for channel in self.listener.poll(5.0):
                self._threads.append(threading.Thread(target=self._one, args=(channel,), daemon=True))
                self._threads[-1].start()

    def _one(self, channel: Channel) -> None:
        with channel:
            try:
                self._serve(channel)
            except BaseException as error:
                self.errors.append(error)

    def close(self) -> None:
        self._ended = True
        self.listener.stop()
        for thread in self._threads:
            thread.join()
        self.listener.close()


def echo(channel: Channel) -> None:
    while channel.wait(20.0):
        channel.send(bytes(channel.receive()))


@contextmanager
def echoing(**keys: object) -> Iterator[Server]:
    with closing(Server(echo, **keys)) as server:  # type: ignore[arg-type]
        yield server


def call(port: int, secret: JobSecret = SECRET, service: str = SERVICE, seconds: float = 20.0) -> Channel:
    return connect("127.0.0.1", port, secret, service, seconds=seconds)


def is_closed(channel: Channel) -> bool:
    return not channel.wait(20.0) and channel.ended


def still_serves(port: int) -> None:
    with call(port) as channel:
        channel.send(b"still there")
        assert channel.receive() == b"still there"


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(0, 3 * PIECE + 5), st.booleans())
@settings(max_examples=15)
def test_what_is_sent_comes_and_nothing_else(messages: list[bytes], length: int, authenticated: bool) -> None:
    secret = SECRET if authenticated else OPEN
    long = secrets.token_bytes(length)

    def serve(channel: Channel) -> None:
        for _ in messages:
            channel.send(channel.receive())
        out = bytearray(length)
        channel.receive_long(memoryview(out))
        channel.send_long(memoryview(out))

    with closing(Server(serve, secret)) as server, call(server.port, secret) as channel:
        for message in messages:
            channel.send(message[:3], message[3:])
            assert channel.receive() == message
        channel.send_long(memoryview(long))
        out = bytearray(length)
        channel.receive_long(memoryview(out))
        assert out == long


@pytest.mark.parametrize(
    ("secret", "service"),
    [(JobSecret.random(), SERVICE), (SECRET.child("peer memory"), SERVICE), (SECRET, "test/2"), (OPEN, SERVICE)],
)
def test_another_secret_service_or_mode_is_refused(secret: JobSecret, service: str) -> None:
    with echoing() as server:
        with pytest.raises(ChannelError, match=rf"127.0.0.1:{server.port}: it refuses this process"):
            call(server.port, secret, service)
        still_serves(server.port)


def test_a_key_without_authentication_opens_no_authenticated_connection() -> None:
    same = JobSecret(SECRET.reveal(), authenticated=False)
    with echoing() as server:
        with call(server.port, same) as channel:  # the proof is of the key; what follows is not of this mode
            channel.send(b"hello")
            assert is_closed(channel)
        assert type(server.errors[0]) is ChannelError


@given(st.data())
@settings(max_examples=60)
def test_a_relay_that_changes_one_bit_is_noticed_wherever_it_is(data: st.DataObject) -> None:
    """In the handshake or after it, on the way to the server or back."""
    message = b"0123456789"
    record = 4 + TAG + len(message) + TAG
    to_server = data.draw(st.booleans())
    length = HELLO + 3 * record if to_server else len(MAGIC) + NONCE + PROOF + 3 * record
    edit = flipped_at(data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7)))
    with echoing() as server, closing(Relay(server.port, **{"to_server" if to_server else "to_client": edit})) as relay:
        got: list[bytes] = []

        def talk() -> None:
            with call(relay.port) as channel:
                for _ in range(3):
                    channel.send(message)
                    got.append(bytes(channel.receive()))

        with pytest.raises(OSError, match=r"127\.0\.0\.1|Connection reset") as caught:
            talk()
        assert got == [message] * len(got)
        noticed = [caught.value, *server.errors]
        assert any(isinstance(one, ChannelError) for one in noticed), noticed


def test_a_recorded_connection_opens_nothing_when_it_is_sent_again() -> None:
    with echoing() as server, closing(Relay(server.port)) as relay:
        with call(relay.port) as channel:
            channel.send(b"delete all")
            assert channel.receive() == b"delete all"
        recorded = bytes(relay.from_client)
        server.errors.clear()
        with socket.create_connection(("127.0.0.1", server.port), 20) as wire:
            wire.recv(len(MAGIC) + NONCE)
            wire.sendall(recorded)
            assert until_closed(wire) in (b"", bytes(PROOF))
        assert server.errors == []
        still_serves(server.port)


def _records(data: bytes, length: int) -> list[bytes]:
    size = 4 + TAG + length + TAG
    return [data[at : at + size] for at in range(HELLO, len(data), size)]


@pytest.mark.parametrize("order", [[0, 0], [1, 0], [1], [0, 2]], ids=["repeated", "swapped", "left out", "gap"])
def test_records_in_another_order_are_refused(order: list[int]) -> None:
    """A relay that holds the records of a client back and sends them as it likes."""
    held = bytearray()

    def hold(at: int, data: bytes) -> bytes:
        held.extend(data[max(0, HELLO - at) :])
        return data[: max(0, HELLO - at)]

    got: list[bytes] = []

    def serve(channel: Channel) -> None:
        while channel.wait(20.0):
            got.append(bytes(channel.receive()))

    messages = [b"first", b"other", b"third"]
    with closing(Server(serve)) as server, closing(Relay(server.port, to_server=hold)) as relay:
        with call(relay.port) as channel:
            for message in messages:
                channel.send(message)
            while len(held) < 3 * (4 + TAG + 5 + TAG):
                pass
            parts = _records(bytes(HELLO) + bytes(held), 5)
            relay._sockets[1].sendall(b"".join(parts[n] for n in order))
            assert is_closed(channel)
        right = 0
        while right < len(order) and order[right] == right:
            right += 1
        assert got == messages[:right]
        assert type(server.errors[0]) is ChannelError


def test_what_a_side_has_sent_is_not_taken_when_it_comes_back() -> None:
    """Reflection: the server's own records, or the client's."""
    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = opened.enter_context(closing(Server(lambda channel: channel.send(b"mine") or echo(channel))))  # type: ignore[func-returns-value]
        with call(server.port) as channel:
            first = channel.wire.recv(4 + TAG + 4 + TAG)
            channel.wire.sendall(first)
            assert is_closed(channel)
        assert type(server.errors[0]) is ChannelError

        def mirror() -> None:
            wire, _ = listening.accept()
            with wire:
                wire.sendall(MAGIC + bytes(NONCE))
                hello = wire.recv(HELLO, socket.MSG_WAITALL)
                wire.sendall(hello[-PROOF:])  # the client's own proof
                until_closed(wire)

        thread = threading.Thread(target=mirror, daemon=True)
        thread.start()
        with pytest.raises(ChannelError, match="does not know the secret"):
            call(listening.getsockname()[1])
        thread.join()


@pytest.mark.parametrize("length", [MAX_RECORD, 1 << 31, (1 << 32) - 1])
def test_a_length_of_a_stranger_gets_no_memory(length: int) -> None:
    """After a handshake that a relay let through, it says a length of its own."""
    with echoing() as server, call(server.port) as channel:
        tracemalloc.start()
        try:
            channel.wire.sendall(struct.pack("!I", length) + bytes(TAG))
            assert is_closed(channel)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert type(server.errors[0]) is ChannelError


def test_a_record_longer_than_is_right_in_its_place_is_refused() -> None:
    def serve(channel: Channel) -> None:
        channel.receive(limit=10)

    with closing(Server(serve)) as server, call(server.port) as channel:
        channel.send(bytes(11))
        assert is_closed(channel)
        assert "a record of 11 bytes" in str(server.errors[0])


@pytest.mark.slow
def test_a_record_that_drips_is_given_up() -> None:
    def serve(channel: Channel) -> None:
        channel.seconds = 0.3
        channel.receive()

    with closing(Server(serve)) as server, call(server.port) as channel:
        with suppress(ConnectionError):
            drip(channel.wire)
        assert type(server.errors[0]) is TimeoutError


def test_a_server_of_another_kind_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            wire, _ = listening.accept()
            with wire:
                wire.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(100))
                until_closed(wire)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        with pytest.raises(ChannelError, match="none of ours"):
            call(listening.getsockname()[1])
        thread.join()


# Strangers


def until_closed(wire: socket.socket) -> bytes:
    """What comes until the other side closes, with bytes unread or not; it has to within seconds."""
    said = b""
    wire.settimeout(30)
    with suppress(ConnectionResetError):
        while got := wire.recv(100):
            said += got
    return said


def drip(wire: socket.socket) -> None:
    """A byte now and then, until the other side closes."""
    wire.settimeout(0.02)
    for _ in range(1000):
        with suppress(TimeoutError):
            wire.sendall(b"\0")
            if not wire.recv(100, socket.MSG_PEEK):
                return
            wire.recv(100)
    raise AssertionError("it waits for as long as a byte comes now and then")


def silent(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def test_silent_connections_keep_nobody_out() -> None:
    with echoing(limits=Limits(8, 4, 60.0)) as server, ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(silent(server.port))
        still_serves(server.port)
        assert server.listener.strangers <= 8


@pytest.mark.slow
def test_a_proof_has_to_come_in_time_however_it_drips() -> None:
    with echoing(limits=Limits(8, 8, 2.0)) as server, silent(server.port) as wire:
        for _ in range(HELLO // 3):  # never enough for a proof
            with suppress(ConnectionError):
                wire.sendall(b"\0")
                threading.Event().wait(0.1)
        until_closed(wire)
        still_serves(server.port)


def test_one_address_does_not_push_out_another() -> None:
    with echoing(limits=Limits(8, 8, 60.0)) as server, ExitStack() as opened:
        other = opened.enter_context(
            socket.create_connection(("127.0.0.1", server.port), 20, source_address=("127.0.0.2", 0))
        )
        assert other.recv(len(MAGIC) + NONCE, socket.MSG_WAITALL)
        for _ in range(50):
            opened.enter_context(silent(server.port)).recv(1)
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):  # still open
            other.recv(1)


def test_it_listens_by_ipv6_too() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = Listener("::1", 0, lambda: SECRET, SERVICE, seconds=20.0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    found: list[Channel] = []

    def serve() -> None:
        while not found:
            found.extend(listener.poll(5.0))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with closing(listener), connect("::1", listener.port, SECRET, SERVICE, seconds=20.0) as channel:
        thread.join()
        assert channel.peer == f"[::1]:{listener.port}"
        found[0].send(b"by 6")
        assert channel.receive() == b"by 6"
        found[0].close()
