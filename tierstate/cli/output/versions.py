"""The output about runs and versions: lists, leaves, differences, tags, forks, copies, files; as tables or as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstate.copy import CopyResult
from tierstate.engine.info import VersionInfo
from tierstate.engine.versions.leaf_locations import LeafLocation, TierShare, subtotals
from tierstate.manifest.format.leaf import CONTAINERS
from tierstate.manifest.format.leaf_path import format_path
from tierstate.manifest.history.diff import LeafDiff
from tierstate.manifest.history.tags import TagTarget
from tierstate.tiers.units import rough_size

if TYPE_CHECKING:
    from tierstate.files.export import ExportResult

from .lines import plural, print_fields, print_json, say, table, when


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
    versions = plural(sum(v.seq > newest.seq for v in known), "version")
    steps = plural(last.step - newest.step, "step")
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
        say(f"restored step {info.step} ({info.id[:12]}) to {to}, {rough_size(to.stat().st_size)}")


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
