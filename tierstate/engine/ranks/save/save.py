"""Save by many ranks together: the save pipeline of one rank, which makes the same decisions as those of all ranks.

All ranks compare their policies, agree on the next version number, and make the same decision on which tiers are due.
Each rank then saves its part of a version through a `SharedTierRun`, which commits it by two-phase commit.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

from tierstate.engine.capture.plan import CapturePlan
from tierstate.engine.placement import LastSave, Route, due_tiers
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.publish.backlog import PendingVersion
from tierstate.engine.publish.save_state import SaveState
from tierstate.engine.ranks.team.team import Team
from tierstate.engine.save.pipeline import SavePipeline
from tierstate.engine.store.run_in_tier import Stop, TierRun
from tierstate.manifest.errors import PolicyError, RankFailed, StateMismatch, TierstateError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head
from tierstate.manifest.history.log import Log, next_seq
from tierstate.manifest.history.retention import RetentionDecision, RetentionPolicy
from tierstate.manifest.sharded.part import part_of
from tierstate.tiers.base import Tier
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.places import check_places
from tierstate.tiers.policy.models import AutoEvery, format_every
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.trace import span

from .commit import GroupCommit
from .leader import MergedVersions

log = logging.getLogger("tierstate")


SEQS_KEPT = 4096
"""Numbers of committed versions that a rank keeps in memory if another rank does the retention for it."""


class StartState(NamedTuple):
    """What the tiers hold when the team starts.

    Attributes:
        seq: the number after which the team's versions are numbered: no lower than the highest that any rank finds in
            any tier, nor than what any rank's clock says.
        last: by tier, step and time of the newest version that any rank finds in it; None if there is none.
    """

    seq: int
    last: dict[str, LastSave | None]


def compare_policies(team: Team, policy: Policy, *, preemption: bool) -> None:
    """Check that the policies of all ranks agree, before any tier is opened; waits for all ranks.

    Args:
        preemption: whether this rank watches for signals, by its policy or by what its program says.

    Raises:
        PolicyError: they differ, so that some ranks would wait for messages that others never post; on every rank.
        RankFailed: a rank does not answer.
    """
    mine: dict[str, Any] = {"chunk": policy.chunk, "digest": policy.digest, "agent": policy.agent.mode}
    # Not the keys: their files may be elsewhere on other hosts, and each tier says of which keys it is.
    mine |= {"seal": policy.seal is not None, "preemption": preemption}
    mine |= {"tiers": [f"{tier.name}: every {tier.every}{_bound(tier)}{_secrecy(tier)}" for tier in policy.tiers]}
    mine |= {"rules": [f"{rule.match}: {rule.tiers}, lossy {rule.lossy}" for rule in policy.rules]}
    first, *others = (json.loads(said) for said in team.gather("policy", json.dumps(mine).encode()))
    for rank, theirs in enumerate(others, 1):
        if differ := [key for key in first if theirs.get(key) != first[key]]:
            told = "; ".join(f"{key} {theirs.get(key)!r:.400} where rank 0 has {first[key]!r:.400}" for key in differ)
            raise PolicyError(f"the policy of rank {rank} is not that of rank 0: {told}; right is the same for all")


def _bound(tier: TierPolicy) -> str:
    return "" if tier.max_lag is None else f", {tier.max_lag!r}"


def _secrecy(tier: TierPolicy) -> str:
    return ", encrypted" if tier.encrypt else ""


def _by_time(tier: TierPolicy) -> bool:
    """Whether clocks decide if a tier is due."""
    timed = tier.max_lag is not None and tier.max_lag.seconds is not None
    return isinstance(tier.every, (timedelta, AutoEvery)) or (timed and tier.every is not None)


def agree_on_start(team: Team, tier_runs: Sequence[TierRun], highest: Callable[[TierRun], int]) -> StartState:
    """Agree with all ranks on the number before the next version's, and on what each tier has; waits for all ranks.

    Args:
        highest: the highest number in use in a tier, as this rank sees it.

    Raises:
        RankFailed: a rank does not answer.
        PolicyError: for some rank two tiers lie in one place; or other ranks share a tier otherwise than for rank 0.
    """
    refused = _same_place(tier_runs)
    seen = {tier_run.name: _newest(tier_run) for tier_run in tier_runs}
    shared = {tier_run.name: tier_run.tier.traits.shared for tier_run in tier_runs}
    mine = {"seq": next_seq(max(map(highest, tier_runs), default=0)) - 1, "newest": seen}
    mine |= {"refused": refused, "shared": shared}
    every = [json.loads(said) for said in team.gather("opening", json.dumps(mine).encode())]
    if refusals := [f"rank {rank}: {said['refused']}" for rank, said in enumerate(every) if said["refused"]]:
        raise PolicyError(refusals[0])
    _check_shared([said["shared"] for said in every])
    newest: dict[str, list[float]] = {name: max((said["newest"][name] for said in every), default=[]) for name in seen}
    last = {name: (int(found[1]), float(found[2])) if found else None for name, found in newest.items()}
    return StartState(max(int(said["seq"]) for said in every), last)


_SHARED_BY = {"process": "no other rank", "host": "the ranks of one host", "site": "all ranks"}


def _check_shared(every: Sequence[Mapping[str, str]]) -> None:
    """Raise PolicyError if a tier is not shared by the same ranks for all: some would wait for messages that others
    never post."""
    for rank, shared in enumerate(every):
        for name, found in shared.items():
            if found != (right := every[0][name]):
                raise PolicyError(
                    f"tiers.{name}: on rank {rank} it is shared by {_SHARED_BY[found]}, and on rank 0 by "
                    f"{_SHARED_BY[right]}; right is one type of tier for all ranks"
                )


def _same_place(tier_runs: Sequence[TierRun]) -> str:
    """Why these tiers cannot be used together; empty if nothing was found."""
    try:
        check_places([tier_run.tier for tier_run in tier_runs])
    except PolicyError as error:
        return str(error)
    return ""


def _newest(tier_run: TierRun) -> list[float]:
    """Number, step and time of the newest version; empty if there is none."""
    try:
        newest = tier_run.newest()
    except TierstateError as error:
        log.warning("%s: its log cannot be read: %s", tier_run.name, error)
        return []
    head = newest.version.head if newest else None
    return [head.seq, head.step, head.time] if head else []


class SharedCadence:
    """Decides which tiers are due, the same on all ranks.

    If every cadence counts steps, each rank computes it. If one counts time, the coordinator decides and posts it,
    since clocks differ.

    Args:
        team: the ranks.
        policy: the cadences (``every``).
        last: by tier, step and time of its last save.
    """

    def __init__(self, team: Team, policy: Policy, last: Mapping[str, LastSave | None]) -> None:
        self._team, self._policy, self._last = team, policy, dict(last)
        self._timed = any(map(_by_time, policy.tiers))
        self._latest: tuple[int, tuple[str, ...]] = (-1, ())
        self.intervals: Callable[[], Mapping[str, timedelta]] = dict

    def of(self, seq: int, step: int, time: float, also: Sequence[str] = ()) -> tuple[str, ...]:
        """The tiers to which a save goes. For the cadence the save counts, even if it fails later.

        Args:
            also: tiers to which it goes in any case, the same on all ranks.

        Raises:
            RankFailed: the coordinator does not answer.
        """
        if self._latest[0] != seq:
            names = self._decide(seq, step, time, also)
            self._last |= dict.fromkeys(names, (step, time))
            self._latest = seq, names
        return self._latest[1]

    def known(self, seq: int) -> tuple[str, ...] | None:
        """What `of` returned for a save, if that was the last call; else None."""
        return self._latest[1] if self._latest[0] == seq else None

    def missed(self, seq: int) -> tuple[str, ...] | None:
        """As `known`, for a save in which this rank takes no part. The coordinator posts all tiers as due then, so that
        no rank waits for its decision.

        Raises:
            RankFailed: it could not be posted.
        """
        if self._latest[0] != seq and self._timed and self._team.coordinator:
            self._latest = seq, tuple(tier.name for tier in self._policy.tiers)
            self._team.post(due_key(seq), json.dumps(self._latest[1]).encode())
        return self.known(seq)

    def _decide(self, seq: int, step: int, time: float, also: Sequence[str]) -> tuple[str, ...]:
        if self._timed and not self._team.coordinator:
            named = set(json.loads(self._team.receive(0, due_key(seq))))
            return tuple(tier.name for tier in self._policy.tiers if tier.name in named)
        due = {*due_tiers(self._policy, step, self._last, time, self.intervals()), *also}
        names = tuple(tier.name for tier in self._policy.tiers if tier.name in due)
        if self._timed:
            self._team.post(due_key(seq), json.dumps(names).encode())
        return names


def due_key(seq: int) -> str:
    """The key under which the coordinator posts the tiers that are due."""
    return f"due/{seq}"


def head_for(team: Team, head: Head) -> Head:
    """The head of this rank's part of a version: with the number of ranks."""
    return Head(**{**head.encode(), "world": team.size})


