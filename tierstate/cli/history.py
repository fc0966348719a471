"""The commands ``bisect``, ``status`` and ``explain``: since when something is wrong, how the run stands, what took
long."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tierstate.agent.launch import agents_of_user, ask_agent
from tierstate.checkpointer import Checkpointer, open_quietly
from tierstate.engine.info import VersionInfo
from tierstate.engine.maintain.bisect import bisect as find_first
from tierstate.engine.maintain.bisect import has_nonfinite
from tierstate.manifest.errors import StateMismatch, TierstateError
from tierstate.telemetry.explain import explain as explain_save

from . import output
from .options import Json, PolicyFile, Run, no_versions

app = typer.Typer()

SKIP = 125
"""Exit status of a command that cannot tell whether it holds, as of ``git bisect run``."""


RECENT = 3600.0
"""Seconds of events that ``status`` looks at."""


Holds = Callable[[VersionInfo], bool | None]


@app.command()
def bisect(
    policy: PolicyFile,
    run: Run,
    when: Annotated[
        str | None, typer.Option(help="What is looked for: nonfinite(GLOB) or missing(GLOB), of leaf paths.")
    ] = None,
    cmd: Annotated[
        str | None,
        typer.Option(help="A shell command that exits with 0 where it does not hold yet, and with 1 where it does."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the first version for which something holds, and look at as few as possible.

    It must hold for all later versions, too. --cmd finds the version in TIERSTATE_STEP and TIERSTATE_VERSION, beside
    TIERSTATE_POLICY and TIERSTATE_RUN; it exits with 125 where it cannot tell. Exit status 1 if it does not hold for
    the newest version.
    """
    if (when is None) == (cmd is None):
        raise ValueError("give one of --when and --cmd")
    with open_quietly(policy, run) as ckpt:
        versions = [version for version in ckpt.versions() if version.id]
        if not versions:
            raise no_versions(ckpt)
        holds = _held(ckpt, when) if when is not None else _command(str(policy), run, cmd or "")
        found = find_first(versions, holds if as_json else _told(holds))
    output.show_bisection(found, as_json)
    raise typer.Exit(0 if found.first is not None else 1)


def _told(holds: Holds) -> Holds:
    def told(version: VersionInfo) -> bool | None:
        found = holds(version)
        output.say(f"step {version.step}: {'cannot be told' if found is None else 'yes' if found else 'no'}")
        return found

    return told


def _held(ckpt: Checkpointer, text: str) -> Holds:
    """What ``--when`` asks.

    Raises:
        ValueError: it is none of what there is.
    """
    found = re.fullmatch(r"\s*(nonfinite|missing)\(\s*([^()]+?)\s*\)\s*", text)
    if found is None:
        raise ValueError(f"--when {text!r}: right are nonfinite(GLOB) and missing(GLOB), as in 'nonfinite(model.**)'")
    what, glob = found.groups()

    def holds(version: VersionInfo) -> bool | None:
        try:
            if what == "missing":
                return not ckpt.located(version=version.id, only=[glob])
            return has_nonfinite(ckpt.load(version=version.id, only=[glob], allow_lossy=True))
        except StateMismatch:
            return what == "missing"

    return holds


def _command(policy: str, run: str, cmd: str) -> Holds:
    def holds(version: VersionInfo) -> bool | None:
        about = {"POLICY": os.path.abspath(policy), "RUN": run, "STEP": str(version.step), "VERSION": version.id}
        environ = os.environ | {f"TIERSTATE_{name}": value for name, value in about.items()}
        status = subprocess.run(cmd, shell=True, check=False, env=environ).returncode
        if status < 0 or status > 127:
            raise TierstateError(f"--cmd ended with {status} at step {version.step}; right are 0, 1 to 127, and {SKIP}")
        return None if status == SKIP else status != 0

    return holds


@app.command()
def status(policy: PolicyFile, run: Run, as_json: Json = False) -> None:
    """Show how a run stands in each tier: its newest version, what is missing, what hangs, what an agent has under way.

    Exit status 1 if a tier hangs or a record cannot be read.
    """
    with open_quietly(policy, run) as ckpt:
        versions = ckpt.versions()
        hung = {name: tier.hung for name, tier in ckpt.stats().tiers.items() if tier.hung}
        if not versions and not hung:
            raise no_versions(ckpt)
        failures = _failures(ckpt)
        tiers = [_tier_status(tier.name, versions, hung, failures) for tier in ckpt.policy.tiers]
    output.show_status(run, tiers, _under_way(run), as_json)
    raise typer.Exit(1 if hung or any(version.unreadable for version in versions) else 0)


@app.command()
def explain(
    policy: PolicyFile,
    run: Run,
    step: Annotated[int, typer.Option(help="The step of the save.")],
    as_json: Json = False,
) -> None:
    """Say where the time of one save went, what waited, and what of the policy would change it.

    From the events that are logged in the tiers (policy: metrics: {events: true}).
    """
    with open_quietly(policy, run) as ckpt:
        events = ckpt.events()
    lines = explain_save(events, step)
    if as_json:
        output.print_json([event.encode() for event in events if event.step == step])
        return
    for line in lines:
        output.say(line)


def _tier_status(
    name: str, versions: list[VersionInfo], hung: dict[str, str], failures: dict[str, str]
) -> dict[str, Any]:
    there = [version for version in versions if name in version.tiers]
    newest = max(there, key=lambda version: version.seq, default=None)
    latest = max((version for version in versions if version.id), key=lambda version: version.seq, default=None)
    behind = latest.step - newest.step if latest is not None and newest is not None else None
    return {
        "tier": name,
        "versions": len(there),
        "step": None if newest is None else newest.step,
        "saved": None if newest is None else newest.time,
        "behind": behind,
        "missing": sum(name in version.late for version in versions),
        "unreadable": sum(name in version.unreadable for version in versions),
        "trouble": hung.get(name) or failures.get(name, ""),
    }


def _failures(ckpt: Checkpointer) -> dict[str, str]:
    """By tier, why its last save failed, if nothing has arrived since; as far as the events are logged."""
    found: dict[str, str] = {}
    try:
        events = ckpt.events(since=time.time() - RECENT)
    except TierstateError:
        return {}
    for event in events:
        if event.kind in ("failed", "away"):
            found[event.tier] = (
                f"step {event.step} has failed: {event.reason}" if event.step is not None else event.reason
            )
        elif event.kind in ("committed", "cascaded", "brought", "back"):
            found.pop(event.tier, None)
    return found


def _under_way(run: str) -> list[str]:
    """What agents of this host still have to publish of the run."""
    found: list[str] = []
    for path in agents_of_user():
        try:
            sessions = ask_agent(path, "status").head["status"]["sessions"]
        except TierstateError:
            continue
        found += [text for session in sessions if session["run"] == run for text in session["under_way"]]
    return found
