"""What the command line prints of two versions' differences."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tierstate.manifest.diff import LeafDiff
from tierstate.tiers.units import rough_size

from .tables import print_json, table


def show_diff(found: Sequence[LeafDiff], values: bool, as_json: bool) -> None:
    """Leaves that differ; as JSON also those that do not."""
    if as_json:
        print_json([_as_json(leaf) for leaf in found])
        return
    rows = [_row(leaf, values) for leaf in found if leaf.change != "same"]
    if rows:
        columns = ["leaf", "change", ">size", ">changed", *([">elements", ">max", ">rms", "values"] if values else [])]
        table(columns, rows)
    counts = Counter(leaf.change for leaf in found)
    nbytes = rough_size(sum(leaf.changed_nbytes for leaf in found))
    told = ", ".join(f"{counts[change]} {change}" for change in ("added", "removed", "changed", "same"))
    print(f"{len(found)} leaves: {told}; {nbytes} differ")


def _row(leaf: LeafDiff, values: bool) -> tuple[object, ...]:
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


def _as_json(leaf: LeafDiff) -> dict[str, Any]:
    return {**dataclasses.asdict(leaf), "path": leaf.name}
