"""Together: what a Checkpointer does otherwise where it is one of several ranks that save one state."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tierstate.manifest.errors import RankFailed
from tierstate.manifest.retention import Keep
from tierstate.tiers.agreeing import compare
from tierstate.tiers.arena import Arena
from tierstate.tiers.base import Tier
from tierstate.tiers.heartbeat import Terms
from tierstate.tiers.joint import JointFlow
from tierstate.tiers.minutes import Minutes
from tierstate.tiers.policy import Policy
from tierstate.tiers.ranked import RankedShelf
from tierstate.tiers.shelf import Shelf
from tierstate.tiers.team import Team

from .planning import checked_step
from .sharing_out import SharingOut

log = logging.getLogger("tierstate")

PARTING = 5.0
"""Seconds for which the coordinator waits for the others as it closes. All have voted on all by then; what they are yet
to hear may be lost with its process."""


def joined(process_group: Any, run: str, policy: Policy) -> Together | None:
    """This rank's place among those that save together; None where it saves alone.

    Raises:
        RankFailed: not all ranks came.
        PolicyError: their policies differ.
    """
    if isinstance(process_group, Team):
        team = process_group
        if team.size == 1:
            return None
    elif process_group is None or torch.distributed.get_world_size(process_group) == 1:
        return None
    else:
        team = Team.of(process_group, run, terms=Terms(policy.ranks.timeout, policy.ranks.silence))
    together = Together(team)
    try:
        compare(team, policy)
    except BaseException:
        together.close()
        raise
    return together


class Together:
    """One rank of a team.

    Args:
        team: the ranks.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self._minutes = Minutes()
        self._sharing: SharingOut | None = None
        self._flow: JointFlow | None = None

    def shelf(self, tier: Tier, run: str, keep: Keep, rules: Mapping[str, Keep]) -> Shelf:
        """A run in a tier that was just opened."""
        tier.meet(self.team)
        return RankedShelf(self.team, self._minutes, tier, run, keep, rules)

    def begin(self, policy: Policy, shelves: Sequence[Shelf], arena: Arena) -> tuple[JointFlow, SharingOut]:
        """Begin alike on all ranks; waits for them.

        Raises:
            RankFailed: one does not answer.
        """
        sharing = SharingOut(self.team)
        self._sharing = sharing
        self._flow = JointFlow(self.team, self._minutes, policy, shelves, arena, sharing.forget)
        return self._flow, sharing

    @contextmanager
    def taking_part(self, seq: int, step: Any) -> Iterator[None]:
        """The block plans a save. Where that fails, the other ranks are told, so that they need not wait for this."""
        assert self._flow is not None
        assert self._sharing is not None
        try:
            checked_step(step)
            yield
        except BaseException as error:
            self._sharing.absent(seq)
            self._flow.miss(seq, step if type(step) is int and step >= 0 else None, time.time(), error)
            raise

    def tell_lost(self) -> None:
        """Raise what an earlier save that reached no persistent tier met, after this one is on its way."""
        assert self._flow is not None
        self._flow.tell_lost()

    def close(self) -> None:
        """Leave the team, the coordinator as the last."""
        if self._sharing is not None:
            self._sharing.close()
        try:
            self.team.say("closing", b"")
            if self.team.coordinator and self._sharing is not None:
                self.team.hear_all(dict.fromkeys(range(1, self.team.size), "closing"), timeout=PARTING)
        except RankFailed as error:
            log.debug("left before all others: %s", error)
        finally:
            self.team.close()
