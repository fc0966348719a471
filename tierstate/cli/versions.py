"""The commands about versions: ls, show, events, diff, copy, tag, fork, rm and prune."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tierstate.cli.output.history import show_events
from tierstate.cli.output.repairs import show_prune, show_removed, show_removed_run
from tierstate.cli.output.versions import (
    show_copied,
    show_diff,
    show_fork,
    show_leaves,
    show_runs,
    show_tag,
    show_tags,
    show_versions,
)
from tierstate.engine.events import KINDS
from tierstate.engine.progress import byte_progress, status_line
from tierstate.manifest.errors import NotFound, TierUnavailable, tier_text
from tierstate.run import runs_of
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import parse_seconds

from .completion import steps, tags, tier_names
from .errors import warn
from .options import AnyRun, Id, Json, Only, PolicyFile, Run, Step, TagName, check_exists, no_versions, open_run

app = typer.Typer()


@app.command("ls")
def list_versions(policy: PolicyFile, run: AnyRun = None, as_json: Json = False) -> None:
    """List the versions of a run over all tiers, or all runs.

    Without --run all runs are listed. Exit status 1 if a record cannot be read or a tier hangs.
    """
    if run is None:
        show_runs(_runs(Policy.load(policy), as_json), as_json)
        return
    with open_run(policy, run) as ckpt:
        versions = ckpt.versions()
        hung = {name: tier.hung for name, tier in ckpt.stats().tiers.items() if tier.hung}
        for name, trouble in hung.items():
            warn(f"{name} {trouble}", as_json=as_json)
        if not versions and hung:
            raise TierUnavailable(
                f"whether run {run!r} has versions is not known: {', '.join(hung)} cannot be asked now"
            )
        if not versions:
            raise no_versions(ckpt)
        show_versions(versions, [t.name for t in ckpt.policy.tiers], as_json)
    raise typer.Exit(1 if hung or any(version.unreadable for version in versions) else 0)


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
    """Show one version: its leaves, and what each tier has of them.

    By default the newest. Reads records only.
    """
    with open_run(policy, run) as ckpt:
        info = ckpt.info(step=step, version=version, tag=tag)
        show_leaves(info, ckpt.located(version=info.id, only=only), depth, as_json)


@app.command()
def events(
    policy: PolicyFile,
    run: Run,
    since: Annotated[str, typer.Option(help="Only events of the last so long, as in 2h.")] = "",
    kind: Annotated[list[str] | None, typer.Option(help="Only events of this kind; may be given again.")] = None,
    as_json: Json = False,
) -> None:
    """Show what has happened to the saves of a run, as logged in its tiers (policy: metrics: {events: true})."""
    start = time.time() - parse_seconds(since) if since else 0.0
    if wrong := [name for name in kind or () if name not in KINDS]:
        raise ValueError(f"--kind {wrong[0]}: right are {', '.join(KINDS)}")
    with open_run(policy, run) as ckpt:
        happened = ckpt.events(since=start)
        if not happened:
            check_exists(ckpt)
    found = [event for event in happened if not kind or event.kind in kind]
    show_events(found, as_json, any_kind=not kind or not happened)


@app.command()
def diff(
    policy: PolicyFile,
    run: Run,
    old: Annotated[int, typer.Argument(help="The step of the older version.", autocompletion=steps)],
    new: Annotated[int, typer.Argument(help="The step of the newer version.", autocompletion=steps)],
    values: Annotated[bool, typer.Option("--values", help="Read what differs, and say by how much.")] = False,
    only: Only = None,
    as_json: Json = False,
) -> None:
    """Compare two versions leaf by leaf; exit 1 if they differ."""
    with open_run(policy, run) as ckpt, byte_progress("comparing", shown=values and not as_json) as progress:
        found = ckpt.diff(old, new, values=values, only=only, progress=progress)
    show_diff(found, values, as_json)
    raise typer.Exit(0 if all(leaf.change == "same" for leaf in found) else 1)


@app.command()
def copy(
    policy: PolicyFile,
    run: Run,
    step: Step = None,
    version: Id = None,
    to: Annotated[
        str | None, typer.Option(help="The tier of this policy that is to get it.", autocompletion=tier_names)
    ] = None,
    into: Annotated[Path | None, typer.Option(help="The policy file whose tiers are to get it.")] = None,
    into_run: Annotated[str | None, typer.Option(help="With --into: the run's name there; none: the same.")] = None,
    as_json: Json = False,
) -> None:
    """Copy a version to another tier, or into another policy.

    By default the newest. Every chunk is verified. Say --to or --into.
    """
    with (
        open_run(policy, run) as ckpt,
        byte_progress(
            "copying", shown=not as_json, total=lambda: ckpt.info(step=step, version=version).nbytes
        ) as progress,
    ):
        found = ckpt.copy(step=step, version=version, to=to, into=into, run=into_run, progress=progress)
    show_copied(found, to or str(into), as_json)


@app.command("tag")
def tag_version(
    policy: PolicyFile,
    run: Run,
    name: Annotated[str | None, typer.Argument(help="The name to give, or none to list all names.")] = None,
    step: Step = None,
    version: Id = None,
    delete: Annotated[str | None, typer.Option("--delete", help="The name to take back.", autocompletion=tags)] = None,
    as_json: Json = False,
) -> None:
    """Give a version a name, list the names, or take one back.

    The newest version gets it, unless another is said. Retention may keep what has a name, and other commands take it
    as --tag.
    """
    if delete is not None and name is not None:
        raise ValueError(f"--delete {delete} takes a name back, and {name} is one to give: one at a time")
    if name is None and not (step is None and version is None):
        raise ValueError("say a name for that version")
    with open_run(policy, run) as ckpt:
        if delete is not None:
            ckpt.untag(delete)
        if name is None:
            named = ckpt.tags()
            if not named and delete is None:
                check_exists(ckpt)
            show_tags(named, as_json)
        else:
            show_tag(ckpt.tag(name, step, version=version), name, as_json)


@app.command("fork")
def fork_run(
    policy: PolicyFile,
    run: Run,
    new_run: Annotated[str, typer.Argument(help="The new run, which has no version yet.")],
    step: Step = None,
    version: Id = None,
    tag: TagName = None,
    as_json: Json = False,
) -> None:
    """Begin a new run with a version of this one, whose data it shares."""
    with open_run(policy, run) as ckpt:
        show_fork(ckpt.fork(new_run, step, version=version, tag=tag), run, as_json)


@app.command("rm")
def remove(
    policy: PolicyFile,
    run: Run,
    step: Annotated[int | None, typer.Option(help="The version of this step.", autocompletion=steps)] = None,
    version: Id = None,
    seq: Annotated[int | None, typer.Option(help="The version of this number (seq in ls).")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole run, with its tags and its log of events.")
    ] = False,
    tier: Annotated[
        str | None, typer.Option(help="Remove it from this tier only; none: from all.", autocompletion=tier_names)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also the newest version, or the only copy, or one that cannot be read; or a whole run."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove one version from one tier, or from all; or the whole run.

    And the chunks that nothing else needs. A version that has a tag, was forked or is being read stays, and so does a
    run of which one was forked or is being read. Nobody may save a run that is removed. Exit status 1 if it could not
    be removed everywhere.
    """
    if sum(one is not None for one in (step, version, seq, everything or None)) != 1:
        raise ValueError("say what to remove: --step, --version or --seq, or --all for the whole run")
    if everything and tier is not None:
        raise ValueError(f"--all removes a run from all tiers; leave --tier {tier} away")
    with open_run(policy, run) as ckpt:
        if everything:
            gone = ckpt.remove_run(force=force, dry_run=dry_run)
            show_removed_run(gone, as_json)
            raise typer.Exit(0 if gone.ok else 1)
        report = ckpt.remove(step=step, version=version, seq=seq, tier=tier, force=force, dry_run=dry_run)
    show_removed(report, force, as_json)
    raise typer.Exit(0 if report.ok or (dry_run and force and not any(t.reasons for t in report.tiers)) else 1)


@app.command()
def prune(
    policy: PolicyFile,
    run: Run,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    grace: Annotated[str, typer.Option(help="How old a pack must be that no version names; 0: nobody saves.")] = "1d",
    as_json: Json = False,
) -> None:
    """Drop what the policy does not keep, and what nothing needs.

    Exit status 1 if a tier could not be pruned.
    """
    seconds = 0.0 if grace.strip() == "0" else parse_seconds(grace)
    with open_run(policy, run) as ckpt, status_line(shown=not as_json) as on_step:
        report = ckpt.prune(dry_run=dry_run, grace=seconds, progress=on_step)
        if report.ok and not any(t.keep or t.drop or t.packs or t.young or t.ageless for t in report.tiers):
            raise NotFound(f"run {run!r} has nothing in {', '.join(t.name for t in ckpt.policy.tiers)}")
    show_prune(report, as_json)
    raise typer.Exit(0 if report.ok else 1)


def _runs(policy: Policy, as_json: bool) -> dict[str, list[str]]:
    """The names of all runs, and the tiers that have each."""
    return runs_of(policy, lambda tier, error: warn(tier_text(tier, error), as_json=as_json))
