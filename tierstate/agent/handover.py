"""Hand captured saves over to the agent, and keep them as long as the agent may still die with them.

`AgentLink` is the connection of one trainer. A `HandOver` takes the slabs of one capture, sends them on, and remembers
them until every tier has the version: if the agent dies before that, the same slabs are published in this process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.publish.publish import DirectJob, SlabReceiver, UnchangedChunks
from tierstate.engine.publish.save_state import SaveState
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import FormatError, TierstateError, TierUnavailable
from tierstate.manifest.format.version import Version
from tierstate.tiers.latch import Latch
from tierstate.tiers.memory.arena import Arena, Slab

from .messages import ConnectionLost, Message, MessageSocket, decode_error, encode_error

log = logging.getLogger("tierstate")


PING_EVERY = 1.0
"""Seconds between two signs of life that are asked for."""


SILENCE = 20.0
"""Seconds without any answer after which the agent counts as hung, and this process publishes by itself."""


class Loan:
    """A slab that was handed over, until the agent gives it back.

    Attributes:
        slab: the slab, with the lease that ends then.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab


class _Answer:
    def __init__(self) -> None:
        self.done = Latch()
        self.message: Message | None = None


class AgentLink:
    """The connection of a trainer to its agent.

    Args:
        link: the connection, after its greeting.
        arena: the slabs that are handed over.
        event: called with the events of saves: committed, failed, left out, brought.
        lost: called once, by a thread of this link, when the agent has died or hangs.

    Attributes:
        over: set when the connection is gone.
        pid: the agent's process.
    """

    def __init__(
        self, link: MessageSocket, arena: Arena, event: Callable[[Message], None], lost: Callable[[], None], pid: int
    ) -> None:
        self._link, self._arena, self._event, self._lost, self.pid = link, arena, event, lost, pid
        self.over = Latch()
        self._closing = self._broken = False
        self._lent: dict[int, Loan] = {}
        self._orphans: list[Loan] = []
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._numbers = count()
        self._heard = time.monotonic()
        self._threads = [
            threading.Thread(target=self._receive_all, name="tierstate-agent-events", daemon=True),
            threading.Thread(target=self._watch, name="tierstate-agent-watch", daemon=True),
        ]

    def start(self) -> None:
        """Begin to take events.

        Raises:
            TierUnavailable: no more threads can be started; the link has ended.
        """
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # `ulimit -u`
            self.leave()
            self._link.close()
            raise TierUnavailable(f"no agent can be used: {error}") from error

    def send(self, head: Mapping[str, Any], *blobs: Any) -> bool:
        """Send a message; False if the agent is gone."""
        try:
            with self._sending:
                if self.over.is_set():
                    return False
                self._link.send(head, blobs)
        except ConnectionLost as error:
            self._end(error)
            return False
        return True

    def lend(self, slab: Slab) -> Loan:
        """Hand a leased slab over; the lease ends when the agent gives it back."""
        assert slab.offset is not None
        loan = Loan(slab)
        with self._lock:
            if self.over.is_set():
                self._orphans.append(loan)
            else:
                self._lent[slab.offset] = loan
        return loan

    def ask(self, what: str, *blobs: Any, **values: Any) -> Message | None:
        """Ask the agent, and wait for its answer; None if it is gone.

        Raises:
            TierstateError: the agent's error.
        """
        number, answer = next(self._numbers), _Answer()
        with self._lock:
            self._answers[number] = answer
        try:
            if not self.send({"kind": "ask", "what": what, "number": number, **values}, *blobs):
                return None
            while not answer.done.wait(0.5):
                if self.over.is_set():
                    return None
        finally:
            with self._lock:
                self._answers.pop(number, None)
        if answer.message is not None and "error" in answer.message.head:
            raise decode_error(answer.message.head["error"])
        return answer.message

    def give_up(self, why: str) -> None:
        """Have the agent publish nothing more, and go on as if it were lost."""
        try:
            self.ask("give_up")
        except TierstateError as error:
            log.warning("the agent does not give its saves up: %s", error)
        self._end(ConnectionLost(why))

    def leave(self) -> None:
        """End the connection, of which nothing was used: the slabs stay this process's alone."""
        self._closing = True
        self._end(ConnectionLost("this process does not use its agent"))
        self._join()

    def close(self) -> None:
        """End the connection: nothing more is handed over. What was handed over is the agent's alone from now on."""
        self._closing = True
        self.send({"kind": "bye"})
        self._end(None)
        self._join()
        with self._lock:
            given, self._orphans = self._orphans, []
        for loan in given:
            loan.slab.give_away()  # the agent goes on with them

    def _join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()

    def _receive_all(self) -> None:
        try:
            while True:
                message = self._link.receive()
                self._heard = time.monotonic()
                self._take(message)
        except ConnectionLost as error:
            self._end(error)
        except Exception as error:
            log.exception("a message of the agent cannot be used")
            self._end(error)
        finally:
            with self._sending:
                self._link.close()

    def _take(self, message: Message) -> None:
        head = message.head
        if message.kind in ("back", "kept"):
            self._take_slab(int(head["offset"]), back=message.kind == "back")
        elif message.kind == "answer":
            with self._lock:
                answer = self._answers.get(int(head["number"]))
            if answer is not None:
                answer.message = message
                answer.done.set()
        elif message.kind == "fatal":
            raise ConnectionLost(f"the agent gives up: {decode_error(head['error'])}")
        elif message.kind not in ("pong", "ready"):
            self._event(message)

    def _take_slab(self, offset: int, *, back: bool) -> None:
        with self._lock:
            if self.over.is_set():
                return  # it was sent before the end, after which no slab is lent
            loan = self._lent[offset]
            if back:
                del self._lent[offset]
        if back:
            loan.slab.release()
        else:
            self._arena.keep(loan.slab.buffer)

    def _watch(self) -> None:
        while not self._pause():
            silent = time.monotonic() - self._heard
            if silent > SILENCE:
                self._end(ConnectionLost(f"the agent (process {self.pid}) has not answered for {silent:.0f} s"))
            elif silent > PING_EVERY:
                # A message that the agent does not take holds up all that wait to send, and not this.
                self._link.send_at_once({"kind": "ping"})
        if self._broken:  # told by this thread, as a new one might not start then
            self._lost()

    def _pause(self) -> bool:
        """Wait until the next look at the agent. Returns whether the connection is gone."""
        began = time.monotonic()
        gone = self.over.wait(PING_EVERY)
        now = time.monotonic()
        # If it took longer, this process was stopped, and did not ask for a sign of life meanwhile.
        self._heard = min(now, self._heard + max(0.0, now - began - 2 * PING_EVERY))
        return gone

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self.over.is_set():
                return
            self._broken = not self._closing
            self.over.set()
            self._orphans += self._lent.values()
            self._lent = {}
        if not self._closing or error is not None:
            self._link.send_at_once({"kind": "leave"})
        self._link.shut()
        if self._broken:
            log.warning("the agent is lost, so this process publishes its saves itself: %s", error)

    @property
    def orphans(self) -> set[Loan]:
        """The slabs that a lost agent had not given back."""
        with self._lock:
            return set(self._orphans)

    def release_orphans(self) -> None:
        """Release the slabs that a lost agent had, once those who need them have leases of their own."""
        with self._lock:
            orphans, self._orphans = self._orphans, []
        for loan in orphans:
            loan.slab.release()


