"""The commands ``log``, ``bisect``, ``status``, ``watch`` and ``explain``: the history of a model, since when something
is wrong, how a run stands, what took long."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Annotated

import typer

from tierstate.agent.launch import agents_of_user, ask_agent
from tierstate.checkpointer import Checkpointer
from tierstate.cli.output.history import show_bisection, show_layer_history, show_leaf_history
from tierstate.cli.output.lines import print_json, say
from tierstate.cli.output.status import RunStatus, TierStatus, show_again_and_again, show_status
from tierstate.engine.info import VersionInfo
from tierstate.engine.versions.bisect import bisect as find_first
from tierstate.engine.versions.bisect import has_nonfinite
from tierstate.engine.versions.leaf_history import VersionHistory
from tierstate.manifest.errors import StateMismatch, TierstateError
from tierstate.telemetry.explain import explain as explain_save
from tierstate.tiers.units import parse_seconds

from .completion import steps
from .options import Json, PolicyFile, Run, check_exists, no_versions, open_run

app = typer.Typer()

SKIP = 125
"""Exit status of a command that cannot tell whether it holds, as of ``git bisect run``."""


RECENT = 3600.0
"""Seconds of events that ``status`` looks at."""


Holds = Callable[[VersionInfo], bool | None]


@app.command()
def log(
    policy: PolicyFile,
    run: Run,
    leaf: Annotated[list[str] | None, typer.Option(help="Leaves that match, a line each, as in 'model.**'.")] = None,
    last: Annotated[int, typer.Option(min=0, help="Only so many of the newest versions; 0: all.")] = 0,
    drift: Annotated[
        bool,
        typer.Option(
            "--drift",
            help="By how much values differ from the version before, if that has statistics: reads both. With --leaf.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the history of a model: what changed from version to version, NaN, norms; of the whole, or leaf by leaf.

    NaN, range and norms are there for versions that were saved with statistics: true.
    """
    if drift and not leaf:
        raise ValueError("--drift reads all values of the leaves: say which by --leaf, as in --leaf 'model.**'")
    with open_run(policy, run) as ckpt:
        if leaf:
            versions = ckpt.history(leaf, last=last and last + drift)  # the first drift is from the one before
            drifts = _drifts(ckpt, versions, leaf) if drift else None
            if not any(version.statistics or version.changed for version in versions):
                ckpt.located(only=leaf)  # which says so if there is no such leaf, or no version
            show_leaf_history(versions[-last:], drifts, as_json)
        elif (layers := ckpt.layers(last=last)).seqs:
            show_layer_history(layers, as_json)
        else:
            raise no_versions(ckpt)


def _drifts(ckpt: Checkpointer, versions: list[VersionHistory], leaf: list[str]) -> dict[tuple[int, str], float]:
    """By number and path: the rms of the differences from the version before, as a part of the rms of the values."""
    found: dict[tuple[int, str], float] = {}
    for old, new in pairwise(versions):
        if not (new.statistics or new.changed):
            continue  # the version has no such leaf
        # By ids, as several versions may have one step. Values are read only where their size before is known.
        for diff in ckpt.diff(old.id, new.id, values=bool(old.statistics), only=leaf):
            before = old.statistics.get(diff.name)
            if diff.change == "same":
                found[new.seq, diff.name] = 0.0
            elif diff.numbers is not None and diff.numbers.rms is not None and before is not None and before.rms:
                found[new.seq, diff.name] = diff.numbers.rms / before.rms
    return found


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
    with open_run(policy, run) as ckpt:
        versions = [version for version in ckpt.versions() if version.id]
        if not versions:
            raise no_versions(ckpt)
        holds = _held(ckpt, when, versions[-1]) if when is not None else _command(str(policy), run, cmd or "")
        found = find_first(versions, holds if as_json else _told(holds))
    show_bisection(found, as_json)
    raise typer.Exit(0 if found.first is not None else 1)


def _told(holds: Holds) -> Holds:
    def told(version: VersionInfo) -> bool | None:
        found = holds(version)
        say(f"step {version.step}: {'cannot be told' if found is None else 'yes' if found else 'no'}")
        return found

    return told


def _held(ckpt: Checkpointer, text: str, newest: VersionInfo) -> Holds:
    """What ``--when`` asks.

    Raises:
        ValueError: it is none of what there is.
        StateMismatch: the newest version has no such leaf, so that none of its numbers could be looked at.
    """
    found = re.fullmatch(r"\s*(nonfinite|missing)\(\s*([^()]+?)\s*\)\s*", text)
    if found is None:
        raise ValueError(f"--when {text!r}: right are nonfinite(GLOB) and missing(GLOB), as in 'nonfinite(model.**)'")
    what, glob = found.groups()
    if what == "nonfinite":
        ckpt.located(version=newest.id, only=[glob])

    def holds(version: VersionInfo) -> bool | None:
        try:
            if what == "nonfinite" and (found := _nonfinite(ckpt, version, glob)) is not None:
                return found
            if what == "missing":
                return not ckpt.located(version=version.id, only=[glob])
            return has_nonfinite(ckpt.load(version=version.id, only=[glob], allow_lossy=True))
        except StateMismatch:
            return what == "missing"

    return holds


