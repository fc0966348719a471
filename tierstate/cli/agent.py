"""The commands ``agent status``, ``start``, ``stop``: processes of this host that publish what trainers capture."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstate.agent.launch import agent_name, agents_of_user, ask_agent, policy_text, socket_path, start_agent
from tierstate.agent.messages import ConnectionLost
from tierstate.agent.server import remove_leftover
from tierstate.cli.output.lines import say
from tierstate.cli.output.status import show_agents
from tierstate.manifest.errors import TierstateError
from tierstate.tiers.policy.policy import Policy

from .options import Json, PolicyFile

app = typer.Typer(help="Agents: processes of this host that publish what trainers have captured.", no_args_is_help=True)


@app.command()
def status(as_json: Json = False) -> None:
    """Show this user's agents on this host, what they hold and what is under way; exit 1 if one does not answer."""
    found = [one for _, one in _asked("status")]
    show_agents(found, as_json)
    raise typer.Exit(1 if any("error" in one for one in found) else 0)


@app.command()
def start(policy: PolicyFile) -> None:
    """Start the agent of a policy ahead of the trainers; does nothing if it runs."""
    loaded = Policy.load(str(policy))
    if loaded.agent.mode == "off":
        raise ValueError(f"{policy}: its trainers use no agent; write 'agent: {{mode: auto}}' into it")
    start_agent(loaded, socket_path(agent_name(policy_text(loaded), os.environ)))


@app.command()
def stop(
    wait: Annotated[bool, typer.Option("--wait", help="Return when they have ended.")] = False,
) -> None:
    """End this user's agents on this host as soon as everything that was handed over is published."""
    for path, one in list(_asked("stop")):
        say(f"{path.name}: {one.get('error') or 'ends'}")
        while wait and "error" not in one and path.exists() and not _was_killed(path):
            time.sleep(0.1)


def _was_killed(path: Path) -> bool:
    """Whether a socket is left by an agent that was killed before it had ended; then it is removed."""
    try:
        ask_agent(path, "status")
    except TierstateError as error:
        return isinstance(error, ConnectionLost) and remove_leftover(path)
    return False


def _asked(kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in agents_of_user():
        try:
            yield path, dict(ask_agent(path, kind).head.get("status", {}))
        except TierstateError as error:
            if not (isinstance(error, ConnectionLost) and remove_leftover(path)):
                yield path, {"socket": str(path), "error": str(error)}