class SharedTierRun(TierRun):
    """One run in one tier, on one rank of a team. It commits together with all other ranks.

    Args:
        team: the ranks.
        merged: the merged versions, shared by the commits to all tiers.
        tier, run, keep, rules: as for `TierRun`.
    """

    together = True

    def __init__(
        self,
        team: Team,
        merged: MergedVersions,
        tier: Tier,
        run: str,
        keep: RetentionPolicy | None = None,
        rules: Mapping[str, RetentionPolicy] = MappingProxyType({}),
    ) -> None:
        super().__init__(tier, run, keep, rules)
        shared = tier.traits.shared
        self.rank, self.leads = team.rank, team.leads(shared)
        self.whole = len(team.ranks_sharing(shared)) == team.size
        self.alone = self.whole and team.coordinator
        self.identity.leads = self.leads
        self._merged, self._coordinator = merged, team.coordinator
        self._group_commit = GroupCommit(team, tier.name, tier, _Checked(self), merged)
        self._team = team
        self._there: dict[int, None] = {}
        self._asked = -1
        self._withdrawn: dict[int, None] = {}
        self._speaking = threading.Lock()
        self._cut: tuple[Record, Record] | None = None

    def forsaken(self) -> bool:
        return self._team.has_dead()

    @property
    def earlier(self) -> Record | None:
        newest = self.newest()
        if newest is None:
            return None
        if self._cut is None or self._cut[0] is not newest:
            self._cut = newest, part_of(newest, self.rank)
        return self._cut[1]

    def cut(self, record: Record) -> Record:
        if self._coordinator:
            self._merged.learn(record.version)  # so that slower tiers get the same version
        return part_of(record, self.rank)

    def publish(self, record: Record, stop: Stop | None = None) -> str:
        """Commit this rank's part of a version, together with all ranks; without ``stop``, commit a whole record alone.

        Returns: as `TierRun.publish`.

        Raises:
            RankFailed: another rank gave no part, so the version is not committed.
            CommitUnknown: the version may be committed or not.
            TierstateError: as `TierRun.publish`.
        """
        seq = record.version.head.seq
        if stop is None:
            return super().publish(record)
        with self._speaking:
            if seq in self._withdrawn:  # a vote after the withdrawal would wait for a decision of its own
                raise RankFailed(f"this rank gives nothing to version {seq}", (self.rank,))
            self._asked = seq
        self.before_commit()
        with span("commit with all ranks", tier=self.name, step=record.version.head.step, rank=self.rank):
            kept = self._group_commit.commit(record, stop)
        self.build_on(kept)
        for key in self._group_commit.unnamed:
            self.distrust(key)  # retention deletes it, since no record names it
        _note(self._there, seq)
        if not self.leads:
            return ""
        self.retention.add(kept)
        return kept.version.id

    def withdraw(self, seq: int, why: BaseException | str, *, left_out: bool = False) -> None:
        with self._speaking:
            if seq == self._asked or seq in self._withdrawn:
                return  # it has voted already
            _note(self._withdrawn, seq)
        error = RankFailed(why) if isinstance(why, str) else why
        try:
            self._group_commit.withdraw(seq, error, left_out=left_out)
        except TierstateError as second:
            log.debug("%s: that nothing comes of version %d could not be told: %s", self.name, seq, second)

    @property
    def known(self) -> Collection[int]:
        return super().known if self.leads else self._there.keys()

    def retire(
        self,
        in_use: Collection[int] = (),
        *,
        room_for_one: bool = False,
        seen: Collection[int] | None = None,
        progress: Progress = no_progress,
    ) -> RetentionDecision:
        """As `TierRun.retire`, by one rank for all ranks that see the same objects; the other ranks delete nothing."""
        if not self.leads:
            return RetentionDecision({}, ())
        return super().retire(in_use, room_for_one=room_for_one, seen=seen, progress=progress)


