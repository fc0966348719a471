"""The page of a report: one HTML file with all numbers as tables, from which charts are drawn; it needs no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any

from .data import ReportData
from .html import (
    NOTHING,
    Format,
    Numbers,
    Place,
    as_count,
    as_seconds,
    as_share,
    as_size,
    as_time,
    embedded_json,
    escape,
    table,
    whole_page,
)

EVENTS_OFF = """<div class="note"><p>No event of {run} is logged, so how long saves took, what was written for them and
what failed is not known. What follows is from the records of its versions. From now on they are logged with</p>
<pre>metrics: {{events: true}}</pre><p>in the policy.</p></div>"""


def render_page(data: ReportData, *, refresh: float = 0.0) -> str:
    """The whole page.

    Args:
        refresh: seconds after which a page that is served asks for what is new; 0 for a file.
    """
    title = ", ".join(run.run for run in data.runs)
    live = '<p id="live" role="status" aria-live="off">Live.</p>' if refresh else ""
    foot = (
        f"Written by tierstate {escape(data.program)}. Times are in UTC. Charts by Apache ECharts, which is part of "
        f"this file. A line has at most {data.points} points: longer runs are shown in groups of consecutive "
        "versions, of durations the longest of each group."
    )
    return whole_page(
        title,
        f"<h1>Saves of <code>{escape(title)}</code></h1>{live}{_contents()}",
        render_body(data),
        foot,
        (asset("echarts/echarts.min.js"), asset("charts.js")),
        asset("page.css"),
        refresh,
    )


def render_body(data: ReportData) -> str:
    """What of the page changes while a run goes on: its sections, with the data that the charts are drawn from."""
    encoded = data.encode()
    numbers = Numbers(encoded)
    sections = "".join(_section(numbers, *one) for one in SECTIONS)
    return f'{sections}<script type="application/json" id="report-data">{embedded_json(encoded)}</script>'


@cache
def asset(name: str) -> str:
    """A file of this package: a script or a style sheet."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _contents() -> str:
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _, _ in SECTIONS)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


Panel = Callable[[Numbers, int], str]


def _section(numbers: Numbers, name: str, title: str, about: str, panel: Panel | None) -> str:
    """A section, in which the runs are beside each other."""
    runs = numbers.at("runs")
    if panel is None:
        inner = _glance(numbers)
    else:
        heads = [f"<h3><code>{escape(run['run'])}</code></h3>" if len(runs) > 1 else "" for run in runs]
        inner = "".join(f"<div>{head}{panel(numbers, i)}</div>" for i, head in enumerate(heads))
        inner = f'<div class="panels">{inner}</div>'
    about = f'<p class="soft">{about}</p>' if about else ""
    head = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}{about}{inner}</section>'


def chart_figure(name: str, run: int, title: str, caption: str = "") -> str:
    """The place of a chart that a script draws; a table with the same numbers must follow.

    Args:
        name: of the chart, in the script.
        run: index of the run.
    """
    label = escape(f"Chart: {title}. The same numbers are in the table that follows.")
    shown = f"<figcaption>{caption or escape(title[:1].upper() + title[1:] + '.')}</figcaption>"
    place = f'<div class="chart" role="img" aria-label="{label}" data-chart="{name}" data-run="{run}"></div>'
    return f"<figure>{place}{shown}</figure>"


