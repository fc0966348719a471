"""The output of what deletes, verifies and repairs: prune, rm, verify, doctor, rebuild; as tables or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from tierstate.engine.maintain.prune import PruneReport, TierPrune
from tierstate.engine.maintain.remove import RemoveReport, RunRemoval
from tierstate.engine.repair.check_chunks import Problem, VerifyReport
from tierstate.engine.repair.health import DoctorReport, Repair
from tierstate.engine.repair.rebuild import RebuildReport
from tierstate.engine.store.catalog import LOOK_FURTHER
from tierstate.manifest.errors import tier_text
from tierstate.tiers.units import rough_size

from .lines import plural, print_fields, print_json, say, table

_UNREAD_SHOWN = 5


def show_prune(report: PruneReport, as_json: bool) -> None:
    """What a prune kept and dropped: versions with the reasons, then packs."""
    if as_json:
        tiers = [{**dataclasses.asdict(tier), "nbytes": tier.nbytes} for tier in report.tiers]
        print_json({"ok": report.ok, "dry_run": report.dry_run, "tiers": tiers})
        return
    rows = [row for tier in report.tiers for row in _versions(tier, report)]
    table(["tier", ">seq", ">step", "", "why"], rows)
    done = ("would go", "would be emptied") if report.dry_run else ("went", "were emptied")
    for tier in report.tiers:
        for line in _packs(tier, *done):
            say(f"{tier.tier}: {line}")
    for problem in (problem for tier in report.tiers for problem in tier.problems):
        say(f"TO DO {problem}")


def _versions(tier: TierPrune, report: PruneReport) -> Iterator[tuple[object, ...]]:
    for seq in sorted({*tier.keep, *tier.drop}):
        dropped = seq in tier.drop
        what = "dropped" if dropped else "thinned" if seq in tier.thin else "kept"
        yield (
            tier.tier,
            seq,
            report.steps.get((tier.tier, seq), "?"),
            what,
            "-" if dropped else ", ".join(tier.keep[seq]),
        )


def _packs(tier: TierPrune, went: str, emptied: str) -> Iterator[str]:
    yield f"{plural(len(tier.packs), 'pack')}, {rough_size(tier.nbytes)}, {went}"
    if tier.young:
        yield f"{plural(tier.young, 'pack')} that no version names may be of a save under way, and stay"
    if tier.ageless:
        yield f"{plural(tier.ageless, 'pack')} that no version names are of unknown age, and stay; --grace 0 takes them"
    if tier.leases:
        yield f"{plural(tier.leases, 'lease')} of dead processes {went}"
    for seq, run in tier.pins:
        yield f"version {seq} is not needed any more by run {run}, which was forked from it"
    if packs := tier.repacked.packs:
        left = f"{rough_size(tier.repacked.copied)} of {rough_size(sum(packs.values()))} were still needed"
        yield f"{plural(len(packs), 'pack')} {emptied}, of which {left}; a later prune deletes them"


def show_report(report: VerifyReport, as_json: bool) -> None:
    """The result of a verification."""
    if as_json:
        print_fields(report, ok=report.ok)
        return
    say(
        f"{plural(report.versions, 'record')}, {plural(report.chunks, 'chunk')}, "
        f"{rough_size(report.nbytes)} of data read"
    )
    if report.sample:
        shares = (f"{n} {100 * report.read.get(n, 0) / held if held else 100:.3g} %" for n, held in report.held.items())
        say(f"a sample, by seed {report.seed}: of the bytes in {', '.join(shares)}")
    for name, reason in report.unreachable.items():
        say(f"{name} cannot be asked: {reason}")
    if report.problems:
        rows = [
            (
                p.tier or "-",
                p.seq,
                "?" if p.step is None else p.step,
                p.leaf or "-",
                p.chunks or "-",
                p.what,
                _state(p),
            )
            for p in report.problems
        ]
        table(["tier", ">seq", ">step", "leaf", ">chunks", "problem", "elsewhere"], rows)
    else:
        say("no problem found" if report.ok else "no problem found in the tiers that answered")
    _show_outcome(report)


def _show_outcome(report: VerifyReport) -> None:
    for name, count in report.mended.items():
        say(f"{name}: {count} damaged chunks were written again")
    if report.unopened:
        say(f"{report.unopened} leaves were not opened: they are pickles")
    for lost in report.lost:
        what = "no record of it can be read"
        if lost.leaves:
            what = f"{lost.leaves} of its leaves are damaged wherever a record names them, {lost.first} the first"
            what += f"; {lost.thinned}" if lost.thinned else ""
        name = f"version {lost.seq}" + ("" if lost.step is None else f" (step {lost.step})")
        say(f"{name} cannot be restored as a whole: {what}")
    if report.lost:
        say(LOOK_FURTHER)


def _state(problem: Problem) -> str:
    if problem.mended:
        return "mended"
    return {True: "whole", False: "no", None: "-"}[problem.whole]


def show_doctor(found: DoctorReport, tiers: Sequence[str], as_json: bool) -> None:
    """Each version with the state of its copies, the repairs in their order, and what cannot be repaired."""
    if as_json:
        print_fields(found, ok=found.ok)
        return
    rows = [
        (v.seq, "?" if v.step is None else v.step, v.id[:12] or "?", *(v.tiers.get(t, "-") for t in tiers), v.state)
        for v in found.versions
    ]
    if rows:
        table([">seq", ">step", "id", *tiers, "all in all"], rows)
    for v in found.versions:
        if v.why:
            lost = f"; not whole: {_named(v.lost, v.leaves)}" if v.leaves else ""
            say(f"version {v.seq} is {v.state}: {v.why}{lost}")
    for name, reason in found.unreachable.items():
        say(f"{name} cannot be asked: {reason}")
    for note in found.notes:
        say(note)
    if found.unknown:
        told = ", ".join(map(str, found.unknown))
        say(f"packs of versions {told} are there, and no record of them anywhere: they were dropped, or are lost")
    _show_repairs(found)


def _named(names: Sequence[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + more


def _show_repairs(found: DoctorReport) -> None:
    if found.repairs:
        rows = [
            (n, r.tier or "all", r.kind, r.seq or "-", "-" if r.step is None else r.step, r.what, _written(r),
             "done" if r.done else r.error or "to do")
            for n, r in enumerate(found.repairs, 1)
        ]  # fmt: skip
        table([">", "tier", "repair", ">seq", ">step", "since", "writes", "state"], rows)
    lost, unknown = (sum(v.state == state for v in found.versions) for state in ("lost", "unknown"))
    left = sum(not r.done for r in found.repairs)
    if not lost and not unknown and not left:
        say("all of it has been repaired" if found.repairs else "nothing is lost, and nothing is to be repaired")
    if left and not found.applied:
        say(f"{plural(left, 'repair')} to do, in this order: `tierstate doctor --apply`, while nobody saves this run")
    if lost:
        bare = sum(v.state == "lost" and not v.tiers for v in found.versions)
        how = "`tierstate rm --seq N` removes one for good" if bare < lost else ""
        prune = "`tierstate prune` deletes what is left of one without a record" if bare else ""
        say(f"{plural(lost, 'version')} cannot be had as a whole; {', '.join(filter(None, (how, prune)))}")
    if unknown:
        say(f"{plural(unknown, 'version')} may be had yet: remove none, and look again when every tier answers")


def _written(repair: Repair) -> str:
    if not repair.chunks:
        return "its record" if repair.kind in ("rebuild", "mend") else "-"
    where = f" from {', '.join(repair.sources)}" if repair.sources else ""
    return f"{rough_size(repair.nbytes)}{where}"


def show_removed(found: RemoveReport, forced: bool, as_json: bool) -> None:
    """What a removal did in each tier, or would do, and what stands in its way."""
    if as_json:
        print_fields(found, ok=found.ok)
        return
    name = f"version {found.seq}" + ("" if found.step is None else f" (step {found.step})")
    for t in found.tiers:
        stays = [*t.reasons, *(() if forced else t.forced)] if found.dry_run else []
        packs = f"{plural(len(t.packs), 'pack')}, {rough_size(sum(t.packs.values()))}"
        if t.removed:
            say(f"{t.tier}: {name} was removed, with {packs}")
        elif found.dry_run and not stays:
            say(f"{t.tier}: {name} would be removed, with {packs}")
        if t.error or stays:
            say(t.error if t.removed else f"{t.tier}: {name} stays: {t.error or '; '.join(stays)}")
        if found.dry_run and not t.reasons and t.forced and not forced:
            say(f"{t.tier}: --force removes it all the same")
    for tier, why in found.unreachable.items():
        say(f"{tier} cannot be asked, and {name} may stay there: {why}")
    _show_replaced(found)


def show_removed_run(found: RunRemoval, as_json: bool) -> None:
    """What the removal of a run did in each tier, or would do, and what stands in its way."""
    if as_json:
        print_fields(found, ok=found.ok)
        return
    would = "would be" if found.dry_run else "were"
    for t in found.tiers:
        packs = (
            f"{plural(t.versions, 'version')} and {plural(len(t.packs), 'pack')}, {rough_size(sum(t.packs.values()))}"
        )
        if stays := t.error or "; ".join(t.reasons):
            done = f"; {packs}, {would} removed before" if t.error else ""
            say(f"{t.tier}: run {found.run} stays: {stays}{done}")
        else:
            say(f"{t.tier}: {packs}, {would} removed")
        if t.left:
            say(
                f"{t.tier}: {plural(t.left, 'pack')} that no version names may be of a save under way, and stay: "
                "`tierstate prune --grace 0` deletes them, while nobody saves the run"
            )
    if found.tags and found.ok:
        say(f"its tags {', '.join(found.tags)} {'would be' if found.dry_run else 'were'} taken back")
    for tier, why in found.unreachable.items():
        say(f"{tier} cannot be asked, and run {found.run} may stay there: {why}")
    _show_replaced(found)


def _show_replaced(found: RemoveReport | RunRemoval) -> None:
    for one in found.replaced.items():
        say(tier_text(*one))


def show_rebuilt(found: RebuildReport, dry_run: bool, as_json: bool) -> None:
    """Records that were rebuilt from packs, and those that could not be."""
    if as_json:
        print_fields(found, ok=found.ok)
        return
    for name, reason in found.unreachable.items():
        say(f"{name} cannot be asked: {reason}")
    if found.versions:
        done = "would be rebuilt" if dry_run else "rebuilt"
        rows = [
            (v.seq, "?" if v.step is None else v.step, v.id[:12], f"{v.found}/{v.chunks}", done if v.rebuilt else v.why)
            for v in found.versions
        ]
        table([">seq", ">step", "id", ">chunks", "record"], rows)
    else:
        say(f"{found.tier}: no record is known to be lost")
    if found.unread:
        listed = [f"{key}: {why}" for key, why in list(found.unread.items())[:_UNREAD_SHOWN]]
        more = f"; and {len(found.unread) - _UNREAD_SHOWN} more" if len(found.unread) > _UNREAD_SHOWN else ""
        say(f"{len(found.unread)} packs do not say all that they hold: {'; '.join(listed)}{more}")
    if found.unknown:
        told = ", ".join(map(str, found.unknown))
        say(f"packs of versions {told} are there, and no record of them anywhere: they were dropped, or are lost")
