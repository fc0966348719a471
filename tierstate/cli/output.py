"""The output of every command: a table or lines for people, or with ``--json`` the same result as JSON for machines.

Commands pass their result, mostly a dataclass, to the ``show_...`` function of its type; no command prints by itself.
What a terminal would obey is written as an escape.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from tierstate.cluster.check import TierFinding
from tierstate.copy import CopyResult
from tierstate.engine.events import Event
from tierstate.engine.info import VersionInfo
from tierstate.engine.maintain.adopt import MarkerResult
from tierstate.engine.maintain.prune import PruneReport, TierPrune
from tierstate.engine.maintain.rekey import RekeyResult
from tierstate.engine.maintain.remove import RemoveReport
from tierstate.engine.repair.check_chunks import Problem, VerifyReport
from tierstate.engine.repair.doctor import DoctorReport, Repair
from tierstate.engine.repair.rebuild import RebuildReport
from tierstate.engine.store.catalog import LOOK_FURTHER
from tierstate.engine.versions.bisect import Bisection
from tierstate.engine.versions.leaf_history import LayerHistory, VersionHistory
from tierstate.engine.versions.leaf_locations import LeafLocation, TierShare, subtotals
from tierstate.manifest.errors import TierUnavailable
from tierstate.manifest.format.leaf import CONTAINERS
from tierstate.manifest.format.leaf_path import format_path
from tierstate.manifest.history.diff import LeafDiff
from tierstate.manifest.history.tags import TagTarget
from tierstate.manifest.printable import escape_controls, escape_json, escape_lines
from tierstate.report.collect import describe_keep
from tierstate.tiers.peer.members import Member
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import rough_size

from .table import shortened, table_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from tierstate.files.export import ExportResult


PLAIN_ABOVE = 1000
"""JSON of more items than this has a line for each, which is much faster."""


_LIVE_COLUMNS = ["tier", "", "lasts", "races", ">put, list ms", ">write/s", ">read/s", ">room"]


_UNREAD_SHOWN = 5


_LAYERS_SHOWN = 3


def print_json(value: Any) -> None:
    """Print JSON on standard output; values that JSON does not have, such as paths and NaN, are printed as text."""
    if isinstance(value, list) and len(value) > PLAIN_ABOVE:  # one line for each
        print("[" + ",\n".join(map(_as_json, value)) + "]")
        return
    print(_as_json(value, 2))


def _as_json(value: Any, indent: int | None = None) -> str:
    try:
        text = json.dumps(value, indent=indent, default=str, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a loss in the metadata of a version may well be NaN
        text = json.dumps(_finite(value), indent=indent, default=str, ensure_ascii=False)
    return escape_json(text)


def _finite(value: Any) -> Any:
    """The same with NaN, Infinity and -Infinity as text, which is how `json.dumps` would write them bare."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def say(line: str, file: TextIO | None = None) -> None:
    """Print one line, on standard output if no file is given."""
    print(escape_controls(line), file=file)


def print_fields(value: DataclassInstance, **more: object) -> None:
    """The fields of a dataclass, and more beside them, as one JSON object."""
    print_json({**dataclasses.asdict(value), **more})


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output, on a terminal as wide as that; names that begin with ``>`` are of numbers."""
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    head, *lines = table_lines(columns, printable(rows), width)
    print("\n".join([f"\x1b[1m{head}\x1b[0m" if bold else head, *lines]))


def printable(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    """The cells of a table as text that a terminal does not obey."""
    return [[escape_controls(str(cell)) for cell in row] for row in rows]


def when(seconds: float) -> str:
    """A time as people write it, in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_runs(found: Mapping[str, Sequence[str]], as_json: bool) -> None:
    """Runs and the tiers that have them."""
    if as_json:
        print_json([{"run": run, "tiers": list(tiers)} for run, tiers in sorted(found.items())])
    else:
        table(["run", "tiers"], [(run, ", ".join(tiers)) for run, tiers in sorted(found.items())])