class HandOver(SlabReceiver):
    """Hands one save over to the agent while it is captured.

    Args:
        link: the connection to the agent.
        save_state: the progress of the save.
        plan: what is captured, without its memory.

    Attributes:
        accepted: set when the agent has all of it, or never will.
        version: the captured version, once it is known.
    """

    def __init__(self, link: AgentLink, save_state: SaveState, plan: CapturePlan) -> None:
        self.link, self.save_state, self.plan = link, save_state, plan
        self.accepted = Latch()
        self.version: Version | None = None
        self._items: list[tuple[SlabChunks | UnchangedChunks, Loan | None]] = []
        self._outcome: Version | BaseException | None = None
        self._jobs: list[DirectJob] | None = None
        self._lock = threading.Lock()

    @property
    def seq(self) -> int:
        """The version's number."""
        return self.save_state.head.seq

    def needless(self, digests: Array) -> Array:
        found = self.link.ask("needless", digests, seq=self.seq) if self._jobs is None else None
        if found is None or found.head["answer"] != len(digests):
            return np.zeros(len(digests), bool)
        bits: Array = np.unpackbits(np.frombuffer(found.blobs[0], np.uint8), count=len(digests)).astype(bool)
        return bits

    def feed(self, item: SlabChunks | UnchangedChunks | Version | BaseException) -> None:
        with self._lock:
            if self._jobs is not None:
                self._feed_here(item, self._jobs)
                return
            if isinstance(item, SlabChunks):
                assert isinstance(item.slab, Slab)
                self._items.append((item, self.link.lend(item.slab)))
            elif isinstance(item, UnchangedChunks):
                self._items.append((item, None))
            else:
                self._outcome = item
            self._send(item)
        if isinstance(item, Version):
            while not (self.accepted.wait(0.5) or self.link.over.is_set()):
                pass

    def _send(self, item: SlabChunks | UnchangedChunks | Version | BaseException) -> None:
        link, seq = self.link, self.seq
        if isinstance(item, SlabChunks):
            assert isinstance(item.slab, Slab)
            columns = (np.ascontiguousarray(c, "i8") for c in (item.rows, item.at, item.nbytes))
            head = {"kind": "slab", "seq": seq, "offset": item.slab.offset}
            link.send(head, *columns, np.ascontiguousarray(item.digests))
        elif isinstance(item, UnchangedChunks):
            rows, digests = np.ascontiguousarray(item.rows, "i8"), np.ascontiguousarray(item.digests)
            link.send({"kind": "unchanged", "seq": seq}, rows, digests)
        elif isinstance(item, Version):
            self.version = item
            digests = np.ascontiguousarray(item.digests)
            known = () if item.statistics is None else item.statistics.encode().values()
            link.send({"kind": "captured", "seq": seq, "parent": item.head.parent}, digests, *known)
        else:
            link.send({"kind": "failed", "seq": seq, "error": encode_error(item)})

    @property
    def is_whole(self) -> bool:
        """Whether this process still has everything that was handed over; known once the agent is lost."""
        with self._lock:
            orphans = self.link.orphans
            return all(loan is None or loan in orphans for _, loan in self._items)

    def take_back(self, jobs: Sequence[DirectJob]) -> None:
        """Publish the save in this process, by these jobs: they get what was handed over, and what is still to come.

        If the agent had given a part back, which may hold something else by now, they get an error.
        """
        with self._lock:
            orphans = self.link.orphans  # within the lock: a capture may be handing one more over
            self._jobs = list(jobs)
            if any(loan is not None and loan not in orphans for _, loan in self._items):
                self._outcome = None
                self._feed_here(_gone(), self._jobs)
                self._jobs = []
                return
            for item, _ in self._items:
                if isinstance(item, SlabChunks):
                    item.slab.lease()
                self._feed_here(item, self._jobs)
            self._items = []
            if self._outcome is not None:
                self._feed_here(self._outcome, self._jobs)

    def forget(self) -> None:
        """Every tier has the version, or has failed: it will not be published again."""
        with self._lock:
            self._items = []

    @staticmethod
    def _feed_here(item: SlabChunks | UnchangedChunks | Version | BaseException, jobs: Sequence[DirectJob]) -> None:
        for job in jobs:
            if isinstance(item, SlabChunks):
                item.slab.lease()
            job.feed(item)
        if isinstance(item, SlabChunks):
            item.slab.release()


def _gone() -> TierstateError:
    return FormatError("the agent has died, and a part of this save, which it had given back, is lost with it")
