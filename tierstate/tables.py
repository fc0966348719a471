"""What the command line prints: tables for people, JSON for machines."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstate.manifest.retention import duration
from tierstate.tiers.policy import Policy
from tierstate.tiers.units import rough_size

from .info import VersionInfo

if TYPE_CHECKING:
    from .exporting import Exported


MANY = 1000
"""Rows that are printed plainly."""


def print_json(value: Any) -> None:
    """JSON on standard output; what is no JSON type as text."""
    if isinstance(value, list) and len(value) > MANY:  # a line for each, which is much faster
        print("[" + ",\n".join(json.dumps(one, default=str, ensure_ascii=False) for one in value) + "]")
        return
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table on standard output; columns whose name starts with ``>`` are set flush right."""
    if len(rows) > MANY:  # which would take half a minute for ten thousand
        _print_plain([name.lstrip(">") for name in columns], [name.startswith(">") for name in columns], rows)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if Console().is_terminal else 160, highlight=False).print(made)


def _print_plain(names: Sequence[str], right: Sequence[bool], rows: Sequence[Sequence[object]]) -> None:
    cells = [list(names), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    row = "  ".join(f"{{:{'>' if flush else '<'}{width}}}" for flush, width in zip(right, widths, strict=True))
    print("\n".join(row.format(*line).rstrip() for line in cells))


def when(seconds: float) -> str:
    """A time as people write it, in the local zone."""
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
            v.step,
            v.id[:12],
            when(v.time),
            rough_size(v.nbytes),
            *(_copy(v, t) for t in tiers),
            *([", ".join(v.tags)] if named else []),
            _pairs({**v.metadata, **({"lossy": "+".join(v.lossy)} if v.lossy else {})}),
        )
        for v in versions
    ]
    table([">seq", ">step", "id", "saved", ">size", *tiers, *(["tags"] if named else []), "metadata"], rows)
    for tier in tiers:
        _show_lag(tier, versions)


def _show_lag(tier: str, versions: Sequence[VersionInfo]) -> None:
    late = [v for v in versions if tier in v.late]
    if late:
        newest = next((f"has step {v.step} as its newest" for v in reversed(versions) if tier in v.tiers), "has none")
        nbytes = rough_size(sum(v.nbytes for v in late))
        print(f"{tier} {newest}, and lacks {len(late)} that are due there: {nbytes}, since {when(late[0].time)}")


def _copy(version: VersionInfo, tier: str) -> str:
    if tier not in version.tiers:
        return "late" if tier in version.late else "-"
    return "part" if tier in version.partial else "yes"


def _pairs(metadata: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in metadata.items())


def show_restored(info: VersionInfo, to: Path, as_json: bool) -> None:
    """What was restored, and where to."""
    if as_json:
        print_json({**dataclasses.asdict(info), "file": str(to)})
    else:
        print(f"restored step {info.step} ({info.id[:12]}, {rough_size(info.nbytes)}) to {to}")


def show_exported(found: Exported, as_json: bool) -> None:
    """What was exported, and what was not."""
    if as_json:
        print_json({**dataclasses.asdict(found), "files": [str(path) for path in found.files]})
        return
    info, files = found.version, found.files
    where = str(files[0]) if len(files) == 1 else f"{len(files) - 1} files, listed in {files[-1]}"
    print(
        f"exported step {info.step} ({info.id[:12]}), {found.tensors} tensors, {rough_size(found.nbytes)}, to {where}"
    )
    for leaf, root in found.tied.items():
        print(f"{leaf} is tied to {root} and has no tensor of its own")
    if found.left_out:
        print(f"left out: {', '.join(found.left_out)}")


def show_imported(info: VersionInfo, source: Path, as_json: bool) -> None:
    """The version that was made of a file."""
    if as_json:
        print_json({**dataclasses.asdict(info), "source": str(source)})
    else:
        print(f"imported {source} as step {info.step} of run {info.run} ({info.id[:12]}, {rough_size(info.nbytes)})")


def show_policy(policy: Policy, as_json: bool) -> None:
    """A policy that was found right."""
    rows = [(t.name, t.type, _every(t.every), _keep(t.keep), t.codec) for t in policy.tiers]
    columns = ["tier", "type", "every", "keep", "codec"]
    if as_json:
        print_json({"ok": True, "durable": policy.durable, "tiers": [dict(zip(columns, r, strict=True)) for r in rows]})
        return
    table(columns, rows)
    print(f"durable: {policy.durable}; {len(policy.rules)} rules; no error found")


def _every(every: Any) -> str:
    return "save" if every is None else f"{every} steps" if isinstance(every, int) else str(every)


def _keep(keep: Any) -> str:
    if keep.all:
        return "all"
    within = keep.within and duration(keep.within)
    best = keep.best and f"{keep.best.count} {keep.best.metric} ({keep.best.mode})"
    said = (("last", keep.last), ("every", keep.every), ("within", within), ("best", best))
    return ", ".join([*(f"{name} {n}" for name, n in said if n), *(["tags"] if keep.tags else [])])


def show_policy_errors(message: str, as_json: bool) -> None:
    """What is wrong with a policy, a line each."""
    if as_json:
        print_json({"ok": False, "errors": message.splitlines()})
    else:
        print(message)
