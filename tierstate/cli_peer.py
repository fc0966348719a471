"""Verbs about the memory that hosts keep objects in for each other."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from tierstate.manifest.errors import NotFound
from tierstate.tiers.peer import Peer
from tierstate.tiers.policy import Policy
from tierstate.tiers.registry import open_tier

from . import peer_table
from .cli_options import Json, PolicyFile

app = typer.Typer(help="Peer memory: what hosts keep for each other.", no_args_is_help=True)
TierName = Annotated[str | None, typer.Option("--tier", help="The tier; none: the policy's peer tiers.")]


@app.command()
def status(policy: PolicyFile, tier: TierName = None, as_json: Json = False) -> None:
    """Every host that this one knows of, and what its keeper says; exit 1 if one says nothing."""
    found = []
    for one in _tiers(policy, tier):
        with closing(one):
            found.append(peer_table.Told(one.name, one.traits.notes, one.members()))
    peer_table.show(found, as_json)
    raise typer.Exit(0 if all(isinstance(said, dict) for told in found for _, said in told.members) else 1)


@app.command()
def stop(policy: PolicyFile, tier: TierName = None) -> None:
    """End this host's keeper, and give its memory back with all that is in it; run it on each host of a job."""
    for one in _tiers(policy, tier):
        with closing(one):
            print(f"{one.name}: {'stopped' if one.stop() else 'there was nothing'}")


def _tiers(file: object, name: str | None) -> list[Peer]:
    policy = Policy.load(str(file))
    specs = [spec for spec in policy.tiers if name in (None, spec.name)]
    opened = [open_tier(spec.name, spec.type, spec.options) for spec in specs if spec.type == "peer"]
    found = [tier for tier in opened if isinstance(tier, Peer)]
    if not found:
        raise NotFound(f"{file} has no tier {name or ''} of type 'peer'".replace("  ", " "))
    return found
