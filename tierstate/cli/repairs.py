"""The commands that check and repair: verify, doctor and rebuild."""

from __future__ import annotations

from typing import Annotated

import typer

from tierstate.cli.output.repairs import show_doctor, show_rebuilt, show_report
from tierstate.engine.progress import byte_progress
from tierstate.engine.repair.check_chunks import Depth
from tierstate.engine.repair.verify import bytes_to_examine, bytes_to_verify
from tierstate.manifest.errors import NotFound
from tierstate.tiers.policy.policy import Policy

from .completion import tier_names
from .options import Json, PolicyFile, Run, no_versions, open_run, parse_share

app = typer.Typer()


@app.command()
def doctor(
    policy: PolicyFile,
    run: Run,
    apply: Annotated[bool, typer.Option("--apply", help="Carry out the repairs; nobody may save the run now.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is lost of a run and what can be repaired; repair it.

    Looks at all tiers together, reads every chunk, also in packs that no record names, and changes nothing without
    --apply. With it nothing is deleted but damaged records that were made again. Safe to interrupt and to run again.
    Exit status 1 if something is wrong and was not repaired.
    """
    with (
        open_run(policy, run) as ckpt,
        byte_progress("reading", shown=not as_json, total=lambda: bytes_to_examine(ckpt._tier_runs)) as progress,
    ):
        report = ckpt.doctor(apply=apply, progress=progress)
        names = [tier.name for tier in ckpt.policy.tiers]
        if not (report.versions or report.unknown) and report.ok:
            raise no_versions(ckpt)
    show_doctor(report, names, as_json)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def rebuild(
    policy: PolicyFile,
    run: Run,
    tier: Annotated[str, typer.Argument(help="The tier whose records are lost.", autocompletion=tier_names)],
    partial: Annotated[bool, typer.Option("--partial", help="Also versions that its packs hold in part.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Make a tier's lost or damaged records again from its packs.

    `tierstate doctor` does this and more, over all tiers. Exit status 1 if a record cannot be made.
    """
    with open_run(policy, run) as ckpt:
        found = ckpt.rebuild(tier, partial=partial, dry_run=dry_run)
        if not (found.packs or found.versions or found.unknown or ckpt.versions()):
            raise NotFound(f"run {run!r} has neither records nor packs in {tier}")
    show_rebuilt(found, dry_run, as_json)
    raise typer.Exit(0 if found.ok else 1)


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
    trusted_key: Annotated[
        list[str] | None, typer.Option(help="A file with the key of `seal`, in place of the policy's; or several.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that every tier has what its records say.

    Without options: records, and packs by presence and length. Exit status 1 if something is wrong and was not mended.
    """
    share = parse_share(sample) if sample is not None else 0.0
    reads = data or deep or mend or sample is not None
    spec = Policy.load(policy)
    spec = spec.trusting(trusted_key) if trusted_key else spec
    how = Depth.of(deep=deep, data=data, sample=share, seed=seed, mend=mend)
    with (
        open_run(spec, run) as ckpt,
        byte_progress(
            "verifying", shown=reads and not as_json, total=lambda: bytes_to_verify(ckpt._tier_runs, how)
        ) as progress,
    ):
        drawn = how.seed if share else None
        report = ckpt.verify(data=data, sample=share, seed=drawn, deep=deep, mend=mend, progress=progress)
        if not report.versions and report.ok:
            raise no_versions(ckpt)
    show_report(report, as_json)
    raise typer.Exit(0 if report.ok else 1)
