"""Dashboard, alert rules and reference name the metrics and events that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tierstate.engine.events import KINDS
from tierstate.telemetry.metrics import METRICS

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = {metric.name for metric in METRICS}
SERIES = NAMES | {f"{m.name}{end}" for m in METRICS if m.kind == "histogram" for end in ("_bucket", "_count", "_sum")}


def named(text: str) -> set[str]:
    return set(re.findall(r"\btierstate_\w+", text))


def test_the_reference_has_all_metrics_and_events() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "reference" / "events-and-metrics.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted([*KINDS, *NAMES])


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board: dict[str, Any] = json.loads((DOCS / "grafana" / "dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert named(target["expr"]) <= SERIES
            assert named(target["expr"])
            assert target["expr"].count("(") == target["expr"].count(")")
            kept = set(re.findall(r"by \(([^)]*)\)", target["expr"])[0].replace(" ", "").split(","))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_alerts_ask_for_metrics_that_there_are() -> None:
    rules = yaml.safe_load((DOCS / "grafana" / "alerts.yaml").read_text())["groups"][0]["rules"]
    known = ["NothingDurable", "TierAway", "LagGrows", "SavesFail", "StateAlarm", "SavesSkipped"]
    assert [rule["alert"] for rule in rules] == known
    for rule in rules:
        assert named(rule["expr"]) <= SERIES
        assert named(rule["expr"])
        assert rule["annotations"]["summary"]
