"""The metrics of a run: their names, and how events and statistics become values of them.

Names follow the conventions of Prometheus: a prefix, base units, the unit and `_total` at the end. OpenTelemetry gets
the same names. The sinks that take the values are in `prometheus` and `opentelemetry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tierstate.engine.events import Event
from tierstate.engine.info import Stats

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper ends of the histograms' buckets, in seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is exported.
        kind: counters only rise; a histogram counts values by size; a gauge is looked at.
        unit: ``seconds``, ``bytes``, or empty for a number.
        text: what it is.
        labels: what its values are told apart by, besides the run and the rank.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    text: str
    labels: tuple[str, ...] = ()


_TIER = ("tier",)

METRICS = (
    Metric("tierstate_save_blocked_seconds", "histogram", "seconds", "for how long calls of save blocked the training"),
    Metric("tierstate_save_captured_seconds", "histogram", "seconds", "from the call of save until all was copied"),
    Metric("tierstate_save_committed_seconds", "histogram", "seconds", "from the call of save to the commit", _TIER),
    Metric("tierstate_copy_seconds", "histogram", "seconds", "of copies from a faster tier", _TIER),
    Metric("tierstate_restore_seconds", "histogram", "seconds", "of restores"),
    Metric("tierstate_guard_wait_seconds_total", "counter", "seconds", "for which steps have waited for captures"),
    Metric("tierstate_arena_wait_seconds_total", "counter", "seconds", "for which saves have waited for memory"),
    Metric("tierstate_saves_total", "counter", "", "calls of save"),
    Metric("tierstate_saves_skipped_total", "counter", "", "saves that were not made, as the arena was full"),
    Metric("tierstate_alarms_total", "counter", "", "alarms of the statistics of leaves"),
    Metric("tierstate_commits_total", "counter", "", "versions that have arrived in a tier", _TIER),
    Metric("tierstate_brought_total", "counter", "", "of those, the ones that were owed before", _TIER),
    Metric("tierstate_failures_total", "counter", "", "versions that have failed in a tier", ("tier", "error")),
    Metric("tierstate_left_out_total", "counter", "", "versions that a tier has left out", _TIER),
    Metric("tierstate_dropped_total", "counter", "", "versions that retention has dropped", _TIER),
    Metric("tierstate_mended_total", "counter", "", "objects in which damaged chunks were written again", _TIER),
    Metric("tierstate_state_bytes_total", "counter", "bytes", "raw bytes of the versions in a tier", _TIER),
    Metric("tierstate_written_bytes_total", "counter", "bytes", "bytes that were written for them", _TIER),
    Metric("tierstate_restored_bytes_total", "counter", "bytes", "raw bytes that were restored"),
    Metric("tierstate_newest_version_timestamp_seconds", "gauge", "seconds", "when the newest version of a tier was "
           "saved, since 1970: time() minus this is what would be lost", _TIER),
    Metric("tierstate_newest_version_step", "gauge", "", "the step of the newest version of a tier", _TIER),
    Metric("tierstate_lag_steps", "gauge", "", "steps from the newest version of a tier to the newest save", _TIER),
    Metric("tierstate_lag_seconds", "gauge", "seconds", "the same in time", _TIER),
    Metric("tierstate_owed_versions", "gauge", "", "versions that have failed in a tier and are brought later", _TIER),
    Metric("tierstate_held_versions", "gauge", "", "versions that a tier keeps longer than its policy says", _TIER),
    Metric("tierstate_waiting_bytes", "gauge", "bytes", "of state that is still to be written to a tier", _TIER),
    Metric("tierstate_tier_healthy", "gauge", "", "1 if the last save to a tier succeeded, else 0", _TIER),
    Metric("tierstate_arena_peak_bytes", "gauge", "bytes", "the most memory that captures and copies have used"),
)  # fmt: skip
"""All metrics."""


BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


class Sink(Protocol):
    """Takes values of metrics. Labels are those of the metric, in its order."""

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """A counter rises, or a histogram gets one more value."""

    def put(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """A gauge has this value now."""


class Recorder:
    """Makes values of events and statistics.

    Args:
        sink: takes them.
        common: labels of all values.
    """

    def __init__(self, sink: Sink, common: Mapping[str, str]) -> None:
        self._sink, self._common = sink, dict(common)

    def event(self, event: Event) -> None:
        """Count an event."""
        match event.kind:
            case "captured":
                self._add("save_captured_seconds", event.seconds or 0.0)
            case "committed" | "cascaded" | "brought":
                self._arrived(event)
            case "failed":
                self._add("failures_total", 1, tier=event.tier, error=event.reason.partition(":")[0])
            case "left_out" | "dropped" | "mended":
                self._add(f"{event.kind}_total", 1, tier=event.tier)
            case _:
                self._of_the_process(event)

    def _of_the_process(self, event: Event) -> None:
        seconds = event.seconds or 0.0
        match event.kind:
            case "saved":
                self._add("saves_total", 1)
                self._add("save_blocked_seconds", seconds)
            case "waited":
                self._add("guard_wait_seconds_total", seconds)
            case "arena_full":
                self._add("arena_wait_seconds_total", seconds)
            case "skipped":
                self._add("saves_skipped_total", 1)
            case "alarm":
                self._add("alarms_total", 1)
            case "restored":
                self._add("restore_seconds", seconds)
                self._add("restored_bytes_total", event.nbytes or 0)

    def _arrived(self, event: Event) -> None:
        tier = event.tier
        self._add("commits_total", 1, tier=tier)
        self._add("written_bytes_total", event.nbytes or 0, tier=tier)
        self._add("state_bytes_total", event.raw or 0, tier=tier)
        if event.kind == "brought":
            self._add("brought_total", 1, tier=tier)
        elif event.seconds is not None:
            name = "save_committed_seconds" if event.kind == "committed" else "copy_seconds"
            self._add(name, event.seconds, tier=tier)

    def statistics(self, stats: Stats) -> None:
        """Set the gauges."""
        self._put("arena_peak_bytes", stats.arena_peak)
        for tier, found in stats.tiers.items():
            self._put("owed_versions", found.owed, tier=tier)
            self._put("held_versions", len(found.held), tier=tier)
            self._put("waiting_bytes", found.waiting, tier=tier)
            self._put("tier_healthy", float(found.healthy and not found.hung), tier=tier)
            if (lag := found.durable_lag) is not None:
                self._put("lag_steps", lag.steps, tier=tier)
                self._put("lag_seconds", lag.seconds, tier=tier)

    def newest(self, tier: str, step: int, when: float) -> None:
        """The newest version of a tier."""
        self._put("newest_version_step", step, tier=tier)
        self._put("newest_version_timestamp_seconds", when, tier=tier)

    def _add(self, name: str, value: float, **labels: str) -> None:
        self._sink.add(BY_NAME[f"tierstate_{name}"], value, self._common | labels)

    def _put(self, name: str, value: float, **labels: str) -> None:
        self._sink.put(BY_NAME[f"tierstate_{name}"], value, self._common | labels)


class Watch:
    """Records one run for some sinks: subscribes to its events, and looks at its statistics when it is asked.

    Args:
        recorder: takes the values.
        stats: returns the statistics; None where there are none any more.
    """

    def __init__(self, recorder: Recorder, stats: Callable[[], Stats | None]) -> None:
        self._recorder, self._stats = recorder, stats
        self._newest: dict[str, tuple[int, int, float]] = {}

    def event(self, event: Event) -> None:
        """Take an event."""
        self._recorder.event(event)
        if event.kind in ("committed", "cascaded", "brought") and event.step is not None and event.saved is not None:
            found = (event.seq or 0, event.step, event.saved)
            self._newest[event.tier] = max(found, self._newest.get(event.tier, found))

    def look(self) -> None:
        """Bring the gauges up to date."""
        stats = self._stats()
        if stats is not None:
            self._recorder.statistics(stats)
        for tier, (_, step, when) in list(self._newest.items()):
            self._recorder.newest(tier, step, when)
