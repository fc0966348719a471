"""The verb that removes what is no longer needed."""

from __future__ import annotations

from typing import Annotated

import typer

from tierstate.manifest.errors import NotFound
from tierstate.tiers.units import parse_seconds

from .checkpointer import Checkpointer
from .cli_options import Json, PolicyFile, Run
from .progress import doing
from .prune_table import show_prune

app = typer.Typer()


@app.command()
def prune(
    policy: PolicyFile,
    run: Run,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    grace: Annotated[str, typer.Option(help="How old a pack must be that no version names; 0: nobody saves.")] = "1d",
    as_json: Json = False,
) -> None:
    """Drop what the policy does not keep, and delete what no version needs; exit 1 if a tier could not be pruned."""
    seconds = 0.0 if grace.strip() == "0" else parse_seconds(grace)
    with Checkpointer(policy, run) as ckpt, doing(shown=not as_json) as told:
        report = ckpt.prune(dry_run=dry_run, grace=seconds, progress=told)
    if report.ok and not any(t.keep or t.drop or t.packs or t.young or t.ageless for t in report.tiers):
        raise NotFound(f"run {run!r} has nothing in {', '.join(t.name for t in ckpt.policy.tiers)}")
    show_prune(report, as_json)
    raise typer.Exit(0 if report.ok else 1)
