"""Many ranks whose saves go by way of agents: each rank hands its part to the agent of its host.

The agents of all ranks commit together, as the ranks would without them; so a version is committed though all trainers
have died, if all parts were captured. If one rank loses its agent, all ranks go on without: each keeps what it captures
until all know of it, and then all do the same with each version.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeAlias

from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.publish import Job
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.engine.ranks.save.leader import remove_record
from tierstate.engine.ranks.save.save import RankParts, SharedPipeline
from tierstate.engine.ranks.team.team import Stop, Team, never
from tierstate.manifest.errors import PolicyError, RankFailed, TierstateError, TierUnavailable, error_text
from tierstate.tiers.base import RankGroup
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.connections.secret import JobSecret

from .handing import BackgroundStart, HandingPipeline
from .handover import AgentLink, HandOver
from .launch import greet
from .messages import encode_error
from .pipeline import agent_refusal
from .received import slower_tiers
from .teams import Place, TeamGreeting

log = logging.getLogger("tierstate")


LOST = "agent-lost"
"""What a rank announces, and under which all ranks then agree; with the number of losses before."""


LOOK_EVERY = 4
"""Saves, at least, between the loss of agents and a look for new ones, and between two looks. All ranks look before the
same save, and wait for each other there."""


LOOKS = 100.0
"""Looks per second, of all ranks, for the loss of another rank's agent; a rank looks once a second at most."""


LOOK_TIMEOUT = 120.0
"""Seconds for which ranks wait for each other before such a save; then they look no more."""


GONE = "agents were lost, and not all ranks have their part of this version any more"
"""Why a version fails that cannot be published without agents."""


RECENT = 64
"""Saves of which a rank knows what became of them."""


Outcome: TypeAlias = Literal["committed", "failed", "redo", "copy"]
"""What is done with a version in a tier after agents were lost: all ranks publish their parts once more, or copy them
from a tier that has it."""


class StoppableTeam(RankGroup):
    """A team for tiers that meet, whose waiting ends when this returns True."""

    def __init__(self, team: Team, stop: Callable[[], bool]) -> None:
        self._team, self._stop = team, stop

    @property
    def rank(self) -> int:
        return self._team.rank

    @property
    def size(self) -> int:
        return self._team.size

    @property
    def hosts(self) -> Sequence[int]:
        return self._team.hosts

    @property
    def secret(self) -> JobSecret:
        return self._team.secret

    def leads(self, shared: Literal["process", "host", "site"]) -> bool:
        return self._team.leads(shared)

    def gather(self, topic: str, data: bytes) -> Sequence[bytes]:
        return self._team.gather(topic, data, stop=self._stop)


