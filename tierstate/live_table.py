"""What was found of live tiers, as a table that an admin can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tierstate.tiers.units import rough_size

from .live import Finding
from .tables import print_json, table

COLUMNS = ["tier", "", "lasts", "races", ">put, list ms", ">write/s", ">read/s", ">room"]


def show_live(findings: Sequence[Finding], as_json: bool) -> None:
    """A row for each tier; below, what was found wrong with what to do, and then what is worth knowing."""
    if as_json:
        print_json([{**dataclasses.asdict(found), "ok": found.ok} for found in findings])
        return
    table(COLUMNS, [_row(found) for found in findings])
    for found in findings:
        broken = (f"{name}: {what}" for name, what in found.broken.items())
        _lines(found.name, "FOUND ", [*filter(None, [found.error.removeprefix(f"{found.name}: ")]), *broken])
        _lines(found.name, "TO DO ", found.problems)
    for found in findings:
        _lines(found.name, "", ["; ".join(_summary(found)), *found.notes])


def _lines(name: str, word: str, said: Sequence[str]) -> None:
    for what in said:
        print(f"{name}: {word}{what}")


def _row(found: Finding) -> tuple[str, ...]:
    """Whether create-only also holds between racing processes is shown as it was found, not as one would like it."""
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


def _summary(found: Finding) -> list[str]:
    said = [f"type {found.type}", f"{len(found.kept)} of {len(found.kept) + len(found.broken)} promises kept"]
    said += [f"failure domain {domain}" for domain in filter(None, [found.traits.get("failure_domain")])]
    said += filter(None, [found.traits.get("io")])
    if found.moved:
        said.append(f"measured with {rough_size(found.moved)}")
    return said