def _nonfinite(ckpt: Checkpointer, version: VersionInfo, glob: str) -> bool | None:
    """Whether leaves have NaN or infinities, by their statistics; None if these do not say it."""
    known = ckpt.statistics(version=version.id, only=[glob])
    if not all(one.finite for one in known.values()):
        return True
    leaves = [one.leaf for one in ckpt.located(version=version.id, only=[glob]) if one.leaf is not None]
    return False if all(leaf.name in known for leaf in leaves if leaf.spec.nbytes) else None


def _command(policy: str, run: str, cmd: str) -> Holds:
    def holds(version: VersionInfo) -> bool | None:
        about = {"POLICY": os.path.abspath(policy), "RUN": run, "STEP": str(version.step), "VERSION": version.id}
        environ = os.environ | {f"TIERSTATE_{name}": value for name, value in about.items()}
        status = subprocess.run(cmd, shell=True, check=False, env=environ).returncode
        if not 0 <= status <= SKIP:  # also 126 and 127, with which a shell says that it could not run the command
            raise TierstateError(
                f"--cmd ended with {status} at step {version.step}; right are 0, 1 to {SKIP - 1}, and {SKIP}"
            )
        return None if status == SKIP else status != 0

    return holds


@app.command()
def status(policy: PolicyFile, run: Run, as_json: Json = False) -> None:
    """Show how a run stands in each tier: its newest version, what is owed, what hangs, what an agent has under way.

    Speeds and failures are known from the events in the tiers (policy: metrics: {events: true}). Exit status 1 if a
    tier hangs or a record cannot be read.
    """
    with open_run(policy, run) as ckpt:
        found, hung = _status(ckpt, run)
    show_status(found, as_json)
    raise typer.Exit(1 if hung or any(tier.unreadable for tier in found.tiers) else 0)


@app.command()
def watch(
    policy: PolicyFile,
    run: Run,
    interval: Annotated[str, typer.Option(help="How often to look, as in 2s or 1min.")] = "2s",
    as_json: Json = False,
) -> None:
    """Show the status of a run again and again, until Ctrl-C.

    On a terminal in place; elsewhere one status after the other, with --json each in a line.
    """
    seconds = parse_seconds(interval)
    with suppress(KeyboardInterrupt), open_run(policy, run) as ckpt:
        show_again_and_again(run, partial(_looked, ckpt, run), seconds, as_json)


def _looked(ckpt: Checkpointer, run: str) -> RunStatus | str:
    """The status, or why there is none just now."""
    try:
        return _status(ckpt, run)[0]
    except TierstateError as error:
        return str(error)


def _status(ckpt: Checkpointer, run: str) -> tuple[RunStatus, dict[str, str]]:
    """How the run stands, and the tiers that hang."""
    versions = ckpt.versions()
    hung = {name: tier.hung for name, tier in ckpt.stats().tiers.items() if tier.hung}
    if not versions and not hung:
        raise no_versions(ckpt)
    failures, speeds = _logged(ckpt)
    trouble = failures | hung
    tiers = [
        _tier_status(tier.name, versions, trouble.get(tier.name, ""), speeds.get(tier.name))
        for tier in ckpt.policy.tiers
    ]
    return RunStatus(run, tiers, _under_way(run)), hung


@app.command()
def explain(
    policy: PolicyFile,
    run: Run,
    step: Annotated[int, typer.Option(help="The step of the save.", autocompletion=steps)],
    as_json: Json = False,
) -> None:
    """Say where the time of one save went, what waited, and what of the policy would change it.

    From the events that are logged in the tiers (policy: metrics: {events: true}).
    """
    with open_run(policy, run) as ckpt:
        events = ckpt.events()
        if not events:
            check_exists(ckpt)
    lines = explain_save(events, step)
    if as_json:
        print_json([event.encode() for event in events if event.step == step])
        return
    for line in lines:
        say(line)


def _tier_status(name: str, versions: list[VersionInfo], trouble: str, speed: float | None) -> TierStatus:
    there = [version for version in versions if name in version.tiers]
    newest = max(there, key=lambda version: version.seq, default=None)
    latest = max((version for version in versions if version.id), key=lambda version: version.seq, default=None)
    lag = (latest.step - newest.step, latest.time - newest.time) if latest is not None and newest is not None else None
    return TierStatus(
        tier=name,
        versions=len(there),
        step=None if newest is None else newest.step,
        saved=None if newest is None else newest.time,
        behind=None if lag is None else lag[0],
        behind_seconds=None if lag is None else max(0.0, lag[1]),
        missing=sum(name in version.late for version in versions),
        unreadable=sum(name in version.unreadable for version in versions),
        speed=speed,
        trouble=trouble,
    )


def _logged(ckpt: Checkpointer) -> tuple[dict[str, str], dict[str, float]]:
    """By tier, why its last save failed, if nothing has arrived since, and the speed of the last write."""
    failures: dict[str, str] = {}
    speeds: dict[str, float] = {}
    try:
        events = ckpt.events(since=time.time() - RECENT)
    except TierstateError:
        return {}, {}
    for event in events:
        if event.kind in ("failed", "away"):
            failures[event.tier] = (
                f"step {event.step} has failed: {event.reason}" if event.step is not None else event.reason
            )
        elif event.kind in ("committed", "cascaded", "brought", "back"):
            failures.pop(event.tier, None)
            if event.nbytes and event.seconds:
                speeds[event.tier] = event.nbytes / event.seconds
    return failures, speeds


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