class SharedAgentPipeline(HandingPipeline, SharedPipeline):
    """The save pipeline of one rank's part of each save, which goes by way of an agent.

    Args:
        parts: as for `SharedPipeline`.
        run: the name of the run.

    Raises:
        RankFailed: a rank does not answer.
        TierstateError: the policy says ``agent: {mode: required}``, and some rank has no agent; on every rank.
    """

    def __init__(self, parts: RankParts, *, run: str) -> None:
        SharedPipeline.__init__(self, parts)
        self._recent: dict[int, SaveState] = {}
        self._latest = self._at_loss = self._seq
        self._losses, self._look_at = 0, math.inf
        self._agent_start = BackgroundStart(self._ensure_agent)
        self._kept_back: list[Callable[[], None]] = []
        self._doubtful: list[tuple[str, SaveState, Mapping[str, Any]]] = []
        try:
            self._run_name = run
            self._find_agents()
        except RankFailed:
            raise
        except TierstateError as error:
            if parts.policy.agent.mode == "required":
                raise
            log.warning("all ranks publish their saves themselves, without agents: %s", error)

    # The agents

    def _find_agents(self) -> None:
        """Begin a session with the agent of this host, and find whether all ranks have one.

        Raises:
            RankFailed: a rank does not answer.
            TierstateError: some rank has none. Whatever is raised, this rank has left its agent.
        """
        team = self._team
        first = team.leads("host")
        self._by_all("agent-refused", self._prepare)
        with ExitStack() as undo:
            undo.callback(self._leave_agent)
            self._by_all("agent-there", lambda: self._ensure_agent() if first else None)
            with ExitStack() as asked:
                places = self._by_all("agent-store", lambda: self._ask_for_store(asked) if team.coordinator else None)
                self._by_all("agent-joined", lambda: self._join(places[0]))
            self._by_all("agent-watched", self._start_watch)
            undo.pop_all()

    def _start_watch(self) -> None:
        if (link := self._link) is not None:
            watch = threading.Thread(target=self._watch_others, args=(link,), name="tierstate-agents", daemon=True)
            start_thread(watch)

    def _by_all(self, topic: str, call: Callable[[], Any]) -> list[Any]:
        """What this returns on all ranks, by rank; if it fails on one, an error on all."""

        def called() -> Any:
            try:
                return call()
            except TierstateError:
                raise
            except Exception as error:
                raise TierUnavailable(f"no agent can be had: {error!r}") from error

        return self._answers(topic, called, lambda rank, why: PolicyError(f"rank {rank} has no agent: {why}"))

    def _answers(
        self, topic: str, call: Callable[[], Any], failed: Callable[[int, str], TierstateError], stop: Stop = never
    ) -> list[Any]:
        """What this returns on all ranks, by rank.

        Args:
            failed: makes the error where it fails on another rank, from that one's number and why.
            stop: ends the waiting for the others.
        """
        said: dict[str, Any] = {}
        mine: Exception | None = None
        try:
            said["value"] = call()
        except Exception as error:  # any error: the other ranks wait for an answer
            mine, said["error"] = error, error_text(error)
        every = [json.loads(one) for one in self._team.gather(topic, json.dumps(said).encode(), stop=stop)]
        if mine is not None:
            raise mine
        for rank, one in enumerate(every):
            if "error" in one:
                raise failed(rank, one["error"])
        return [one["value"] for one in every]

    def _prepare(self) -> None:
        self._begin_agent(self._run_name)
        if why := agent_refusal(list(self._tier_runs.values())):
            raise PolicyError(why)

    # New agents

    def prepare(self, seq: int) -> None:
        """After agents were lost: hand this save and the next ones over, if all ranks find that agents are there again
        and that nothing is under way in their processes."""
        while self._holding is not None and seq >= self._at_loss + LOOK_EVERY and not self._stopped:
            time.sleep(0.01)  # until it is known before which save all ranks look
        if self._link is not None or seq < self._look_at:
            return
        ready = self._is_quiet() and (not self._team.leads("host") or self._agent_start.has_started())
        mine = {"seq": seq, "ready": ready}
        try:
            text = json.dumps(mine).encode()
            said = self._team.gather("agents-again", text, LOOK_TIMEOUT, stop=lambda: self._stopped)
            every = [json.loads(one) for one in said]
            self._look_at = max(one["seq"] for one in every) + LOOK_EVERY
            if all(one == {"seq": seq, "ready": True} for one in every):
                self._find_agents()
                self._look_at = math.inf
        except TierstateError as error:
            if isinstance(error, RankFailed):
                self._look_at = math.inf
            log.warning("all ranks go on without agents: %s", error)

    def _ask_for_store(self, asked: ExitStack) -> Any:
        """Let the agent make the store of the agents' team. Returns where it is.

        Args:
            asked: ends when all sessions use it.
        """
        link, answer = greet(self._path, {"kind": "team", "hosts": len(set(self._team.hosts))})
        asked.callback(link.close)
        return answer.head["place"]

    def _join(self, place: Sequence[Any]) -> None:
        """Begin the session of this rank. The agents of all ranks wait for each other where tiers have to meet."""
        greeting = TeamGreeting.of(self._team, Place.decode(place))
        self._connect(self._team.timeouts.timeout, team=greeting._asdict())

    def _leave_agent(self) -> None:
        with self._changing:
            link, self._link = self._link, None
        self._drop_memory()
        if link is not None:
            link.leave()

    def _watch_others(self, link: AgentLink) -> None:
        """Notice that another rank has lost its agent."""
        pause = max(1.0, self._team.size / LOOKS)
        while not link.over.wait(pause):
            doubtful = list(self._doubtful)  # of before the look
            try:
                if self._is_announced():
                    link.give_up("another rank has lost its agent")
                else:
                    self._believe(doubtful)
            except Exception as error:  # no memory, say: a save that nothing tells of would be waited for without end
                log.exception("what became of saves in agents cannot be told")
                link.give_up(error_text(error))

    def _is_announced(self) -> bool:
        try:
            return self._team.announced(self._loss)
        except RankFailed:
            return False  # no other rank can be heard any more: what the agent tells is all there is

    def _settle(self, kind: str, name: str, save_state: SaveState, head: Mapping[str, Any]) -> None:
        """A failure is doubted first: another rank may have said that it goes on without its agent, and so made it."""
        if kind == "failed":
            self._doubtful.append((name, save_state, head))
        else:
            super()._settle(kind, name, save_state, head)

    def _believe(self, doubtful: Sequence[tuple[str, SaveState, Mapping[str, Any]]]) -> None:
        with self._changing:
            for one in [one for one in doubtful if one in self._doubtful]:  # none, if the agent was lost since
                self._doubtful.remove(one)
                super()._settle("failed", *one)

    def brought(self, name: str, due: PendingVersion) -> None:
        """What is brought had failed for all ranks. Only the one that brings it hears of it, so a failure that it still
        doubts counts at once: else it would tell of a save that has arrived, and the others of one that has failed."""
        with self._changing:
            self._believe([one for one in self._doubtful if (one[0], one[1].head.seq) == (name, due.seq)])
        super().brought(name, due)

    # Saves

    def bring_newest(self) -> None:
        """Nothing where agents have it: they keep it in memory, and outlive this process."""
        if not self._hands_over:
            super().bring_newest()

    def continue_from(self, version: str) -> None:
        super().continue_from(version)
        with self._changing:
            if self._link is not None:
                self._link.send({"kind": "continue", "version": version})

    def _note_sent(self, save_state: SaveState) -> None:
        super()._note_sent(save_state)
        with self._changing:
            self._latest = max(self._latest, save_state.head.seq)
            self._recent[save_state.head.seq] = save_state
            for old in list(self._recent)[:-RECENT]:
                del self._recent[old]

    def withdraw(
        self, seq: int, why: BaseException | str, names: Sequence[str] | None = None, *, left_out: bool = False
    ) -> None:
        with self._changing:
            self._latest = max(self._latest, seq)
            error = RankFailed(why) if isinstance(why, str) else why
            told = {"kind": "withdraw", "seq": seq, "error": encode_error(error), "left_out": left_out}
            if self._link is not None:
                self._link.send(told | {"tiers": None if names is None else list(names)})
            elif self._holding is not None:
                self._kept_back.append(lambda: SharedPipeline.withdraw(self, seq, why, names, left_out=left_out))
            else:
                super().withdraw(seq, why, names, left_out=left_out)

    # The loss of an agent

    def _on_lost(self) -> None:
        with self._changing:
            if (link := self._link) is None:
                return
            self._holding, self._link, self._at_loss = link, None, self._seq
            self._agent_start.put_off()
            self._doubtful.clear()
            self._drop_memory()
        try:
            self._team.announce(self._loss)
            self._meet_again()
            outcomes, again = self._agree()
            with self._changing:
                if not self._stopped:
                    self._begin_here(again)
                self._carry_out_all(outcomes, None)
        except BaseException as error:
            log.exception("saves that the agents had cannot be published")
            with self._changing:
                if not self._stopped and not self.queues:
                    self._begin_here(self._latest + 1)
                self._carry_out_all({}, error)
        finally:
            self._holding = None
            link.release_orphans()

    @property
    def _loss(self) -> str:
        return f"{LOST}/{self._losses}"

    def _meet_again(self) -> None:
        """Let the tiers of all ranks meet: with the agents, the keepers of peer memory may be gone.

        Raises:
            RankFailed: a rank does not answer.
        """
        group = StoppableTeam(self._team, lambda: self._stopped)
        for name, tier_run in self._tier_runs.items():
            try:
                tier_run.tier.meet(group)
            except RankFailed:
                raise
            except Exception as error:  # any error: the other ranks go on, and wait for what this one has
                log.warning("%s: saves go on without it: %s", name, error)

    def _agree(self) -> tuple[dict[int, dict[str, Outcome]], int]:
        """Agree with all ranks on what becomes of each version that is not in all its tiers.

        Returns:
            The outcomes, and the number of the first version that this process publishes.

        Raises:
            RankFailed: a rank does not answer, or cannot tell what it has.
        """

        def failed(rank: int, why: str) -> RankFailed:
            return RankFailed(f"rank {rank} cannot tell what it has of the saves that agents had: {why}")

        every = self._answers(self._loss, self._what_is_here, failed, lambda: self._stopped)
        mine = every[self._team.rank]["saves"]
        leaders = {name: self._team.leaders(s.tier.traits.shared) for name, s in self._tier_runs.items()}
        lasting = [name for name, s in self._tier_runs.items() if s.tier.traits.persistent]
        outcomes = decide(every, leaders, lasting)
        self._remove_partial(mine, outcomes)
        self._look_at, self._losses = max(one["begun"] for one in every) + LOOK_EVERY, self._losses + 1
        again = [seq for seq, tiers in outcomes.items() if set(tiers.values()) & {"redo", "copy"}]
        return outcomes, min(again, default=max(one["latest"] for one in every) + 1)

    def _what_is_here(self) -> dict[str, Any]:
        """What this rank tells the others after a loss; see `decide`."""
        with self._changing:
            latest, saves = self._latest, dict(self._recent)
        mine = {str(seq): self._states(save_state) for seq, save_state in saves.items()}
        # No rank has got as far as the save before which all look: also not by one that is just planned, or that no
        # tier gets.
        return {"latest": latest, "begun": self._seq, "saves": mine}

    def _carry_out_all(self, outcomes: Mapping[int, Mapping[str, Outcome]], error: BaseException | None) -> None:
        """Do with everything that this rank holds what was agreed; called with the lock, after which nothing is held.

        Args:
            error: why nothing was agreed.
        """
        while self._handed:
            seq = min(self._handed)
            handover = self._handed.pop(seq)
            anew: dict[str, Outcome] = dict.fromkeys(handover.save_state.tiers, "redo")
            if not self._publish_here(handover, partial(self._jobs_of, handover, outcomes.get(seq, anew), error)):
                SharedPipeline.withdraw(self, seq, error or RankFailed("this rank could not publish its part again"))
        for seq, tiers in outcomes.items():
            if failed := [name for name, outcome in tiers.items() if outcome == "failed"]:
                # Also of versions that this rank, or another one, has still to save.
                SharedPipeline.withdraw(self, seq, RankFailed(GONE), failed)
        for withdraw in self._kept_back:
            withdraw()
        self._kept_back.clear()
        self._holding = None

    def _states(self, save_state: SaveState) -> dict[str, str]:
        """By tier: ``done``, ``failed``, ``gone`` (this rank could not publish its part again), ``record`` (this rank
        leads, and there is a record of it), or ``open``."""
        handover, found = self._handed.get(save_state.head.seq), {}
        for name, outcome in save_state.tiers.items():
            if outcome.done():
                found[name] = "done" if save_state.done(name) else "failed"
            elif self._tier_runs[name].leads and self._has_record(name, save_state):
                found[name] = "record"
            else:
                found[name] = "open" if handover is not None and handover.is_whole else "gone"
        return found

    def _has_record(self, name: str, save_state: SaveState) -> bool:
        tier_run = self._tier_runs[name]
        tier_run.look_again()
        return tier_run.has(save_state.head)

    def _remove_partial(
        self, mine: Mapping[str, Mapping[str, str]], outcomes: Mapping[int, Mapping[str, Outcome]]
    ) -> None:
        """Delete the records that this rank's agent has created of versions that not all hosts have."""
        for seq, tiers in outcomes.items():
            for name, outcome in tiers.items():
                if outcome != "committed" and mine.get(str(seq), {}).get(name) == "record":
                    self._remove_record(name, seq)

    def _remove_record(self, name: str, seq: int) -> None:
        tier_run = self._tier_runs[name]
        try:
            remove_record(tier_run.log, tier_run.record(seq), RankFailed("not all hosts have this version"))
        except TierstateError as error:
            log.warning("%s: the record of version %d, which not all hosts have, stays: %s", name, seq, error)
        tier_run.look_again()

    def _jobs_of(
        self, handover: HandOver, outcomes: Mapping[str, Outcome], error: BaseException | None
    ) -> list[tuple[TierQueue, Job]]:
        """The jobs for the tiers that lack a version, after the outcomes that need none have been told.

        Raises:
            BaseException: ``error``, if a tier lacks it.
        """
        save_state, plan = handover.save_state, handover.plan
        due = PendingVersion.of(save_state)
        copies, again = list[str](), list[str]()
        for name in [name for name, outcome in save_state.tiers.items() if not outcome.done()]:
            outcome = outcomes.get(name, "failed")
            if error is not None:
                whole = self._tier_runs[name].whole  # then a record is that of all ranks
                outcome = "committed" if whole and self._has_record(name, save_state) else "redo"
            if outcome == "committed":
                super()._settle("committed", name, save_state, {})
            elif error is not None:
                raise error
            elif outcome == "failed":
                self.failed(name, save_state, RankFailed(GONE))
                save_state.failed(name, RankFailed(GONE))
            else:
                (again if outcome == "redo" else copies).append(name)
        jobs = self._jobs(save_state, plan, again, self._routes.of(plan.leaves), plan.stages) if again else []
        return [*jobs, *((self.queues[name], self._cascade.copy(name, due, save_state)) for name in copies)]


