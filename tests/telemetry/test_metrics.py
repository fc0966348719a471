"""Metrics: what Prometheus and OpenTelemetry get is what has happened."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpointer_worlds import policy, tier

import tierstate as ts
from tierstate.engine.events import Event
from tierstate.telemetry.metrics import BY_NAME, METRICS, Metric, Recorder, Watch

DOCS = Path(__file__).resolve().parents[2] / "docs"


def world(place: Path, **metrics: object) -> ts.Policy:
    return policy({"nvme": tier("nvme", place, keep={"last": 2}), "lustre": tier("lustre", place)}, metrics=metrics)


@pytest.fixture(autouse=True)
def own_sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test counts, and serves, as if it were alone in the process."""
    from tierstate.telemetry import prometheus

    served: dict[int, Any] = {}
    monkeypatch.setattr(prometheus, "_sink", None)
    monkeypatch.setattr(prometheus, "_served", served)
    yield
    for server in served.values():
        server.shutdown()
        server.server_close()


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and tier, the values of a text in the format of Prometheus."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if "le" not in one.labels and one.labels.get("run") == "metrics-run":
                found[one.name, one.labels.get("tier", "")] = one.value
    return found


def save_some(ckpt: ts.Checkpointer) -> dict[str, torch.Tensor]:
    state = {"w": torch.randn(1000)}
    for step in (1, 2, 3):
        state["w"] += 1
        ckpt.save(state, step).wait("lustre")
    ckpt.restore(state)
    return state


def test_prometheus_gets_what_has_happened(place: Path) -> None:
    from prometheus_client import generate_latest

    from tierstate.telemetry import prometheus

    file = place / "run.prom"
    with ts.Checkpointer(world(place, port=0, textfile=str(file), interval="100s"), "metrics-run") as ckpt:
        save_some(ckpt)
        (port,) = prometheus._served
        served, end = {}, time.monotonic() + 60
        while served.get(("tierstate_newest_version_step", "lustre")) != 3 and time.monotonic() < end:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                served = samples(answer.read().decode())
        assert served["tierstate_lag_steps", "nvme"] == 0
        assert served["tierstate_tier_healthy", "lustre"] == 1
        assert served["tierstate_newest_version_step", "lustre"] == 3
    found = samples(file.read_text())
    later = samples(generate_latest(prometheus.sink_of_process().registry).decode())
    of_now = ("tierstate_lag", "tierstate_newest", "tierstate_tier")
    assert not [name for name, _ in (*later, *found) if name.startswith(of_now)]
    assert later["tierstate_saves_total", ""] == 3
    assert found["tierstate_saves_total", ""] == 3
    assert found["tierstate_save_blocked_seconds_count", ""] == 3
    assert found["tierstate_commits_total", "nvme"] == found["tierstate_commits_total", "lustre"] == 3
    assert found["tierstate_state_bytes_total", "nvme"] == 12_000
    assert found["tierstate_written_bytes_total", "nvme"] >= 12_000
    assert found["tierstate_copy_seconds_count", "lustre"] == 3
    assert found["tierstate_dropped_total", "nvme"] == 1
    assert found["tierstate_restored_bytes_total", ""] == 4000
    assert ("tierstate_failures_total", "nvme") not in found