def show_versions(versions: Sequence[VersionInfo], tiers: Sequence[str], as_json: bool) -> None:
    """Versions, oldest first, with a column per tier."""
    if as_json:
        names = [field.name for field in dataclasses.fields(VersionInfo)]
        print_json([{name: getattr(v, name) for name in names} for v in versions])
        return
    named = any(v.tags for v in versions)
    rows = [
        (
            v.seq,
            *((v.step, v.id[:12], when(v.time), rough_size(v.nbytes)) if v.id else ("?", "?", "?", "?")),
            *(_copy(v, t) for t in tiers),
            *([", ".join(v.tags)] if named else []),
            _pairs({**v.metadata, **({"lossy": "+".join(v.lossy)} if v.lossy else {})}),
        )
        for v in versions
    ]
    table([">seq", ">step", "id", "saved", ">size", *tiers, *(["tags"] if named else []), "metadata"], rows)
    for tier in tiers:
        _show_lag(tier, versions)
    for v in versions:
        for why in v.unreadable.values():
            say(f"version {v.seq} cannot be read: {why}", sys.stderr)


def _show_lag(tier: str, versions: Sequence[VersionInfo]) -> None:
    """What a tier lacks that is due there, and how far its newest version is behind the newest of all."""
    late, known = [v for v in versions if tier in v.late], [v for v in versions if v.id]
    newest = next((v for v in reversed(known) if tier in v.tiers), None)
    if not late and (newest is None or newest is known[-1]):
        return
    told = f"{tier} has none" if newest is None else f"{tier} has step {newest.step} as its newest"
    if late:
        nbytes = rough_size(sum(v.nbytes for v in late))
        told += f", and lacks {len(late)} that are due there: {nbytes}, since {when(late[0].time)}"
    say(told if newest is None else f"{told}; {_behind(newest, known)}")


def _behind(newest: VersionInfo, known: Sequence[VersionInfo]) -> str:
    last = known[-1]
    versions = _count(sum(v.seq > newest.seq for v in known), "version")
    steps = _count(last.step - newest.step, "step")
    seconds = max(0.0, last.time - newest.time)
    return f"{versions}, {steps} and {seconds:.3g} s behind step {last.step}"


def _copy(version: VersionInfo, tier: str) -> str:
    if tier in version.unreadable:
        return "unreadable"
    if tier not in version.tiers:
        return "late" if tier in version.late else "-"
    return "part" if tier in version.partial else "yes"


def _pairs(metadata: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in metadata.items())


def show_restored(info: VersionInfo, to: Path, as_json: bool) -> None:
    """The version that was restored, and the file that has it."""
    if as_json:
        print_fields(info, file=to)
    else:
        say(f"restored step {info.step} ({info.id[:12]}, {rough_size(info.nbytes)}) to {to}")


def show_exported(found: ExportResult, as_json: bool) -> None:
    """The files of an export, and the leaves that were left out."""
    if as_json:
        print_fields(found)
        return
    info, files = found.version, found.files
    where = str(files[0]) if len(files) == 1 else f"{len(files) - 1} files, listed in {files[-1]}"
    say(f"exported step {info.step} ({info.id[:12]}), {found.tensors} tensors, {rough_size(found.nbytes)}, to {where}")
    for leaf, root in found.tied.items():
        say(f"{leaf} is tied to {root} and has no tensor of its own")
    if found.left_out:
        say(f"left out: {', '.join(found.left_out)}")


def show_imported(info: VersionInfo, source: str, as_json: bool) -> None:
    """The version that was imported from a file."""
    if as_json:
        print_fields(info, source=source)
    else:
        say(f"imported {source} as step {info.step} of run {info.run} ({info.id[:12]}, {rough_size(info.nbytes)})")


def show_policy(policy: Policy, notes: Mapping[str, Sequence[str]], as_json: bool) -> None:
    """A valid policy: its tiers with cadence, retention and codec, and notes about them."""
    rows = [(t.name, t.type, _every(t.every), describe_keep(t.keep), t.codec) for t in policy.tiers]
    columns = ["tier", "type", "every", "keep", "codec"]
    if as_json:
        tiers = [{**dict(zip(columns, r, strict=True)), "notes": notes.get(r[0], ())} for r in rows]
        print_json({"ok": True, "durable": policy.durable, "tiers": tiers})
        return
    table(columns, rows)
    for name, said in notes.items():
        _lines(name, "", said)
    say(f"durable: {policy.durable}; {len(policy.rules)} rules; no error found")


def _every(every: Any) -> str:
    return "save" if every is None else f"{every} steps" if isinstance(every, int) else str(every)


