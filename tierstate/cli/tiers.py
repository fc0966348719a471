"""The commands about tiers as such: init writes their markers ahead of training, adopt uses one in place of another,
rekey replaces the keys of sealed and encrypted ones."""

from __future__ import annotations

from typing import Annotated

import typer

from tierstate.cli.output.policies import show_markers, show_rekeyed
from tierstate.engine.maintain.adopt import adopt_tier, init_tiers
from tierstate.engine.maintain.rekey import rekey_tiers
from tierstate.tiers.policy.policy import Policy

from .completion import tier_names
from .options import Json, PolicyFile

app = typer.Typer()


@app.command()
def init(
    policy: PolicyFile,
    tiers: Annotated[
        list[str] | None, typer.Argument(help="The tiers; none: all that survive the host.", autocompletion=tier_names)
    ] = None,
    as_json: Json = False,
) -> None:
    """Create the markers of a policy's tiers, ahead of training; those that have one keep it."""
    show_markers(init_tiers(Policy.load(policy), tiers or ()), as_json)


@app.command()
def adopt(
    policy: PolicyFile,
    tier: Annotated[str, typer.Argument(help="The tier to be used from now on as it is.", autocompletion=tier_names)],
    as_json: Json = False,
) -> None:
    """Use what lies in a tier's place from now on: after a copy of a disk, or when a tier is lost for good."""
    show_markers([adopt_tier(Policy.load(policy), tier)], as_json)


@app.command()
def rekey(
    policy: PolicyFile,
    tiers: Annotated[
        list[str] | None, typer.Argument(help="The tiers; none: all with keys.", autocompletion=tier_names)
    ] = None,
    as_json: Json = False,
) -> None:
    """Replace the keys of sealed and encrypted tiers by the first that the policy lists; no pack is written again.

    The policy lists the new key first, and then the old one. Nobody may save to a sealed tier meanwhile. Jobs that
    save to encrypted ones, and read the policy before, go on with what they have read. Exit 1 if something could not
    be sealed again.
    """
    found = rekey_tiers(Policy.load(policy), tiers or ())
    show_rekeyed(found, as_json)
    raise typer.Exit(1 if any(one.left for one in found) else 0)