def decide(
    every: Sequence[Mapping[str, Any]], leaders: Mapping[str, Collection[int]], lasting: Sequence[str]
) -> dict[int, dict[str, Outcome]]:
    """What becomes of the versions that agents had; computed alike on all ranks.

    Args:
        every: by rank, the number of its ``latest`` save, and for the latest of its ``saves``, by number, its states
            (`SharedAgentPipeline._states`).
        leaders: by tier, fastest first, the ranks that create its records.
        lasting: the tiers that are persistent.
    """
    found: dict[int, dict[str, Outcome]] = {}
    for seq in sorted({int(seq) for one in every for seq in one["saves"]}):
        tiers = {name: None for one in every for name in one["saves"].get(str(seq), ())}
        states = {
            name: [
                "later" if seq > one["latest"] else one["saves"].get(str(seq), {}).get(name, "gone") for one in every
            ]
            for name in tiers
        }
        there = {
            name for name, said in states.items()
            if "done" in said or all(said[rank] == "record" for rank in leaders[name])
        }  # fmt: skip
        copied = slower_tiers(list(leaders), there & set(lasting))
        found[seq] = {name: _outcome(states[name], name in there, name in copied) for name in tiers}
    return found


def _outcome(states: Sequence[str], there: bool, copied: bool) -> Outcome:
    if there:
        return "committed"
    if "failed" in states:
        return "failed"
    if copied:
        return "copy"
    return "failed" if "gone" in states else "redo"


def shared_pipeline_of(parts: RankParts, *, run: str) -> SharedPipeline:
    """The pipeline of one of several ranks that a policy asks for: with an agent or without. All ranks call it.

    Raises:
        RankFailed, TierstateError: as `SharedAgentPipeline`.
    """
    return SharedPipeline(parts) if parts.policy.agent.mode == "off" else SharedAgentPipeline(parts, run=run)