def show_markers(found: Sequence[MarkerResult], as_json: bool) -> None:
    """Tiers and their ids."""
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    rows = [(one.tier, one.id, "created" if one.created else "as it was", ", ".join(one.replaces)) for one in found]
    table(["tier", "id", "marker", "in place of"], rows)


def show_rekeyed(found: Sequence[RekeyResult], as_json: bool) -> None:
    """Tiers and the ids of their new keys."""
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    table(["tier", "key", "data keys"], [(one.tier, one.key, str(one.data_keys)) for one in found])


def show_policy_errors(message: str, as_json: bool) -> None:
    """The errors of a policy, one per line."""
    if as_json:
        print_json({"ok": False, "errors": message.splitlines()})
    else:
        print(escape_controls(message, "\n"))


def show_diff(found: Sequence[LeafDiff], values: bool, as_json: bool) -> None:
    """Leaves that differ; as JSON all leaves."""
    if as_json:
        print_json([_diff_as_json(leaf) for leaf in found])
        return
    rows = [_diff_row(leaf, values) for leaf in found if leaf.change != "same"]
    if rows:
        columns = ["leaf", "change", ">size", ">changed", *([">elements", ">max", ">rms", "values"] if values else [])]
        table(columns, rows)
    counts = Counter(leaf.change for leaf in found)
    nbytes = rough_size(sum(leaf.changed_nbytes for leaf in found))
    told = ", ".join(f"{counts[change]} {change}" for change in ("added", "removed", "changed", "same"))
    say(f"{len(found)} leaves: {told}; {nbytes} differ")


def _diff_row(leaf: LeafDiff, values: bool) -> tuple[object, ...]:
    cells = (leaf.name, leaf.change, rough_size(leaf.nbytes), rough_size(leaf.changed_nbytes))
    return (*cells, *_numbers(leaf)) if values else cells


def _numbers(leaf: LeafDiff) -> tuple[str, str, str, str]:
    found = leaf.numbers
    if found is None:
        return "-", "-", "-", " -> ".join(leaf.values) if leaf.values else leaf.note
    told = [f"{name} {a} -> {b}" for name, (a, b) in (("NaN", found.nan), ("Inf", found.inf)) if a or b]
    if found.largest is None:
        return f"{found.changed}/{found.elements} bytes", "-", "-", ""
    return f"{found.changed}/{found.elements}", f"{found.largest:.6g}", f"{found.rms:.6g}", ", ".join(told)


def _diff_as_json(leaf: LeafDiff) -> dict[str, Any]:
    return {**dataclasses.asdict(leaf), "path": leaf.name}


def show_leaves(info: VersionInfo, leaves: Sequence[LeafLocation], depth: int | None, as_json: bool) -> None:
    """One version and its leaves; with ``depth`` the sums below each path of so many keys."""
    rows = leaves if depth is None else subtotals(leaves, depth)
    if as_json:
        print_fields(info, leaves=[_leaf_as_json(one) for one in rows])
        return
    say(f"version {info.seq} of run {info.run}, step {info.step}, saved {when(info.time)}")
    say(f"id {info.id}, {rough_size(info.nbytes)}, in {', '.join(info.tiers)}  {_pairs(info.metadata)}")
    if depth is None:
        values = [one for one in rows if one.leaf is not None and one.leaf.spec.kind not in CONTAINERS]
        cut = any(one.shards > 1 for one in values)  # a run of one rank needs no such column
        cells = [
            (*_what(one), *([one.shards] if cut else []), rough_size(one.nbytes), *_where(one.tiers, info.tiers))
            for one in values
        ]
        table(["leaf", "kind", "dtype", "shape", *([">shards"] if cut else []), ">size", *info.tiers], cells)
    else:
        sums = [
            (_below(one), one.leaves, rough_size(one.nbytes), *_where(one.tiers, info.tiers, short=True))
            for one in rows
        ]
        table(["below", ">leaves", ">size", *info.tiers], sums)


def _what(one: LeafLocation) -> tuple[str, str, str, str]:
    assert one.leaf is not None
    spec = one.leaf.spec
    return one.leaf.name, spec.kind, spec.dtype, "x".join(map(str, spec.shape)) or "scalar"


def _below(one: LeafLocation) -> str:
    return "  " * len(one.path) + (format_path(one.path[-1:]) if one.path else "all")


def _where(found: Mapping[str, TierShare], tiers: Sequence[str], *, short: bool = False) -> list[str]:
    return [_cell(found[name], short) if name in found else "-" for name in tiers]


