"""The agent's memory as a tier of a trainer: a process that is started again restores from the slabs of the one before.

`AgentMemory` asks the agent where the bytes of an object lie, and copies them from the slabs' file itself, so that they
never pass through a socket. `serve_memory` is the agent's side. With a `HandedMemory` a trainer has its own `host` tier
in the agent.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from tierstate.manifest.chunk import Buffer, as_buffer, view
from tierstate.manifest.errors import TierstateError, TierUnavailable
from tierstate.tiers.base import ObjectWriter, Range, Tier, Traits, check_key, check_spans
from tierstate.tiers.memory.host import InMemoryTier
from tierstate.tiers.policy.policy import TierPolicy, wrap_policy_tier
from tierstate.tiers.registry import open_tier
from tierstate.tiers.wrappers.base import Wrapping

from .messages import ConnectionLost, Message, MessageSocket, decode_error, encode_error
from .shared_slabs import AllSlabs

INLINE = -1
"""In place of a file's number: the bytes come with the answer, since they are in no slab."""


ANSWER_TIMEOUT = 30.0
"""Seconds until an agent that does not answer counts as gone."""


READERS = 4
"""Connections, at most, over which one process reads at the same time."""


class AgentMemory(Tier):
    """Reads what an agent keeps in memory.

    Args:
        connect: opens a new connection to the agent.
    """

    persistent: ClassVar[bool] = False

    def __init__(self, connect: Callable[[], MessageSocket]) -> None:
        self._connect = connect
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._free: list[MemoryConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def traits(self) -> Traits:
        host = socket.gethostname()
        return Traits(False, "host", f"host:{host}", parallelism=READERS, conditional_create=True)

    def put(self, key: str, data: Buffer) -> None:
        self._call({"op": "put", "key": check_key(key)}, view(data))

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        spans = [[offset, out.numel()] for offset, out in ranges]
        with self._connection(key) as connection:
            answer = connection.ask({"kind": "call", "op": "locate", "key": check_key(key), "spans": spans})
            connection.copy(answer, [out for _, out in ranges])

    def list(self, prefix: str) -> Iterator[str]:
        return iter(self._call({"op": "list", "prefix": prefix})["keys"])

    def size(self, key: str) -> int:
        return int(self._call({"op": "size", "key": check_key(key)})["size"])

    def age(self, key: str) -> float | None:
        return float(self._call({"op": "age", "key": check_key(key)})["age"])

    def delete(self, key: str) -> None:
        self._call({"op": "delete", "key": check_key(key)})

    def close(self) -> None:
        with self._lock:
            self._closed, free, self._free = True, self._free, []
        for connection in free:
            connection.close()

    def _call(self, head: Mapping[str, Any], *blobs: Any) -> Mapping[str, Any]:
        with self._connection(str(head.get("key", ""))) as connection:
            return connection.ask({"kind": "call", **head}, *blobs).head

    @contextmanager
    def _connection(self, key: str) -> Iterator[MemoryConnection]:
        """A connection, which is used again unless something is wrong with it."""
        connection, sound = self._take(), False
        try:
            yield connection
            sound = True
        except ConnectionLost as error:
            raise TierUnavailable(f"{self.name}: {key}: {error}", tier=self.name, key=key) from error
        except TierstateError:
            sound = True  # the agent has answered
            raise
        finally:
            if sound:
                self._give_back(connection)
            else:
                connection.close()

    def _take(self) -> MemoryConnection:
        if os.getpid() != self._pid:
            self._begin()  # a forked child: over the connections its parent speaks
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"{self.name}: the connection to the agent is closed", tier=self.name)
            if self._free:
                return self._free.pop()
        try:
            return MemoryConnection(self._connect())
        except TierstateError as error:
            # Also one that refuses, as it is of another version, or that has the tier no more: others are read then.
            raise TierUnavailable(f"{self.name}: {error}", tier=self.name) from error

    def _give_back(self, connection: MemoryConnection) -> None:
        with self._lock:
            if not self._closed and len(self._free) < READERS:
                self._free.append(connection)
                return
        connection.close()


