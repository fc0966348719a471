"""The page: each way beside its limit, what pinning costs, and what a save adds to a step."""

from __future__ import annotations

import statistics

from benchmarks.results import Results, Sample, Spread, short
from benchmarks.tables import table
from tierstate.tiers.units import rough_size

from .raw import limit_of
from .state import SHAPES


def report(results: Results) -> str:
    """All tables that there are samples for."""
    parts = [f"{name}: {what}" for name, what in results.machine.items()]
    pages = ["\n".join(f"* {part}" for part in parts)]
    for shape in SHAPES:
        found = results.pick("copies", peer=shape)
        if found:
            pages += [f"State `{shape}`, {rough_size(found[0]['size'])}:", copies_table(found)]
    pages += [pin_table(results.pick("pin")), stalls_table(results)]
    return "\n\n".join(page for page in pages if page)


def copies_table(samples: list[Sample]) -> str:
    """Each way beside its limit, both of the same round."""
    rows = []
    for way in dict.fromkeys(s["way"] for s in samples):
        mine = [s for s in samples if s["way"] == way]
        limit, first = limit_of(way), way.startswith("first ")
        seconds, spread = (Spread.of(mine, lambda s, k=k: s["seconds"] * k) for k in (1, 1e3))
        assert seconds is not None
        # Of the first save there is one, before the first round of raw copies.
        ratios = [_raw(samples, limit, 1 if first else s["round"], s["group"]) / s["seconds"] for s in mine if limit]
        extra = max((s["extra"] for s in mine if "extra" in s), default=None)
        rate = mine[0]["size"] / seconds.median / 1e9
        ratio = short(statistics.median(ratios)) if ratios else ""
        more = "" if extra is None else f"{extra / 2**20:.0f}"
        rows.append([way, str(spread), short(rate), ratio, limit, more])
    return table("way | ms (least–most) | GB/s | / limit | limit | extra device memory, MiB", rows)


def _raw(samples: list[Sample], way: str, number: int, group: str) -> float:
    found = [s for s in samples if (s["way"], s["round"], s["group"]) == (way, number, group)]
    return float(found[0]["seconds"])


def pin_table(samples: list[Sample]) -> str:
    """Milliseconds for each GiB."""
    rows = []
    for way in dict.fromkeys(s["way"] for s in samples):
        mine = [s for s in samples if s["way"] == way]
        rows.append([way, str(Spread.of(mine, lambda s: s["seconds"] * 1e3 * 2**30 / s["size"]))])
    return table("slabs of the arena | ms per GiB (least–most)", rows)


def stalls_table(results: Results) -> str:
    """What a save adds to a step."""
    rows = []
    for shape in SHAPES:
        samples = results.pick("stalls", peer=shape)
        for way in dict.fromkeys(s["way"] for s in samples):
            mine = [s for s in samples if s["way"] == way]
            quiet, call, waited = (Spread.of(mine, lambda s, k=k: s[k] * 1e3) for k in ("quiet", "call", "waited"))
            stall = Spread.of(mine, lambda s: s["stall"] * 1e3)
            share = statistics.median(s["stall"] / s["quiet"] for s in mine)
            extra = max(s["extra"] for s in mine)
            row = [shape, way, *map(str, (quiet, stall)), f"{100 * share:+.2f} %", *map(str, (call, waited))]
            rows.append([*row, f"{extra / 2**20:.0f}"])
    head = "state | save | step, ms | stall, ms (least–most) | of the step | of which the call, ms"
    return table(f"{head} | and the optimizer waiting, ms | extra device memory, MiB", rows)
