"""What one rank writes in a DCP save: its items as a capture plan, and on the coordinator the list values of all ranks.

DCP's planner gives each list item to some rank, and only whoever has all items of a list can save it as one value. So
ranks that save together send their list values to the coordinator, as messages of their team.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import RankFailed, format_ranks
from tierstate.manifest.format.leaf_path import Path
from tierstate.manifest.sharded.state_order import state_order
from tierstate.providers.values.encoding import decode_value, encode_value

from .leaves import LeafTables, PickleAllowed, RankValues, list_leaves, paths_of, values_of

FAILED = b""
"""The message of a rank that cannot give its values."""


class PeerFailed(RankFailed):
    """Another rank has failed while it planned its part. DCP tells all ranks of that rank's own error."""


class PlanMaker:
    """Makes the capture plans of one rank from its DCP plans.

    Args:
        allowed: whether an object that is not a plain value may be pickled, by path.
        team: the ranks that save together; None: this process saves alone.
    """

    def __init__(self, allowed: PickleAllowed, team: Team | None) -> None:
        self._allowed, self._team = allowed, team
        self._tables = LeafTables()
        self._posted: list[str] = []

    def plan(self, seq: int, plan: SavePlan, planner: SavePlanner) -> CapturePlan:
        """The capture plan of this rank.

        Args:
            seq: the version's number, the same on all ranks.
            plan: the rank's final DCP save plan.
            planner: DCP's planner.

        Raises:
            CaptureError: a value cannot be saved; the message names its key, type and a remedy.
            PeerFailed: another rank cannot save one of its values.
            RankFailed: another rank did not answer.
        """
        keys = list(plan.planner_data or [item.index.fqn for item in plan.items])
        order = state_order(paths_of(plan.planner_data, keys))
        if self._team is None:
            mine = values_of(plan, planner, self._allowed)
            return self._tables.plan([*mine.leaves, *list_leaves(mine.listed, mine.split)], order)
        if not self._team.coordinator:
            return self._tables.plan(self._sent(self._team, seq, plan, planner).leaves)
        mine = values_of(plan, planner, self._allowed)
        listed, split, whole = self._received(self._team, seq, mine)
        order = tuple(dict.fromkeys((*order, *state_order(whole))))  # what this rank does not have itself comes last
        return replace(self._tables.plan([*mine.leaves, *list_leaves(listed, split)]), order=order)

    def _sent(self, team: Team, seq: int, plan: SavePlan, planner: SavePlanner) -> RankValues:
        """What this rank saves, once its list values are sent to the coordinator."""
        key = _key(seq)
        try:
            mine = values_of(plan, planner, self._allowed)
            said = encode_value(([*mine.listed.items()], [*mine.split], mine.whole))
        except BaseException:
            team.post(key, FAILED)
            raise
        # Messages before this one were received: the coordinator has ended those saves.
        team.forget(self._posted)
        self._posted = [key]
        team.post(key, said)
        return mine

    @staticmethod
    def _received(team: Team, seq: int, mine: RankValues) -> tuple[Mapping[Path, Any], set[Path], list[Path]]:
        """The list values of all ranks, the lists that are split, and the containers of other ranks that are not."""
        told = team.receive_all(dict.fromkeys(range(1, team.size), _key(seq)))
        if failed := [rank for rank, said in told.items() if said == FAILED]:
            raise PeerFailed(f"{format_ranks(failed)} cannot save what it has", failed)
        listed, split, whole = dict(mine.listed), set(mine.split), list[Path]()
        for said in told.values():
            items, lists, containers = decode_value(said)
            listed |= items
            split |= _as_set(lists)
            whole += map(tuple, containers)
        return listed, split, whole


def _as_set(paths: Iterable[Path]) -> set[Path]:
    return {tuple(path) for path in paths}


def _key(seq: int) -> str:
    return f"lists/{seq}"
