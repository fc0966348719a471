"""Tables of results, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.field import NAMES, Missing, find
from benchmarks.results import Results, Sample, Spread, short

OURS = "eager"
"""What ratios are made against."""


def title(peer: str) -> str:
    """A competitor's name in tables."""
    try:
        return find(peer).title
    except Missing:
        return peer


def way_of(sample: Sample) -> str:
    """How a restore or a load was done."""
    return str(sample.get("way", ""))


def save_table(results: Results, size: int) -> str:
    """Second saves of a process, and what they cost."""
    ours = results.pick("save", size=size, peer=OURS)
    rows = []
    for peer in NAMES:
        samples = results.pick("save", size=size, peer=peer)
        if not samples:
            continue
        last, nbytes = [s["saves"][-1] for s in samples], samples[0]["nbytes"]
        blocked, captured, durable = (Spread.of(last, lambda s, k=k: s[k]) for k in ("blocked", "captured", "durable"))
        base = [s["saves"][-1] for s in ours]
        rows.append(
            [
                title(peer),
                _times(blocked),
                _over(blocked, Spread.of(base, lambda s: s["blocked"])),
                _times(captured) if _is_later(captured, blocked) else "",
                _times(durable),
                _rate(nbytes, durable),
                _over(durable, Spread.of(base, lambda s: s["durable"])),
                _middle(Spread.of([s["saves"][0] for s in samples], lambda s: s["durable"])),
                _middle(Spread.of(last, lambda s: s["cpu"])),
                _gib(Spread.of(samples, lambda s: s["memory"])),
                str(last[0]["files"]) if durable else "",
                f"{statistics.median(s['written'] for s in last) / nbytes:.3f}" if durable else "",
            ]
        )
    head = "save | blocked, s | / eager | captured, s | durable, s | GB/s | / eager | first save durable, s | CPU s"
    return table(f"{head} | extra memory, GiB | files | written / state", rows)


def cold_table(results: Results, phase: str, size: int) -> str:
    """Cold restores in place, or fresh loads."""
    base = Spread.of(results.pick(phase, size=size, peer=OURS), lambda s: s["seconds"])
    rows = []
    for peer in NAMES:
        samples = results.pick(phase, size=size, peer=peer)
        saved = results.pick("save", size=size, peer=peer)
        for way in dict.fromkeys(way_of(s) for s in samples):
            found = [s for s in samples if way_of(s) == way]
            seconds, nbytes = Spread.of(found, lambda s: s["seconds"]), saved[0]["nbytes"]
            rows.append(
                [
                    way,
                    _times(seconds),
                    _rate(nbytes, seconds),
                    _over(seconds, base),
                    _middle(Spread.of(found, lambda s: s["cpu"])),
                    _gib(Spread.of(found, lambda s: s["memory"])),
                    f"{statistics.median(s['read'] for s in found) / nbytes:.3f}",
                ]
            )
    what = "cold restore in place" if phase == "restore" else "fresh load"
    return table(f"{what} | s | GB/s | / tierstate | CPU s | extra memory, GiB | read / state", rows)


def unchanged_table(results: Results) -> str:
    """Second saves of a state that has not changed."""
    rows = []
    for peer in NAMES:
        samples = results.pick("unchanged", peer=peer)
        if samples:
            last, nbytes = [s["saves"][-1] for s in samples], samples[0]["nbytes"]
            durable = Spread.of(last, lambda s: s["durable"])
            written = statistics.median(s["written"] for s in last) / nbytes
            rows.append([title(peer), _times(durable), _rate(nbytes, durable), f"{written:.4f}"])
    return table("unchanged state, saved again | durable, s | GB/s of state | written / state", rows)


def training_table(results: Results) -> str:
    """What saves cost a training."""
    rows = []
    for sample in results.pick("training"):
        quiet, saving = statistics.mean(sample["quiet"]), statistics.mean(sample["saving"])
        rows.append(
            [
                title(sample["peer"]),
                str(sample["every"]),
                f"{quiet:.3f}",
                f"{saving:.3f}",
                f"{100 * (saving / quiet - 1):+.1f} %",
                f"{saving - quiet:+.3f} s × {sample['every']} = {(saving - quiet) * sample['every']:+.2f} s",
                f"{statistics.mean(sample['blocked']):.3f}",
                f"{sample['waited'] / len(sample['blocked']):.3f}" if sample["waited"] else "",
                f"{statistics.mean(sample['drained']):.2f}",
            ]
        )
    head = "training | a save each … steps | step without, s | step with, s | slower by | cost of one save"
    return table(f"{head} | of which the call, s | and the optimizer waiting, s | left at the end, s", rows)


def import_table(results: Results) -> str:
    """Seconds of imports."""
    samples = results.pick("import")
    modules = dict.fromkeys(s["peer"] for s in samples)
    rows = [[f"`{m}`", _middle(Spread.of(_of(samples, m), lambda s: s["seconds"]))] for m in modules]
    return table("import | s", rows)


def _of(samples: list[Sample], peer: str) -> list[Sample]:
    return [s for s in samples if s["peer"] == peer]


def table(head: str, rows: Iterable[list[str]]) -> str:
    """Markdown; empty without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {head} |", "|" + " --- |" * (head.count("|") + 1), *lines]) if lines else ""


def _is_later(captured: Spread | None, blocked: Spread | None) -> bool:
    """By more than the time it takes to ask."""
    return captured is not None and blocked is not None and captured.median - blocked.median > 0.001


def _times(found: Spread | None) -> str:
    return "" if found is None else str(found)


def _middle(found: Spread | None) -> str:
    return "" if found is None else short(found.median)


def _gib(found: Spread | None) -> str:
    return "" if found is None else f"{found.median / 2**30:.2f}"


def _rate(nbytes: int, found: Spread | None) -> str:
    return "" if found is None else f"{nbytes / found.median / 1e9:.2f}"


def _over(found: Spread | None, base: Spread | None) -> str:
    return "" if found is None or base is None else f"{found.median / base.median:.2f}"