def _cell(held: TierShare, short: bool) -> str:
    if held.has == "none":
        return "-"
    part = "part, " if held.has == "part" else ""
    return part + (rough_size(held.stored) if short else f"{'+'.join(held.codecs)} {rough_size(held.stored)}")


def _leaf_as_json(one: LeafLocation) -> dict[str, Any]:
    tiers = {name: dataclasses.asdict(held) for name, held in one.tiers.items()}
    if one.leaf is None:
        return {"below": list(map(str, one.path)), "leaves": one.leaves, "nbytes": one.nbytes, "tiers": tiers}
    what = {"path": one.leaf.name, **dataclasses.asdict(one.leaf.spec), "shards": one.shards}
    return {**what, "nbytes": one.nbytes, "tiers": tiers}


def show_made_policy(file: Path, policy: Policy, findings: Sequence[TierFinding], as_json: bool) -> None:
    """A policy file that was written, and what was found of its tiers."""
    if as_json:
        live = [{**dataclasses.asdict(found), "ok": found.ok} for found in findings]
        tiers = [{"tier": t.name, "type": t.type} for t in policy.tiers]
        print_json({"file": file, "durable": policy.durable, "tiers": tiers, "live": live})
        return
    if findings:
        show_live(findings, as_json)
    say(f"wrote {file}: tiers {', '.join(t.name for t in policy.tiers)}; save.wait() waits for {policy.durable}")


def show_live(findings: Sequence[TierFinding], as_json: bool) -> None:
    """A row for each live tier; below, what is wrong and how to fix it, then notes."""
    if as_json:
        print_json([{**dataclasses.asdict(found), "ok": found.ok} for found in findings])
        return
    table(_LIVE_COLUMNS, [_live_row(found) for found in findings])
    for found in findings:
        broken = (f"{name}: {what}" for name, what in found.broken.items())
        _lines(found.name, "FOUND ", [*filter(None, [found.error.removeprefix(f"{found.name}: ")]), *broken])
        _lines(found.name, "TO DO ", found.problems)
    for found in findings:
        _lines(found.name, "", ["; ".join(_summary(found)), *found.notes])


def _lines(name: str, word: str, said: Sequence[str]) -> None:
    for what in said:
        say(f"{name}: {word}{what}")


def _live_row(found: TierFinding) -> tuple[str, ...]:
    """Whether create-only holds between racing processes is shown as it was measured, not as the tier declares it."""
    traits = found.traits
    calls = " ".join(f"{1000 * seconds:.2g}" for seconds in (found.put_seconds, found.list_seconds) if seconds)
    return (
        found.name,
        "ok" if found.ok else "HUNG" if found.hung else "BROKEN" if found.reached else "AWAY",
        {True: f"by {traits.get('shared')}", False: "no", None: "-"}[traits.get("persistent")],
        {True: "one wins", False: "not safe", None: "-"}[traits.get("conditional_create") if found.reached else None],
        calls or "-",
        *(rough_size(rate) if rate else "-" for rate in (found.write, found.read)),
        "-" if found.room is None else rough_size(found.room),
    )


def _summary(found: TierFinding) -> list[str]:
    said = [f"type {found.type}", f"{len(found.kept)} of {len(found.kept) + len(found.broken)} promises kept"]
    said += [f"failure domain {domain}" for domain in filter(None, [found.traits.get("failure_domain")])]
    said += filter(None, [found.traits.get("io")])
    if found.moved:
        said.append(f"measured with {rough_size(found.moved)}")
    return said


def show_tags(tags: Mapping[str, VersionInfo | TagTarget], as_json: bool) -> None:
    """Tags, and the version of each."""
    if as_json:
        told = {n: v._asdict() if isinstance(v, TagTarget) else dataclasses.asdict(v) for n, v in tags.items()}
        print_json(
            [{"tag": name, **version, "there": not isinstance(tags[name], TagTarget)} for name, version in told.items()]
        )
        return
    if not tags:
        say("no tags")
        return
    table(["tag", ">seq", ">step", "id", "saved", "tiers"], [_tag_row(name, version) for name, version in tags.items()])


def _tag_row(name: str, version: VersionInfo | TagTarget) -> tuple[object, ...]:
    if isinstance(version, TagTarget):
        return name, version.seq, "?", version.id[:12], "", "none: the version is not there any more"
    return name, version.seq, version.step, version.id[:12], when(version.time), ", ".join(version.tiers)


