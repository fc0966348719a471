"""Verbs that look at what was saved."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.manifest.log import runs
from tierstate.tiers.opening import opened
from tierstate.tiers.policy import Policy

from . import tables
from .checkpointer import Checkpointer
from .cli_options import AnyRun, Id, Json, PolicyFile, Run, Step, TagName
from .progress import reading

app = typer.Typer()


@app.command("ls")
def list_versions(policy: PolicyFile, run: AnyRun = None, as_json: Json = False) -> None:
    """List the versions of a run over all tiers, or all runs."""
    if run is None:
        tables.show_runs(_runs(Policy.load(policy)), as_json)
        return
    with Checkpointer(policy, run) as ckpt:
        versions = ckpt.versions()
        if not versions:
            raise NotFound(f"run {run!r} has no version in {', '.join(t.name for t in ckpt.policy.tiers)}")
        tables.show_versions(versions, [t.name for t in ckpt.policy.tiers], as_json)


@app.command()
def show(
    policy: PolicyFile, run: Run, step: Step = None, version: Id = None, tag: TagName = None, as_json: Json = False
) -> None:
    """Show one version: its leaves with kind, dtype, shape and size, and the tiers that have it."""
    with Checkpointer(policy, run) as ckpt:
        info = ckpt.info(step=step, version=version, tag=tag)
        tables.show_leaves(info, ckpt.leaves(version=info.id), as_json)


@app.command()
def verify(
    policy: PolicyFile,
    run: Run,
    data: Annotated[bool, typer.Option("--data", help="Read every chunk and compare its digest.")] = False,
    as_json: Json = False,
) -> None:
    """Check that every tier has what it claims to have; exit 1 if something is missing or damaged."""
    with Checkpointer(policy, run) as ckpt, reading("verifying", shown=data and not as_json) as progress:
        report = ckpt.verify(deep=data, progress=progress)
    tables.show_report(report, as_json)
    raise typer.Exit(0 if report.ok else 1)


def _runs(policy: Policy) -> dict[str, list[str]]:
    """Names of runs, and the tiers that have them."""
    found: dict[str, list[str]] = {}
    for spec in policy.tiers:
        tier = opened(spec)
        try:
            for run in runs(tier):
                found.setdefault(run, []).append(spec.name)
        except TierstateError as error:
            print(f"{spec.name}: {error}", file=sys.stderr)
        finally:
            tier.close()
    return found
