"""The commands ``peer status``, ``stop``, ``reap``: the memory servers in which hosts keep replicas for each other."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from tierstate.cli.output.lines import say
from tierstate.cli.output.status import PeerStatus, show_peers
from tierstate.manifest.errors import NotFound, TierError
from tierstate.tiers.peer.host import memories_of_user
from tierstate.tiers.peer.host import reap as free_memory
from tierstate.tiers.peer.tier import Peer
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.registry import open_tier

from .options import Json, PolicyFile

app = typer.Typer(help="Peer memory: what hosts keep for each other.", no_args_is_help=True)


TierName = Annotated[str | None, typer.Option("--tier", help="The tier; none: the policy's peer tiers.")]


@app.command()
def status(policy: PolicyFile, tier: TierName = None, as_json: Json = False) -> None:
    """Show every known host and the status of its memory server; exit 1 if one does not answer."""
    found = []
    for one in _tiers(policy, tier):
        with closing(one):
            found.append(PeerStatus(one.name, one.traits.notes, one.members()))
    show_peers(found, as_json)
    raise typer.Exit(0 if all(isinstance(said, dict) for peer in found for _, said in peer.members) else 1)


@app.command()
def stop(policy: PolicyFile, tier: TierName = None) -> None:
    """Stop this host's memory server, and free its memory with all its objects; run it on each host of a job."""
    for one in _tiers(policy, tier):
        with closing(one):
            say(f"{one.name}: {'stopped' if one.stop() else 'there was nothing'}")


@app.command()
def reap(
    paths: Annotated[list[Path] | None, typer.Argument(help="Folders; none: those of this user in /dev/shm.")] = None,
    keepers: Annotated[bool, typer.Option("--keepers", help="End servers, too, whose memory no process uses.")] = False,
) -> None:
    """Free the memory that dead jobs of this user left on this host, as in a node's epilog; exit 1 if one is foreign.

    Memory that is in use stays, and so does memory whose server lives, which frees it itself after its idle time.
    """
    foreign = False
    for path in paths or memories_of_user():
        try:
            print(f"{path}: {free_memory(path.absolute(), keepers=keepers)}")
        except TierError as error:
            foreign = True
            print(error, file=sys.stderr)
    raise typer.Exit(1 if foreign else 0)


def _tiers(file: object, name: str | None) -> list[Peer]:
    policy = Policy.load(str(file))
    specs = [spec for spec in policy.tiers if name in (None, spec.name)]
    opened = [open_tier(spec.name, spec.type, spec.options) for spec in specs if spec.type == "peer"]
    found = [tier for tier in opened if isinstance(tier, Peer)]
    if not found:
        raise NotFound(f"{file} has no tier {name or ''} of type 'peer'".replace("  ", " "))
    return found