def show_tag(info: VersionInfo, name: str, as_json: bool) -> None:
    """A version that got a tag."""
    if as_json:
        print_fields(info)
    else:
        say(f"{name}: version {info.seq} of run {info.run}, step {info.step} ({info.id[:12]})")


def show_fork(info: VersionInfo, old: str, as_json: bool) -> None:
    """The first version of a new run."""
    if as_json:
        print_fields(info)
    else:
        say(f"run {info.run} begins with step {info.step} of run {old} ({info.id[:12]}), in {', '.join(info.tiers)}")


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


def show_report(report: VerifyReport, as_json: bool) -> None:
    """The result of a verification."""
    if as_json:
        print_fields(report, ok=report.ok)
        return
    say(f"{report.versions} records, {report.chunks} chunks, {rough_size(report.nbytes)} of data read")
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
        say(f"{_count(left, 'repair')} to do, in this order: `tierstate doctor --apply`, while nobody saves this run")
    if lost:
        say(f"{_count(lost, 'version')} cannot be had as a whole; `tierstate rm --seq N` removes one for good")
    if unknown:
        say(f"{_count(unknown, 'version')} may be had yet: remove none, and look again when every tier answers")


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
        packs = f"{_count(len(t.packs), 'pack')}, {rough_size(sum(t.packs.values()))}"
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


def show_copied(found: CopyResult, where: str, as_json: bool) -> None:
    """The copy of a version, or that the target had it already."""
    info = found.version
    if as_json:
        print_fields(info, copied=found.tiers)
        return
    name = f"step {info.step} ({info.id[:12]}, {rough_size(info.nbytes)})"
    if not found.tiers:
        say(f"{where} has {name} already, as version {info.seq} of run {info.run}")
    else:
        say(f"copied {name} to {', '.join(found.tiers)}, as version {info.seq} of run {info.run}")


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
        say(f"{len(found.unread)} packs say nothing of what they hold: {'; '.join(listed)}{more}")
    if found.unknown:
        told = ", ".join(map(str, found.unknown))
        say(f"packs of versions {told} are there, and no record of them anywhere: they were dropped, or are lost")


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """One peer tier, and for each host the status that its memory server answers, or the error."""

    name: str
    notes: tuple[str, ...]
    members: Sequence[tuple[Member, dict[str, Any] | TierUnavailable]]


def show_peers(tiers: Sequence[PeerStatus], as_json: bool) -> None:
    """The hosts of each peer tier."""
    if as_json:
        print_json([{"tier": t.name, "notes": t.notes, "hosts": [_peer_as_json(*m) for m in t.members]} for t in tiers])
        return
    for tier in tiers:
        say(f"{tier.name}: {'; '.join(tier.notes)}")
        if tier.members:
            table(["host", "domain", ">objects", ">used", ">capacity", "keeper"], [_peer_row(*m) for m in tier.members])


def _peer_as_json(member: Member, said: dict[str, Any] | TierUnavailable) -> dict[str, Any]:
    found = {"address": member.address, "port": member.port, "domain": member.domain, "id": member.id}
    return found | (said if isinstance(said, dict) else {"error": str(said)})


def _peer_row(member: Member, said: dict[str, Any] | TierUnavailable) -> tuple[object, ...]:
    if not isinstance(said, dict):
        return member.place, member.domain, "", "", "", f"does not answer: {said}"
    capacity = "-" if said["capacity"] is None else rough_size(said["capacity"])
    return member.place, member.domain, said["objects"], rough_size(said["used"]), capacity, f"runs, pid {said['pid']}"


def show_bisection(found: Bisection, as_json: bool) -> None:
    """What a bisection has found."""
    if as_json:
        looks = [{"step": look.version.step, "id": look.version.id, "holds": look.holds} for look in found.looks]
        ends = {name: v and {"step": v.step, "seq": v.seq, "id": v.id, "time": v.time}
                for name, v in (("first", found.first), ("before", found.before))}  # fmt: skip
        print_json({**ends, "looks": looks})
    elif found.first is None:
        say("it does not hold for the newest version")
    else:
        before = f"; not yet at step {found.before.step}" if found.before is not None else ", the oldest version"
        say(f"first at step {found.first.step} (version {found.first.id[:12]}, {when(found.first.time)}){before}")


