"""Verbs that look at what was saved."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.manifest.log import runs
from tierstate.tiers.opening import opened
from tierstate.tiers.policy import Policy

from . import leaf_table, report_table, tables
from .checkpointer import Checkpointer
from .cli_options import AnyRun, Id, Json, Only, PolicyFile, Run, Step, TagName, parse_share
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
    policy: PolicyFile,
    run: Run,
    step: Step = None,
    version: Id = None,
    tag: TagName = None,
    only: Only = None,
    depth: Annotated[
        int | None, typer.Option(min=0, help="Sums of what lies below so many keys, instead of leaves.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one version: its leaves with kind, dtype, shape and size, and what each tier has of them."""
    with Checkpointer(policy, run) as ckpt:
        info = ckpt.info(step=step, version=version, tag=tag)
        leaf_table.show_leaves(info, ckpt.located(version=info.id, only=only), depth, as_json)


@app.command()
def verify(
    policy: PolicyFile,
    run: Run,
    data: Annotated[bool, typer.Option("--data", help="Read every chunk and compare its digest.")] = False,
    sample: Annotated[str | None, typer.Option(help="Read a random share of each tier's bytes, as in 5%.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With --sample: choose as a report with this seed did.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="--data, and open every leaf; footers too.")] = False,
    mend: Annotated[bool, typer.Option("--mend", help="Write again what is whole in another tier.")] = False,
    as_json: Json = False,
) -> None:
    """Check that every tier has what it claims to have; exit 1 if something is wrong and was not mended."""
    share = parse_share(sample) if sample is not None else 0.0
    reads = data or deep or mend or sample is not None
    with Checkpointer(policy, run) as ckpt, reading("verifying", shown=reads and not as_json) as progress:
        report = ckpt.verify(data=data, sample=share, seed=seed, deep=deep, mend=mend, progress=progress)
    if not report.versions and report.ok:
        raise NotFound(f"run {run!r} has no version in {', '.join(t.name for t in ckpt.policy.tiers)}")
    report_table.show_report(report, as_json)
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
