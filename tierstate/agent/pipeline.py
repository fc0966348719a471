"""The save pipeline of a trainer that has an agent, as the only rank: with an agent, or without while there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.publish import Job
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.publish.tier_queue import TierQueue
from tierstate.engine.save.pipeline import SavePipeline
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import PolicyError, TierstateError
from tierstate.manifest.format.version import Head
from tierstate.tiers.base import layer_of
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .handing import BackgroundStart, HandingPipeline
from .handover import HandOver
from .memory_tier import HandedMemory
from .messages import ConnectionLost
from .received import slower_tiers

log = logging.getLogger("tierstate")


STARTS = 3
"""How often an agent is started, if each has ended before it was used."""


class AgentPipeline(HandingPipeline):
    """Saves by way of the host's agent, or in this process where there is none.

    Args:
        policy: the tiers, the rules, and ``agent``.
        run: the name of the run.
        tier_runs: the run in each tier, for saves in this process.
        arena: slabs in shared memory.

    Raises:
        PolicyError: the policy says ``agent: {mode: required}`` and cannot be handed to another process.
        TierstateError: it says so, and no agent can be had.
    """

    def __init__(self, policy: Policy, run: str, tier_runs: Sequence[TierRun], arena: Arena) -> None:
        super().__init__(policy, tier_runs, arena)
        self._begin_agent(run)
        self._agent_start = BackgroundStart(self._ensure_agent)
        self._connect_or_start(wait=policy.agent.mode == "required")

    def _connect_or_start(self, *, wait: bool = False) -> None:
        """Connect to the agent, if it is there; else start one.

        Args:
            wait: return when there is one, and raise if there cannot be; training that has begun never waits.
        """
        if wait:
            self._connect_again()
            return
        try:
            self._connect()
        except ConnectionLost:
            self._agent_start.begin()
        except TierstateError as error:
            self._agent_start.put_off()
            log.warning("saves are published by this process, since the agent refuses it: %s", error)

    def _connect_again(self) -> None:
        """Connect; start an agent where there is none, and another one where that has ended just then, as by `tierstate
        agent stop`.

        Raises: as `_connect` and `_ensure_agent`.
        """
        for _ in range(STARTS):
            with suppress(ConnectionLost):
                return self._connect()
            self._ensure_agent()
        self._connect()

    def _look_for_agent(self) -> None:
        """Between two saves: hand the next ones over, if an agent is there by now and nothing is under way here."""
        if self._link is None and self._is_quiet() and self._agent_start.has_started():
            self._agent_start.put_off()
            self._connect_or_start()

    def submit(self, plan: CapturePlan, head: Head) -> SaveState:
        self._look_for_agent()
        return super().submit(plan, head)

    def _on_lost(self) -> None:
        """Publish in this process what the agent had, and had not made durable."""
        with self._changing:
            link, self._link = self._link, None
            if link is None:
                return
            self._drop_memory()
            self._agent_start.put_off()
            handed = [h for _, h in sorted(self._handed.items()) if not h.save_state.settled()]
            self._handed.clear()
            try:
                if (handed or self.queues) and not self._stopped:
                    self._begin_here(self._first_after(handed))
            finally:
                for handover in handed:
                    self._publish_here(handover, partial(self._jobs_left, handover))
                link.release_orphans()

    def _first_after(self, handed: Sequence[HandOver]) -> int:
        """The number from which versions are of this process's queues: all before are looked for in faster tiers."""
        return handed[0].seq if handed else self._seq + 1

    def _jobs_left(self, handover: HandOver) -> list[tuple[TierQueue, Job]]:
        """The jobs for the tiers that lack a save: copies from a faster tier that has it, or else from its slabs."""
        save_state, plan = handover.save_state, handover.plan
        self._find_committed(handover)
        names = [name for name in save_state.tiers if not save_state.tiers[name].done()]
        lasting = [n for n, s in self._tier_runs.items() if s.tier.traits.persistent and n in save_state.tiers]
        copied = slower_tiers(list(self._tier_runs), [name for name in lasting if save_state.done(name)])
        due, anew = PendingVersion.of(save_state), [n for n in names if n not in copied]
        jobs = self._jobs(save_state, plan, anew, self._routes.of(plan.leaves), plan.stages) if anew else []
        return [*jobs, *((self.queues[n], self._cascade.copy(n, due, save_state)) for n in names if n in copied)]

    def _find_committed(self, handover: HandOver) -> None:
        """What the agent has committed in its last moment, without telling."""
        save_state, version = handover.save_state, handover.version
        for name, done in save_state.tiers.items():
            if version is None or done.done():
                continue
            try:
                if self._tier_runs[name].record(version.head.seq).version.id == version.id:
                    self._settle("committed", name, save_state, {})
            except TierstateError as error:
                log.debug("%s: version %d: %s", name, version.head.seq, error)


def pipeline_of(policy: Policy, run: str, tier_runs: Sequence[TierRun], arena: Arena) -> SavePipeline:
    """The pipeline that a policy asks for: with an agent or without.

    Raises:
        PolicyError, TierstateError: as `AgentPipeline`.
    """
    if policy.agent.mode == "off":
        return SavePipeline(policy, tier_runs, arena)
    why = agent_refusal(tier_runs)
    try:
        if why:
            raise PolicyError(why)
        return AgentPipeline(policy, run, tier_runs, arena)
    except TierstateError as error:
        if policy.agent.mode == "required":
            raise
        log.warning("saves are published by this process, without an agent: %s", error)
        return SavePipeline(policy, tier_runs, arena)


def agent_refusal(tier_runs: Sequence[TierRun]) -> str:
    """Why these tiers cannot be an agent's; empty if they can."""
    for tier_run in tier_runs:
        if tier_run.gpu is not None:
            return f"tiers.{tier_run.name}: an agent cannot keep what lies in this process's device memory"
        if tier_run.tier.traits.shared == "process" and layer_of(tier_run.tier, HandedMemory) is None:
            return f"tiers.{tier_run.name}: an agent cannot show this process what is in a tier of its own process"
    return ""
