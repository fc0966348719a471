"""An authenticated connection between two processes of a job: handshake, then records with sequence numbers and MACs.

Both sides know the job's secret. In the handshake each side proves it, before either takes anything else of the other::

    server  magic (4), nonce (32)
    client  nonce (32), claim (8), proof (32)
    server  proof (32), or 32 zero bytes: the client's proof is wrong

Nonces are random numbers. The proofs, and one key for each direction, are derived (HKDF, `JobSecret.derive`) from the
secret, both nonces, the name of the service, and the claim, which is what the client says about itself. So no
connection has the keys of another: what was recorded from one is refused by every other, and by a server that was
started again. Then each side sends records::

    record  length (4), MAC of the length (16), the bytes, MAC of the length and the bytes (16)

The MACs are HMAC-SHA256, shortened to 128 bits, over the record's number as well, which is counted on both sides and
not sent. A record that was changed, left out, repeated, moved, cut, or sent back to its sender is refused
(`ChannelError`), and the connection ends. The length is verified before any memory is allocated for it. Nothing is
encrypted. If the secret is one of ``trust: network``, checksums (xxh3) take the place of MACs, which guard against
damage and not against people.

All numbers are big-endian.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import xxhash

from .secret import JobSecret

MAGIC = b"TSC1"
"""Begins every connection; the digit is the protocol's version."""


NONCE = 32
"""Bytes of the random number of each side."""


PROOF = 32
"""Bytes of a proof."""


CLAIM = 8
"""Bytes of what a client says about itself."""


HELLO = NONCE + CLAIM + PROOF
"""Bytes that a server takes from a client that has not proven itself."""


TAG = 16
"""Bytes of a MAC."""


MAX_RECORD = (4 << 20) + (1 << 12)
"""Bytes of one record, at most."""


PIECE = 1 << 20
"""Bytes of a record of a long transfer: few enough to be in the processor's cache from the MAC to the copy."""


REFUSED = bytes(PROOF)


RETRY_PAUSE = 0.02
"""Seconds between two attempts to connect to a server that drops connections because it has too many."""


_LENGTH = struct.Struct("!I")


_NUMBER = struct.Struct("!Q")


class ChannelError(OSError):
    """The other side does not know the secret, or bytes arrive that it did not send in this place."""


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class Keys(NamedTuple):
    """What is derived for one connection: the proofs of both sides, and by direction what begins a MAC."""

    client_proof: bytes
    server_proof: bytes
    from_client: Callable[[], _Hash]
    from_server: Callable[[], _Hash]


def derive_keys(secret: JobSecret, service: str, claim: bytes, server: bytes, client: bytes) -> Keys:
    """The keys of one connection.

    Args:
        service: what the server is; a connection to one service is refused by every other.
        claim: what the client says about itself.
        server, client: the nonces.
    """
    context = (service.encode(), claim, server, client)

    def begin(key: bytes) -> Callable[[], _Hash]:
        started: Callable[[], _Hash] = (
            hmac.new(key, digestmod="sha256").copy if secret.authenticated else xxhash.xxh3_128
        )
        return started

    mode = "MAC" if secret.authenticated else "checksum"
    names = ("client proof", "server proof", f"{mode} from client", f"{mode} from server")
    keys = [secret.derive(name, *context) for name in names]
    return Keys(keys[0], keys[1], begin(keys[2]), begin(keys[3]))


