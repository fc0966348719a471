"""Join a team: how the `Checkpointer` of one of several ranks opens, plans saves and closes together with the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tierstate.engine.ranks.team.heartbeat import Timeouts
from tierstate.engine.ranks.team.team import Team
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.arguments import as_step, short_repr
from tierstate.manifest.errors import RankFailed
from tierstate.manifest.history.retention import RetentionPolicy
from tierstate.manifest.sharded.state_order import StateOrder
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .leader import MergedVersions
from .ownership import OwnershipPlanner
from .relay import VersionRelay
from .save import RankParts, SharedPipeline, SharedTierRun, compare_policies

log = logging.getLogger("tierstate")


P = TypeVar("P", bound=SharedPipeline)


CLOSE_TIMEOUT = 5.0
"""Seconds that the closing coordinator waits for the others. They have voted on everything by then, but may not have
received the last decisions, which may be lost with the coordinator's process (if it serves the store)."""


def join_team(process_group: Any, run: str, policy: Policy, *, preemption: bool) -> TeamMember | None:
    """This rank as a member of the team that saves together; None where the rank saves alone.

    Args:
        preemption: whether this rank watches for signals that announce its end.

    Raises:
        RankFailed: not all ranks came in time.
        PolicyError: their policies differ, or they have no secret by which they know each other.
        TypeError: it is no process group.
    """
    if size_of(process_group) == 1:
        return None
    if isinstance(process_group, Team):
        team = process_group
    else:
        timeouts = Timeouts(policy.ranks.timeout, policy.ranks.silence)
        team = Team.of(process_group, run, timeouts=timeouts, trust=policy.ranks.trust)
    together = TeamMember(team)
    try:
        compare_policies(team, policy, preemption=preemption)
    except BaseException:
        together.close()
        raise
    return together


def size_of(process_group: Any) -> int:
    """The number of ranks of a process group or a `Team`; 1 for None, negative if this process is not in the group.

    Raises:
        TypeError: it is none of these.
    """
    if process_group is None:
        return 1
    if isinstance(process_group, Team):
        return process_group.size
    dist = torch.distributed
    if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
        if dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return -1
        raise TypeError(
            f"process group {short_repr(process_group)}: give a group of torch.distributed, as group.WORLD of it, or "
            "mesh.get_group() of a mesh with one dimension; or None, and this process saves alone"
        )
    return dist.get_world_size(process_group)


class TeamMember:
    """One rank of a team, for its `Checkpointer`.

    Args:
        team: the ranks.
        patience: seconds for which the coordinator waits at `close` until the others have left.
    """

    def __init__(self, team: Team, patience: float = CLOSE_TIMEOUT) -> None:
        self.team, self._patience = team, patience
        self._merged = MergedVersions()
        if team.has_secret:
            self._merged.relay = VersionRelay(team, self._merged.wait_for)
        self._sharing: OwnershipPlanner | None = None
        self._pipeline: SharedPipeline | None = None

    def tier_run(self, tier: Tier, run: str, keep: RetentionPolicy, rules: Mapping[str, RetentionPolicy]) -> TierRun:
        """The run in a tier that was just opened; the tier learns of the team, too."""
        tier.meet(self.team)
        return SharedTierRun(self.team, self._merged, tier, run, keep, rules)

    def begin(
        self, policy: Policy, tier_runs: Sequence[TierRun], arena: Arena, make: Callable[[RankParts], P]
    ) -> tuple[P, OwnershipPlanner]:
        """Make the pipeline and the ownership planner of this rank; waits for all ranks.

        Args:
            make: makes the pipeline.

        Raises:
            RankFailed: a rank does not answer.
        """
        sharing = OwnershipPlanner(self.team)
        self._sharing = sharing
        pipeline = make(RankParts(self.team, self._merged, policy, tier_runs, arena, sharing.forget))
        self._pipeline = pipeline
        return pipeline, sharing

    def sort(self, seq: int, order: StateOrder) -> None:
        """Say in which order the leaves of a version are, that is to be merged; see `MergedVersions.sort`."""
        self._merged.sort(seq, order)

    @contextmanager
    def taking_part(self, seq: int, step: Any, *, planned: bool = False) -> Iterator[None]:
        """The block plans a save. If it raises, this rank votes no, so that the other ranks do not wait for it.

        Args:
            planned: no rank asks who saves what, so that none waits for this rank's answer.
        """
        assert self._pipeline is not None
        assert self._sharing is not None
        known = None
        try:
            self._pipeline.prepare(seq)  # first: all ranks come to it
            known = as_step(step)
            yield
        except BaseException as error:
            if not planned:
                self._sharing.absent(seq)
            self._pipeline.miss(seq, known, time.time(), error)
            raise

    def tell_lost(self, before: int) -> None:
        """Raise the error of a save before this version that reached no persistent tier; called when this version's
        save is submitted."""
        assert self._pipeline is not None
        self._pipeline.tell_lost(before)

    def close(self) -> None:
        """Leave the team. The coordinator waits for the other ranks, so it leaves last."""
        if self._sharing is not None:
            self._sharing.close()
        try:
            self.team.post("closing", b"")
            if self.team.coordinator and self._sharing is not None:
                self.team.receive_all(dict.fromkeys(range(1, self.team.size), "closing"), timeout=self._patience)
        except RankFailed as error:
            log.debug("left before all others: %s", error)
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the team at once."""
        if self._merged.relay is not None:
            self._merged.relay.close()
        self.team.close()
