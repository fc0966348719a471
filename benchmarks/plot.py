"""Plots: seconds of each competitor for the biggest state measured, and bars in groups for tables of other work."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.field import NAMES
from benchmarks.results import Results, Spread, short
from benchmarks.tables import title, way_of

OURS, PEERS, LIMITS = "#1b6ca8", "#b9b9b9", "#e4d8b4"
"""Colours of tierstate, of the others, and of the limits of the hardware."""
PANELS = {
    "training blocked": ("save", "blocked"),
    "durable": ("save", "durable"),
    "cold restore in place": ("restore", "seconds"),
    "fresh load": ("load", "seconds"),
}
Bars = list[tuple[str, float, str]]


def draw(results: Results, path: Path) -> bool:
    """Write a PNG; False where there is nothing to draw."""
    if not results.sizes("save"):
        return False
    size = results.sizes("save")[-1]
    panels = {name: bars(results, size, *what) for name, what in PANELS.items()}
    panels = {name: found for name, found in panels.items() if found}
    height = 0.31 * max(map(len, panels.values())) * len(panels) / 2 + 1
    figure = Figure(figsize=(11, height))
    axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (name, found) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, name, found)
    state = results.pick("save", size=size)[0]
    figure.suptitle(
        f"{state['nbytes'] / 2**30:.1f} GiB of training state, {state['tensors']:,} tensors: seconds, less is better",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def draw_groups(path: Path, title: str, panels: dict[str, dict[str, dict[str, float]]]) -> None:
    """Write a PNG with bars in groups.

    Args:
        panels: by the panel's title, by group, each competitor's number.
    """
    figure = Figure(figsize=(11, 3.1 * len(panels) + 0.6))
    axes = figure.subplots(len(panels), 1, squeeze=False)
    for axis, (name, groups) in zip(axes.flat, panels.items(), strict=True):
        titles = list(dict.fromkeys(title for group in groups.values() for title in group))
        greys = [str(0.45 + 0.4 * i / max(1, len(titles))) for i in range(len(titles))]
        width = 0.84 / len(titles)
        for number, one in enumerate(titles):
            there = [(i, group[one]) for i, group in enumerate(groups.values()) if one in group]
            at = [i + (number - (len(titles) - 1) / 2) * width for i, _ in there]
            colour = OURS if one.startswith("tierstate") else LIMITS if "bare" in one else greys[number]
            axis.bar(
                at,
                [value for _, value in there],
                width,
                label=plain(one),
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )
        axis.set_xticks(range(len(groups)), groups, fontsize=8)
        axis.set_title(name, fontsize=10, loc="left")
    axes[0, 0].legend(fontsize=8, ncols=6, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def bars(results: Results, size: int, phase: str, number: str) -> Bars:
    """Name, median and colour, in the order of the field."""
    found: Bars = []
    for peer in NAMES:
        samples = results.pick(phase, size=size, peer=peer)
        for way in dict.fromkeys(way_of(s) for s in samples):
            mine = [s for s in samples if way_of(s) == way]
            spread = Spread.of([s["saves"][-1] if "saves" in s else s for s in mine], lambda s: s[number])
            if spread is not None:
                found.append((plain(way or title(peer)), spread.median, colour(peer)))
    return found


def plain(text: str) -> str:
    """Without Markdown."""
    return text.replace("`", "")


def colour(peer: str) -> str:
    """By which kind of competitor it is."""
    kind = NAMES[peer].partition(":")[0]
    return OURS if kind == "ours" else LIMITS if kind in ("memory", "disk", "fio") else PEERS


def _panel(axis: Axes, name: str, found: Bars) -> None:
    names, seconds, colours = zip(*found, strict=True)
    drawn = axis.barh(range(len(found)), seconds, color=colours, height=0.72)
    axis.bar_label(drawn, [short(s) for s in seconds], padding=3, fontsize=8)
    axis.set_yticks(range(len(found)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(seconds) * 1.13)
    axis.set_title(name, fontsize=10, loc="left")
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
