"""Verbs that name versions, and begin new runs with them."""

from __future__ import annotations

from typing import Annotated

import typer

from . import named_table
from .checkpointer import Checkpointer
from .cli_options import Id, Json, PolicyFile, Run, Step, TagName

app = typer.Typer()


@app.command("tag")
def tag_version(
    policy: PolicyFile,
    run: Run,
    name: Annotated[str | None, typer.Argument(help="The name to give, or none to list all names.")] = None,
    step: Step = None,
    version: Id = None,
    delete: Annotated[str | None, typer.Option("--delete", help="The name to take back.")] = None,
    as_json: Json = False,
) -> None:
    """Give a version a name, which retention may keep and every verb takes as --tag; list names, or take one back."""
    if delete is not None and name is not None:
        raise ValueError(f"--delete {delete} takes a name back, and {name} is one to give: one at a time")
    if name is None and not (step is None and version is None):
        raise ValueError("say a name for that version")
    with Checkpointer(policy, run) as ckpt:
        if delete is not None:
            ckpt.untag(delete)
        if name is None:
            named_table.show_tags(ckpt.tags(), as_json)
        else:
            named_table.show_tag(ckpt.tag(name, step, version=version), name, as_json)


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
    with Checkpointer(policy, run) as ckpt:
        named_table.show_fork(ckpt.fork(new_run, step, version=version, tag=tag), run, as_json)
