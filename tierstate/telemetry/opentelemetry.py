"""Metrics and spans for OpenTelemetry, by its API: without an SDK in the process they go nowhere and cost little."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from tierstate.engine.events import Event
from tierstate.manifest.errors import PolicyError

from .metrics import BUCKETS, METRICS, Metric

_SPANS = {
    "saved": "tierstate.save",
    "captured": "tierstate.capture",
    "committed": "tierstate.commit",
    "cascaded": "tierstate.copy",
    "restored": "tierstate.restore",
}
"""By kind of event, the span that it is the end of."""


class OpenTelemetrySink:
    """The metrics of this process, as instruments of the global meter provider.

    Raises:
        PolicyError: `opentelemetry-api` is not installed.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError:
            raise PolicyError(
                "metrics: opentelemetry: opentelemetry-api is not installed; install tierstate[opentelemetry]"
            ) from None
        meter = metrics.get_meter("tierstate")
        self._tracer = trace.get_tracer("tierstate")
        makers: dict[str, Any] = {
            "counter": meter.create_counter,
            "histogram": partial(meter.create_histogram, explicit_bucket_boundaries_advisory=BUCKETS),
            "gauge": meter.create_gauge,
        }
        self._instruments: dict[str, Any] = {
            metric.name: makers[metric.kind](metric.name, unit=_unit(metric), description=metric.text)
            for metric in METRICS
        }

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        made = self._instruments[metric.name]
        made.record(value, labels) if metric.kind == "histogram" else made.add(value, labels)

    def put(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._instruments[metric.name].set(value, labels)

    def event(self, event: Event) -> None:
        """Make a span of what has ended by this event, with its numbers as attributes."""
        name = _SPANS.get(event.kind)
        if name is None or event.seconds is None:
            return
        values = {f"tierstate.{k}": v for k, v in event.encode().items() if k not in ("kind", "time", "seconds")}
        end = int(1e9 * event.time)
        span = self._tracer.start_span(name, start_time=end - int(1e9 * event.seconds), attributes=values)
        span.end(end)


@cache
def sink_of_process() -> OpenTelemetrySink:
    """The sink that all Checkpointers of this process share: an instrument is made once. Raises PolicyError as
    `OpenTelemetrySink`."""
    return OpenTelemetrySink()


def _unit(metric: Metric) -> str:
    return {"seconds": "s", "bytes": "By"}.get(metric.unit, "1")
