"""Metrics for Prometheus: served on a port, or in a file for the node exporter's textfile collector."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from tierstate.manifest.errors import PolicyError
from tierstate.tiers.concurrency import start_thread

from .metrics import BUCKETS, METRICS, Metric

log = logging.getLogger("tierstate")


COMMON = ("run", "rank")
"""Labels of every metric."""


class PrometheusSink:
    """The metrics of this process, in a registry of their own.

    Attributes:
        registry: for `prometheus_client`; a program that serves metrics itself may add it to its own.

    Raises:
        PolicyError: `prometheus_client` is not installed.
    """

    def __init__(self) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            raise PolicyError(
                "metrics: prometheus_client is not installed; install tierstate[prometheus], or take port and textfile "
                "away"
            ) from None
        self.registry = client.CollectorRegistry()
        makers: dict[str, Any] = {"counter": client.Counter, "gauge": client.Gauge, "histogram": client.Histogram}
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            more = {"buckets": BUCKETS} if metric.kind == "histogram" else {}
            made = makers[metric.kind](metric.name, metric.text, (*COMMON, *metric.labels), registry=None, **more)
            self._metrics[metric.name] = made
        self._looks: list[Callable[[], None]] = []
        self._put: set[tuple[str, tuple[str, ...]]] = set()
        self.registry.register(self)

    def collect(self) -> Iterable[Any]:
        """Called by `prometheus_client` at each scrape."""
        for look in list(self._looks):
            try:
                look()
            except Exception:  # of one run: the values of the others are of use
                log.exception("the statistics of a run cannot be had")
        for made in self._metrics.values():
            yield from made.collect()

    def describe(self) -> Iterable[Any]:
        """Called by `prometheus_client` when it is registered."""
        return [family for made in self._metrics.values() for family in made.describe()]

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        made = self._metrics[metric.name].labels(**labels)
        made.observe(value) if metric.kind == "histogram" else made.inc(value)

    def put(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._metrics[metric.name].labels(**labels).set(value)
        self._put.add((metric.name, tuple(labels[name] for name in (*COMMON, *metric.labels))))

    def forget(self, common: Mapping[str, str]) -> None:
        """Remove the gauges of a run that is closed: they would say for ever what was true in the end."""
        mine = tuple(common[name] for name in COMMON)
        # Of a copy, which is made at once: other runs of this process put gauges meanwhile.
        for name, values in [one for one in self._put.copy() if one[1][: len(COMMON)] == mine]:
            self._put.discard((name, values))
            with suppress(KeyError):
                self._metrics[name].remove(*values)

    def watch(self, look: Callable[[], None]) -> Callable[[], None]:
        """Have this called before each scrape. Returns what ends that."""
        self._looks.append(look)

        def end() -> None:
            with suppress(ValueError):
                self._looks.remove(look)

        return end


_lock = threading.Lock()
_sink: PrometheusSink | None = None
_served: dict[int, Any] = {}


def _begin_child() -> None:
    """A forked child serves nothing, and counts what it does itself; a lock may have been held when it was forked."""
    global _lock, _sink, _served
    _lock, _sink, _served = threading.Lock(), None, {}


os.register_at_fork(after_in_child=_begin_child)


def _local_rank() -> int:
    """The number of this rank on its host; 0 where launchers say none."""
    said = os.environ.get("LOCAL_RANK", "")
    return int(said) if said.isdecimal() else 0


def sink_of_process() -> PrometheusSink:
    """The sink that all Checkpointers of this process share. Raises PolicyError as `PrometheusSink`."""
    global _sink
    with _lock:
        if _sink is None:
            _sink = PrometheusSink()
        return _sink


def serve(sink: PrometheusSink, address: str, port: int) -> int:
    """Serve the metrics at ``http://ADDRESS:PORT/metrics``, until this process ends. Several ranks of a host each take
    the port and their number on the host (``LOCAL_RANK``).

    Returns:
        The port; 0 if it cannot be had, which is logged: no training fails for its metrics.
    """
    from prometheus_client import start_http_server

    port += _local_rank() if port else 0
    with _lock:
        if port in _served:
            return port
        try:
            server, _ = start_http_server(port, address, sink.registry)
        except (OSError, OverflowError) as error:  # with its number on the host a port may be above the highest
            log.warning("metrics are not served at %s:%d: %s", address, port, error)
            return 0
        found = int(server.server_address[1])
        _served[found] = server
        return found


class TextFile:
    """Writes the metrics to a file again and again, whole or not at all.

    Args:
        sink: has them.
        path: of the file; must end with ``.prom`` for the node exporter to read it. Ranks of a host after the first
            have their ``LOCAL_RANK`` before that.
        interval: seconds between two times.
    """

    def __init__(self, sink: PrometheusSink, path: str, interval: float) -> None:
        if local := _local_rank():
            path = f"{path.removesuffix('.prom')}-{local}.prom"
        self._sink, self._path, self._interval = sink, path, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstate-metrics", daemon=True)
        start_thread(self._thread)

    def write(self) -> None:
        """Write the file now."""
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(self._path, self._sink.registry)
        except Exception as error:  # no save fails for its metrics
            log.warning("metrics cannot be written to %s: %s", self._path, error)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self.write()

    def close(self) -> None:
        """Write it once more, and no more after that."""
        self._over.set()
        self._thread.join(5.0)
        self.write()