class _Checked(Log):
    """The log as `GroupCommit` uses it: a record is created only if what it builds on still exists."""

    def __init__(self, tier_run: TierRun) -> None:
        super().__init__(tier_run.tier, tier_run.run)
        self._tier_run = tier_run

    def commit(self, record: Record, generation: int = 0) -> None:
        self._tier_run.create(record)


def _note(seqs: dict[int, None], seq: int) -> None:
    seqs[seq] = None
    if len(seqs) > SEQS_KEPT:
        del seqs[next(iter(seqs))]


class RankParts(NamedTuple):
    """Of what the save pipeline of one rank is made.

    Attributes:
        team: the ranks; all of them create their pipelines together.
        merged: the merged versions, shared by the commits to all tiers.
        policy, tier_runs, arena: as for `SavePipeline`.
        mismatched: called with the number of a version whose parts did not fit together.
    """

    team: Team
    merged: MergedVersions
    policy: Policy
    tier_runs: Sequence[TierRun]
    arena: Arena
    mismatched: Callable[[int], None]


class SharedPipeline(SavePipeline):
    """The save pipeline of one rank's part of each save. Version numbers and due tiers are the same on all ranks.

    Args:
        parts: of what it is made.
        start: what the tiers hold, if all ranks know it; by default they agree on it.

    Raises:
        RankFailed: a rank does not answer.
    """

    def __init__(self, parts: RankParts, start: StartState | None = None) -> None:
        super().__init__(parts.policy, parts.tier_runs, parts.arena)
        self._team, self._merged, self._mismatched = parts.team, parts.merged, parts.mismatched
        self.rank = parts.team.rank
        agreed = start or agree_on_start(parts.team, parts.tier_runs, self._highest)
        self._seq, self._look = agreed.seq, False
        self._found, self._dues = agreed.last, SharedCadence(parts.team, parts.policy, agreed.last)
        self._dues.intervals = self._intervals

    def _after(self, highest: int) -> int:
        return highest + 1  # no clock: all ranks must get the same number without asking each other

    def prepare(self, seq: int) -> None:
        """Called on all ranks before a save is planned. May wait for all; if it raises, this rank votes no."""

    def _check_rules(self, leaves: Sequence[Leaf]) -> None:
        """Nothing: this rank has not got all leaves; `arrived` looks at those of the first version."""

    def arrived(self, name: str, due: PendingVersion) -> None:
        super().arrived(name, due)
        if not self._team.coordinator or self._rules_checked:
            return
        try:
            newest = self._tier_runs[name].newest()
        except TierstateError as error:
            log.debug("%s: whether all rules match a leaf is looked at later: %s", name, error)
            return
        if newest is not None:
            super()._check_rules(newest.version.leaves)

    def _last_of(self, name: str) -> LastSave | None:
        return self._found.get(name)

    def continue_from(self, version: str) -> None:
        super().continue_from(version)
        latest = self._history.latest()  # in an agent, which gives no numbers, this is all that is known
        self._merged.continue_from(version, max(self._seq, 0 if latest is None else latest.seq))

    def submit(self, plan: CapturePlan, head: Head) -> SaveState:
        """As `SavePipeline.submit`. If it fails or skips the save, this rank votes no, so that no rank waits for it."""
        if plan.order is not None:
            self._merged.sort(head.seq, plan.order)
        try:
            save_state = super().submit(plan, head_for(self._team, head))
        except BaseException as error:
            self.withdraw(head.seq, error, self._missed(head.seq))
            raise
        if save_state.skipped:
            why = f"rank {self.rank} skipped the save of step {head.step}: its arena was full (on_full: skip)"
            self.withdraw(head.seq, why, tuple(save_state.tiers), left_out=True)
        return save_state

    def withdraw(
        self, seq: int, why: BaseException | str, names: Sequence[str] | None = None, *, left_out: bool = False
    ) -> None:
        """Vote no: this rank gives no part to a version.

        Args:
            seq: the version's number.
            why: the reason.
            names: of the tiers; by default all.
            left_out: this rank skips the save, which is not a failure.
        """
        for name, tier_run in self._tier_runs.items():
            if names is None or name in names:
                tier_run.withdraw(seq, why, left_out=left_out)

    def miss(self, seq: int, step: int | None, time: float, why: BaseException) -> None:
        """Vote no for a save that this rank could not plan. For the cadence the save counts, as on all other ranks.

        Args:
            seq: the version's number.
            step: the step; None if the given step is not valid.
            time: seconds since 1970.
            why: the error.
        """
        names = self._missed(seq) if step is None else None
        if step is not None:
            try:
                names = self._dues.of(seq, step, time, self._last_resort())
            except RankFailed as error:
                log.debug("which tiers save %d goes to is not known: %s", seq, error)
        self.withdraw(seq, why, names)
        self._start(seq)  # as `submit` does: at the first save others wait for the markers that this rank creates

    def bring_newest(self) -> None:
        """Copy the newest version to the nearest persistent tier, together with all ranks, if it went to none.

        All ranks call this after the same save, before `close`. What a rank alone finds whole in a faster tier, `hurry`
        has brought.
        """
        names = self._dues.known(self._seq) or ()
        lasting = [name for name, tier_run in self._tier_runs.items() if tier_run.tier.traits.persistent]
        if not lasting or not self.queues or not set(names).isdisjoint(lasting):
            return
        first, sources = lasting[0], self._cascade.sources(lasting[0], names)
        if not sources or any(tier_run.whole for tier_run in sources):
            return
        save_state = self._saves.find(self._seq)
        if save_state is None:
            self.withdraw(self._seq, f"rank {self.rank} has no part of this version", (first,))
            return
        save_state.goes_also(first)
        due = PendingVersion.of(save_state)
        self.queues[first].put(self._cascade.copy(first, due, save_state, [tier_run.name for tier_run in sources]))

    def _missed(self, seq: int) -> Sequence[str] | None:
        try:
            return self._dues.missed(seq)
        except RankFailed as error:
            log.debug("which tiers save %d goes to could not be said: %s", seq, error)
            return None

    def tell_lost(self, before: int) -> None:
        """Raise the error of a save before this version that reached no persistent tier.

        The ranks learn of it at different times, so `submit` does not raise it: a rank must not miss a save that the
        other ranks make.
        """
        super()._tell_lost(before)

    def _tell_lost(self, before: int) -> None:
        pass

    def _due(self, head: Head, routes: Mapping[str, Route]) -> tuple[list[str], dict[str, str]]:
        # A tier for which this rank has no leaf is due all the same: other ranks may have leaves for it.
        names = list(self._dues.of(head.seq, head.step, head.time, self._last_resort()))
        others = [tier for tier in self._policy.tiers if tier.name not in names]
        return names, {tier.name: f"its `every: {format_every(tier.every)}` is not due" for tier in others}

    def failed(self, name: str, save_state: SaveState, error: BaseException) -> None:
        self._settled(name, save_state.head.seq)
        # A failed save counts for the cadence and keeps its number, since the ranks learn of it at different times.
        if isinstance(error, StateMismatch):
            self._mismatched(save_state.head.seq)

    def brought(self, name: str, due: PendingVersion) -> None:
        self._saves.brought(name, due.seq)
