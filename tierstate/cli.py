"""The command line: the same verbs as the Checkpointer, for people and, with --json, for machines.

Exit status: 0 all is well; 1 something was looked at and found wanting; 2 what was asked could not be done.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstate.manifest.errors import NotFound, PolicyError, TierstateError
from tierstate.manifest.log import runs
from tierstate.tiers.opening import opened
from tierstate.tiers.policy import Policy, policy_schema
from tierstate.tiers.units import parse_seconds, parse_size

from . import tables
from .checkpointer import Checkpointer
from .foreign import MAX_STEP
from .progress import doing, reading

app = typer.Typer(
    help="Training state on every tier of a cluster.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
policy_app = typer.Typer(help="Policies: check one, or print their schema.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")

PolicyFile = Annotated[Path, typer.Option("--policy", "-p", envvar="TIERSTATE_POLICY", help="The policy file.")]
Run = Annotated[str, typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run.")]
AnyRun = Annotated[str | None, typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run; none: all runs.")]
Step = Annotated[int | None, typer.Option(help="The version of this step; none: the newest.")]
Id = Annotated[str | None, typer.Option("--version", help="The version whose id begins so.")]
Only = Annotated[list[str] | None, typer.Option(help="Only leaves that match, as in 'model.**'.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines instead of a table.")]


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
def show(policy: PolicyFile, run: Run, step: Step = None, version: Id = None, as_json: Json = False) -> None:
    """Show one version: its leaves with kind, dtype, shape and size, and the tiers that have it."""
    with Checkpointer(policy, run) as ckpt:
        info = ckpt.info(step=step, version=version)
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


@app.command()
def restore(
    policy: PolicyFile,
    run: Run,
    to: Annotated[Path, typer.Argument(help="The file to write, readable with torch.load.")],
    step: Step = None,
    version: Id = None,
    only: Only = None,
    older: Annotated[bool, typer.Option("--older", help="On damage, go back to the newest whole version.")] = False,
    allow_pickle: Annotated[list[str] | None, typer.Option(help="Leaves whose pickles may be loaded.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Restore a version, every chunk verified, into one file that torch.load reads."""
    if to.exists() and not force:
        raise TierstateError(f"{to} exists; name another file, or say --force to replace it")
    with Checkpointer(policy, run, allow_pickle=allow_pickle or ()) as ckpt:
        state = ckpt.load(step=step, version=version, only=only, on_damage="older" if older else "raise")
        _write(state, to)
        assert ckpt.restored is not None
        tables.show_restored(ckpt.restored, to, as_json)


@app.command()
def export(
    policy: PolicyFile,
    run: Run,
    to: Annotated[Path, typer.Argument(help="The file to write: its name ends with .safetensors, .h5 or .hdf5.")],
    step: Step = None,
    version: Id = None,
    only: Only = None,
    strip_prefix: Annotated[str, typer.Option(help="What every tensor's name begins with, to be left off.")] = "",
    max_shard: Annotated[str, typer.Option(help="Bytes in one .safetensors file before there are several.")] = "5GiB",
    skip_values: Annotated[bool, typer.Option("--skip-values", help="Leave out what is no such tensor.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a version to a safetensors or HDF5 file that other programs open, every chunk verified."""
    from .exporting import export as write

    with Checkpointer(policy, run) as ckpt, reading("exporting", shown=not as_json) as progress:
        found = write(
            ckpt,
            to,
            step=step,
            version=version,
            only=only,
            strip_prefix=strip_prefix,
            max_shard=parse_size(max_shard),
            skip_values=skip_values,
            force=force,
            progress=progress,
        )
    tables.show_exported(found, as_json)


@app.command("import")
def import_file(
    policy: PolicyFile,
    run: Run,
    source: Annotated[Path, typer.Argument(help="A safetensors, HDF5 or torch.save file, or a DCP folder.")],
    step: Annotated[
        int | None, typer.Option(min=0, max=MAX_STEP, help="The new version's step; none: the file's own, or 0.")
    ] = None,
    under: Annotated[str, typer.Option(help="The key to put the state under, as in 'model'.")] = "",
    skip_values: Annotated[
        bool, typer.Option("--skip-values", help="Leave out an HDF5 file's text and attributes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Save what lies in another program's file as a new version of the run. No code in the file is run."""
    from .importing import import_version

    with Checkpointer(policy, run) as ckpt, reading("importing", shown=not as_json) as progress:
        info = import_version(ckpt, source, step=step, under=under, skip_values=skip_values, progress=progress)
    tables.show_imported(info, source, as_json)


@policy_app.command("check")
def check_policy(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    live: Annotated[bool, typer.Option("--live", help="Open each tier and try what it promises.")] = False,
    limit: Annotated[str, typer.Option(help="With --live: time for each tier, as in 5min.")] = "2min",
    state: Annotated[str | None, typer.Option(help="With --live: size of the state to be saved, as in 40GiB.")] = None,
    as_json: Json = False,
) -> None:
    """Check a policy; with --live also its tiers, by the contract, on a scratch prefix that is removed afterwards."""
    try:
        policy = Policy.load(file)
    except PolicyError as error:
        tables.show_policy_errors(str(error), as_json)
        raise typer.Exit(1) from error
    if state and not live:
        raise ValueError("--state is what live tiers are compared with; say --live too")
    if not live:
        tables.show_policy(policy, as_json)
        return
    from . import live_table
    from .advice import advise
    from .apart import look_at_all

    seconds, nbytes = parse_seconds(limit), parse_size(state) if state else None
    with doing(shown=not as_json) as told:
        findings = look_at_all(policy, seconds, told)
    advise(policy, findings, nbytes)
    live_table.show_live(findings, as_json)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


@policy_app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of policies, with every tier type that is installed; for editors."""
    tables.print_json(policy_schema())


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


def _write(state: Any, to: Path) -> None:
    """Write the whole file or none."""
    import torch

    handle, name = tempfile.mkstemp(dir=to.parent, prefix=f".{to.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, to)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _told() -> Iterator[None]:
    """Errors of ours as one message and exit status 2, without a traceback."""
    try:
        yield
    except (TierstateError, ValueError, OSError, ImportError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"tierstate: {error}{notes}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Entry point of the command ``tierstate``."""
    with _told():
        app()