def show_leaf_history(
    versions: Sequence[VersionHistory], drifts: Mapping[tuple[int, str], float] | None, as_json: bool
) -> None:
    """Statistics of leaves over versions; ``drifts``: by number and path, where they were asked for."""
    rows = [_leaf_row(version, name, drifts) for version in versions for name in _names_of(version)]
    if as_json:
        print_json(rows)
        return
    columns = ["step", "leaf", ">NaN", ">infinite", ">min", ">max", ">rms", ">norm", ">changed"]
    keys = ["step", "leaf", "nan", "infinite", "min", "max", "rms", "norm", "changed"]
    if drifts is not None:
        columns, keys = [*columns, ">drift"], [*keys, "drift"]
    table(columns, [[_number(row[key], share=key in ("changed", "drift")) for key in keys] for row in rows])


def _names_of(version: VersionHistory) -> Sequence[str]:
    return list(dict.fromkeys((*version.statistics, *version.changed)))


def _leaf_row(
    version: VersionHistory, name: str, drifts: Mapping[tuple[int, str], float] | None
) -> Mapping[str, object]:
    known = version.statistics.get(name)
    row: dict[str, object] = {"seq": version.seq, "step": version.step, "id": version.id, "leaf": name}
    for key in ("count", "nan", "infinite", "min", "max", "rms", "norm"):
        row[key] = getattr(known, key, None)
    row["changed"] = version.changed.get(name)
    return row if drifts is None else row | {"drift": drifts.get((version.seq, name))}


def _number(value: object, *, share: bool = False) -> object:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{100 * value:.3g}%" if share else f"{value:.5g}"
    return value


def show_layer_history(layers: LayerHistory, as_json: bool) -> None:
    """How a model has changed from version to version: a line each, with the layers that are not
    finite, or else the one whose norm has changed most."""
    rows = list(_layer_rows(layers))
    if as_json:
        print_json(rows)
        return
    keys = ["step", "changed", "nonfinite", "norm", "norm_change", "layer"]
    shares = {"changed", "norm_change"}
    columns = [">step", ">changed", ">not finite", ">norm", ">norm changed", "layer"]
    table(columns, [[_number(row[key], share=key in shares) for key in keys] for row in rows])


