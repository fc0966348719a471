"""The output about policies and tiers: a policy read, made or tried, identities, keys; as tables or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstate.cluster.check import TierFinding
from tierstate.engine.maintain.adopt import MarkerResult
from tierstate.engine.maintain.rekey import RekeyResult
from tierstate.manifest.printable import escape_controls
from tierstate.report.collect import describe_keep
from tierstate.tiers.policy.models import format_every
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import rough_size

from .lines import plural, print_json, say, table

_LIVE_COLUMNS = ["tier", "", "lasts", "races", ">put, list ms", ">write/s", ">read/s", ">room"]


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
    say(f"durable: {policy.durable}; {plural(len(policy.rules), 'rule')}; no error found")


def _every(every: Any) -> str:
    return "save" if every is None else f"{every} steps" if isinstance(every, int) else format_every(every)


def show_markers(found: Sequence[MarkerResult], as_json: bool) -> None:
    """Tiers and their ids."""
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    rows = [(one.tier, one.id, "created" if one.created else "as it was", ", ".join(one.replaces)) for one in found]
    table(["tier", "id", "marker", "in place of"], rows)


def show_rekeyed(found: Sequence[RekeyResult], as_json: bool) -> None:
    """Tiers, the ids of their new keys, and what they were used for."""
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    rows = [(one.tier, one.key, one.data_keys or "-", "-" if one.data_keys else one.sealed) for one in found]
    table(["tier", "key", ">data keys", ">sealed"], rows)
    for why in dict.fromkeys(why for one in found for why in one.left):
        say(f"not sealed again: {why}")


def show_policy_errors(message: str, as_json: bool) -> None:
    """The errors of a policy, one per line."""
    if as_json:
        print_json({"ok": False, "errors": message.splitlines()})
    else:
        print(escape_controls(message, "\n"))


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
