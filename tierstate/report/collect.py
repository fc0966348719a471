"""Collects what a report says of runs from their records, events and policy; changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from tierstate.checkpointer import Checkpointer, open_quietly
from tierstate.engine.events import Event
from tierstate.engine.info import VersionInfo
from tierstate.engine.maintain.prune import PruneRun
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.format.leaf import Leaf
from tierstate.manifest.history.retention import RetentionDecision, format_duration
from tierstate.manifest.printable import escape_controls, escape_json
from tierstate.pause_gc import gc_paused
from tierstate.tiers.policy.models import KeepKeys
from tierstate.tiers.policy.policy import Policy, TierPolicy
from tierstate.tiers.policy.yaml import KeyPath

from .data import (
    NEWEST,
    POINTS,
    STATES,
    Happening,
    KeptVersion,
    PolicyLine,
    RankReport,
    ReasonCount,
    ReportData,
    RunReport,
    TierReport,
    TierRetention,
    VersionRow,
)
from .history import Groups, TierColumns, exposures, history_of
from .layers import layer_map
from .policy_lines import policy_lines

log = logging.getLogger("tierstate")


TOLD = (
    *("failed", "owed", "brought", "left_out", "skipped", "mended", "away", "back", "restored"),
    *("alarm", "arena_full", "rank_silent", "rank_late"),
)
"""Kinds of events that are listed one by one."""


MAX_REASONS = 50
"""Reasons of retention that are counted, at most; further ones are left off."""


MAX_METADATA = 200
"""Characters of a version's metadata that are shown."""


def collect_runs(policy: Policy | str | os.PathLike[str], runs: Sequence[str]) -> ReportData:
    """What a report says of some runs of a policy, one after the other.

    Raises:
        TierstateError: a run cannot be opened.
    """
    found = []
    for run in runs:
        with closing(open_quietly(policy, run)) as ckpt:
            found.append(collect_run(ckpt))
    return report_of(found)


def report_of(runs: Sequence[RunReport]) -> ReportData:
    """A report of runs, made now."""
    return ReportData(time.time(), importlib.metadata.version("tierstate"), runs)


def collect_run(run: Checkpointer) -> RunReport:
    """What a report says of one run."""
    with gc_paused():  # it makes many small objects, and none of them is garbage
        return _Collection(run).report()


class _Collection:
    """Everything that is read of one run."""

    def __init__(self, run: Checkpointer) -> None:
        self.run, self.policy = run, run.policy
        self.problems: list[str] = []
        self.versions = run.versions()
        self.events = self._events()
        self.known = [version for version in self.versions if version.id]
        self.history = history_of(self.versions, self.events, [tier.name for tier in self.policy.tiers])
        self.groups = Groups(len(self.history.seq), POINTS)
        self.counts: dict[str, Counter[str]] = {}
        for event in self.events:
            self.counts.setdefault(event.tier, Counter())[event.kind] += 1
        self.hung = {name: tier.hung for name, tier in run.stats().tiers.items()}

    def _events(self) -> list[Event]:
        try:
            return self.run.events()
        except TierstateError as error:
            self.problems.append(escape_controls(f"events cannot be read: {error}"))
            return []

    def report(self) -> RunReport:
        """The report of the run."""
        newest = self.known[-1] if self.known else None
        told = [event for event in self.events if event.kind in TOLD]
        tiers, retention = [self._tier(tier) for tier in self.policy.tiers], self._retention()
        kinds = Counter(event.kind for event in self.events)
        return RunReport(
            run=self.run.run,
            durable=self.policy.durable,
            versions=len(self.versions),
            known=len(self.history.seq),
            events=len(self.events),
            saves=kinds["saved"],
            skipped=kinds["skipped"],
            restores=kinds["restored"],
            failures=kinds["failed"],
            newest=newest.step if newest else None,
            newest_time=newest.time if newest else None,
            oldest_time=self.known[0].time if self.known else None,
            nbytes=newest.nbytes if newest else None,
            axis=self.groups.axis(self.history),
            blocked=self.groups.durations(self.history.blocked),
            captured=self.groups.durations(self.history.captured),
            waited=sum(event.seconds or 0.0 for event in self.events if event.kind == "waited"),
            tiers=tiers,
            retention=retention,
            happened=len(told),
            happenings=[_happening(event) for event in told[: -NEWEST - 1 : -1]],
            ranks=ranks_of(self.events),
            layers=layer_map(self.run, self.known),
            policy=self._policy(tiers, retention, kinds),
            newest_versions=[_row(version) for version in self.versions[: -NEWEST - 1 : -1]],
            problems=self.problems,
        )

    def _tier(self, tier: TierPolicy) -> TierReport:
        columns, groups = self.history.tiers[tier.name], self.groups
        here = [version for version in self.known if tier.name in version.tiers]
        owed = [version for version in self.versions if tier.name in version.late]
        newest, last = here[-1] if here else None, self.known[-1] if self.known else None
        behind = exposures(self.history, tier.name) if tier.persistent else columns.arrived * float("nan")
        arrival = groups.durations(columns.arrived - self.history.time)
        exposure = groups.longest(behind)
        return TierReport(
            name=tier.name,
            type=tier.type,
            persistent=tier.persistent,
            visible=self._is_visible(tier.name),
            states=[groups.counts(columns.state == number) for number in range(len(STATES))],
            versions=len(here),
            partial=sum(tier.name in version.partial for version in here),
            owed=len(owed),
            owed_bytes=sum(version.nbytes for version in owed),
            unreadable=sum(tier.name in version.unreadable for version in self.versions),
            newest=newest.step if newest else None,
            newest_time=newest.time if newest else None,
            behind=last.step - newest.step if newest and last else None,
            behind_seconds=max(0.0, last.time - newest.time) if newest and last else None,
            arrival=arrival,
            exposure=exposure,
            exposure_worst=max((value for value in exposure if value is not None), default=None),
            raw=groups.sums(columns.raw),
            written=groups.sums(columns.written),
            stored=groups.sums(columns.stored),
            **_saved(columns),
            counts=dict(self.counts.get(tier.name, {})),
            trouble=escape_controls(self.hung.get(tier.name, "")),
        )

    def _is_visible(self, name: str) -> bool:
        tier = next(tier_run.tier for tier_run in self.run._tier_runs if tier_run.name == name)
        return tier.traits.persistent or tier.traits.shared != "process"

    def _retention(self) -> list[TierRetention]:
        decisions = PruneRun(self.policy, self.run._tier_runs).decisions(self.versions)
        return [
            retention_of(tier, decisions[tier.name], {v.seq: v.step for v in self.versions if tier.name in v.tiers})
            for tier in self.policy.tiers
            if self._is_visible(tier.name)
        ]

    def _policy(
        self, tiers: Sequence[TierReport], retention: Sequence[TierRetention], kinds: Mapping[str, int]
    ) -> list[PolicyLine]:
        durable = next(tier for tier in tiers if tier.name == self.policy.durable)
        newest = "no version yet" if durable.newest is None else f"newest durable step: {durable.newest}"
        effects: dict[KeyPath, str] = {
            ("durable",): newest,
            ("arena",): f"{kinds['skipped']:,} saves were not made, as the arena was full",
            ("metrics", "events"): f"{len(self.events):,} events are logged",
        }
        return policy_lines(self.policy, tiers, retention, self._leaves(), effects)

    def _leaves(self) -> Sequence[Leaf]:
        if not self.known or not self.policy.rules:
            return ()
        try:
            return self.run.leaves(version=self.known[-1].id)
        except TierstateError as error:
            self.problems.append(escape_controls(f"the newest version cannot be read: {error}"))
            return ()