def _layer_rows(layers: LayerHistory) -> Iterator[Mapping[str, object]]:
    changes = layers.norm_change
    for at, (seq, step) in enumerate(zip(layers.seqs, layers.steps, strict=True)):
        nonfinite, norm, changed = layers.nonfinite[:, at], layers.norm[:, at], layers.changed[:, at]
        nbytes = layers.nbytes[:, at] * (changed == changed)
        known, moved = nonfinite >= 0, changes[:, at] == changes[:, at]
        most = int(np.nanargmax(changes[:, at])) if moved.any() else None
        bad = [layers.layers[i] for i in np.flatnonzero(nonfinite > 0).tolist()]
        yield {
            "seq": seq,
            "step": step,
            "changed": float(np.nansum(changed * nbytes) / nbytes.sum()) if nbytes.any() else None,
            "nonfinite": int(nonfinite[known].sum()) if known.any() else None,
            "norm": float(np.sqrt(np.nansum(norm**2))) if known.any() else None,
            "norm_change": None if most is None else float(changes[most, at]),
            "layer": _some(bad) if bad else "-" if most is None else layers.layers[most],
        }


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LAYERS_SHOWN
    return ", ".join(names[:_LAYERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


_STATUS = ["tier", ">newest step", "saved", ">behind", ">versions", ">owed", ">unreadable", ">speed"]


@dataclasses.dataclass(frozen=True)
class TierStatus:
    """How a run stands in one tier.

    Attributes:
        step, saved: of its newest version; None if it has none.
        behind, behind_seconds: steps and seconds from there to the newest version of all tiers.
        versions: that it has.
        missing: versions that are due there and not there yet.
        unreadable: records that cannot be read.
        speed: bytes per second of the newest write that is logged; None if none is.
        trouble: that it hangs, or why its last save failed; empty if all is well.
    """

    tier: str
    versions: int
    step: int | None
    saved: float | None
    behind: int | None
    behind_seconds: float | None
    missing: int
    unreadable: int
    speed: float | None
    trouble: str


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        under_way: what agents of this host still have to publish of it.
    """

    run: str
    tiers: Sequence[TierStatus]
    under_way: Sequence[str]


def show_status(found: RunStatus, as_json: bool) -> None:
    """How a run stands in each tier."""
    if as_json:
        print_fields(found)
        return
    table(_STATUS, [_status_row(tier) for tier in found.tiers])
    for line in _remarks(found):
        say(line)


def status_lines(found: RunStatus, width: int) -> list[str]:
    """The same as lines for a terminal of this width."""
    rows = printable([_status_row(tier) for tier in found.tiers])
    return [*table_lines(_STATUS, rows, width), *(escape_controls(line) for line in _remarks(found))]


def show_again_and_again(run: str, look: Callable[[], RunStatus | str], seconds: float, as_json: bool) -> None:
    """Show what a look has found, or why it has failed, every so many seconds: on a terminal in place. Never ends."""
    if as_json or not sys.stdout.isatty():
        while True:
            _show_once(look(), as_json)
            time.sleep(seconds)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            found, head = look(), f"run {run}, {when(time.time())}, again every {seconds:g} s; Ctrl-C ends"
            lines = escape_lines(found).split("\n") if isinstance(found, str) else status_lines(found, console.width)
            live.update(Text("\n".join([shortened(escape_controls(head), console.width), *lines])), refresh=True)
            time.sleep(seconds)


def _show_once(found: RunStatus | str, as_json: bool) -> None:
    told = {"error": found} if isinstance(found, str) else dataclasses.asdict(found)
    if as_json:
        print(_as_json({"time": time.time(), **told}), flush=True)
        return
    say(when(time.time()))
    if isinstance(found, str):
        print(escape_lines(found), flush=True)
    else:
        show_status(found, as_json)
    sys.stdout.flush()


def _remarks(found: RunStatus) -> list[str]:
    troubles = [f"{tier.tier}: {tier.trouble}" for tier in found.tiers if tier.trouble]
    return troubles + [f"an agent has under way: {text}" for text in found.under_way]


def _rough_age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _status_row(tier: TierStatus) -> tuple[object, ...]:
    saved = "" if tier.saved is None else f"{when(tier.saved)}, {_rough_age(time.time() - tier.saved)} ago"
    behind = "–" if tier.behind is None else f"{_count(tier.behind, 'step')}, {_rough_age(tier.behind_seconds or 0.0)}"
    step, speed = "–" if tier.step is None else tier.step, "" if tier.speed is None else f"{rough_size(tier.speed)}/s"
    return tier.tier, step, saved, behind, tier.versions, tier.missing, tier.unreadable, speed


def show_events(events: Sequence[Event], as_json: bool) -> None:
    """Events of a run, oldest first."""
    if as_json:
        print_json([event.encode() for event in events])
        return
    table(["time", "event", ">step", "tier", ">seconds", ">bytes", "reason"], [_event_row(event) for event in events])
    if not events:
        say("no events are logged; 'metrics: {events: true}' in the policy logs them")


def _event_row(event: Event) -> tuple[object, ...]:
    seconds = "" if event.seconds is None else f"{event.seconds:.3f}"
    size = "" if event.nbytes is None else rough_size(event.nbytes)
    step = "" if event.step is None else event.step
    return when(event.time), event.kind, step, event.tier, seconds, size, event.reason


def show_agents(agents: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """The agents of this user on this host, with their trainers."""
    if as_json:
        print_json(list(agents))
        return
    for one in agents:
        if "error" in one:
            say(f"{one['socket']}: {one['error']}")
            continue
        memory = f"{rough_size(one['memory'])} of {rough_size(one['capacity'])} in memory"
        say(f"process {one['pid']} (tierstate {one['version']}), tiers {', '.join(one['tiers'])}: {memory}")
        if rows := [_trainer_row(session) for session in one["sessions"]]:
            table(["run", ">trainer", "", ">slabs", "under way"], rows)
        for peer in one["peer"]:
            say(f"peer memory {peer['path']}: {rough_size(peer['used'])}, {peer['connections']} connections")
    if not agents:
        say("no agent runs on this host")


def _trainer_row(session: Mapping[str, Any]) -> tuple[object, ...]:
    under_way = "; ".join(session["under_way"]) or "nothing"
    return session["run"], session["pid"], session["trainer"], rough_size(session["held"]), under_way
