"""The command line ``tierstate``: the operations of a Checkpointer, for people and, with ``--json``, for machines.

Exit status: 0 success; 1 a check found a problem or a difference; 2 the command failed; 130 it was interrupted.
"""

from __future__ import annotations

import importlib.metadata
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tierstate.engine.progress import status_line
from tierstate.manifest.errors import PolicyError
from tierstate.tiers.connections.secret import NOT_AUTHENTICATED
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.policy.schema import policy_schema
from tierstate.tiers.units import parse_seconds, parse_size

from . import errors, files, output, peer, repairs, tiers, versions
from .options import Json

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for commands in (versions, repairs, files, tiers):
    app.add_typer(commands.app)
policy_app = typer.Typer(help="Policies: check one, or print their schema.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(peer.app, name="peer")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tierstate {importlib.metadata.version('tierstate')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Training state on every tier of a cluster: look at its versions, check, repair, move and drop them.

    Most commands are about one run, and need a policy file and the run's name: --policy FILE --run NAME, or the
    environment's TIERSTATE_POLICY and TIERSTATE_RUN. Begin with `tierstate ls`; when something is wrong, with
    `tierstate doctor`. Exit status: 0 success, 1 a check found a problem, 2 the command failed.
    """


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
        output.show_policy_errors(str(error), as_json)
        raise typer.Exit(1) from error
    if policy.ranks.trust == "network":
        errors.warn(f"{file}: {NOT_AUTHENTICATED}", as_json=as_json)
    from tierstate.cluster.check import look_at_tiers

    same, notes = look_at_tiers(policy)
    if same:
        output.show_policy_errors(f"{file}: {same}", as_json)
        raise typer.Exit(1)
    if state and not live:
        raise ValueError("--state is what live tiers are compared with; say --live too")
    if not live:
        output.show_policy(policy, notes, as_json)
        return
    from tierstate.cluster.advice import advise
    from tierstate.cluster.process import check_tiers

    seconds, nbytes = parse_seconds(limit), parse_size(state) if state else None
    with status_line(shown=not as_json) as on_step:
        findings = check_tiers(policy, seconds, on_step)
    advise(policy, findings, nbytes)
    output.show_live(findings, as_json)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


@policy_app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of policies, with every tier type that is installed; for editors."""
    output.print_json(policy_schema())


def main() -> None:
    """Entry point of the command ``tierstate``."""
    words = sys.argv[1:]
    sys.exit(
        errors.run(partial(app, words, prog_name="tierstate", standalone_mode=False), as_json=errors.wants_json(words))
    )