def _details(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def _axis_table(numbers: Numbers, run: int, caption: str, columns: Sequence[tuple[str, Format, Place]]) -> str:
    """Series of a run: a row for each group of its axis."""
    at: Place = ("runs", run)
    there = [(name, how, place) for name, how, place in columns if any(v is not None for v in numbers.at(*at, *place))]
    rows = [
        [
            _steps(numbers, at, i),
            numbers.show(as_time, *at, "axis", "time", i),
            *(numbers.show(how, *at, *place, i) for _, how, place in there),
        ]
        for i in range(len(numbers.at(*at, "axis", "time")))
    ]
    shown = table(caption, [">step", "saved", *(f">{name}" for name, _, _ in there)], rows if there else [])
    return _details("Numbers of the chart", shown)


def _steps(numbers: Numbers, at: Place, i: int) -> str:
    first, last = numbers.show(str, *at, "axis", "first", i), numbers.show(str, *at, "axis", "last", i)
    return first if numbers.at(*at, "axis", "first", i) == numbers.at(*at, "axis", "last", i) else f"{first}–{last}"


def _tiers(numbers: Numbers, run: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The tiers of a run that are seen from here, with their numbers."""
    return ((i, tier) for i, tier in enumerate(numbers.at("runs", run, "tiers")) if tier["visible"])


# The sections


_MEASURES: tuple[tuple[str, Format, Place], ...] = (
    ("newest step", str, ("newest",)),
    ("saved", as_time, ("newest_time",)),
    ("versions now", as_count, ("versions",)),
    ("versions that are known of", as_count, ("known",)),
    ("state", as_size, ("nbytes",)),
    ("saves", as_count, ("saves",)),
    ("a save blocked the training, mean", as_seconds, ("blocked", "mean_of_all")),
    ("a save blocked the training, longest", as_seconds, ("blocked", "longest_of_all")),
    ("saves blocked the training, in all", as_seconds, ("blocked", "total")),
    ("steps waited for captures, in all", as_seconds, ("waited",)),
    ("a state was captured after, longest", as_seconds, ("captured", "longest_of_all")),
    ("saves that were not made (arena full)", as_count, ("skipped",)),
    ("restores", as_count, ("restores",)),
    ("events", as_count, ("events",)),
)


def _glance(numbers: Numbers) -> str:
    runs = numbers.at("runs")
    notes = "".join(_notes(run) for run in runs)
    tiles = _tiles(numbers) if len(runs) == 1 else ""
    rows = [
        [escape(name), *(numbers.show(how, "runs", i, *place) for i in range(len(runs)))]
        for name, how, place in _MEASURES
    ]
    rows += [
        [f"newest step in {escape(name)}", *(_of_tier(numbers, i, name, str, "newest") for i in range(len(runs)))]
        for name in dict.fromkeys(tier["name"] for run in runs for tier in run["tiers"] if tier["visible"])
    ]
    beside = table("Runs beside each other", ["", *(f">{run['run']}" for run in runs)], rows, whole=True)
    tiers = "".join(_tier_table(numbers, i) for i in range(len(runs)))
    made = numbers.show(as_time, "made")
    about = f'<p class="soft">Made {made} UTC.{_unseen(runs)}</p>'
    shown = _details("All measures", beside) if len(runs) == 1 else beside
    return f"{notes}{about}{tiles}{tiers}{shown}"


def _notes(run: dict[str, Any]) -> str:
    name = f"<code>{escape(run['run'])}</code>"
    off = "" if run["events"] else EVENTS_OFF.format(run=name)
    problems = [*run["problems"], *(f"{tier['name']}: {tier['trouble']}" for tier in run["tiers"] if tier["trouble"])]
    return off + "".join(f'<div class="note"><p>{name}: {escape(problem)}</p></div>' for problem in problems)


def _unseen(runs: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(tier["name"] for run in runs for tier in run["tiers"] if not tier["visible"])
    return f" Not seen from here, as in the memory of the training: {escape(', '.join(names))}." if names else ""


def _tiles(numbers: Numbers) -> str:
    run = numbers.at("runs", 0)
    durable = next(i for i, tier in enumerate(run["tiers"]) if tier["name"] == run["durable"])
    at: Place = ("runs", 0, "tiers", durable)
    tiles: list[tuple[str, str, str, Place, Format]] = [
        ("Newest version", _newest_step(numbers, "runs", 0), "state of ", ("nbytes",), as_size),
        (
            f"Durable in {run['durable']}",
            _newest_step(numbers, *at),
            "behind by ",
            (*at[2:], "behind_seconds"),
            as_seconds,
        ),
        (
            "At risk at most",
            numbers.show(as_seconds, *at, "exposure_worst"),
            f"if only {run['durable']} had been left",
            (),
            str,
        ),
        (
            "A save blocks",
            numbers.show(as_seconds, "runs", 0, "blocked", "mean_of_all"),
            "at most ",
            ("blocked", "longest_of_all"),
            as_seconds,
        ),
        ("Written", numbers.show(as_size, *at, "written_total"), "of ", (*at[2:], "raw_total"), as_size),
        ("Failures", numbers.show(as_count, "runs", 0, "failures"), "in all tiers", (), str),
    ]
    return f'<dl class="tiles">{"".join(_tile(numbers, *tile) for tile in tiles)}</dl>'


def _tile(numbers: Numbers, name: str, value: str, about: str, place: Place, how: Format) -> str:
    more = f"{escape(about)}{numbers.show(how, 'runs', 0, *place)}" if place else escape(about)
    return f"<div><dt>{escape(name)}</dt><dd>{value}<small>{more}</small></dd></div>"


def _newest_step(numbers: Numbers, *place: str | int) -> str:
    shown = numbers.show(str, *place, "newest")
    return shown if shown == NOTHING else f"step {shown}"


def _of_tier(numbers: Numbers, run: int, name: str, how: Format, key: str) -> str:
    for i, tier in _tiers(numbers, run):
        if tier["name"] == name:
            return numbers.show(how, "runs", run, "tiers", i, key)
    return NOTHING


_TIER_COLUMNS: tuple[tuple[str, Format, Place], ...] = (
    (">newest step", str, ("newest",)),
    (">behind, steps", as_count, ("behind",)),
    (">behind", as_seconds, ("behind_seconds",)),
    (">versions", as_count, ("versions",)),
    (">owed", as_count, ("owed",)),
    (">unreadable", as_count, ("unreadable",)),
    (">mean until there", as_seconds, ("arrival", "mean_of_all")),
    (">longest", as_seconds, ("arrival", "longest_of_all")),
    (">most at risk", as_seconds, ("exposure_worst",)),
    (">written", as_size, ("written_total",)),
    (">of", as_size, ("raw_total",)),
)


def _tier_table(numbers: Numbers, run: int) -> str:
    rows = [
        [
            f"<code>{escape(tier['name'])}</code>",
            escape(tier["type"]),
            *(numbers.show(how, "runs", run, "tiers", i, *place) for _, how, place in _TIER_COLUMNS),
            *(_count_of(numbers, run, i, kind) for kind in ("failed", "mended")),
        ]
        for i, tier in _tiers(numbers, run)
    ]
    columns = ["tier", "type", *(name for name, _, _ in _TIER_COLUMNS), ">failed", ">mended"]
    return table(f"Tiers of {numbers.at('runs', run, 'run')}", columns, rows, whole=True)


def _count_of(numbers: Numbers, run: int, tier: int, kind: str) -> str:
    counts = numbers.at("runs", run, "tiers", tier, "counts")
    return numbers.show(as_count, "runs", run, "tiers", tier, "counts", kind) if kind in counts else "0"


def _timeline(numbers: Numbers, run: int) -> str:
    states, at = numbers.at("states"), ("runs", run, "tiers")
    columns = [
        (f"{tier['name']}: {state}", as_count, ("tiers", i, "states", number))
        for i, tier in _tiers(numbers, run)
        for number, state in enumerate(states)
        if number and any(numbers.at(*at, i, "states", number))
    ]
    held = chart_figure(
        "timeline",
        run,
        "how each version stands in each tier",
        "How each version stands in each tier. In a group the state counts that needs the most attention.",
    )
    took = chart_figure(
        "durations",
        run,
        "how long saves took",
        "From the call of <code>save</code>: how long it blocked, until all was captured, until it was in each tier.",
    )
    parts: list[tuple[str, Place]] = [("blocked", ("blocked", "longest")), ("captured", ("captured", "longest"))]
    parts += [(f"in {tier['name']}", ("tiers", i, "arrival", "longest")) for i, tier in _tiers(numbers, run)]
    known = any(value is not None for _, place in parts for value in numbers.at("runs", run, *place))
    times = took + _axis_table(numbers, run, "How long saves took at most", [(n, as_seconds, p) for n, p in parts])
    return held + _axis_table(numbers, run, "Versions by state", columns) + (times if known else "")


def _exposure(numbers: Numbers, run: int) -> str:
    columns = [(t["name"], as_seconds, ("tiers", i, "exposure")) for i, t in _tiers(numbers, run) if t["persistent"]]
    chart = chart_figure("exposure", run, "what would have been lost at the worst moment, by tier")
    return chart + _axis_table(numbers, run, "At risk at most", columns)


def _bytes(numbers: Numbers, run: int) -> str:
    logged = numbers.at("runs", run, "events")
    kinds = ("raw", "written", "stored") if logged else ("stored",)
    columns = [
        (f"{tier['name']}: {kind}", as_size, ("tiers", i, kind)) for i, tier in _tiers(numbers, run) for kind in kinds
    ]
    what = "bytes written" if logged else "bytes that the versions take"
    parts = chart_figure("written", run, f"{what}, by tier") + _axis_table(
        numbers, run, f"{what.capitalize()}", columns
    )
    if not logged:
        return parts
    keys = ("raw_total", "written_total", "by_reuse", "by_codecs", "by_both")
    names = [">state", ">written", ">saved by deduplication", ">by codecs", ">by both, version is gone"]
    rows = [
        [f"<code>{escape(t['name'])}</code>", *(numbers.show(as_size, "runs", run, "tiers", i, key) for key in keys)]
        for i, t in _tiers(numbers, run)
    ]
    return (
        chart_figure("bytes", run, "what became of the bytes of all states")
        + table("What became of the bytes", ["tier", *names], rows, whole=True)
        + parts
    )


def _retention(numbers: Numbers, run: int) -> str:
    count = len(numbers.at("runs", run, "retention"))
    cards = "".join(f"<div>{_retained(numbers, ('runs', run, 'retention', i))}</div>" for i in range(count))
    return f'<div class="cards">{cards}</div>'


def _retained(numbers: Numbers, at: Place) -> str:
    tier = numbers.at(*at)
    if tier["problem"]:
        return f'<p><code>{escape(tier["tier"])}</code>: <span class="bad">{escape(tier["problem"])}</span></p>'
    reasons = [
        [escape(one["reason"]), numbers.show(as_count, *at, "reasons", i, "versions")]
        for i, one in enumerate(tier["reasons"])
    ]
    kept = [
        [
            numbers.show(str, *at, "newest", i, "step"),
            numbers.show(str, *at, "newest", i, "seq"),
            escape("; ".join(one["reasons"])),
        ]
        for i, one in enumerate(tier["newest"])
    ]
    title = f"{tier['tier']} keeps {tier['keep']}"
    drop = f", would drop {numbers.show(as_count, *at, 'drop')}" if tier["drop"] else ""
    said = f"<p><code>{escape(tier['tier'])}</code> keeps {numbers.show(as_count, *at, 'kept')} versions now{drop}.</p>"
    return (
        said
        + table(title, ["reason", ">versions"], reasons, whole=len(reasons) < 12)
        + _details(
            f"Newest versions in {tier['tier']}, each with its reasons",
            table(title, [">step", ">seq", "because"], kept),
        )
    )


def _happenings(numbers: Numbers, run: int) -> str:
    at: Place = ("runs", run, "happenings")
    rows = [
        [
            numbers.show(as_time, *at, i, "time"),
            _kind(one["kind"]),
            escape(one["tier"]),
            numbers.show(str, *at, i, "step"),
            escape(one["reason"]),
        ]
        for i, one in enumerate(numbers.at(*at))
    ]
    shown = f"<p>{numbers.show(as_count, 'runs', run, 'happened')} in all; the newest are listed.</p>" if rows else ""
    return shown + table("What has happened", ["time", "what", "tier", ">step", "why"], rows)


def _kind(kind: str) -> str:
    shown = escape(kind.replace("_", " "))
    return f'<span class="bad">{shown}</span>' if kind in ("failed", "away") else shown


def _ranks(numbers: Numbers, run: int) -> str:
    at: Place = ("runs", run, "ranks")
    ranks = numbers.at(*at)
    columns: tuple[tuple[str, Format, str], ...] = (
        (">saves", as_count, "saves"),
        (">blocked, in all", as_seconds, "blocked"),
        (">longest", as_seconds, "blocked_longest"),
        (">waits of steps", as_count, "waits"),
        (">waited, in all", as_seconds, "waited"),
    )
    rows = [
        [
            "alone" if rank["rank"] is None else numbers.show(str, *at, i, "rank"),
            *(numbers.show(how, *at, i, key) for _, how, key in columns),
        ]
        for i, rank in enumerate(ranks)
    ]
    chart = chart_figure("ranks", run, "for how long each rank waited") if len(ranks) > 1 else ""
    return chart + table("Waits by rank", ["rank", *(name for name, _, _ in columns)], rows)


_MAPS: tuple[tuple[str, str, Format], ...] = (
    (
        "changed",
        "Share of each layer's bytes whose chunks have changed since the version before that is shown",
        as_share,
    ),
    ("drift", "By which part of itself each layer's norm differs from the version before that is shown", as_share),
    ("norms", "Norm of each layer's values", lambda value: f"{value:.4g}"),
    ("nonfinite", "How many values of each layer are NaN or infinite", as_count),
)


def _layers(numbers: Numbers, run: int) -> str:
    layers = numbers.at("runs", run, "layers")
    shown = [one for one in _MAPS if any(value is not None for row in layers[one[0]] for value in row)]
    more = (
        f'<p class="soft">{numbers.show(as_count, "runs", run, "layers", "left_off")} further layers are left off.</p>'
        if layers["left_off"]
        else ""
    )
    parts = "".join(_map(numbers, run, *one) for one in shown)
    return parts + more if parts else '<p class="soft">There are not two versions yet.</p>'


def _map(numbers: Numbers, run: int, name: str, title: str, how: Format) -> str:
    at: Place = ("runs", run, "layers")
    steps = range(len(numbers.at(*at, "steps")))
    rows = [
        [f"<code>{escape(layer)}</code>", *(numbers.show(how, *at, name, i, j) for j in steps)]
        for i, layer in enumerate(numbers.at(*at, "layers"))
    ]
    columns = ["layer", *(f">step {numbers.at(*at, 'steps', j)}" for j in steps)]
    chart = chart_figure(name, run, title) if name != "nonfinite" else ""
    return chart + _details("Numbers of the chart" if chart else title, table(title, columns, rows))


def _policy(numbers: Numbers, run: int) -> str:
    at: Place = ("runs", run, "policy")
    rows = [
        [numbers.show(str, *at, i, "number"), escape(line["text"]), escape(line["did"])]
        for i, line in enumerate(numbers.at(*at))
    ]
    return table(
        "The policy, without secrets, and what each line did",
        [">line", "policy", "did"],
        rows,
        name="policy",
        whole=True,
    )


def _versions(numbers: Numbers, run: int) -> str:
    at: Place = ("runs", run, "newest_versions")
    rows = [
        [
            numbers.show(str, *at, i, "step"),
            numbers.show(str, *at, i, "seq"),
            f"<code>{escape(one['id'][:12])}</code>",
            numbers.show(as_time, *at, i, "time"),
            numbers.show(as_size, *at, i, "nbytes"),
            escape(", ".join(one["tiers"])),
            escape(", ".join([*one["owed"], *(f"{name} (unreadable)" for name in one["unreadable"])])),
            escape(", ".join(one["tags"])),
            escape(one["metadata"]),
        ]
        for i, one in enumerate(numbers.at(*at))
    ]
    columns = [">step", ">seq", "id", "saved", ">state", "in", "missing in", "tags", "metadata"]
    return table("Newest versions", columns, rows)


SECTIONS: tuple[tuple[str, str, str, Panel | None], ...] = (
    ("glance", "At a glance", "", None),
    ("timeline", "Saves, tier by tier", "", _timeline),
    (
        "risk",
        "What would have been lost",
        "The age of a tier's newest version just before the next one arrived (RPO): the work that would have been lost "
        "if only that tier had been left. Without events a version counts as there when it was saved, so the true "
        "value is larger.",
        _exposure,
    ),
    (
        "bytes",
        "Bytes",
        "What was written is less than the state (what of it rules send to the tier) where chunks were there already "
        "(deduplication), or were encoded (codecs). Of a version that is gone it is not known which of the two it was.",
        _bytes,
    ),
    ("retention", "Retention", "What each tier keeps now, and why. A version may have several reasons.", _retention),
    ("happened", "Failures and mends", "", _happenings),
    ("ranks", "Waits of ranks", "How long the training waited. Ranks that lead no tier log no events.", _ranks),
    (
        "layers",
        "Layers",
        "From digests of chunks, for versions that are spread evenly over the run; no value is read.",
        _layers,
    ),
    ("policy", "Policy", "", _policy),
    ("versions", "Newest versions", "", _versions),
)
