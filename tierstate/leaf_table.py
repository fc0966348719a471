"""What the command line prints of a version's leaves: what they are, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tierstate.manifest.leaf import CONTAINERS, format_path
from tierstate.tiers.units import rough_size

from .info import VersionInfo
from .locating import Held, Located, subtotals
from .tables import print_json, table, when


def show_leaves(info: VersionInfo, leaves: Sequence[Located], depth: int | None, as_json: bool) -> None:
    """One version and its leaves, or with ``depth`` the sums of what lies below each path."""
    rows = leaves if depth is None else subtotals(leaves, depth)
    if as_json:
        print_json({**dataclasses.asdict(info), "leaves": [_as_json(one) for one in rows]})
        return
    print(f"version {info.seq} of run {info.run}, step {info.step}, saved {when(info.time)}")
    said = " ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in info.metadata.items())
    print(f"id {info.id}, {rough_size(info.nbytes)}, in {', '.join(info.tiers)}  {said}")
    if depth is None:
        values = [one for one in rows if one.leaf is not None and one.leaf.spec.kind not in CONTAINERS]
        cut = any(one.shards > 1 for one in values)  # a run of one rank has no use for the column
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


def _what(one: Located) -> tuple[str, str, str, str]:
    assert one.leaf is not None
    spec = one.leaf.spec
    return one.leaf.name, spec.kind, spec.dtype, "x".join(map(str, spec.shape)) or "scalar"


def _below(one: Located) -> str:
    return "  " * len(one.path) + (format_path(one.path[-1:]) if one.path else "all")


def _where(found: Mapping[str, Held], tiers: Sequence[str], *, short: bool = False) -> list[str]:
    return [_cell(found[name], short) if name in found else "-" for name in tiers]


def _cell(held: Held, short: bool) -> str:
    if held.has == "none":
        return "-"
    part = "part, " if held.has == "part" else ""
    return part + (rough_size(held.stored) if short else f"{'+'.join(held.codecs)} {rough_size(held.stored)}")


def _as_json(one: Located) -> dict[str, Any]:
    tiers = {name: dataclasses.asdict(held) for name, held in one.tiers.items()}
    if one.leaf is None:
        return {"below": list(map(str, one.path)), "leaves": one.leaves, "nbytes": one.nbytes, "tiers": tiers}
    what = {"path": one.leaf.name, **dataclasses.asdict(one.leaf.spec), "shards": one.shards}
    return {**what, "nbytes": one.nbytes, "tiers": tiers}