class Channel:
    """One end of an authenticated connection, after its handshake: sends and receives records.

    Args:
        wire: the connected socket; `close` closes it.
        seconds: timeout for one record.
        sending, receiving: what begins a MAC, of each direction.

    Attributes:
        peer: address of the other side, for messages.
        claim: what the client has said about itself, and proven to know the secret with.
        secret: the secret that both sides have proven to know.
        ended: whether the other side was found to have closed the connection, by `wait`.
    """

    def __init__(
        self,
        wire: socket.socket,
        seconds: float,
        sending: Callable[[], _Hash],
        receiving: Callable[[], _Hash],
        claim: bytes,
        secret: JobSecret,
    ) -> None:
        self.wire, self.seconds, self.claim, self.secret = wire, seconds, claim, secret
        self.ended = False
        self.peer = peer_name(wire)
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self._length = -1
        self._body = memoryview(b"")
        self._timed = TimedSocket(wire, self.peer)

    def close(self) -> None:
        """Close the connection."""
        self.wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Records

    def send(self, *parts: bytes | memoryview) -> None:
        """Send the parts as one record.

        Raises:
            OSError: the connection has failed, or did not take the whole record in time. It has to be closed.
        """
        length = _LENGTH.pack(sum(map(len, parts)))
        number = _NUMBER.pack(self._sent)
        self._sent += 1
        self._timed.begin(self.seconds)
        self._timed.send(
            length, _mac(self._sending, b"L", number, length), *parts, _mac(self._sending, b"B", number, length, *parts)
        )

    def wait(self, seconds: float | None) -> bool:
        """Wait for the next record to begin; False if the other side has closed, or sent nothing for so long.

        Args:
            seconds: None for as long as it takes.
        """
        came = self._timed.wait(seconds)
        self.ended = came == b""
        return bool(came)

    def next_length(self, limit: int = MAX_RECORD) -> int:
        """The length of the next record, which has to be received next.

        Raises:
            ChannelError: it is not of the other side, or longer than ``limit``.
            OSError: the connection has failed, or the record did not come in time.
        """
        if self._length < 0:
            self._timed.begin(self.seconds)
            head = self._timed.take(_LENGTH.size + TAG)
            length, number = head[: _LENGTH.size], _NUMBER.pack(self._received)
            self._check(head[_LENGTH.size :], b"L", number, length)
            (self._length,) = _LENGTH.unpack(length)
        if self._length > limit:
            raise ChannelError(f"{self.peer}: a record of {self._length} bytes; {limit} at most are right here")
        return self._length

    def receive(self, limit: int = MAX_RECORD) -> memoryview:
        """The bytes of the next record. They are valid until the next call.

        Raises: as `next_length`.
        """
        length = self.next_length(limit)
        if len(self._body) < length:
            self._body = memoryview(bytearray(length))
        found = self._body[:length]
        self.receive_into(found)
        return found

    def receive_into(self, out: memoryview) -> None:
        """Receive the next record into ``out``, which it has to fill exactly. If that fails, ``out`` has any bytes.

        Raises: as `next_length`.
        """
        if self.next_length() != len(out):
            raise ChannelError(f"{self.peer}: a record of {self._length} bytes where {len(out)} were to come")
        self._timed.fill(out)
        number, length = _NUMBER.pack(self._received), _LENGTH.pack(len(out))
        self._check(self._timed.take(TAG), b"B", number, length, out)
        self._received += 1
        self._length = -1

    def receive_exactly(self, nbytes: int) -> bytes:
        """The next record, which has to be of this length.

        Raises: as `next_length`.
        """
        out = bytearray(nbytes)
        self.receive_into(memoryview(out))
        return bytes(out)

    def _check(self, tag: bytes, *parts: bytes | memoryview) -> None:
        if not hmac.compare_digest(tag, _mac(self._receiving, *parts)):
            raise ChannelError(
                f"{self.peer}: bytes that the other side did not send: the connection is not to be trusted"
            )

    # Long transfers

    def send_long(self, data: memoryview) -> None:
        """Send any number of bytes, in records of `PIECE` bytes."""
        for at in range(0, len(data), PIECE):
            self.send(data[at : at + PIECE])

    def receive_long(self, out: memoryview) -> None:
        """Receive what `send_long` of as many bytes sends, directly into ``out``."""
        for at in range(0, len(out), PIECE):
            self.receive_into(out[at : at + PIECE])


def _mac(begin: Callable[[], _Hash], *parts: bytes | memoryview) -> bytes:
    found = begin()
    for part in parts:
        found.update(part)
    return found.digest()[:TAG]