def test_a_port_that_is_taken_costs_a_warning_only(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ts.Checkpointer(world(place, port=port), "metrics-run") as ckpt:
            ckpt.save({"w": torch.ones(3)}, 1).wait()
    assert f"metrics are not served at 127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize("said", ["", "first", "-1", "65535"])
def test_no_training_fails_for_what_a_launcher_says(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("LOCAL_RANK", said)
        with ts.Checkpointer(world(place, port=port, textfile=str(place / "run.prom")), "metrics-run") as ckpt:
            ckpt.save({"w": torch.ones(3)}, 1).wait()
    rank = int(said) if said.isdecimal() else 0
    assert f"metrics are not served at 127.0.0.1:{port + rank}" in caplog.text
    assert [one.name for one in place.glob("*.prom")] == [f"run-{rank}.prom" if rank else "run.prom"]


def test_a_run_is_forgotten_while_another_one_is_counted() -> None:
    from tierstate.telemetry.prometheus import PrometheusSink

    sink, lag = PrometheusSink(), BY_NAME["tierstate_lag_steps"]

    class Closed(str):
        """The name of a run; whenever it is compared, another run puts a gauge."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            sink.put(lag, 1.0, {"run": f"other-{len(sink._put)}", "rank": "", "tier": "nvme"})
            return str.__eq__(self, other)

    for tier_name in ("nvme", "lustre"):
        sink.put(lag, 1.0, {"run": "closed", "rank": "", "tier": tier_name})
    sink.forget({"run": Closed("closed"), "rank": ""})
    there = {one.labels["run"] for family in sink.collect() for one in family.samples if family.name == lag.name}
    assert len(there) > 1
    assert "closed" not in there


@pytest.mark.slow
def test_a_forked_process_serves_and_counts_for_itself() -> None:
    """The port is its parent's, which it is told; nothing of what the parent has counted is its own."""
    program = """
import os, sys
from tierstate.telemetry import prometheus
from tierstate.telemetry.metrics import BY_NAME
sink = prometheus.sink_of_process()
sink.add(BY_NAME["tierstate_saves_total"], 1, {"run": "r", "rank": ""})
port = prometheus.serve(sink, "127.0.0.1", 0)
assert prometheus.serve(sink, "127.0.0.1", port) == port
prometheus._lock.acquire()
child = os.fork()
if child == 0:
    mine = prometheus.sink_of_process()
    assert prometheus.serve(mine, "127.0.0.1", port) == 0
    assert not [one for family in mine.collect() for one in family.samples if one.value]
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_opentelemetry_gets_metrics_and_spans(place: Path) -> None:
    """In a process of its own, since providers are set once per process."""
    program = f"""
import json, torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
metrics.set_meter_provider(MeterProvider([reader]))
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
import tierstate as ts
text = '''version: 1
chunk: 64KiB
arena: {{size: 4MiB}}
metrics: {{opentelemetry: true}}
tiers: {{nvme: {{type: nvme, path: "{place}/nvme"}}}}
'''
with ts.Checkpointer(ts.Policy.parse(text), "run") as ckpt:
    for step in (1, 2):
        ckpt.save({{"w": torch.ones(1000)}}, step).wait()
points = {{}}
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                points[metric.name] = getattr(point, "value", getattr(point, "count", None))
named = [(span.name, span.attributes.get("tierstate.step"), span.end_time >= span.start_time)
         for span in spans.get_finished_spans()]
print(json.dumps([points, named]))
"""
    import json

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ)
    assert ran.returncode == 0, ran.stderr
    points, spans = json.loads(ran.stdout.splitlines()[-1])
    assert points["tierstate_saves_total"] == 2
    assert points["tierstate_save_blocked_seconds"] == 2
    assert points["tierstate_commits_total"] == 2
    assert [list(one) for one in spans if one[0] == "tierstate.commit"] == [
        ["tierstate.commit", 1, True], ["tierstate.commit", 2, True],
    ]  # fmt: skip
    assert {one[0] for one in spans} == {"tierstate.save", "tierstate.capture", "tierstate.commit"}


def test_a_checkpointer_that_cannot_be_made_leaves_no_metrics(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import generate_latest

    from tierstate.telemetry import prometheus

    def fails(self: object, keys: object) -> None:
        raise ts.PolicyError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(ts.Checkpointer, "_watch", fails)
        with pytest.raises(ts.PolicyError, match="planted"):
            ts.Checkpointer(world(place, port=0), "metrics-run", preemption=True)
    generate_latest(prometheus.sink_of_process().registry)
    with ts.Checkpointer(world(place, port=0), "metrics-run") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).wait()


def test_the_newest_version_is_the_newest_though_an_older_one_comes_later() -> None:
    put: dict[str, float] = {}

    class Noted:
        def add(self, metric: Metric, value: float, labels: dict[str, str]) -> None:
            pass

        def put(self, metric: Metric, value: float, labels: dict[str, str]) -> None:
            put[metric.name] = value

    watch = Watch(Recorder(Noted(), {}), lambda: None)  # type: ignore[arg-type]
    watch.event(Event("committed", 9000.0, "run", "nvme", 3, 3, saved=3000.0, raw=5))
    watch.event(Event("brought", 9001.0, "run", "nvme", 2, 2, saved=2000.0, raw=5))
    watch.look()
    assert put == {"tierstate_newest_version_step": 3, "tierstate_newest_version_timestamp_seconds": 3000.0}


@pytest.mark.parametrize(
    ("metrics", "package"),
    [({"port": 0}, "prometheus_client"), ({"opentelemetry": True}, "opentelemetry")],
)
def test_what_is_not_installed_is_told_before_anything_is_opened(
    place: Path, metrics: dict[str, object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ts.PolicyError, match=r"is not installed; install tierstate\["):
        ts.Checkpointer(world(place, **metrics), "metrics-run")
    assert not (place / "nvme").exists()


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert metric.name.startswith("tierstate_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        if metric.unit:
            assert metric.unit in metric.name.split("_")
    assert len({metric.name for metric in METRICS}) == len(METRICS)