def _saved(tier: TierColumns) -> dict[str, int]:
    """What became of the bytes of the versions that have arrived in a tier, as far as events say so."""
    told = ~(tier.written != tier.written)
    there = told & (tier.stored == tier.stored)
    gone = told & ~there
    return {
        "raw_total": int(tier.raw[told].sum()),
        "written_total": int(tier.written[told].sum()),
        "by_codecs": int((tier.raw - tier.stored)[there].sum()),
        "by_reuse": int((tier.stored - tier.written)[there].sum()),
        "by_both": int((tier.raw - tier.written)[gone].sum()),
    }


def retention_of(
    tier: TierPolicy, decision: RetentionDecision | TierstateError, steps: Mapping[int, int]
) -> TierRetention:
    """What retention would do in a tier.

    Args:
        steps: of the versions, by number.
    """
    keep = describe_keep(tier.keep)
    if isinstance(decision, TierstateError):
        return TierRetention(tier.name, keep, 0, 0, (), (), escape_controls(str(decision)))
    reasons = Counter(reason for why in decision.keep.values() for reason in why).most_common(MAX_REASONS)
    newest = sorted(decision.keep, reverse=True)[:NEWEST]
    return TierRetention(
        tier.name,
        keep,
        len(decision.keep),
        len(decision.drop),
        [ReasonCount(escape_controls(reason), count) for reason, count in reasons],
        [KeptVersion(steps.get(seq, -1), seq, [escape_controls(why) for why in decision.keep[seq]]) for seq in newest],
    )


def describe_keep(keep: KeepKeys) -> str:
    """What a tier keeps, as its policy says."""
    if keep.all:
        return "all"
    within = keep.within and format_duration(keep.within)
    best = keep.best and f"{keep.best.count} {keep.best.metric} ({keep.best.mode})"
    said = (("last", keep.last), ("every", keep.every), ("within", within), ("best", best))
    return ", ".join([*(f"{name} {value}" for name, value in said if value), *(["tags"] if keep.tags else [])])


def ranks_of(events: Iterable[Event]) -> list[RankReport]:
    """For how long each rank has waited, as far as its events are logged."""
    blocked: dict[int | None, list[float]] = {}
    waited: dict[int | None, list[float]] = {}
    for event in events:
        if event.kind in ("saved", "waited"):
            into = blocked if event.kind == "saved" else waited
            into.setdefault(event.rank, []).append(event.seconds or 0.0)
    return [
        RankReport(
            rank,
            len(blocked.get(rank, ())),
            sum(blocked.get(rank, ())),
            max(blocked.get(rank, ()), default=0.0),
            len(waited.get(rank, ())),
            sum(waited.get(rank, ())),
        )
        for rank in sorted({*blocked, *waited}, key=lambda rank: -1 if rank is None else rank)
    ]


def _happening(event: Event) -> Happening:
    return Happening(
        event.time,
        escape_controls(event.kind),
        escape_controls(event.tier),
        event.step,
        event.seq,
        event.rank,
        escape_controls(event.reason),
        event.seconds,
    )


def _row(version: VersionInfo) -> VersionRow:
    metadata = (
        escape_json(json.dumps(dict(version.metadata), ensure_ascii=False, default=str)) if version.metadata else ""
    )
    short = metadata if len(metadata) <= MAX_METADATA else f"{metadata[:MAX_METADATA]}…"
    return VersionRow(
        version.seq,
        version.step,
        version.id,
        version.time,
        version.nbytes,
        version.tiers,
        version.late,
        version.tags,
        short,
        sorted(version.unreadable),
    )