class TimedSocket:
    """Sends and receives exact numbers of bytes within the time that a record may take.

    Args:
        wire: the socket.
        peer: the other side's address, for messages.
    """

    def __init__(self, wire: socket.socket, peer: str) -> None:
        self._wire, self._peer = wire, peer
        # The kernel keeps the timeouts (SO_RCVTIMEO, SO_SNDTIMEO), so one system call on a blocking socket moves all
        # bytes; with a timeout of Python's the socket would not block, and each part would need a call of its own.
        wire.settimeout(None)
        self._end = self._seconds = 0.0
        if wire.family != socket.AF_UNIX:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, seconds: float) -> None:
        """Start the timeout."""
        self._seconds, self._end = seconds, time.monotonic() + seconds

    @contextmanager
    def _waiting(self, option: int) -> Iterator[None]:
        """The block makes one call to the socket, with what is left of the timeout."""
        left = self._end - time.monotonic()
        try:
            if left <= 0:
                raise BlockingIOError
            self._wire.setsockopt(socket.SOL_SOCKET, option, _timeval(left))
            yield
        except BlockingIOError:
            raise TimeoutError(f"{self._peer}: no whole message in {self._seconds:g} s") from None

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all these bytes."""
        rest = [memoryview(part) for part in parts if len(part)]
        while rest:
            with self._waiting(socket.SO_SNDTIMEO):
                sent = self._wire.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def fill(self, out: memoryview) -> None:
        """Receive exactly ``len(out)`` bytes, directly into ``out``."""
        at = 0
        while at < len(out):
            with self._waiting(socket.SO_RCVTIMEO):
                n = self._wire.recv_into(out[at:], 0, socket.MSG_WAITALL)
            if not n:
                raise ConnectionResetError(f"{self._peer}: the other side has closed the connection")
            at += n

    def take(self, nbytes: int) -> bytes:
        """Receive exactly ``nbytes`` bytes."""
        out = bytearray(nbytes)
        self.fill(memoryview(out))
        return bytes(out)

    def wait(self, seconds: float | None) -> bytes | None:
        """Wait for a byte, which stays in the socket; empty if the other side has closed, None if none came in time."""
        self._wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        try:
            return self._wire.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""


def _timeval(seconds: float | None) -> bytes:
    """Seconds as the kernel's ``struct timeval``; None as 0, which is no timeout."""
    micros = 0 if seconds is None else max(1, int(seconds * 1e6))
    return struct.pack("@ll", *divmod(micros, 1_000_000))


def peer_name(wire: socket.socket) -> str:
    """The address of a socket's other side, for messages."""
    try:
        return place_name(wire.getpeername())
    except OSError:
        return "a connection that is closed"


def place_name(address: object) -> str:
    """An address as Python has it, for messages."""
    if not isinstance(address, tuple):
        return "a process of this host"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def connect(
    address: str, port: int, secret: JobSecret, service: str, *, seconds: float, claim: bytes = bytes(CLAIM)
) -> Channel:
    """Connect to a server of the job, with the handshake.

    A server that has too many connections of strangers drops some before they could prove themselves. So this tries
    again until the time is over.

    Args:
        seconds: timeout for all of it; then for each record.

    Raises:
        ChannelError: the server does not know the secret, or says that this process does not.
        OSError: no server listens, or it is too slow.
    """
    end = time.monotonic() + seconds
    while True:
        wire = socket.create_connection((address, port), max(0.001, end - time.monotonic()))
        try:
            return client_handshake(wire, secret, service, claim, seconds, end - time.monotonic())
        except (ConnectionResetError, BrokenPipeError):
            wire.close()
            if time.monotonic() + RETRY_PAUSE >= end:
                raise
            time.sleep(RETRY_PAUSE)
        except BaseException:
            wire.close()
            raise


def client_handshake(
    wire: socket.socket, secret: JobSecret, service: str, claim: bytes, seconds: float, left: float
) -> Channel:
    """The client's side of the handshake. Raises as `connect`."""
    peer = peer_name(wire)
    timed = TimedSocket(wire, peer)
    timed.begin(left)
    if timed.take(len(MAGIC)) != MAGIC:
        raise ChannelError(f"{peer}: what listens there is none of ours, or of another version of this program")
    theirs, mine = timed.take(NONCE), secrets.token_bytes(NONCE)
    keys = derive_keys(secret, service, claim, theirs, mine)
    timed.send(mine, claim, keys.client_proof)
    proof = timed.take(PROOF)
    if proof == REFUSED:
        raise ChannelError(f"{peer}: it refuses this process, which has another secret than it")
    if not hmac.compare_digest(proof, keys.server_proof):
        raise ChannelError(f"{peer}: what listens there does not know the secret of this job")
    return Channel(wire, seconds, keys.from_client, keys.from_server, claim, secret)


def check_hello(hello: bytes, nonce: bytes, secret: JobSecret, service: str) -> tuple[Keys, bytes] | None:
    """The server's check of what a client has sent.

    Args:
        hello: the client's `HELLO` bytes.
        nonce: the server's.

    Returns:
        The keys and the claim; None if the proof is wrong.
    """
    theirs, claim, proof = hello[:NONCE], hello[NONCE : NONCE + CLAIM], hello[NONCE + CLAIM :]
    keys = derive_keys(secret, service, claim, nonce, theirs)
    return (keys, claim) if hmac.compare_digest(proof, keys.client_proof) else None
