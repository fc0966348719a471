"""A plan as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierstate.report.html import (
    NOTHING,
    Numbers,
    as_count,
    as_seconds,
    as_share,
    as_size,
    embedded_json,
    escape,
    table,
    whole_page,
)
from tierstate.report.page import asset, chart_figure


def render_plan(plan: Mapping[str, Any], given: Sequence[tuple[str, str]]) -> str:
    """The whole page.

    Args:
        plan: a `Plan` as JSON values.
        given: the figures that it was made from: names and values.
    """
    numbers = Numbers({"runs": [plan]})
    parts = (
        ("glance", "At a glance", _glance(numbers) + _advice(plan["advice"])),
        ("intervals", "What an interval costs", _curves(numbers)),
        (
            "tiers",
            "Tiers",
            _tiers(numbers, "now", "As the policy is") + _tiers(numbers, "best", "With these intervals"),
        ),
        ("failures", "Failures", _failures(numbers)),
        ("given", "Made from", table("Figures", ["figure", "value"], [[escape(n), escape(v)] for n, v in given])),
    )
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in parts)
    main = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{inner}</section>'
        for name, title, inner in parts
    )
    main += f'<script type="application/json" id="report-data">{embedded_json({"runs": [plan]})}</script>'
    foot = "A simulation with the rules of tierstate, over tiers that are constant rates. Charts by Apache ECharts."
    header = f'<h1>What a policy costs</h1><nav aria-label="Sections"><ul>{links}</ul></nav>'
    scripts = (asset("echarts/echarts.min.js"), asset("charts.js"))
    return whole_page("plan", header, main, foot, scripts, asset("page.css"))


def _glance(numbers: Numbers) -> str:
    def both(name: str, how: Any, *place: str) -> list[str]:
        return [name, numbers.show(how, "runs", 0, "now", *place), numbers.show(how, "runs", 0, "best", *place)]

    rows = [
        both("time that counts in the end", as_share, "goodput"),
        both("time that saves cost", as_share, "saving"),
        both("saves a day", _rounded, "saves"),
        both("a save blocks, on average", as_seconds, "blocked"),
        both("the longest", as_seconds, "longest"),
    ]
    return table("The policy, and the intervals that cost least", ["", ">as it is", ">with these intervals"], rows)


def _advice(advice: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(one)}</li>" for one in advice)
    return f"<h3>What to change</h3><ul>{items}</ul>" if items else "<p>Nothing to change.</p>"


def _curves(numbers: Numbers) -> str:
    rows = [
        [
            escape(curve["tier"]),
            numbers.show(as_seconds, "runs", 0, "curves", i, "cost"),
            numbers.show(as_seconds, "runs", 0, "curves", i, "best"),
            escape(numbers.at("runs", 0, "every").get(curve["tier"], NOTHING) or "every save"),
        ]
        for i, curve in enumerate(numbers.at("runs", 0, "curves"))
    ]
    about = (
        "Share of the time that saves to a tier and the failures that it is there for cost together, by its interval"
    )
    shown = chart_figure("cadence", 0, about, f"{about}. A circle: the best; a diamond: that of the policy.")
    return shown + table("Intervals", ["tier", ">cost of a save", ">best interval", "in the policy"], rows)


def _tiers(numbers: Numbers, which: str, caption: str) -> str:
    rows = []
    for i, tier in enumerate(numbers.at("runs", 0, which, "tiers")):
        cells = [("versions", _rounded), ("nbytes", as_size), ("busy", as_share), ("delay", as_seconds)]
        cells += [("kept", as_count), ("stored", as_size), ("restore", as_seconds), ("money", _rounded)]
        shown = [numbers.show(how, "runs", 0, which, "tiers", i, name) for name, how in cells]
        rows.append([escape(tier["tier"]), escape(tier["every"]), *shown])
    columns = [">versions a day", ">written a day", ">busy", ">there after", ">versions kept", ">bytes kept"]
    return table(caption, ["tier", "every", *columns, ">read back in", ">money a day"], rows)


def _failures(numbers: Numbers) -> str:
    rows = [
        [
            "a host is lost" if failure["host_lost"] else "a process is killed",
            numbers.show(as_share, "runs", 0, "now", "failures", i, "share"),
            escape(failure["tier"] or "nothing"),
            numbers.show(as_seconds, "runs", 0, "now", "failures", i, "lost"),
            numbers.show(as_seconds, "runs", 0, "now", "failures", i, "recovery"),
        ]
        for i, failure in enumerate(numbers.at("runs", 0, "now", "failures"))
    ]
    return table(
        "As the policy is", ["failure", ">share", "restored from", ">lost, on average", ">until it goes on"], rows
    )


def _rounded(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
