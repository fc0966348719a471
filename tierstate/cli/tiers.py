"""The commands about tiers as such: init writes their markers ahead of training, adopt uses one in place of another,
rekey replaces the key of an encrypted one."""

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
        list[str] | None, typer.Argument(help="The tiers; none: all that are encrypted.", autocompletion=tier_names)
    ] = None,
    as_json: Json = False,
) -> None:
    """Replace the key of encrypted tiers by the first one that the policy lists; no pack is written again.

    The policy lists the new key first, and then the old one. Jobs that run on, and read the policy before, go on with
    what they have read.
    """
    show_rekeyed(rekey_tiers(Policy.load(policy), tiers or ()), as_json)
