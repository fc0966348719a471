"""The command ``plan``: what a policy costs and protects, before a job runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstate.cli.output.lines import print_json, say, table
from tierstate.tiers.policy.models import FailuresKeys
from tierstate.tiers.policy.policy import Policy
from tierstate.tiers.units import parse_rate, parse_seconds, rough_duration, rough_size

from .completion import run_names
from .errors import warn
from .options import Json, PolicyFile, parse_share

if TYPE_CHECKING:
    from tierstate.planning.figures import RunFigures, Speed
    from tierstate.planning.model import TierModel, Workload
    from tierstate.planning.plan import Forecast, Plan

app = typer.Typer()

CAPTURE = 8 << 30
"""Bytes per second of a host into the memory of its arenas, where nothing else is said."""


@app.command()
def plan(
    policy: PolicyFile,
    state: Annotated[
        str | None, typer.Option(help="The state: parameters that Adam trains in 16 bit, as 70b, or bytes, as 40GiB.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", "-r", help="Take state, steps and speeds from this run.", autocompletion=run_names),
    ] = None,
    step: Annotated[str | None, typer.Option(help="Time of a training step, as in 12s.")] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Training steps between two saves; 1.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of the job.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each host.")] = 8,
    mtbf: Annotated[str | None, typer.Option(help="Mean time between failures of the job, as in 6h.")] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(help="TIER=WRITE:READ, as in nvme=2GiB/s:3GiB/s; of each host, or of all for a shared tier."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the tiers here, as policy check --live.")] = False,
    capture: Annotated[str | None, typer.Option(help="How fast each host copies a state, as in 20GiB/s.")] = None,
    slower: Annotated[str | None, typer.Option(help="By how much steps are slower during a write, as in 2%.")] = None,
    changed: Annotated[str, typer.Option(help="How much of the state changes from save to save.")] = "100%",
    restart: Annotated[str, typer.Option(help="Time from a failure until the state is read.")] = "5min",
    price: Annotated[list[str] | None, typer.Option(help="TIER=PRICE of a GB for a month, as in s3=0.023.")] = None,
    during: Annotated[str | None, typer.Option("--for", help="Training that is simulated, as in 1d.")] = None,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="Also write it as an HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Tell what a policy costs a job and what a failure costs it, and which intervals would cost least.

    The job is simulated with the rules by which tierstate saves. Nothing is saved, and without --run and --measure no
    tier is touched.
    """
    from tierstate.engine.progress import status_line
    from tierstate.files.atomic_files import AtomicFiles
    from tierstate.planning.figures import parse_speeds, parse_state, tier_models
    from tierstate.planning.model import Workload
    from tierstate.planning.plan import make_plan

    if to is not None:
        AtomicFiles(force=True).check(to)  # now, as the rest takes a while
    read = Policy.load(policy)
    if mtbf is not None:
        failures = FailuresKeys(mtbf=parse_seconds(mtbf), host_lost=read.failures.host_lost)
        read = read.model_copy(update={"failures": failures})
    if (state is None) == (run is None):
        raise ValueError("say either --state, as in 70b or 40GiB, or --run, a run that was saved with this policy")
    known = None if run is None else _figures(policy, run)
    seconds = parse_seconds(step) if step else known and known.step
    if not seconds:
        raise ValueError("how long a training step takes is not known: say --step, as in 12s")
    rate = parse_rate(capture) * nodes if capture else (known and known.capture) or CAPTURE * nodes
    work = Workload(
        leaves=known.leaves if known else parse_state(state or ""),
        step=seconds,
        save_every=save_every or (known and known.save_every) or 1,
        hosts=nodes,
        processes=processes,
        capture=rate,
        slower=parse_share(slower) if slower else 0.0,
        changed=parse_share(changed),
        restart=parse_seconds(restart),
    )
    said = parse_speeds(speed or (), read)
    measured, fixed = _measured(read, as_json) if measure else ({}, {})
    seen = {name: one for name, one in (known.speeds if known else {}).items() if name not in {*said, *measured}}
    alone = measured.keys() - said.keys() if nodes > 1 else set()
    models = tier_models(read, nodes, processes, rate, {**measured, **seen, **said}, fixed, seen)
    long, prices = _simulated(during, read, work), _prices(price or (), read)
    with status_line(shown=not as_json) as tell:
        made = make_plan(read, work, models, long, prices, tell)
    encoded = dataclasses.asdict(made)
    if to is not None:
        _write(to, encoded, [*_given(made, work, models, alone)])
    if as_json:
        print_json(encoded)
        return
    _show(made, [*_given(made, work, models, alone)])
    if to is not None:
        say(f"wrote {to}")


def _figures(policy: Path, run: str) -> RunFigures:
    from tierstate.checkpointer import open_quietly
    from tierstate.planning.figures import figures_of

    with open_quietly(policy, run) as opened:
        return figures_of(opened)


