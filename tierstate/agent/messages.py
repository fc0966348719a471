"""Messages between trainers and their agent over a Unix socket: a JSON head, blobs of bytes, and file descriptors.

A message is the number of its parts (4 bytes), their lengths (8 bytes each, little-endian), and the parts: the head,
which is JSON, and blobs. File descriptors travel beside the first byte (``SCM_RIGHTS``). Both ends are processes of one
user, as the kernel says (``SO_PEERCRED``); lengths are checked all the same, before memory is taken for them.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from tierstate.manifest import errors
from tierstate.manifest.errors import RankFailed, TierError, TierstateError, TierUnavailable
from tierstate.tiers.connections.distribution import process_of, short_path, user_of

PROTOCOL = 4
"""Number of the protocol; processes that speak another one are refused."""


MAX_PARTS = 64
MAX_HEAD = 1 << 24
MAX_BLOB = 1 << 34

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")

_TIMEVAL = struct.Struct("ll")

SEND_TIMEOUT = 30
"""Seconds until a process that takes nothing of a message counts as gone."""


class ConnectionLost(TierUnavailable):
    """The process at the other end has closed the connection, died, or does not answer."""


class Message(NamedTuple):
    """One message.

    Attributes:
        head: JSON values; ``kind`` says what it is.
        blobs: bytes that belong to it.
        descriptors: file descriptors, which now belong to the receiver.
    """

    head: Mapping[str, Any]
    blobs: Sequence[bytearray] = ()
    descriptors: Sequence[int] = ()

    @property
    def kind(self) -> str:
        """What it is."""
        return str(self.head.get("kind"))


class MessageSocket:
    """One end of a connection. Several threads may send; one receives.

    Args:
        wire: the connected socket.

    Attributes:
        peer: number of the process at the other end, as the kernel says.
    """

    def __init__(self, wire: socket.socket) -> None:
        _limit_sending(wire)
        self._wire = wire
        self.peer = process_of(wire)
        self._sending = threading.Lock()

    @classmethod
    def connect(cls, path: os.PathLike[str]) -> Self:
        """Connect to the socket at a path.

        Raises:
            ConnectionLost: nothing listens there.
            TierstateError: what listens there is of another user.
        """
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _limit_sending(wire)  # it holds for connecting too, to a process that hangs and has too many waiting already
        try:
            with short_path(Path(path)) as short:
                wire.connect(short)
            if (user := user_of(wire)) != os.geteuid():
                raise TierstateError(f"{path}: a process of user {user} listens there, and not of {os.geteuid()}")
        except OSError as error:
            wire.close()
            why = "the agent there hangs" if isinstance(error, BlockingIOError) else "no agent listens there"
            raise ConnectionLost(f"{path}: {why}: {error.strerror}") from error
        except BaseException:
            wire.close()
            raise
        return cls(wire)

    def send(self, head: Mapping[str, Any], blobs: Sequence[Any] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one message.

        Args:
            blobs: objects with the buffer interface.
            descriptors: open files to hand over; they stay open here.

        Raises:
            ConnectionLost: it could not be sent whole.
        """
        views = [memoryview(blob).cast("B") for blob in blobs]
        first = _first_part(head, list(map(len, views)))
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with self._sending:
            try:
                sent = self._wire.sendmsg([first], extra)
                for part in (memoryview(first)[sent:], *views):
                    if len(part):
                        self._wire.sendall(part)
            except OSError as error:
                raise ConnectionLost(f"a message could not be sent: {error}") from error

    def send_at_once(self, head: Mapping[str, Any]) -> None:
        """Send a short message if that is possible without waiting; else it is not sent."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with suppress(OSError):
                self._wire.send(_first_part(head, ()), socket.MSG_DONTWAIT)
        finally:
            self._sending.release()

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            ConnectionLost: the connection has ended, or what came is no message.
        """
        found: list[int] = []
        try:
            count = _COUNT.unpack(self._exactly(_COUNT.size, found))[0]
            if not 1 <= count <= MAX_PARTS:
                raise ConnectionLost(f"a message of {count} parts; right are 1 to {MAX_PARTS}")
            lengths = [n for (n,) in _LENGTH.iter_unpack(self._exactly(_LENGTH.size * count, found))]
            if lengths[0] > MAX_HEAD or max(lengths) > MAX_BLOB:
                raise ConnectionLost(f"a message with a part of {max(lengths)} bytes")
            head = json.loads(bytes(self._exactly(lengths[0], found)))
            if not isinstance(head, dict):
                raise ConnectionLost("a message whose head is no mapping")
            return Message(head, [self._exactly(n, found) for n in lengths[1:]], tuple(found))
        except BaseException as error:
            for descriptor in found:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise ConnectionLost("the process at the other end does not answer") from error
            if isinstance(error, (OSError, ValueError, RecursionError)):
                raise ConnectionLost(f"the connection has failed: {error}") from error
            raise

    def _exactly(self, nbytes: int, descriptors: list[int]) -> bytearray:
        data = bytearray(nbytes)
        view, at = memoryview(data), 0
        while at < nbytes:
            room, how = socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC
            got, control, flags, _ = self._wire.recvmsg_into([view[at:]], room, how)
            for level, kind, body in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    some = array.array("i")
                    some.frombytes(body[: len(body) - len(body) % some.itemsize])
                    descriptors += some
            if flags & socket.MSG_CTRUNC:
                raise ConnectionLost("this process has no file descriptor left for those that came with a message")
            if not got:
                raise ConnectionLost("the process at the other end has closed the connection")
            at += got
        return data

    def watch_peer(self) -> int:
        """A new descriptor that is ready once the process at the other end has ended (pidfd).

        Raises:
            TierUnavailable: this process cannot see it.
        """
        if not self.peer:
            raise TierUnavailable(
                "the agent would not notice that this process has ended, since it is in another PID namespace; let "
                "them share one (Kubernetes: 'hostPID: true'; Docker: '--pid=host')"
            )
        return os.pidfd_open(self.peer)

    def limit(self, seconds: float) -> None:
        """Let `receive` fail if nothing comes for so long."""
        whole = int(seconds)
        self._wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, int(1e6 * (seconds - whole))))

    def has_ended(self) -> bool:
        """Whether the other end has closed the connection; what it has sent before may still be received."""
        ending = select.poll()
        ending.register(self._wire, select.POLLRDHUP)
        return bool(ending.poll(0))

    def shut(self) -> None:
        """End the connection; a thread that waits in `receive` gets an error when it has read what had come."""
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free its descriptor. Called when no other thread uses it."""
        self.shut()
        self._wire.close()


def _limit_sending(wire: socket.socket) -> None:
    # Of the kernel and not of Python, where a limit for sending is one for receiving too.
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(SEND_TIMEOUT, 0))


def _first_part(head: Mapping[str, Any], blobs: Sequence[int]) -> bytes:
    """A message up to its blobs, of which these are the lengths."""
    text = json.dumps(head, separators=(",", ":")).encode()
    lengths = [len(text), *blobs]
    return _COUNT.pack(len(lengths)) + b"".join(map(_LENGTH.pack, lengths)) + text


def encode_message(head: Mapping[str, Any], blobs: Sequence[Any]) -> bytes:
    """A message as one piece of bytes."""
    views = [memoryview(blob).cast("B") for blob in blobs]
    return b"".join([_first_part(head, list(map(len, views))), *views])


def split_messages(data: bytearray) -> tuple[list[Message], int]:
    """The messages that bytes begin with, one after the other, up to the first that is not there whole.

    Returns:
        The messages, and the length of them all.
    """
    found, at, view = list[Message](), 0, memoryview(data)
    while True:
        try:
            (count,) = _COUNT.unpack_from(view, at)
            start = at + _COUNT.size + _LENGTH.size * count
            lengths = [n for (n,) in _LENGTH.iter_unpack(view[at + _COUNT.size : start])]
            if not 1 <= count <= MAX_PARTS or len(lengths) < count or start + sum(lengths) > len(view):
                return found, at
            parts = list[bytearray]()
            for length in lengths:
                parts.append(bytearray(view[start : start + length]))
                start += length
            head = json.loads(parts[0])
        except (struct.error, ValueError):
            return found, at
        if not isinstance(head, dict):
            return found, at
        found.append(Message(head, parts[1:]))
        at = start


def encode_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON values: its nearest class that both sides know, its text and notes."""
    known = next(
        cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls or cls is BaseException
    )
    text = str(error) if known is not BaseException else f"{type(error).__name__}: {error}"
    found: dict[str, Any] = {"class": known.__name__, "text": text, "notes": getattr(error, "__notes__", [])}
    if isinstance(error, RankFailed):
        return found | {"ranks": list(error.ranks)}
    return found | {"tier": error.tier, "key": error.key} if isinstance(error, TierError) else found


def decode_error(encoded: Mapping[str, Any]) -> TierstateError:
    """The error that `encode_error` has encoded in the other process."""
    found = getattr(errors, str(encoded.get("class")), None)
    kind = found if isinstance(found, type) and issubclass(found, TierstateError) else TierstateError
    text = str(encoded.get("text"))
    error: TierstateError
    if issubclass(kind, RankFailed):
        error = kind(text, [rank for rank in encoded.get("ranks") or () if isinstance(rank, int)])
    elif issubclass(kind, TierError):
        error = kind(text, tier=str(encoded.get("tier")), key=str(encoded.get("key")))
    else:
        error = kind(text)
    for note in encoded.get("notes", ()):
        error.add_note(str(note))
    return error
