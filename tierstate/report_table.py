"""What the command line prints of verifications, copies and rebuilt records."""

from __future__ import annotations

import dataclasses

from tierstate.tiers.findings import Problem, Report
from tierstate.tiers.rebuilding import Rebuilding
from tierstate.tiers.units import rough_size

from .copying import Copied
from .tables import print_json, table

_LISTED = 5


def show_report(report: Report, as_json: bool) -> None:
    """What a verification found."""
    if as_json:
        print_json({**dataclasses.asdict(report), "ok": report.ok})
        return
    print(f"{report.versions} records, {report.chunks} chunks, {rough_size(report.nbytes)} of data read")
    if report.sample:
        shares = (f"{n} {100 * report.read.get(n, 0) / held if held else 100:.3g} %" for n, held in report.held.items())
        print(f"a sample, by seed {report.seed}: of the bytes in {', '.join(shares)}")
    for name, reason in report.unreachable.items():
        print(f"{name} cannot be asked: {reason}")
    if report.problems:
        rows = [
            (p.tier or "-", p.seq, "?" if p.step is None else p.step, p.leaf or "-", p.chunks or "-", p.what, _then(p))
            for p in report.problems
        ]
        table(["tier", ">seq", ">step", "leaf", ">chunks", "problem", "elsewhere"], rows)
    else:
        print("no problem found" if report.ok else "no problem found in the tiers that answered")
    _show_ends(report)


def _show_ends(report: Report) -> None:
    for name, count in report.mended.items():
        print(f"{name}: {count} damaged chunks were written again")
    if report.unopened:
        print(f"{report.unopened} leaves were not opened: they are pickles")
    for lost in report.lost:
        what = "no record of it can be read"
        if lost.leaves:
            what = f"{lost.leaves} of its leaves are whole nowhere, {lost.first} the first"
            what += f"; {lost.thinned}" if lost.thinned else ""
        name = f"version {lost.seq}" + ("" if lost.step is None else f" (step {lost.step})")
        print(f"{name} cannot be restored as a whole: {what}")


def _then(problem: Problem) -> str:
    if problem.mended:
        return "mended"
    return {True: "whole", False: "no", None: "-"}[problem.whole]


def show_copied(found: Copied, where: str, as_json: bool) -> None:
    """What was copied, or that it was there already."""
    info = found.version
    if as_json:
        print_json({**dataclasses.asdict(info), "copied": list(found.tiers)})
        return
    name = f"step {info.step} ({info.id[:12]}, {rough_size(info.nbytes)})"
    if not found.tiers:
        print(f"{where} has {name} already, as version {info.seq} of run {info.run}")
    else:
        print(f"copied {name} to {', '.join(found.tiers)}, as version {info.seq} of run {info.run}")


def show_rebuilt(found: Rebuilding, dry_run: bool, as_json: bool) -> None:
    """Which records were made again, and which were not."""
    if as_json:
        print_json({**dataclasses.asdict(found), "ok": found.ok})
        return
    for name, reason in found.unreachable.items():
        print(f"{name} cannot be asked: {reason}")
    if found.versions:
        done = "would be rebuilt" if dry_run else "rebuilt"
        rows = [
            (v.seq, "?" if v.step is None else v.step, v.id[:12], f"{v.found}/{v.chunks}", done if v.rebuilt else v.why)
            for v in found.versions
        ]
        table([">seq", ">step", "id", ">chunks", "record"], rows)
    else:
        print(f"{found.tier}: no record is known to be lost")
    if found.unread:
        listed = [f"{key}: {why}" for key, why in list(found.unread.items())[:_LISTED]]
        more = f"; and {len(found.unread) - _LISTED} more" if len(found.unread) > _LISTED else ""
        print(f"{len(found.unread)} packs say nothing of what they hold: {'; '.join(listed)}{more}")
    if found.unknown:
        told = ", ".join(map(str, found.unknown))
        print(f"packs of versions {told} are there, and no record of them anywhere: they were dropped, or are lost")
