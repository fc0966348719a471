"""What a prune did, as tables for people or JSON for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tierstate.tiers.units import rough_size

from .pruning import PruneReport, TierPrune
from .tables import print_json, table


def show_prune(report: PruneReport, as_json: bool) -> None:
    """Versions with what became of each, then packs."""
    if as_json:
        tiers = [{**dataclasses.asdict(tier), "nbytes": tier.nbytes} for tier in report.tiers]
        print_json({"ok": report.ok, "dry_run": report.dry_run, "tiers": tiers})
        return
    rows = [row for tier in report.tiers for row in _versions(tier, report)]
    table(["tier", ">seq", ">step", "", "why"], rows)
    done = ("would go", "would be emptied") if report.dry_run else ("went", "were emptied")
    for tier in report.tiers:
        for line in _packs(tier, *done):
            print(f"{tier.tier}: {line}")
    for problem in (problem for tier in report.tiers for problem in tier.problems):
        print(f"TO DO {problem}")


def _versions(tier: TierPrune, report: PruneReport) -> Iterator[tuple[object, ...]]:
    for seq in sorted({*tier.keep, *tier.drop}):
        dropped = seq in tier.drop
        what = "dropped" if dropped else "thinned" if seq in tier.thin else "kept"
        yield tier.tier, seq, report.steps.get(seq, "?"), what, "-" if dropped else ", ".join(tier.keep[seq])


def _packs(tier: TierPrune, went: str, emptied: str) -> Iterator[str]:
    yield f"{_count(len(tier.packs), 'pack')}, {rough_size(tier.nbytes)}, {went}"
    if tier.young:
        yield f"{_count(tier.young, 'pack')} that no version names may be of a save under way, and stay"
    if tier.ageless:
        yield f"{_count(tier.ageless, 'pack')} that no version names are of unknown age, and stay; --grace 0 takes them"
    if tier.leases:
        yield f"{_count(tier.leases, 'lease')} of dead processes {went}"
    for seq, run in tier.pins:
        yield f"version {seq} is not needed any more by run {run}, which was forked from it"
    if packs := tier.repacked.packs:
        left = f"{rough_size(tier.repacked.copied)} of {rough_size(sum(packs.values()))} were still needed"
        yield f"{_count(len(packs), 'pack')} {emptied}, of which {left}; a later prune deletes them"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
