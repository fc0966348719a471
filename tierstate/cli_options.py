"""Options of the command line that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PolicyFile = Annotated[Path, typer.Option("--policy", "-p", envvar="TIERSTATE_POLICY", help="The policy file.")]
Run = Annotated[str, typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run.")]
AnyRun = Annotated[str | None, typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run; none: all runs.")]
Step = Annotated[int | None, typer.Option(help="The version of this step; none: the newest.")]
Id = Annotated[str | None, typer.Option("--version", help="The version whose id begins so.")]
TagName = Annotated[str | None, typer.Option("--tag", help="The version that has this name.")]
Only = Annotated[list[str] | None, typer.Option(help="Only leaves that match, as in 'model.**'.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines instead of a table.")]
