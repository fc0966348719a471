"""Starts for one Checkpointer what the policy's ``metrics`` asks for, and ends it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tierstate.engine.events import EVERY, EventBus
from tierstate.engine.info import Stats
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.concurrency import start_thread
from tierstate.tiers.policy.models import MetricsKeys

from .event_log import EventLog
from .metrics import Recorder, Sink, Watch

log = logging.getLogger("tierstate")


CLOSE_WAIT = 15.0
"""Seconds that `Telemetry.close` waits."""


def check_packages(keys: MetricsKeys) -> None:
    """Check that what the policy asks for is installed, before anything is opened.

    Raises:
        PolicyError: it is not.
    """
    if keys.port is not None or keys.textfile is not None:
        from .prometheus import sink_of_process

        sink_of_process()
    if keys.opentelemetry:
        from .opentelemetry import sink_of_process as instruments

        instruments()


class Telemetry:
    """What one run tells of itself in this process.

    Args:
        keys: of the policy.
        events: of the run.
        tier_runs: the run in each tier.
        stats: returns the statistics.

    Raises:
        PolicyError: a package that is needed is not installed.
    """

    def __init__(
        self, keys: MetricsKeys, events: EventBus, run: str, tier_runs: Sequence[TierRun], stats: Callable[[], Stats]
    ) -> None:
        self._events, self._stats = events, stats
        self._common = {"run": run, "rank": "" if events.rank is None else str(events.rank)}
        self._closing = ExitStack()
        try:
            if keys.port is not None or keys.textfile is not None:
                self._start_prometheus(keys)
            if keys.opentelemetry:
                self._start_opentelemetry()
            if keys.events:
                written = EventLog(tier_runs, run)
                self._closing.callback(written.close)
                events.subscribe(EVERY, written.event, apart=True)
                events.ticks.append(written.tick)
        except BaseException:
            self._closing.close()
            raise

    def _watch(self, sink: Sink) -> Watch:
        watch = Watch(Recorder(sink, self._common), self._statistics)
        self._events.subscribe(EVERY, watch.event, apart=True)
        return watch

    def _statistics(self) -> Stats | None:
        try:
            return self._stats()
        except TierstateError as error:  # it is closed meanwhile
            log.debug("there are no statistics: %s", error)
            return None

    def _start_prometheus(self, keys: MetricsKeys) -> None:
        from .prometheus import TextFile, serve, sink_of_process

        sink = sink_of_process()
        if keys.textfile is not None:  # closed last: the file stays, and what is in it then is told for ever
            self._closing.callback(TextFile(sink, keys.textfile, keys.interval).close)
        self._closing.callback(sink.forget, self._common)
        self._closing.callback(sink.watch(self._watch(sink).look))
        if keys.port is not None:
            serve(sink, keys.address, keys.port)

    def _start_opentelemetry(self) -> None:
        from .opentelemetry import sink_of_process

        sink = sink_of_process()
        watch = self._watch(sink)
        changing = ("committed", "cascaded", "brought", "failed", "owed", "away", "back", "dropped")
        self._events.subscribe(EVERY, sink.event, apart=True)
        self._events.subscribe(changing, lambda _: watch.look(), apart=True)
        self._events.ticks.append(watch.look)

    def close(self) -> None:
        """Write what is left, and end. Called when no more events come, and before the tiers are closed.

        A tier that hangs is waited for a bounded time: what was to be logged there is lost, and no save is.
        """
        closing = threading.Thread(target=self._closing.close, name="tierstate-metrics-close", daemon=True)
        try:
            start_thread(closing)
        except RuntimeError:  # no more threads (`ulimit -u`): this one waits, as all that was saved is saved by now
            self._closing.close()
            return
        closing.join(CLOSE_WAIT)
        if closing.is_alive():
            log.warning("the last events and metrics are not written: a tier or a file system does not answer")
