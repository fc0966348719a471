"""The attempt: one version restored by all ranks, each what it wants of it, or by none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from tierstate.manifest import columns as col
from tierstate.manifest.columns import Array
from tierstate.manifest.errors import Damaged, RankFailed, StateMismatch, TierstateError
from tierstate.providers.target import Target, plan_restore
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Entry
from tierstate.tiers.exchange import Exchange, draw_up
from tierstate.tiers.leasing import Moved
from tierstate.tiers.offers import WANTED, Offer
from tierstate.tiers.rowsets import mask_of, pack, runs_in, unpack
from tierstate.tiers.wires import Door

from .agreement import Accord, named_ranks
from .delivery import Delivery
from .filling import land
from .finding import Dropped, Wanted, check_still_there, name_of

ROUNDS = 4
"""How often chunks are read that did not come: those that one rank cannot read, others try."""

WHAT = "what another rank wants"


class NotWhole(Exception):
    """A version of which some ranks cannot have all that they want; raised on all ranks alike.

    Args:
        text: which ranks lack what.
        ranks: those ranks.
        own: what this rank met.

    Attributes:
        begun: whether anything was read before that was known.
    """

    def __init__(self, text: str, ranks: Sequence[int], own: Damaged | None, *, begun: bool) -> None:
        super().__init__(text)
        self.begun, self._ranks, self._own = begun, ranks, own

    def told(self, rank: int) -> TierstateError:
        """The error for the user of one rank."""
        if self.begun and rank not in self._ranks:
            return RankFailed(str(self), self._ranks)
        return self._own or Damaged(str(self))


class Attempt:
    """One version, tried by all ranks.

    Args:
        accord: asks all ranks.
        entry: the version, and what this rank has of it.
        wanted: what this rank wants of it.
        arena: the memory that bytes pass through.

    Attributes:
        begun: whether bytes may have been loaded.
    """

    def __init__(self, accord: Accord, entry: Entry, wanted: Wanted, arena: Arena) -> None:
        self._accord, self._entry, self._wanted, self._arena = accord, entry, wanted, arena
        self._team, self._version = accord.team, entry.version
        self._target: Target | None = None
        self._delivery: Delivery | None = None
        self._door: Door | None = None
        self.begun = False

    def restore(self) -> Any:
        """The restored state.

        Raises:
            NotWhole: some ranks cannot have all that they want.
            StateMismatch: the version does not fit some state.
            RankFailed: another rank failed.
        """
        hosts, nbytes = self._team.hosts, self._version.chunk_nbytes
        for number in range(ROUNDS + 1):
            with ExitStack() as opened:
                offers, doors = self._ask(opened)
                wanted = np.flatnonzero(np.logical_or.reduce([mask_of(o.wants, len(nbytes)) for o in offers]))
                if not len(wanted):
                    return self._finish()
                plan = draw_up(offers, hosts, nbytes, self._team.rank, apart=number > 0)
                if plan.lacking or number == ROUNDS:
                    break
                self.begun = True
                assert self._delivery is not None
                assert self._door is not None
                self._delivery.exchange(plan, wanted, self._door, doors)
        raise self._not_whole(offers, plan)

    def _plan(self) -> Delivery:
        """What this rank wants; decided once."""
        wanted = self._wanted
        self._target = plan_restore(
            self._version.leaves,
            into=wanted.into,
            only=wanted.only,
            device=wanted.device,
            allow_pickle=wanted.allow_pickle,
            allow_lossy=wanted.allow_lossy,
            elsewhere=True,
            rank=self._team.rank,
        )
        return Delivery(self._accord, self._entry, land(self._version, self._target), self._arena)

    def _ask(self, opened: ExitStack) -> tuple[list[Offer], list[str]]:
        """What all ranks want still and what they reach, and where they take chunks."""
        rows, leaves = len(self._version.digests), len(self._version.leaves)
        offers, doors, nowhere = [], [], np.ones(leaves, bool)
        for said in self._accord.ask("offer", lambda: self._offer(opened)):
            head, columns = col.decode(memoryview(said), WHAT)
            sets = [unpack(_column(columns, f"rows.{i}"), rows) for i in range(WANTED + 1)]
            offers.append(Offer(sets[WANTED], (sets[0], sets[1], sets[2], sets[3])))
            doors.append(col.field(head, "door", str, WHAT))
            nowhere &= mask_of(unpack(_column(columns, "elsewhere"), leaves), leaves)
        self._check_wanted(np.flatnonzero(nowhere).tolist())
        return offers, doors

    def _offer(self, opened: ExitStack) -> bytes:
        # Here, where the others hear of it if it fails.
        door = self._door = opened.enter_context(closing(Door(len(set(self._team.hosts)))))
        delivery = self._delivery = self._delivery or self._plan()
        assert self._target is not None
        if delivery.failure is not None:
            raise delivery.failure
        self.check_still_there(delivery.damage)
        elsewhere = np.isin(np.arange(len(self._version.leaves)), list(self._target.elsewhere))
        sets = {f"rows.{i}": mask for i, mask in enumerate([*delivery.reach, delivery.missing])}
        columns = {name: pack(runs_in(mask)) for name, mask in {**sets, "elsewhere": elsewhere}.items()}
        return col.encode({"door": door.address}, {name: np.frombuffer(d, "<u1") for name, d in columns.items()})

    def _check_wanted(self, nowhere: Sequence[int]) -> None:
        """Raises StateMismatch on all ranks where leaves of the version are in none of their states."""
        if nowhere:
            names = [self._version.leaves[i].name for i in nowhere[:20]]
            more = f"\n  and {len(nowhere) - 20} more" if len(nowhere) > 20 else ""
            raise StateMismatch(
                f"{name_of(self._entry)} has leaves that are missing in the states of all ranks; name what is to be "
                "restored by `only`:\n  " + "\n  ".join(names) + more
            )

    def check_still_there(self, damage: Damaged | None) -> None:
        """Raises Moved where it is no wonder that chunks could not be read."""
        if damage is not None:
            try:
                check_still_there(self._entry, damage)
            except Dropped as error:
                raise Moved(str(error)) if self._wanted.newest else error from error

    def _not_whole(self, offers: Sequence[Offer], plan: Exchange) -> NotWhole:
        found = plan.lacking or {rank: _rows(offer.wants) for rank, offer in enumerate(offers) if len(offer.wants)}
        told = "; ".join(self._lacks(rank, rows) for rank, rows in list(found.items())[:8])
        more = f"; and {len(found) - 8} more ranks" if len(found) > 8 else ""
        gone = f"; {self._entry.thinned}" if self._entry.thinned else ""
        text = f"{name_of(self._entry)} is not whole for {named_ranks(list(found))}, in no tier of any rank: {told}"
        own = self._delivery.damage if self._delivery is not None else None
        return NotWhole(text + more + gone, list(found), own, begun=self.begun)

    def _lacks(self, rank: int, rows: Array) -> str:
        leaves = np.unique(self._version.chunk_leaf[rows])
        return f"rank {rank} lacks {len(leaves)} leaves, {self._version.leaves[int(leaves[0])].name} the first"

    def _finish(self) -> Any:
        found = []

        def finish() -> bytes:
            assert self._target is not None
            found.append(self._target.finish())
            return b""

        self._accord.ask("finish", finish)
        return found[0]


def _rows(runs: Array) -> Array:
    return np.concatenate([np.arange(start, stop) for start, stop in runs.tolist()])


def _column(columns: col.Columns, name: str) -> bytes:
    return col.column(columns, name, "<u1", WHAT).tobytes()
