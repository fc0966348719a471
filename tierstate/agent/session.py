"""One trainer's connection to the agent: takes in what it captures, publishes it, and reports what became of it.

If the trainer dies, what it had handed over whole goes on to every tier; what it had not is given up. The session ends
when all of that is done.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from tierstate.engine.events import EVERY, Event, EventBus
from tierstate.engine.info import TierStats
from tierstate.engine.packs.slab_layout import SlabChunks
from tierstate.engine.placement import retention_of, rule_retention_of
from tierstate.engine.ranks.save.join import TeamMember
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arrays import Array, digest_list
from tierstate.manifest.digest import digest_function
from tierstate.manifest.errors import CaptureError, FormatError, TierstateError
from tierstate.manifest.format.statistics import ChunkStatistics
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.history.log import check_run
from tierstate.manifest.sharded.state_order import StateOrder
from tierstate.telemetry.event_log import EventLog
from tierstate.tiers.base import layers
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.memory.host import InMemoryTier
from tierstate.tiers.policy.models import KeepKeys
from tierstate.tiers.policy.policy import Policy, open_policy_tier, wrap_policy_tier

from .journal import Journal, JournalLink
from .messages import ConnectionLost, Message, MessageSocket, decode_error, encode_error
from .received import (
    MEMORY,
    IncomingSave,
    ReceivingPipeline,
    SharedReceivingPipeline,
    trainer_gone,
    with_memory,
)
from .shared_slabs import SharedSlab, SharedSlabs
from .store import VersionsInMemory, drop_run
from .supervisor import Holder
from .teams import DoubtedFailures, TeamGreeting, TeamStores

log = logging.getLogger("tierstate")


JOURNALED = ("slab", "unchanged", "captured", "failed", "withdraw", "continue", "bye")
"""Messages that are written to the journal as they came; `_on_begin` writes one with all that it builds on."""


ARRIVED = ("committed", "brought")
"""Events of a save that is in a tier by now."""

OUTCOMES = (*ARRIVED, "failed", "left_out")
"""Events that say what became of a save in a tier."""


ENDING = 60.0
"""Seconds until a process that has closed its connection without a word must have ended, or else lives on. Its last
descriptors may take long to close; until it is known, nothing of it is committed."""


COPY_SLABS = 8
"""Slabs for copies from tier to tier."""


class SessionOwner(Protocol):
    """What a session needs of the agent.

    Attributes:
        policy: the agent's policy.
        memory: the versions in memory.
        stores: by which the ranks of a job speak.
        holder: the agent's parent.
    """

    policy: Policy
    memory: VersionsInMemory
    stores: TeamStores
    holder: Holder

    def may_give_up(self) -> bool:
        """Whether versions that do not arrive may be left to the next process: nothing has arrived for long."""

    def progressed(self) -> None:
        """A version has arrived in a tier."""

    def sessions_of(self, run: str) -> list[TrainerSession]:
        """All that save this run, or still publish what was saved of it."""


class TrainerSession:
    """One trainer.

    Args:
        agent: the agent.
        link: the connection, after its greeting; or the journal of a trainer whose agent was killed.
        hello: the trainer's greeting: its run, what its tiers keep, the file of its slabs, and its team, if several
            ranks save together.
        journal: where what becomes durable is written, if ``link`` is a journal.

    Attributes:
        run: the name of the run.
        pid: the trainer's process.
        alive: whether the trainer is there.
        id: by which the trainer names this session.
        in_memory: by name, the tiers that would be in the trainer's own memory without an agent, which it reads here.

    Raises:
        TierstateError: a tier cannot be opened, or the greeting is not valid.
    """

    def __init__(
        self,
        agent: SessionOwner,
        link: MessageSocket | JournalLink,
        hello: Message,
        journal: Journal | None = None,
    ) -> None:
        self._agent, self._link = agent, link
        self.run, self.pid = check_run(str(hello.head["run"])), link.peer
        self.alive = True
        self._begun, self.id = time.time(), uuid.uuid4().hex
        self._member: TeamMember | None = None
        self._doubted: DoubtedFailures | None = None
        self._team: str | None = None
        self._given_up = self._bye = False
        self._received_all = threading.Event()
        self._saves: dict[int, IncomingSave] = {}
        self._structure: Version | None = None
        self._order: StateOrder = ()
        self._replays = journal is not None
        self._spoiled: set[int] = set()
        self._digest = digest_function(agent.policy.digest)
        self._outbox: SimpleQueue[tuple[Mapping[str, Any], tuple[bytes, ...]] | None] = SimpleQueue()
        slab_size = int(hello.head["slab_size"])
        if slab_size != agent.memory.slabs.slab_size or len(hello.descriptors) != 1:
            raise FormatError(f"slabs of {slab_size} bytes; right are {agent.memory.slabs.slab_size}, in one file")
        with ExitStack() as undo:
            self._trainer = link.watch_peer()
            undo.callback(os.close, self._trainer)
            descriptor = os.dup(hello.descriptors[0])
            try:
                self._slabs = SharedSlabs(descriptor, slab_size, self._slab_is_back, self._slab_is_kept)
            except BaseException:
                os.close(descriptor)
                raise
            undo.callback(self._slabs.leave)
            if (team := hello.head.get("team")) is not None:
                self._join(TeamGreeting.decode(team), undo)
            self._pipeline = self._open(_with_keeps(agent.policy, hello.head.get("keep", {})), undo)
            self._journal = journal or Journal.begun(agent.holder, hello, self._slabs.descriptor, self._trainer)
            undo.callback(self._journal.close)
            self._undo = undo.pop_all()
        self._pipeline.stand_beside(self._others)
        agent.memory.slabs.add(self._slabs)
        agent.memory.begin(self.run)

    def _join(self, told: TeamGreeting, undo: ExitStack) -> None:
        self._team = told.place.name
        undo.enter_context(self._agent.stores.used(told.place))
        team = self._agent.stores.join(told)
        self._member, self._doubted = TeamMember(team, patience=team.timeouts.decision), DoubtedFailures(team)
        undo.callback(self._leave)

    def _others(self) -> list[ReceivingPipeline]:
        """Those of trainers of this run that went before this one, and came after it; not of ranks beside it."""
        found = self._agent.sessions_of(self.run)
        return [one._pipeline for one in found if not (one is self or one._given_up or one._is_beside(self))]

    def _is_beside(self, other: TrainerSession) -> bool:
        return self._team is not None and self._team == other._team

    def _leave(self) -> None:
        """Leave the team: once all others have, if this session has served; they may need what this one still says."""
        assert self._member is not None
        if self.alive:
            self._member.leave()
        else:
            self._member.close()

    def _open(self, policy: Policy, undo: ExitStack) -> ReceivingPipeline:
        self.in_memory: dict[str, InMemoryTier] = {}
        policy = with_memory(policy, self._agent.memory.capacity)
        self._policy = policy
        arena = Arena(min(policy.arena.size, COPY_SLABS * policy.chunk), policy.chunk)
        undo.callback(arena.close)
        tier_runs, member = [], self._member
        tier_run_of = TierRun if member is None else member.tier_run
        for spec in policy.tiers:
            if spec.name == MEMORY:
                tier = wrap_policy_tier(spec, self._agent.memory.tier)
            else:
                tier = open_policy_tier(spec, self._agent.memory.slabs)
                undo.callback(tier.close)
                *_, bare = layers(tier)
                if isinstance(bare, InMemoryTier):
                    self.in_memory[spec.name] = bare
            tier.name = spec.name
            tier_runs.append(tier_run_of(tier, self.run, retention_of(spec), rule_retention_of(policy, spec)))
        rank = None if member is None else member.team.rank
        events = EventBus(self.run, rank)
        events.subscribe(EVERY, self._forward)
        self._event_log = EventLog(tier_runs, self.run) if policy.metrics.events else None
        undo.callback(events.close)
        for tier_run in tier_runs:
            tier_run.events = events
            tier_run.beside, tier_run.identity.beside = tier_runs, [one.identity for one in tier_runs]
            tier_run.identity.required = policy.tier(tier_run.name).initialized
            tier_run.before_commit = self._check_is_ours
        self._tier_runs = {tier_run.name: tier_run for tier_run in tier_runs}
        if member is None:
            return ReceivingPipeline(policy, tier_runs, arena, self._tell)
        return member.begin(policy, tier_runs, arena, partial(SharedReceivingPipeline, report=self._tell))[0]

    def serve(self) -> None:
        """Take in saves until the trainer is gone; then publish what it has handed over, and close the tiers.

        If it lives and has broken off, as it heard nothing for too long, it publishes that itself, from slabs that it
        then uses again.
        """
        sender = threading.Thread(target=self._send_all, name="tierstate-agent-send", daemon=True)
        watcher = threading.Thread(target=self._watch, name="tierstate-agent-watch", daemon=True)
        try:
            sender.start()
            watcher.start()
            self._tell({"kind": "ready", "pid": os.getpid(), "session": self.id})
            if isinstance(self._link, JournalLink):
                self._begin_again(self._link)
            self._take_all()
        finally:
            if self._given_up or not (self._bye or self._trainer_has_ended(ENDING)):
                self._break_off()
            self._received_all.set()
            self.alive = False
            self._link.shut()
            (self._slabs.leave if self._given_up else self._slabs.abandon)()
            for save in self._saves.values():
                save.lost(trainer_gone())
            self._finish()
            self._outbox.put(None)
            if sender.ident is not None:
                sender.join()

    def _begin_again(self, journal: JournalLink) -> None:
        """The process before was killed: let the queues look for what is owed, and other ranks not wait for this one's
        part of what it had seen to be durable."""
        self._pipeline.look_back(journal.first)
        for seq in sorted(journal.durable):
            for tier_run in self._tier_runs.values():
                tier_run.withdraw(seq, "this version was durable when the agent was killed")

    def end_if_done(self) -> None:
        """End the connection if everything that was handed over is published: the trainer goes on by itself."""
        if self.alive and not self._pipeline.under_way():
            self._given_up = True  # nothing is left to do, and the trainer's slabs are its own
            self._link.shut()

    def _take_all(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except ConnectionLost as error:
                log.info("run %s: process %d: %s", self.run, self.pid, error)
                return
            try:
                if self._take(message):
                    return
            except Exception as error:
                # Whatever is wrong with one message: the trainer goes on without this agent.
                log.exception("run %s: a %s of process %d", self.run, message.kind, self.pid)
                self._tell({"kind": "fatal", "error": encode_error(error)})
                return

    def _finish(self) -> None:
        try:
            if self._given_up:
                log.warning("run %s: process %d goes on without this agent", self.run, self.pid)
                self._journal.close()
                self._pipeline.stop()
                drop_run(self._agent.memory.tier, self.run)
            elif owed := self._pipeline.deliver(self._agent.may_give_up):
                log.warning("run %s: still owed: %s", self.run, owed)
        except BaseException as error:
            log.error("run %s: %s", self.run, error)
        else:
            if not self._given_up:
                log.info("run %s: all that process %d handed over is published", self.run, self.pid)
        finally:
            for save in self._saves.values():
                save.let_go()
            self._undo.close()
            self._agent.memory.slabs.forget_closed()
            self._agent.memory.end(self.run)

    def _watch(self) -> None:
        """Notice the end of the trainer also where a child of it has the socket too, and tell it of failures that are
        doubted no more."""
        try:
            while self.alive and not self._trainer_has_ended(1.0):
                self._tell_doubted()
        finally:
            self._link.shut()

    def _tell_doubted(self) -> None:
        if self._doubted is None:
            return
        failures, count = self._doubted.look()
        if failures and not count:
            # Not the rank has failed but its agent, or that of another one: all trainers go on by themselves.
            self._break_off()
            failures = [{"kind": "fatal", "error": failures[0]["error"]}]
        for failure in failures:
            self._put(failure)

    def _break_off(self) -> None:
        """Publish nothing more: the trainer does it. Before anything fails by that, the other agents can see it; else
        they would take it for a failure of this rank."""
        if self._member is not None:
            self._member.team.break_off()
        self._given_up = True

    def _trainer_has_ended(self, seconds: float) -> bool:
        """Whether the trainer's process ends within so many seconds."""
        ending = select.poll()
        ending.register(self._trainer, select.POLLIN)
        return bool(ending.poll(1000 * seconds))

    def _check_is_ours(self) -> None:
        """Before each commit: the trainer does not publish this itself, nor uses the slabs again meanwhile.

        Raises:
            CaptureError: it does.
        """
        if self._link.has_ended():
            self._received_all.wait()  # it may have said good-bye
        if self._given_up:
            raise CaptureError("the trainer has broken off, and publishes its saves itself")

    # What is sent

    def _tell(self, event: Mapping[str, Any], *blobs: bytes) -> None:
        if event["kind"] in ARRIVED:
            self._agent.progressed()
        if self._doubted is not None and event["kind"] == "failed" and self.alive:
            self._doubted.add(event)
            return
        if self._doubted is not None and event["kind"] == "brought":
            # Only this rank hears of it. A failure that is still doubted comes first, as it does on all others.
            for failure in self._doubted.take(event["seq"], event["tier"]):
                self._put(failure)
        self._put(event, *blobs)

    def _put(self, event: Mapping[str, Any], *blobs: bytes) -> None:
        self._outbox.put((event, blobs))
        if event["kind"] not in OUTCOMES or (save := self._saves.get(event["seq"])) is None:
            return
        lasting = event["kind"] in ARRIVED and self._tier_runs[event["tier"]].tier.traits.persistent
        if save.told(event["tier"], lasting=lasting):
            self._let_go(event["seq"])  # the trainer hears of its slabs after that, and knows then why they come back

    def _send_all(self) -> None:
        while (one := self._outbox.get()) is not None:
            if self.alive:
                try:
                    self._link.send(*one)
                except (ConnectionLost, OSError) as error:
                    log.info("run %s: process %d takes no events: %s", self.run, self.pid, error)
                    self._link.shut()

    def _forward(self, event: Event) -> None:
        if event.tier == MEMORY:
            return
        if self.alive:
            self._tell({"kind": "event", "event": event.encode()})
        elif self._event_log is not None:  # otherwise the trainer logs it
            self._event_log.event(event)
            self._event_log.close()

    def _slab_is_back(self, offset: int) -> None:
        if not self._given_up:  # else the trainer publishes what is in it
            self._tell({"kind": "back", "offset": offset})

    def _slab_is_kept(self, offset: int) -> None:
        self._tell({"kind": "kept", "offset": offset})

    # What is received

    def _take(self, message: Message) -> bool:
        """Take one message. Returns whether it was the last one."""
        for descriptor in message.descriptors:
            os.close(descriptor)
        takes: Callable[[Message], object] | None = getattr(self, f"_on_{message.kind}", None)
        if takes is None:
            raise FormatError(f"a message of unknown kind {message.kind!r:.40}")
        if message.kind in JOURNALED:
            seq = None if message.kind == "withdraw" else message.head.get("seq")
            self._journal.note(None if seq is None else int(seq), message.head, message.blobs)
        if not self._spoiled or message.head.get("seq") not in self._spoiled:
            takes(message)
        return message.kind in ("bye", "leave")

    def _on_bye(self, message: Message) -> None:
        """The trainer has closed its Checkpointer."""
        self._bye = True

    def _on_leave(self, message: Message) -> None:
        """The trainer lives, and goes on without this agent."""
        self._given_up = True

    def _on_ping(self, message: Message) -> None:
        self._tell({"kind": "pong"})

    def _on_begin(self, message: Message) -> None:
        head, blobs = Head.decode(message.head["head"]), iter(message.blobs)
        if message.head.get("structure"):
            self._structure = Version.decode(memoryview(next(blobs)))
        if self._structure is None:
            raise FormatError("a save without leaves")
        if message.head.get("order") == "new":
            self._order = tuple(map(str, json.loads(next(blobs))))
        if message.head.get("order") and self._member is not None:
            self._member.sort(head.seq, self._order)
        self._pipeline.required = [str(name) for name in message.head["required"]]
        stages = next(blobs) if message.head.get("stages") else None
        self._note_begin(head.seq, message.head, stages)
        structure = self._structure.again(head, self._structure.digests)
        names, total = [str(name) for name in message.head["tiers"]], structure.nbytes
        if self._replays:
            names = [name for name in names if not self._tier_runs[name].has(head)]
        if self._has_room(total):
            names.insert(0, MEMORY)
        else:
            self._tier_runs[MEMORY].withdraw(head.seq, f"{MEMORY}: there is no room for this version", left_out=True)
        self._saves = {n: save for n, save in self._saves.items() if save.hold or not save.save_state.settled()}
        leaf_stages = None if stages is None else np.frombuffer(stages, "i8")
        save = self._saves[head.seq] = self._pipeline.receive(head, structure, leaf_stages, names, total)
        save.hold = MEMORY in names
        for name in [name for name, outcome in save.save_state.tiers.items() if outcome.done()]:
            save.told(name, lasting=False)  # it was left out, or failed, before this save could be found

    def _note_begin(self, seq: int, said: Mapping[str, Any], stages: bytearray | None) -> None:
        """Write the beginning of a save to the journal, with all that earlier ones have told."""
        assert self._structure is not None
        head, blobs = {**said, "seq": seq, "structure": True}, list[Any]([self._structure.data])
        if said.get("order"):
            head["order"] = "new"
            blobs.append(json.dumps(self._order).encode())
        self._journal.note(seq, head, blobs if stages is None else [*blobs, stages])

    def _let_go(self, seq: int) -> None:
        """A save is durable, and in all tiers that nothing could be copied to, or the trainer does not want it back:
        neither this process nor the next one has to keep its slabs."""
        if (save := self._saves.get(seq)) is not None:
            save.let_go()
            self._journal.durable(seq)

    def _has_room(self, nbytes: int) -> bool:
        """Make room in memory for a save, if need be by dropping the run's versions that are there: the newest last."""
        memory, queue = self._agent.memory, self._pipeline.queues.get(MEMORY)
        if memory.make_room(nbytes):
            return True
        if nbytes > memory.capacity or queue is None or queue.outstanding():
            return False
        queue.retire(room_for_one=True)
        if memory.make_room(nbytes):
            return True
        if self._member is not None:
            return False
        if self._drop_oldest(nbytes):
            return True
        drop_run(memory.tier, self.run)
        self._tier_runs[MEMORY].look_again()
        return memory.make_room(nbytes)

    def _drop_oldest(self, nbytes: int) -> bool:
        """Drop, one after the other, versions that no persistent tier has taken yet, as long as there is no room."""
        memory, tier_run = self._agent.memory, self._tier_runs[MEMORY]
        pinned = dict(self._pipeline.pinned(MEMORY))
        while pinned and not memory.make_room(nbytes):
            del pinned[min(pinned)]
            tier_run.retire(pinned, room_for_one=True)
        return memory.make_room(nbytes)

    def _save(self, message: Message) -> IncomingSave:
        try:
            return self._saves[int(message.head["seq"])]
        except KeyError:
            raise FormatError(f"version {message.head.get('seq')} was not begun") from None

    def _on_slab(self, message: Message) -> None:
        save = self._save(message)
        rows, at, nbytes = (np.frombuffer(blob, "i8") for blob in message.blobs[:3])
        digests = _digests(message.blobs[3])
        if not len(rows) == len(at) == len(nbytes) == len(digests) or _outside(at, nbytes, self._slabs.slab_size):
            raise FormatError("chunks that do not lie in their slab")
        slab = self._slabs.take(int(message.head["offset"]))
        if self._replays and not self._is_exact(slab, at, nbytes, digests):
            slab.release()
            self._spoiled.add(save.save_state.head.seq)
            save.lost(CaptureError("the agent was killed, and the trainer has used a slab of this save again"))
            return
        if save.hold:
            self._slab_is_kept(slab.offset)
        save.slab(SlabChunks(slab, rows, at, nbytes, digests))

    def _is_exact(self, slab: SharedSlab, at: Array, nbytes: Array, digests: Array) -> bool:
        """Whether a slab still has these chunks."""
        spans = zip(at.tolist(), nbytes.tolist(), digest_list(digests), strict=True)
        return all(self._digest(slab.buffer[start : start + n]) == digest for start, n, digest in spans)

    def _on_unchanged(self, message: Message) -> None:
        self._save(message).unchanged(np.frombuffer(message.blobs[0], "i8"), _digests(message.blobs[1]))

    def _on_captured(self, message: Message) -> None:
        save = self._save(message)
        digests, columns = _digests(message.blobs[0]), message.blobs[1:]
        statistics = ChunkStatistics.of_blobs(columns, len(digests)) if columns else None
        version = save.captured(str(message.head["parent"]), digests, statistics)
        self._tell({"kind": "captured", "seq": version.head.seq, "id": version.id})

    def _on_failed(self, message: Message) -> None:
        self._save(message).lost(decode_error(message.head["error"]))

    def _on_continue(self, message: Message) -> None:
        self._pipeline.continue_from(str(message.head["version"]))

    def _on_settled(self, message: Message) -> None:
        """The trainer does not want this save back."""
        self._let_go(int(message.head["seq"]))

    def _on_withdraw(self, message: Message) -> None:
        """The trainer gives nothing to a version that other ranks save."""
        names, why = message.head.get("tiers"), decode_error(message.head["error"])
        for name, tier_run in self._tier_runs.items():
            if names is None or name in (MEMORY, *names):
                tier_run.withdraw(int(message.head["seq"]), why, left_out=bool(message.head["left_out"]))

    def _on_hurry(self, message: Message) -> None:
        self._pipeline.ending = True
        self._pipeline.hurry(time.monotonic() + float(message.head["seconds"]))

    def _on_hold(self, message: Message) -> None:
        self._pipeline.hold(int(message.head["seq"]), end=bool(message.head.get("end")))

    def _on_ask(self, message: Message) -> None:
        answers: dict[str, Callable[[Message], tuple[Any, tuple[bytes, ...]]]] = {
            "needless": self._needless,
            "stats": lambda m: (self._stats(str(m.head["tier"])), ()),
            "pinned": lambda m: (list(self._pipeline.pinned(str(m.head["tier"])).items()), ()),
            "coming": lambda m: (sorted(self._pipeline.coming(str(m.head["tier"]))), ()),
            "unfinished": lambda _: (self._pipeline.under_way(), ()),
            "left_behind": lambda _: (self._pipeline.left_behind(), ()),
            "give_up": lambda _: (self._give_up(), ()),
        }
        number = message.head["number"]
        try:
            answer, blobs = answers[str(message.head["what"])](message)
        except TierstateError as error:
            self._tell({"kind": "answer", "number": number, "error": encode_error(error)})
        else:
            self._tell({"kind": "answer", "number": number, "answer": answer}, *blobs)

    def _give_up(self) -> bool:
        """Publish nothing more: all ranks do it in their own processes."""
        self._given_up = True
        self._pipeline.stop()
        return True

    def _needless(self, message: Message) -> tuple[Any, tuple[bytes, ...]]:
        found = self._save(message).needless(_digests(message.blobs[0]))
        return len(found), (np.packbits(found).tobytes(),)

    def _stats(self, name: str) -> dict[str, Any]:
        tier_run = self._tier_runs[name]
        found = TierStats.of(self._pipeline.queues.get(name)).measured(tier_run.tier)
        encoded = asdict(found)
        encoded["hung"], encoded["held"] = tier_run.tier.trouble, list(found.held.items())
        return encoded

    def status(self) -> dict[str, Any]:
        """For `tierstate agent status`."""
        return {
            "run": self.run,
            "pid": self.pid,
            "trainer": "alive" if self.alive else "gone",
            "since": self._begun,
            "held": self._slabs.held,
            "under_way": self._pipeline.under_way(),
        }


def _digests(blob: bytearray) -> Array:
    if len(blob) % 16:
        raise FormatError("half a digest is left over")
    return np.frombuffer(blob, "<u8").reshape(-1, 2)


def _outside(at: Array, nbytes: Array, slab_size: int) -> bool:
    return bool(len(at)) and bool((at < 0).any() or (nbytes < 0).any() or ((at + nbytes) > slab_size).any())


def _with_keeps(policy: Policy, keeps: Mapping[str, Any]) -> Policy:
    """The policy with the retention that the trainer's Checkpointer has, which a framework's adapter may have set."""
    tiers = tuple(
        tier.model_copy(update={"keep": KeepKeys.model_validate(keeps[tier.name])}) if tier.name in keeps else tier
        for tier in policy.tiers
    )
    return policy.model_copy(update={"tiers": tiers})
