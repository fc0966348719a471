"""Command line options that several commands have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from tierstate import run as runs
from tierstate.checkpointer import Checkpointer, open_quietly
from tierstate.engine.store.catalog import RunCatalog
from tierstate.manifest.errors import NotFound, TierstateError
from tierstate.manifest.history.log import list_runs
from tierstate.providers.tree.rename import RenameStep, unwrapped
from tierstate.tiers.policy.policy import Policy

from .completion import ids, run_names, steps, tags

PolicyFile = Annotated[Path, typer.Option("--policy", "-p", envvar="TIERSTATE_POLICY", help="The policy file.")]


Run = Annotated[str, typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run.", autocompletion=run_names)]


AnyRun = Annotated[
    str | None,
    typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run; none: all runs.", autocompletion=run_names),
]


Step = Annotated[int | None, typer.Option(help="The version of this step; none: the newest.", autocompletion=steps)]


Id = Annotated[str | None, typer.Option("--version", help="The version whose id begins so.", autocompletion=ids)]


TagName = Annotated[str | None, typer.Option("--tag", help="The version that has this name.", autocompletion=tags)]


Only = Annotated[list[str] | None, typer.Option(help="Only leaves that match, as in 'model.**'.")]


Rename = Annotated[
    list[str] | None,
    typer.Option(help="Other names: OLD=NEW, as in 'model.encoder=model.net', or 'unwrapped'; each in turn."),
]


Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]


Json = Annotated[bool, typer.Option("--json", help="JSON for machines instead of a table.")]


@contextmanager
def open_run(policy: Path | Policy, run: str, *, allow_pickle: Sequence[str] = ()) -> Iterator[Checkpointer]:
    """A run, for a command that is about what is there. If it has no version, the error that something is not found is
    followed by the runs that there are."""
    with open_quietly(policy, run, allow_pickle=allow_pickle) as ckpt:
        try:
            yield ckpt
        except NotFound as error:
            if names := _other_runs(ckpt):
                near = get_close_matches(run, names, n=1)
                told = f"did you mean run {near[0]!r}?" if near else f"the runs that there are: {', '.join(names)}"
                error.args = (f"{error}; {told}",)
            raise


def _other_runs(ckpt: Checkpointer) -> list[str]:
    """The runs in the tiers that can be asked; none if this one has versions."""
    found = set[str]()
    with suppress(TierstateError):
        if RunCatalog(ckpt._tier_runs).seqs():
            return []
    for tier_run in ckpt._tier_runs:
        with suppress(TierstateError):
            found.update(list_runs(tier_run.tier))
    return sorted(found - {ckpt.run})


def check_exists(run: runs.Run) -> None:
    """Raises NotFound if no tier has a version of the run: its name may be a slip, where there is nothing to show."""
    if not run.versions():
        raise no_versions(run)


def no_versions(run: runs.Run) -> NotFound:
    """The error for a run of which no tier has a version."""
    catalog = RunCatalog(run._tier_runs)
    names = ", ".join(tier.name for tier in run.policy.tiers)
    return NotFound(f"run {run.run!r} has no version in {names}{catalog.stray_packs()}")


def parse_rename(texts: list[str] | None) -> list[RenameStep] | None:
    """The steps of ``--rename``; None without one.

    Raises:
        ValueError: one is neither ``OLD=NEW`` nor ``unwrapped``.
    """
    steps: list[RenameStep] = []
    for text in texts or ():
        old, equals, new = text.partition("=")
        if not equals and text != unwrapped.__name__:
            raise ValueError(f"--rename {text!r}: right are OLD=NEW, as in 'model.encoder=model.net', and 'unwrapped'")
        steps.append((old, new) if equals else unwrapped)
    return steps or None


def parse_share(text: str) -> float:
    """Parse a share: ``5%`` or ``0.05``.

    Raises:
        ValueError: it is not above 0 and up to 1.
    """
    number, percent = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        share = float(number) / percent
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is no share; write one above 0% and up to 100%, as in 5%")
    return share
