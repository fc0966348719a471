"""The commands about policy files: check one, make one for this machine, print the schema."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstate.cli.output.lines import print_json
from tierstate.cli.output.policies import show_live, show_made_policy, show_policy, show_policy_errors
from tierstate.engine.progress import status_line
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.errors import PolicyError
from tierstate.tiers.connections.secret import NOT_AUTHENTICATED
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.policy.schema import policy_schema
from tierstate.tiers.units import parse_seconds, parse_size

from . import errors
from .options import Force, Json

if TYPE_CHECKING:
    from tierstate.cluster.check import TierFinding

app = typer.Typer(help="Policies: make one, check one, or print their schema.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    live: Annotated[bool, typer.Option("--live", help="Open each tier and try what it promises.")] = False,
    limit: Annotated[str, typer.Option(help="With --live: time for each tier, as in 5min.")] = "2min",
    state: Annotated[str | None, typer.Option(help="With --live: size of the state to be saved, as in 40GiB.")] = None,
    as_json: Json = False,
) -> None:
    """Check a policy; with --live also its tiers, by the contract, on a scratch prefix that is removed afterwards."""
    try:
        policy = Policy.load(file)
    except PolicyError as error:
        show_policy_errors(str(error), as_json)
        raise typer.Exit(1) from error
    if policy.ranks.trust == "network":
        errors.warn(f"{file}: {NOT_AUTHENTICATED}", as_json=as_json)
    from tierstate.cluster.check import look_at_tiers

    same, notes = look_at_tiers(policy)
    if same:
        show_policy_errors(f"{file}: {same}", as_json)
        raise typer.Exit(1)
    if state and not live:
        raise ValueError("--state is what live tiers are compared with; say --live too")
    if not live:
        show_policy(policy, notes, as_json)
        return
    findings = _check_live(policy, file, limit, parse_size(state) if state else None, as_json)
    show_live(findings, as_json)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


def _check_live(policy: Policy, file: Path, limit: str, state: int | None, as_json: bool) -> Sequence[TierFinding]:
    """What is found of each tier, with advice; warns of an arena for which there is no memory."""
    import torch

    from tierstate.cluster.advice import advise, advise_agent, advise_arena
    from tierstate.cluster.process import check_tiers
    from tierstate.tiers.memory.limits import MemoryLimits
    from tierstate.tiers.memory.pages import shares_huge_pages

    seconds = parse_seconds(limit)
    with status_line(shown=not as_json) as on_step:
        findings = check_tiers(policy, seconds, on_step)
    notes = advise_arena(policy.arena.size, MemoryLimits.of_process(), torch.cuda.device_count() > 0)
    for note in [*notes, *advise_agent(policy.agent.mode, shares_huge_pages())]:
        errors.warn(f"{file}: {note}", as_json=as_json)
    advise(policy, findings, state)
    return findings


@app.command()
def init(
    places: Annotated[
        list[str] | None,
        typer.Argument(help="Folders and URLs where to save; none: the best scratch folder of this machine."),
    ] = None,
    to: Annotated[Path, typer.Option("--output", "-o", help="The policy file to write.")] = Path("policy.yaml"),
    measure: Annotated[bool, typer.Option(help="Open each tier, try what it promises, and measure it.")] = True,
    limit: Annotated[str, typer.Option(help="Time for each tier that is measured, as in 5min.")] = "2min",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a policy for this machine, with comments that say why each line is there and what was measured."""
    from tierstate.cluster.advice import describe_finding
    from tierstate.cluster.check import look_at_tiers
    from tierstate.files.atomic_files import AtomicFiles
    from tierstate.tiers.policy.auto import choose_places, policy_text, policy_warnings
    from tierstate.tiers.policy.machine import look_at_machine

    with AtomicFiles(force=force) as written:
        written.check(to)  # now, as the rest takes a while
        facts = choose_places(look_at_machine(places or ()))
        policy = Policy.parse(policy_text(facts), f"{to}, not written")
        same, _ = look_at_tiers(policy)
        if same:
            raise PolicyError(same)
        findings = _check_live(policy, to, limit, None, as_json) if measure else ()
        today = f"{date.today():%Y-%m-%d}"
        heading = [f"Made for this machine by `tierstate policy init` on {today}. Change what you like.", ""]
        remarks = {found.name: describe_finding(found, today) for found in findings}
        text = as_buffer(policy_text(facts, heading, remarks).encode())
        written.create(to, text.numel()).write(0, text)
        written.commit()
    for warning in policy_warnings(facts):
        errors.warn(warning, as_json=as_json)
    show_made_policy(to, policy, findings, as_json)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of policies, with every tier type that is installed; for editors."""
    print_json(policy_schema())
