"""The command line ``tierstate``: the operations of a Checkpointer, for people and, with ``--json``, for machines.

Exit status: 0 success; 1 a check found a problem or a difference; 2 the command failed; 130 it was interrupted.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from functools import partial
from typing import Annotated

import typer

from . import agent, completion, errors, files, history, peer, plan, policy, repairs, report, tiers, versions

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for commands in (versions, history, report, plan, repairs, files, tiers):
    app.add_typer(commands.app)
app.add_typer(policy.app, name="policy")
app.add_typer(peer.app, name="peer")
app.add_typer(agent.app, name="agent")


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


def main() -> None:
    """Entry point of the command ``tierstate``."""
    words = sys.argv[1:]
    as_json = errors.wants_json(words)
    errors.prepare_streams(as_json=as_json)
    if completion.ASKED in os.environ:
        completion.answer(partial(app, words, prog_name="tierstate"))
    sys.exit(errors.run(partial(app, words, prog_name="tierstate", standalone_mode=False), as_json=as_json))
