"""The command line: the same verbs as the Checkpointer, for people and, with --json, for machines.

Exit status: 0 all is well; 1 something was looked at and found wanting; 2 what was asked could not be done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tierstate.manifest.errors import PolicyError, TierstateError
from tierstate.tiers.policy import Policy, policy_schema
from tierstate.tiers.units import parse_seconds, parse_size

from . import cli_copies, cli_moved, cli_named, cli_peer, cli_prune, cli_saved, tables
from .cli_options import Json
from .progress import doing

app = typer.Typer(
    help="Training state on every tier of a cluster.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
for verbs in (cli_saved, cli_copies, cli_named, cli_prune, cli_moved):
    app.add_typer(verbs.app)
policy_app = typer.Typer(help="Policies: check one, or print their schema.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(cli_peer.app, name="peer")


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
