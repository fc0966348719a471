"""The commands ``report`` and ``serve``: what happened in runs, as one HTML file, as JSON, or live in a browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tierstate.cli.output.lines import print_json, say
from tierstate.files.atomic_files import AtomicFiles
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import NotFound
from tierstate.report.collect import collect_runs
from tierstate.report.page import render_page
from tierstate.tiers.policy.policy import Policy

from .options import Json, PolicyFile

app = typer.Typer()


Runs = Annotated[
    list[str], typer.Option("--run", "-r", envvar="TIERSTATE_RUN", help="The run; several are shown beside each other.")
]


@app.command()
def report(
    policy: PolicyFile,
    run: Runs,
    to: Annotated[Path, typer.Option("--output", "-o", help="The HTML file, which is replaced.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write what happened in runs as one HTML file, which needs no network.

    Saves tier by tier, what would have been lost, bytes, retention with reasons, failures, waits of ranks, layers that
    changed, and what each line of the policy did. With --json the same numbers are printed, and no file is written.
    """
    if not as_json:
        AtomicFiles(force=True).check(to)  # now, as the rest may take a while
    data = collect_runs(policy, run)
    for one in data.runs:
        if not (one.versions or one.events or one.problems or any(tier.trouble for tier in one.tiers)):
            names = ", ".join(tier.name for tier in one.tiers)
            raise NotFound(f"run {one.run!r} has no version and no event in {names}")
    if as_json:
        print_json(data.encode())
        return
    page = render_page(data).encode("utf-8", "backslashreplace")
    with AtomicFiles(force=True) as files:
        files.create(to, len(page)).write(0, as_buffer(page))
        files.commit()
    say(f"wrote {to}")


@app.command()
def serve(
    policy: PolicyFile,
    run: Runs,
    address: Annotated[str, typer.Option(help="An address of this host's loopback interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8765,
) -> None:
    """Show the report in a browser of this host, live, also while the run goes on; until Ctrl-C.

    It reads the tiers again and again, and changes nothing.
    """
    from tierstate.report.serve import ReportServer

    collect = partial(collect_runs, Policy.load(policy), run)
    with ReportServer(collect, address, port) as server:
        server.live.get()  # what cannot be read is told here
        say(f"{server.url} (Ctrl-C ends it)")
        server.serve_forever()