class MemoryConnection:
    """One connection over which an agent's memory is read.

    Args:
        link: the connection, after its greeting.
    """

    def __init__(self, link: MessageSocket) -> None:
        link.limit(ANSWER_TIMEOUT)
        self._link = link
        self._files: dict[int, int] = {}

    def ask(self, head: Mapping[str, Any], *blobs: Any) -> Message:
        """Send a request and wait for the answer.

        Raises:
            TierstateError: the agent's error.
        """
        self._link.send(head, blobs)
        answer = self._link.receive()
        for number, descriptor in zip(answer.head.get("files", ()), answer.descriptors, strict=True):
            self._files[int(number)] = descriptor
        if "error" in answer.head:
            raise decode_error(answer.head["error"])
        return answer

    def copy(self, answer: Message, outs: Sequence[Buffer]) -> None:
        """Copy the pieces of an answer into the buffers of the ranges that were asked for, and let the agent go on."""
        try:
            for which, at, number, offset, nbytes in answer.head["pieces"]:
                out = view(outs[which][at : at + nbytes])
                if number == INLINE:
                    out[:] = memoryview(answer.blobs[0])[offset : offset + nbytes]
                else:
                    _read_file(self._files[number], offset, out)
        finally:
            self._link.send({"kind": "done"})

    def close(self) -> None:
        """Close the connection and the files."""
        self._link.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _read_file(descriptor: int, offset: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        got = os.preadv(descriptor, [out[done:]], offset + done)
        if got <= 0:
            raise ConnectionLost("a slab of the agent is shorter than it was")
        done += got


class HandedMemory(Wrapping):
    """A tier in a trainer's own memory, such as `host`, whose objects are in its agent while that publishes the saves.

    What the trainer has saved to its own memory before can be read until the agent has something newer.

    Args:
        inner: the tier in the trainer's memory.

    Attributes:
        agent: reads the same tier in the agent; None without one.
    """

    def __init__(self, inner: InMemoryTier) -> None:
        super().__init__(inner)
        self.agent: AgentMemory | None = None

    def superseded(self) -> None:
        """The agent has a newer version: free what was saved to the trainer's own memory."""
        if self.agent is not None:
            self.inner.discard(self.inner.list(""))

    def _having(self, key: str) -> Tier:
        """Where an object is, or is to be."""
        agent = self.agent  # once: the agent may be lost at any moment
        return agent if agent is not None and key not in self.inner.list(key) else self.inner

    def put(self, key: str, data: Buffer) -> None:
        self._having(key).put(key, data)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return self._having(key).writer(key, size_hint)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        self._having(key).read(key, ranges)

    def list(self, prefix: str) -> Iterator[str]:
        agent = self.agent
        there = () if agent is None else agent.list(prefix)
        return iter(sorted({*self.inner.list(prefix), *there}))

    def size(self, key: str) -> int:
        return self._having(key).size(key)

    def age(self, key: str) -> float | None:
        return self._having(key).age(key)

    def delete(self, key: str) -> None:
        self._having(key).delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def room(self) -> int | None:
        return None if self.agent is not None else self.inner.room()


def open_handed_tier(spec: TierPolicy, arena: object) -> Tier:
    """A tier of a trainer that may have an agent; as `open_policy_tier`, but with a `HandedMemory` in it if it lies in
    the trainer's own memory."""
    opened = open_tier(spec.name, spec.type, spec.options, arena)
    return wrap_policy_tier(spec, HandedMemory(opened) if isinstance(opened, InMemoryTier) else opened)


def serve_memory(tier: InMemoryTier, slabs: AllSlabs, link: MessageSocket) -> None:
    """Answer the requests of one connection until it ends.

    Args:
        tier: what is read.
        slabs: in which its buffers lie.
    """
    known: set[int] = set()
    while True:
        message = link.receive()
        try:
            _answer(tier, slabs, link, message, known)
        except TierstateError as error:
            link.send({"kind": "answer", "error": encode_error(error)})


def _answer(tier: InMemoryTier, slabs: AllSlabs, link: MessageSocket, message: Message, known: set[int]) -> None:
    op, key = message.head.get("op"), str(message.head.get("key", ""))
    if op == "locate":
        _locate(tier, slabs, link, message, known)
        return
    answer: dict[str, Any] = {}
    if op == "list":
        answer["keys"] = list(tier.list(str(message.head["prefix"])))
    elif op == "size":
        answer["size"] = tier.size(key)
    elif op == "age":
        answer["age"] = tier.age(key)
    elif op == "delete":
        tier.delete(key)
    elif op == "put":
        tier.put(key, as_buffer(bytes(message.blobs[0])))
    else:
        raise TierstateError(f"a request of unknown kind {op!r:.40}")
    link.send({"kind": "answer", **answer})


def _locate(tier: InMemoryTier, slabs: AllSlabs, link: MessageSocket, message: Message, known: set[int]) -> None:
    """Say where the bytes of ranges are, and keep them there until the reader has copied them."""
    key = check_key(str(message.head["key"]))
    spans = [(int(offset), int(nbytes)) for offset, nbytes in message.head["spans"]]
    with ExitStack() as reading:
        held = reading.enter_context(tier.reading(key))
        pieces: list[tuple[int, int, int, int, int]] = []
        inline: list[memoryview] = []
        files: dict[int, int] = {}
        check_spans(f"{tier.name}: {key}", held.nbytes, spans)
        for which, (offset, nbytes) in enumerate(spans):
            for at, buffer in held.parts(offset, nbytes):
                found = slabs.place(buffer)
                if found is None:
                    pieces.append((which, at, INLINE, sum(map(len, inline)), buffer.numel()))
                    inline.append(view(buffer))
                else:
                    file, start = found
                    pieces.append((which, at, file.number, start, buffer.numel()))
                    if file.number not in known:
                        files[file.number] = file.descriptor
        known |= set(files)
        answer = {"kind": "answer", "pieces": pieces, "files": list(files)}
        link.send(answer, [b"".join(inline)], list(files.values()))
        link.receive()  # "done", or the reader is gone
