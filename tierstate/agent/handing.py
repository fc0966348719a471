"""What the save pipelines of trainers with an agent have in common: they hand over what they have captured.

Without an agent, before it is there and after it is lost, the same saves go the way of `SavePipeline`, in this process.
A save is captured once the agent has all of it: from then on it reaches its tiers, whether this process lives or not.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tierstate.engine.capture.capture_thread import CaptureJob, CaptureThread
from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.events import Event
from tierstate.engine.info import TierStats
from tierstate.engine.placement import Route
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.publish import DirectJob, Job
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.engine.publish.tier_write import Stages
from tierstate.engine.save.pipeline import DRAIN_INTERVAL, INTERRUPT_GRACE, OnDrain, SavePipeline
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import PolicyError, TierstateError, TierUnavailable
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.sharded.state_order import StateOrder
from tierstate.tiers.base import layer_of
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.policy.policy import wrap_policy_tier
from tierstate.tiers.wrappers.measure import OperationStats

from .handover import AgentLink, HandOver
from .launch import GREETING, STARTING, agent_name, greet, policy_text, socket_path, start_agent
from .memory_tier import AgentMemory, HandedMemory
from .messages import ConnectionLost, Message, decode_error
from .received import MEMORY, encode_keep, with_memory
from .version import check_up_to_date

log = logging.getLogger("tierstate")


TRY_AGAIN = 30.0
"""Seconds after a loss, or a failed start, until an agent is looked for again."""


class BackgroundStart:
    """Starts an agent beside the training, now and then, as long as there is none.

    Args:
        start: starts one, and returns when it answers; raises `TierstateError`.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        self._start, self._thread = start, threading.Thread()
        self._started, self._next = False, 0.0

    def begin(self) -> None:
        """Start one now."""
        self._thread = threading.Thread(target=self._run, name="tierstate-agent-start", daemon=True)
        try:
            start_thread(self._thread)
        except RuntimeError as error:  # no more threads (`ulimit -u`)
            self.put_off()
            log.warning("saves are published by this process, since no agent could be started: %s", error)

    def _run(self) -> None:
        try:
            self._start()
            self._started = True
        except Exception as error:  # of any type: or each save would try it again at once
            self.put_off()
            log.warning("saves are published by this process, since no agent could be started: %s", error)

    def put_off(self) -> None:
        """Forget one that was started, and start none for `TRY_AGAIN` seconds."""
        self._started, self._next = False, time.monotonic() + TRY_AGAIN

    def has_started(self) -> bool:
        """Whether one was started since `put_off`. If not, and it is time, begins to start one."""
        if not self._started and not self._thread.is_alive() and time.monotonic() >= self._next:
            self.begin()
        return self._started