def _measured(policy: Policy, as_json: bool) -> tuple[dict[str, Speed], dict[str, float]]:
    """What tiers can do here, and the seconds that a version takes besides its bytes."""
    from tierstate.cluster.process import check_tiers
    from tierstate.engine.progress import status_line
    from tierstate.planning.figures import Speed

    with status_line(shown=not as_json) as on_step:
        findings = check_tiers(policy, 120.0, on_step)
    speeds = {one.name: Speed(one.write, one.read) for one in findings if one.write and one.read}
    for one in findings:
        if one.name not in speeds:
            why = "; ".join(filter(None, [one.error, *one.problems, *one.broken.values()]))
            warn(f"{one.name} was not measured: {why}", as_json=as_json)
    return speeds, {one.name: 2 * (one.put_seconds or 0.0) for one in findings}


def _simulated(during: str | None, policy: Policy, work: Workload) -> float | None:
    from tierstate.planning.plan import check_simulated

    if not during:
        return None
    seconds = parse_seconds(during)
    check_simulated(policy, work, seconds)
    return seconds


def _prices(texts: Sequence[str], policy: Policy) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        price = math.nan
        with suppress(ValueError):
            price = float(value)
        if not 0 <= price < math.inf:
            raise ValueError(f"--price {text!r}: right is TIER=PRICE of a GB for a month, as in s3=0.023")
        found[policy.tier(name).name] = price
    return found


def _write(to: Path, encoded: dict[str, Any], given: Sequence[tuple[str, str]]) -> None:
    from tierstate.files.atomic_files import AtomicFiles
    from tierstate.manifest.chunk import as_buffer
    from tierstate.planning.page import render_plan

    page = render_plan(encoded, given).encode("utf-8", "backslashreplace")
    with AtomicFiles(force=True) as files:
        files.create(to, len(page)).write(0, as_buffer(page))
        files.commit()


def _given(
    made: Plan, work: Workload, models: Sequence[TierModel], alone: Collection[str]
) -> Iterator[tuple[str, str]]:
    """What the plan was made from. ``alone``: tiers whose speed was measured here, by one of several hosts."""
    steps = "every step" if work.save_every == 1 else f"every {work.save_every} steps"
    yield "job", f"{work.hosts} hosts of {work.processes} processes; a failure every {rough_duration(made.mtbf)}"
    yield "simulated", f"{rough_duration(made.now.simulated)}, with saves and without failures"
    yield "state", f"{rough_size(work.nbytes)}, of which {work.changed:.0%} change from save to save"
    yield "training", f"a step takes {rough_duration(work.step)}; save is called after {steps}"
    yield "capture", f"{rough_size(work.capture)}/s in the whole job; steps are {work.slower:.0%} slower during writes"
    for model in models:
        rates = f"writes {rough_size(model.write)}/s, reads {rough_size(model.read)}/s in the whole job"
        rates += f", and {rough_duration(model.fixed)} per version" if model.fixed else ""
        if model.level.name in alone and model.level.shared == "site":
            rates += ", as this host alone gets it; say --speed if all hosts together get more"
        yield model.level.name, rates


def _show(made: Plan, given: Sequence[tuple[str, str]]) -> None:
    for name, value in given:
        say(f"{name}: {value}")
    say("")
    _show_tiers(made.now)
    say("")
    _show_forecast(made.now)
    said = ", ".join(f"{name} {f'every {text}' if text else 'every save'}" for name, text in made.every.items())
    say(f"least cost: {said or 'as it is'}: {made.best.goodput:.2%} of the time counts in the end")
    for advice in made.advice:
        say(f"TO DO {advice}")


def _show_tiers(now: Forecast) -> None:
    rows = [
        (
            tier.tier,
            tier.every,
            f"{tier.versions:.3g}",
            rough_size(tier.nbytes),
            f"{tier.busy:.1%}",
            "-" if tier.delay is None else rough_duration(tier.delay),
            tier.kept,
            rough_size(tier.stored),
            rough_duration(tier.restore),
            "-" if tier.money is None else f"{tier.money:.2f}",
        )
        for tier in now.tiers
    ]
    columns = [">versions/day", ">written/day", ">busy", ">there after", ">kept", ">bytes kept", ">read back in"]
    table(["tier", "every", *columns, ">money/day"], rows)


def _show_forecast(now: Forecast) -> None:
    say(
        f"saves: {now.saves:.0f} a day, each blocks {rough_duration(now.blocked)} ({rough_duration(now.longest)} at "
        f"most); they cost {now.saving:.2%} of the time"
    )
    for failure in now.failures:
        what = "a host is lost" if failure.host_lost else "a process is killed"
        lost = "all is lost" if failure.lost is None else f"{rough_duration(failure.lost)} are lost on average"
        source = f"restored from {failure.tier}, " if failure.tier else ""
        say(f"{what} ({failure.share:.0%}): {lost}; {source}{rough_duration(failure.recovery)} until it goes on")
    say(f"{now.goodput:.2%} of the time counts in the end")
