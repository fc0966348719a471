"""Verbs that compare versions, copy them, and make lost records again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstate.manifest.errors import NotFound

from . import diff_table, report_table
from .checkpointer import Checkpointer
from .cli_options import Id, Json, Only, PolicyFile, Run, Step
from .progress import reading

app = typer.Typer()


@app.command()
def diff(
    policy: PolicyFile,
    run: Run,
    old: Annotated[int, typer.Argument(help="The step of the older version.")],
    new: Annotated[int, typer.Argument(help="The step of the newer version.")],
    values: Annotated[bool, typer.Option("--values", help="Read what differs, and say by how much.")] = False,
    only: Only = None,
    as_json: Json = False,
) -> None:
    """Compare two versions leaf by leaf; exit 1 if they differ."""
    with Checkpointer(policy, run) as ckpt, reading("comparing", shown=values and not as_json) as progress:
        found = ckpt.diff(old, new, values=values, only=only, progress=progress)
    diff_table.show_diff(found, values, as_json)
    raise typer.Exit(0 if all(leaf.change == "same" for leaf in found) else 1)


@app.command()
def copy(
    policy: PolicyFile,
    run: Run,
    step: Step = None,
    version: Id = None,
    to: Annotated[str | None, typer.Option(help="The tier of this policy that is to get it.")] = None,
    into: Annotated[Path | None, typer.Option(help="The policy file whose tiers are to get it.")] = None,
    into_run: Annotated[str | None, typer.Option(help="With --into: the run's name there; none: the same.")] = None,
    as_json: Json = False,
) -> None:
    """Copy a version, every chunk verified, to a tier of its policy or into the tiers of another."""
    with Checkpointer(policy, run) as ckpt, reading("copying", shown=not as_json) as progress:
        found = ckpt.copy(step=step, version=version, to=to, into=into, run=into_run, progress=progress)
    report_table.show_copied(found, to or str(into), as_json)


@app.command()
def rebuild(
    policy: PolicyFile,
    run: Run,
    tier: Annotated[str, typer.Argument(help="The tier whose records are lost.")],
    partial: Annotated[bool, typer.Option("--partial", help="Also versions that its packs hold in part.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Make a tier's lost or damaged records again, from its packs; exit 1 if one cannot be made."""
    with Checkpointer(policy, run) as ckpt:
        found = ckpt.rebuild(tier, partial=partial, dry_run=dry_run)
        if not (found.packs or found.versions or found.unknown or ckpt.versions()):
            raise NotFound(f"run {run!r} has neither records nor packs in {tier}")
    report_table.show_rebuilt(found, dry_run, as_json)
    raise typer.Exit(0 if found.ok else 1)