class HandingPipeline(SavePipeline):
    """Hands saves over, as long as there is an agent. Sub-classes find one, and say what becomes of saves it loses."""

    def _begin_agent(self, run: str) -> None:
        """Called once by each constructor. ``run``: its name.

        Raises:
            PolicyError: the policy cannot be handed to another process.
        """
        self._run_name = run
        self._link: AgentLink | None = None
        self._memory: TierRun | None = None
        self._structure: Version | None = None
        self._sent_structure: Version | None = None
        self._sent_order: StateOrder | None = None
        self._plan: CapturePlan | None = None
        self._stopped = False
        self._holding: AgentLink | None = None
        """The lost connection, as long as it is not known what becomes of the saves that went over it."""
        self._handed: dict[int, HandOver] = {}
        found = {name: layer_of(tier_run.tier, HandedMemory) for name, tier_run in self._tier_runs.items()}
        self._in_memory: dict[str, HandedMemory] = {name: tier for name, tier in found.items() if tier is not None}
        self._changing = threading.RLock()
        self._path = socket_path(agent_name(policy_text(self._policy), os.environ))

    # The connection

    @property
    def agent(self) -> int | None:
        """Process number of the agent that publishes the saves; None where this process does."""
        return None if self._link is None else self._link.pid

    @property
    def memory(self) -> TierRun | None:
        """The run in the agent's memory; None without an agent."""
        return None if self._link is None else self._memory

    def _connect(self, seconds: float = GREETING, **team: Any) -> None:
        """Begin a session with the agent.

        Args:
            seconds: until it must have begun.
            team: more of the greeting.

        Raises:
            ConnectionLost: there is no agent.
            TierstateError: it refuses.
        """
        shared = self._arena.shared
        if shared is None:
            raise PolicyError("an agent needs slabs in shared memory")
        keeps = {tier.name: encode_keep(tier.keep) for tier in self._policy.tiers}
        hello = {"kind": "save", "run": self._run_name, "slab_size": self._arena.slab_size, "keep": keeps}
        hello |= team
        self._replace_other_version()
        wire, answer = greet(self._path, hello, (shared.descriptor,), seconds)
        link = AgentLink(wire, self._arena, self._event, self._on_lost, int(answer.head["pid"]))
        spec = with_memory(self._policy, 1).tiers[0]
        tier = wrap_policy_tier(spec, self._reader(MEMORY))
        with self._changing:
            self._end_here()
            self._sent_structure = self._sent_order = None
            self._memory = TierRun(tier, self._run_name)
            for name, handed in self._in_memory.items():
                handed.agent = self._reader(name, session=answer.head["session"])
            self._link = link
        try:
            link.start()
        except TierstateError:
            with self._changing:
                self._link = None
            self._drop_memory()
            raise
        log.info("run %s: saves are published by the agent, process %d", self._run_name, link.pid)

    def _reader(self, name: str, **of: Any) -> AgentMemory:
        """Reads a tier in the agent; ``of``: more of the greeting."""
        reader = AgentMemory(lambda: greet(self._path, {"kind": "read", "tier": name, **of})[0])
        reader.name = name
        return reader

    def _replace_other_version(self) -> None:
        """An agent of another version of this package gives its place up, and ends when it is done.

        Raises:
            ConnectionLost: there is none, or it was such a one.
            TierstateError: it refuses, and this process is the one that is out of date.
        """
        try:
            greet(self._path, {"kind": "status"})[0].close()
        except ConnectionLost:
            raise
        except TierstateError as error:
            check_up_to_date()  # else the newer one, which others use, would be replaced by one of its kind
            log.warning("%s; it publishes what it has, and a new one takes its place", error)
            greet(self._path, {"kind": "retire"})[0].close()
            raise ConnectionLost("the agent of another version has given its place up") from None

    def _ensure_agent(self) -> None:
        """Start an agent if there is none; return when one answers.

        Raises:
            TierstateError: none does, or another user's process listens there.
        """
        try:
            self._replace_other_version()
        except ConnectionLost:
            start_agent(self._policy, self._path)  # nothing, if one listens that is just being started again
            greet(self._path, {"kind": "status"}, seconds=STARTING)[0].close()

    def _drop_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.tier.close()
        for handed in self._in_memory.values():
            reader, handed.agent = handed.agent, None
            if reader is not None:
                reader.close()

    # Saves

    @property
    def _hands_over(self) -> bool:
        """Whether saves are handed over, or kept until it is known who publishes them."""
        return self._link is not None or self._holding is not None

    def _make_queues(self, seq: int) -> None:
        if not self._hands_over:
            super()._make_queues(seq)

    def _start(self, seq: int) -> Any:
        capturing = super()._start(seq)
        with self._changing:
            if not self._hands_over and not self.queues:
                self._begin_here(seq)
        return capturing

    def _begin_here(self, seq: int) -> None:
        """This process publishes from now on: from its first save, if it has made none."""
        if self._capturing is None:
            return  # that save makes the queues, and `close` ends none before it
        for tier_run in self._tier_runs.values():
            tier_run.look_again()  # the agent has changed the tiers
        super()._make_queues(seq)
        for queue in self.queues.values():
            queue.start()

    def _end_here(self) -> None:
        """The agent publishes from now on; nothing is under way here. New queues look for what it leaves behind."""
        for queue in self.queues.values():
            queue.end()
            queue.join(None)
        self._cascade.queues = {}

    def _is_quiet(self) -> bool:
        """Whether nothing is under way in this process, so that its queues end without a wait."""
        return all(state.settled() for state in self._saves.save_states()) and all(
            queue.at_rest for queue in self.queues.values()
        )

    def _capture_job(
        self,
        save_state: SaveState,
        plan: CapturePlan,
        names: Sequence[str],
        routes: Mapping[str, Route],
        stages: Stages,
    ) -> CaptureJob:
        with self._changing:
            link = self._link or self._holding
            if link is None:
                if not self.queues:
                    self._begin_here(save_state.head.seq)
                return super()._capture_job(save_state, plan, names, routes, stages)
            handover = HandOver(link, save_state, plan.without_memory())
            self._handed = {seq: h for seq, h in self._handed.items() if not self._forget(h)}
            self._handed[save_state.head.seq] = handover
            if self._link is not None:
                self._send_begin(link, save_state, plan, stages)
        return CaptureJob(save_state, plan, [], handed_over=handover)

    @staticmethod
    def _forget(handover: HandOver) -> bool:
        if settled := handover.save_state.settled():
            handover.forget()
        return settled

    def _send_begin(self, link: AgentLink, save_state: SaveState, plan: CapturePlan, stages: Stages) -> None:
        head: dict[str, Any] = {"kind": "begin", "head": save_state.head.encode(), "tiers": list(save_state.tiers)}
        head["required"] = list(self.required)
        structure, blobs = self._structure_of(save_state.head, plan), []
        if structure is not self._sent_structure:
            head["structure"] = True
            blobs.append(structure.data)
            self._sent_structure = structure
        if plan.order is not None:
            head["order"] = "again"
            if plan.order != self._sent_order:
                head["order"] = "new"
                blobs.append(json.dumps(plan.order).encode())
                self._sent_order = plan.order
        if any(tier.format != "native" for tier in self._policy.tiers):
            head["stages"] = True
            blobs.append(np.ascontiguousarray(stages(), "i8").tobytes())
        link.send(head, *blobs)

    def _structure_of(self, head: Head, plan: CapturePlan) -> Version:
        """The leaves and shards of a plan, as a version without digests."""
        last, known = self._plan, self._structure
        alike = last is not None and last.leaves is plan.leaves and last.boxes is plan.boxes
        if known is None or not (alike and known.head.chunk == head.chunk):
            none = np.zeros((int(plan.counts(head.chunk).sum()), 2), "<u8")
            known = Version.build(head, plan.leaves, plan.shards(self.rank or 0), none)
        self._plan, self._structure = plan.without_memory(), known
        return known

    # Events

    def _event(self, message: Message) -> None:
        with self._changing:
            self._apply(message)

    def _apply(self, message: Message) -> None:
        head = message.head
        if self._link is None:
            return  # it is lost: what becomes of its saves is decided otherwise
        if message.kind == "event":
            self.events.publish(Event.decode(head["event"]))
            return
        if message.kind == "brought":
            due = PendingVersion(int(head["seq"]), int(head["step"]), float(head["time"]))
            self.arrived(str(head["tier"]), due)
            self.brought(str(head["tier"]), due)
            return
        handover = self._handed.get(int(head["seq"]))
        if handover is None:
            return
        if message.kind == "captured":
            if self.rank is None:
                handover.save_state.version = str(head["id"])
            handover.accepted.set()
        elif (name := str(head["tier"])) in handover.save_state.tiers:
            self._settle(message.kind, name, handover.save_state, head)

    def _settle(self, kind: str, name: str, save_state: SaveState, head: Mapping[str, Any]) -> None:
        if save_state.tiers[name].done():
            return
        if kind == "committed":
            if name in self._in_memory:
                self._in_memory[name].superseded()
            self._tier_runs[name].look_again()  # what it knows of the tier is outdated
            self.arrived(name, PendingVersion.of(save_state))
            save_state.measured(name)
            save_state.version = str(head.get("id", "")) or save_state.version
            save_state.committed(name)
        elif kind == "failed":
            error = decode_error(head["error"])
            self.failed(name, save_state, error)
            save_state.failed(name, error)
        elif kind == "left_out":
            save_state.leave_out(name, str(head["why"]))
        if self._link is not None and all(done.done() for done in save_state.tiers.values()):
            # Not `settled`: the capture thread may still be about to say that all is captured.
            self._link.send({"kind": "settled", "seq": save_state.head.seq})

    def brought(self, name: str, due: PendingVersion) -> None:
        super().brought(name, due)
        save_state = self._saves.find(due.seq)
        if save_state is not None and name in save_state.tiers and not save_state.tiers[name].done():
            save_state.committed(name)

    # The loss of the agent

    def _on_lost(self) -> None:
        """The connection is lost: what the agent had is published in another way."""
        raise NotImplementedError

    def _publish_here(self, handover: HandOver, make: Callable[[], Sequence[tuple[TierQueue, Job]]]) -> bool:
        """Publish in this process what was handed over. Returns whether that is possible; else the save has failed.

        Args:
            make: returns the jobs; what it raises is why the save fails.
        """
        jobs: Sequence[tuple[TierQueue, Job]] = []
        failure: BaseException | None = None
        try:
            if self._stopped:
                raise TierUnavailable("the Checkpointer is closed")
            jobs = make()
        except BaseException as error:
            failure = error
            log.exception("step %d, which the agent had, cannot be published", handover.save_state.head.step)
            self._fail_all(handover.save_state, error)
        for queue, job in jobs:
            queue.put(job)
        handover.take_back([job for _, job in jobs if isinstance(job, DirectJob)])
        handover.accepted.set()
        return failure is None

    @staticmethod
    def _fail_all(save_state: SaveState, error: BaseException) -> None:
        for name, done in save_state.tiers.items():
            if not done.done():
                save_state.failed(name, error)

    # What the agent is asked

    def pinned(self, tier: str) -> Mapping[int, str]:
        if (found := self._ask("pinned", tier=tier)) is None:
            return super().pinned(tier)
        return {int(seq): str(why) for seq, why in found}

    def coming(self, tier: str) -> set[int]:
        found = self._ask("coming", tier=tier)
        return super().coming(tier) | {int(seq) for seq in found or ()}

    def tier_stats(self, name: str) -> TierStats | None:
        """The counters of a tier in the agent; None without one."""
        if (found := self._ask("stats", tier=name)) is None:
            return None
        known = {k: v for k, v in found.items() if k in TierStats.__dataclass_fields__}
        known["held"] = {int(seq): why for seq, why in known["held"]}
        known["seconds"] = tuple(known["seconds"])
        known["operations"] = {k: OperationStats(**v) for k, v in known["operations"].items()}
        return TierStats(**{**known, "durable_lag": None})

    def hold(self, seq: int, *, end: bool) -> None:
        """Keep a version in every tier until this is called again with ``end``."""
        super().hold(seq, end=end)
        if (link := self._link) is not None:
            link.send({"kind": "hold", "seq": seq, "end": end})

    def _ask(self, what: str, **values: Any) -> Any:
        link = self._link
        answer = None if link is None else link.ask(what, **values)
        return None if answer is None else answer.head["answer"]

    # The end

    def hurry(self, end: float) -> None:
        if (link := self._link) is None:
            super().hurry(end)
        else:
            self._end = end
            link.send({"kind": "hurry", "seconds": max(0.0, end - time.monotonic())})

    def unfinished(self) -> str:
        """With an agent: the saves that it has not got yet; it goes on with all others when this process ends."""
        if self._link is None:
            return super().unfinished()
        states = self._saves.save_states()
        return ", ".join(f"step {s.head.step} to the agent" for s in states if not s.captured.done())

    def left_behind(self) -> str:
        if (found := self._ask("unfinished")) is None:
            return super().left_behind()
        return f"the agent goes on with {', '.join(found)}" if found else ""

    def close(self, timeout: float | None = None, watch: OnDrain | None = None) -> str:
        """As `SavePipeline.close`. If time runs out, the agent goes on with what it has, which is no error."""
        link, capturing = self._link, self._capturing
        if (link is None and self._holding is None) or os.getpid() != self._pid:
            return super().close(timeout, watch)
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        if capturing is not None:
            self._end_captures(capturing, link, end)
        if link is not None and self._wait_settled(link, end, watch):
            text = ", ".join(self._ask("unfinished") or ())
            if text:
                log.info("closed; the agent goes on with %s", text)
            with self._changing:
                self._link, self._capturing = None, None
            self._drop_memory()
            link.close()
            return ""
        # The agent was lost: until its saves are taken back.
        while (link is not None and self._link is link) or self._holding is not None:
            if min(end, self._end) <= time.monotonic():
                raise TierUnavailable(f"closed while the saves of a lost agent are taken back: {super().unfinished()}")
            time.sleep(DRAIN_INTERVAL)
        with self._changing:
            self._end_queues()
        return super().close(None if end == math.inf else max(0.0, end - time.monotonic()), watch)

    def _end_captures(self, capturing: CaptureThread, link: AgentLink | None, end: float) -> None:
        """Wait until the agent has all of all saves.

        Raises:
            TierUnavailable: time is over before that; the agent goes on with what it has whole.
        """
        self._run_threads(capturing).end()
        while not (whole := capturing.join(DRAIN_INTERVAL)) and min(end, self._end) > time.monotonic():
            pass
        if whole or link is None or link.over.is_set():
            return
        late = self.unfinished()
        self._saves.cancel()
        self._arena.wake()
        capturing.join(INTERRUPT_GRACE)
        with self._changing:
            self._link, self._capturing = None, None
        self._drop_memory()
        link.close()
        raise TierUnavailable(f"closed while still under way: {late}")

    def _wait_settled(self, link: AgentLink, end: float, watch: OnDrain | None) -> bool:
        """Wait until every tier has all saves, or time is over. Returns whether the agent lives."""
        while not link.over.is_set() and min(end, self._end) > time.monotonic():
            waiting = [s for s in self._saves.save_states() if not s.settled()]
            if not waiting:
                break
            if watch is not None:
                names = {name: 0 for name in self._tier_runs}
                for state in waiting:
                    names |= {n: names[n] + state.nbytes for n, done in state.tiers.items() if not done.done()}
                watch(names)
            waiting[0].captured.exception() if not waiting[0].captured.done() else link.over.wait(DRAIN_INTERVAL)
        return not link.over.is_set()

    def stop(self) -> None:
        self._stopped = True
        grace = time.monotonic() + INTERRUPT_GRACE
        while self._holding is not None and os.getpid() == self._pid and time.monotonic() < grace:
            time.sleep(DRAIN_INTERVAL)
        if (link := self._link) is not None and os.getpid() == self._pid:
            self._saves.cancel()
            self._arena.wake()
            if self._capturing is not None:
                self._run_threads(self._capturing).end()
                self._capturing.join(INTERRUPT_GRACE)
                self._capturing = None
            self._link = None
            self._drop_memory()
            link.close()
        super().stop()
