"""What the shell completes on Tab: names of runs, steps, tags and tiers, from the policy that the line names.

A shell that waits for an answer cannot be told of an error: where a name cannot be found out soon, nothing is offered.
Only what a shell takes as it is, without quotes, is offered, so that a name in a store is never read as a command.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import typer

from tierstate.checkpointer import open_quietly
from tierstate.engine.info import VersionInfo
from tierstate.run import Run, runs_of
from tierstate.tiers.policy.policy import Policy

LIMIT = 5.0
"""Seconds until a tier that does not answer is given up, and nothing is offered."""


ASKED = "_TIERSTATE_COMPLETE"
"""The environment variable by which a shell asks."""


_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@%/-]*")


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs that the tiers of the policy have."""
    return _offered(incomplete, lambda: sorted(runs_of(_policy(ctx), lambda _tier, _error: None)))


def tier_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Tiers of the policy."""
    return _offered(incomplete, lambda: [tier.name for tier in _policy(ctx).tiers])


def steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Steps of the run's versions, the newest first."""
    return _offered(incomplete, lambda: [str(version.step) for version in _versions(ctx)])


def ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of the run's versions, the newest first."""
    return _offered(incomplete, lambda: [version.id for version in _versions(ctx)])


def tags(ctx: typer.Context, incomplete: str) -> list[str]:
    """Tags of the run."""
    return _offered(incomplete, lambda: _tags(ctx))


def answer(call: Callable[[], object]) -> None:
    """Answer a shell, and end the process: nothing on standard error, and no wait for a tier that hangs."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    status = 0
    try:
        call()
    except BaseException as error:  # also what ends the process; the shell takes the status
        status = getattr(error, "exit_code", getattr(error, "code", 1)) or 0
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 1)


def _offered(incomplete: str, find: Callable[[], Iterable[str]]) -> list[str]:
    """What was found in time, and begins as the word does."""
    found: list[str] = []

    def look() -> None:
        try:
            found.extend(find())
        except Exception:
            return  # a shell shows no error; the command itself will

    thread = threading.Thread(target=look, name="tierstate-complete", daemon=True)
    thread.start()
    thread.join(LIMIT)
    return [name for name in dict.fromkeys(found) if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def _policy(ctx: typer.Context) -> Policy:
    return Policy.load(ctx.params.get("policy") or os.environ["TIERSTATE_POLICY"])


def _open(ctx: typer.Context) -> AbstractContextManager[Run]:
    return open_quietly(_policy(ctx), ctx.params.get("run") or os.environ["TIERSTATE_RUN"])


def _tags(ctx: typer.Context) -> list[str]:
    with _open(ctx) as run:
        return sorted(run.tags())


def _versions(ctx: typer.Context) -> list[VersionInfo]:
    with _open(ctx) as run:
        return [version for version in reversed(run.versions()) if version.id]
