"""The journal of a trainer: what it has handed over and is not durable yet, in memory that outlives the agent.

The messages are written as they came (`tierstate.agent.messages`), before anything is done with them. The slabs' file
and the journal are held by the agent's parent. If the agent is killed, the next process reads the journal as if the
trainer sent it now; a part of a message at the end, which was being written, is left out. What is durable is not looked
at again, and what the slabs hold by then is compared with the digests.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from .messages import ConnectionLost, Message, encode_message, split_messages
from .supervisor import HeldFiles, Holder

log = logging.getLogger("tierstate")


HELLO, DURABLE = "hello", "durable"


SLACK = 16 << 20
"""Bytes that a journal may have beyond twice those that are needed."""


RECENT = 256
"""Messages that belong to no save of this trainer, such as that it gives nothing to one, of which these are kept."""


class Journal:
    """Writes a journal. May be used by several threads.

    Args:
        holder: holds it.
        name: under which it is held.
        files: the descriptors that are held; they belong to the caller.
        hello: the trainer's greeting.
    """

    def __init__(self, holder: Holder, name: str, files: HeldFiles, hello: bytes) -> None:
        self._holder, self._name, self._files, self._hello = holder, name, files, hello
        self._lock = threading.Lock()
        self._needed: defaultdict[int, list[bytes]] = defaultdict(list)
        self._others: deque[bytes] = deque(maxlen=RECENT)
        self._length = len(hello)
        self.replaying = False

    @classmethod
    def begun(cls, holder: Holder, hello: Message, slabs: int, trainer: int) -> Self:
        """The journal of a new trainer.

        Args:
            hello: its greeting.
            slabs, trainer: as of `HeldFiles`; duplicated.
        """
        first = encode_message({**hello.head, "kind": HELLO}, ())
        with ExitStack() as undo:  # a file of slabs that stays open keeps all of the trainer's memory
            files = HeldFiles(os.dup(slabs), -1, -1)
            undo.callback(os.close, files.slabs)
            files = files._replace(trainer=os.dup(trainer))
            undo.callback(os.close, files.trainer)
            files = files._replace(journal=_new_file(first))
            undo.pop_all()
        made = cls(holder, uuid.uuid4().hex, files, first)
        holder.hold(made._name, files)
        return made

    def note(self, seq: int | None, head: Mapping[str, Any], blobs: Sequence[Any]) -> None:
        """Write a message.

        Args:
            seq: the save to which it belongs; None for one that belongs to none.
        """
        if self.replaying:
            return
        data = encode_message(head, blobs)
        with self._lock:
            (self._others if seq is None else self._needed[seq]).append(data)
            self._write(data)

    def durable(self, seq: int) -> None:
        """A version need not be published again."""
        with self._lock:
            self._needed.pop(seq, None)
            try:
                self._write(encode_message({"kind": DURABLE, "seq": seq}, ()))
                if not self.replaying:
                    self._shorten()
            except OSError as error:
                # Called by the thread that has committed the version, and that other versions wait for.
                log.warning("a journal stays longer than it need be: %s", error)

    def _write(self, data: bytes) -> None:
        if self._files.journal < 0:
            return
        at = os.lseek(self._files.journal, 0, os.SEEK_CUR)
        try:
            _write_all(self._files.journal, data)
        except OSError:
            os.ftruncate(self._files.journal, at)  # a part of a message would hide what is written after it
            os.lseek(self._files.journal, at, os.SEEK_SET)
            raise
        self._length += len(data)

    def _shorten(self) -> None:
        needed = [self._hello, *self._others, *(data for messages in self._needed.values() for data in messages)]
        if self._files.journal >= 0 and self._length > 2 * sum(map(len, needed)) + SLACK:
            old, self._files = self._files, self._files._replace(journal=_new_file(*needed))
            self._length = sum(map(len, needed))
            self._holder.hold(self._name, self._files)
            os.close(old.journal)

    def close(self) -> None:
        """Give it up: nothing of it need be published again. May be called twice."""
        with self._lock:
            if self._files.journal >= 0:
                self._holder.drop(self._name)
                self._files.close()
                self._files = HeldFiles(-1, -1, -1)


class JournalLink:
    """A trainer whose journal was found, in the place of a connection to it.

    Args:
        files: what was held for it; they belong to the caller.

    Attributes:
        peer: number of its process.
        hello: its greeting.
        has_closed: whether it has closed its Checkpointer, and so left everything to the agent.
        length: bytes of the journal that are whole messages.
        durable: numbers of the versions that were durable; their messages are left out.
        first: the lowest number of the others; None if there are none.

    Raises:
        ConnectionLost: it is no journal.
    """

    def __init__(self, files: HeldFiles) -> None:
        self._files = files
        data = _read_all(files.journal)
        found, self.length = split_messages(data)
        if not found or found[0].kind != HELLO:
            raise ConnectionLost("what was held is no journal")
        self.hello = found[0]._replace(descriptors=(files.slabs,))
        self.durable = {int(message.head["seq"]) for message in found if message.kind == DURABLE}
        left = [m for m in found[1:] if m.kind != DURABLE and m.head.get("seq") not in self.durable]
        self.first = min((int(m.head["seq"]) for m in left if m.kind == "begin"), default=None)
        self.has_closed = any(message.kind == "bye" for message in left)
        self._left = deque(left)
        self.peer = int(self.hello.head["pid"])

    def receive(self) -> Message:
        """The next message. Raises ConnectionLost after the last one."""
        if not self._left:
            raise ConnectionLost("the journal ends here")
        return self._left.popleft()

    def watch_peer(self) -> int:
        """A descriptor that is ready once the trainer has ended."""
        return os.dup(self._files.trainer)

    def has_ended(self) -> bool:
        """True: the trainer says nothing more."""
        return True

    def send(self, head: Mapping[str, Any], blobs: Sequence[Any] = (), descriptors: Sequence[int] = ()) -> None:
        """Nothing: nobody hears it."""

    def shut(self) -> None:
        """Nothing: what is in the journal is still read."""


def reopened(holder: Holder, name: str, files: HeldFiles, link: JournalLink) -> Journal:
    """The journal of a trainer that is gone, to which is added what becomes durable. ``files``: become its own."""
    os.ftruncate(files.journal, link.length)  # a part of a message would hide what is written after it
    os.lseek(files.journal, 0, os.SEEK_END)
    made = Journal(holder, name, files, b"")
    made.replaying = True
    return made


def _new_file(*parts: bytes) -> int:
    descriptor = os.memfd_create("tierstate-journal", os.MFD_CLOEXEC)
    try:
        for part in parts:
            _write_all(descriptor, part)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _read_all(descriptor: int) -> bytearray:
    data = bytearray(os.fstat(descriptor).st_size)
    view, at = memoryview(data), 0
    while at < len(data):
        at += os.preadv(descriptor, [view[at:]], at)
    return data
