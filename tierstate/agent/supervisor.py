"""The parent of an agent's process: it holds what must outlive that, and starts it again if it was killed.

The agent's process is large and busy, so it is the one that is killed where memory is short. Its parent is small, has
one thread, and waits. It has the listening socket, and for each trainer the file of its slabs, the journal of what it
has handed over (`tierstate.agent.journal`), and the handle of its process. All of that is inherited by the next process
that it forks. An idea of service managers (systemd's file descriptor store), without needing one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from tierstate.tiers.latch import Latch

log = logging.getLogger("tierstate")


RESTARTS = 6
"""Processes in a row that are started again though each was killed within `STABLE` seconds: at once, then after 1, 3, 7
seconds and so on, since memory may be short. Then the parent gives up."""


STABLE = 60.0


MESSAGE = 4096
"""Bytes of a message to the parent, at most."""


class HeldFiles(NamedTuple):
    """Descriptors that are held for one trainer.

    Attributes:
        slabs: the file of its slabs.
        journal: what it has handed over.
        trainer: its process (pidfd).
    """

    slabs: int
    journal: int
    trainer: int

    def close(self) -> None:
        """Close all of them."""
        for descriptor in self:
            os.close(descriptor)


class Holder:
    """The parent, as the agent's process speaks to it.

    Args:
        wire: the connection to it.
        found: what it held when this process was forked, by name; the descriptors are this process's own.
        retired: whether another agent has taken the place of this one.
        stopping: whether it was told to end before this process was forked.
    """

    def __init__(
        self, wire: socket.socket, found: Mapping[str, HeldFiles], *, retired: bool, stopping: bool = False
    ) -> None:
        self._wire, self.found, self.retired, self.stopping = wire, dict(found), retired, stopping
        self._lock = threading.Lock()

    def hold(self, name: str, files: HeldFiles) -> None:
        """Hold files, in place of those of the same name."""
        self._tell({"hold": name}, files)

    def drop(self, name: str) -> None:
        """Close the files of a name."""
        self._tell({"drop": name})

    def retire(self) -> None:
        """Another agent takes the place of this one: a process that is started again does not listen."""
        self._tell({"retire": True})

    def _tell(self, said: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
        with self._lock, suppress(OSError):  # a parent that is gone holds nothing, which is no reason to end
            socket.send_fds(self._wire, [json.dumps(said).encode()], list(descriptors))


class Supervisor:
    """Runs the agent's process as a child, again if it is killed."""

    def __init__(self) -> None:
        self._held: dict[str, HeldFiles] = {}
        self._retired, self._ending = False, Latch()
        self._child = 0

    def run(self, work: Callable[[Holder], None], forked: Callable[[], None]) -> None:
        """Run this in a child until it returns, or nothing is held when it was killed, or it is killed too often.

        A SIGTERM is one to the child. Where there is none, as it was killed, the next one publishes what is held first.

        Args:
            work: what the child does.
            forked: called here after each fork.
        """
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._pass_on())
        quick = 0
        while quick <= RESTARTS and (self._held or not self._ending.is_set()):
            began, stopping = time.monotonic(), self._ending.is_set()
            try:
                self._child, ours, theirs = self._fork()
            except OSError as error:
                if not self._held:
                    raise
                log.warning("the agent could not be started again: %s", error)
                quick = self._pause(quick, stopping=stopping)
                continue
            with ours:
                if self._child == 0:
                    ours.close()
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    work(Holder(theirs, self._held, retired=self._retired, stopping=stopping))
                    sys.exit()
                if self._ending.is_set() and not stopping:
                    self._pass_on()  # it came while there was no child yet to pass it on to
                theirs.close()
                forked()
                self._attend(ours)
            _, status = os.waitpid(self._child, 0)
            self._child = 0
            if status == 0 or not self._held:
                return
            log.warning("the agent has ended (status %d) and held saves of %d trainers", status, len(self._held))
            if time.monotonic() - began > STABLE:
                quick = 0
            quick = self._pause(quick, stopping=stopping)
        log.error("the agent is not started again, and saves of %d trainers are lost", len(self._held))

    @staticmethod
    def _fork() -> tuple[int, socket.socket, socket.socket]:
        """Fork. Returns the child's number, which is 0 in the child, and a connection: this process's end, the child's.

        Raises:
            OSError: processes, memory or descriptors are short.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            return os.fork(), ours, theirs
        except OSError:
            ours.close()
            theirs.close()
            raise

    def _pause(self, quick: int, *, stopping: bool) -> int:
        """Wait before the next try. Returns the number of those that were quick to end, with one more."""
        pause = time.sleep if stopping else self._ending.wait  # SIGTERM cuts the pause that it falls into
        pause(2**quick - 1)
        return quick + 1

    def _pass_on(self) -> None:
        self._ending.set()
        if self._child:
            with suppress(ProcessLookupError):  # it was waited for just now
                os.kill(self._child, signal.SIGTERM)

    def _attend(self, wire: socket.socket) -> None:
        """Do what the child says, until it has ended."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(wire, MESSAGE, len(HeldFiles._fields))
            except ConnectionResetError:
                return
            if not data:
                return
            said = json.loads(data)
            self._retired = self._retired or bool(said.get("retire"))
            before = self._held.pop(said.get("hold") or said.get("drop", ""), None)
            if before is not None:
                before.close()
            if "hold" not in said:
                continue
            if len(descriptors) == len(HeldFiles._fields):
                self._held[said["hold"]] = HeldFiles(*descriptors)
                continue
            log.warning(
                "what a trainer hands over would be lost with the agent: no file descriptor is left for it here"
            )
            for descriptor in descriptors:
                os.close(descriptor)
