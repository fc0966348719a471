"""In words, from the events of a run: where the time of one save went, and what of the policy would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierstate.engine.events import Event
from tierstate.manifest.errors import NotFound
from tierstate.tiers.units import rough_size

LONG = 0.25
"""Seconds of blocked training below which nothing is advised."""


NEARLY = 0.8
"""The share of the capture from which on a save counts as not lazy."""


def explain(events: Sequence[Event], step: int) -> list[str]:
    """What became of the save of a step, line by line; the latest one, if the step was saved again.

    Args:
        events: of the run, oldest first, as `read_events` returns them.

    Raises:
        NotFound: no event is about this step.
    """
    about = [event for event in events if event.step == step and event.kind != "restored"]
    if not about:
        raise NotFound(f"no event of step {step} is logged; 'metrics: {{events: true}}' in the policy logs them")
    seq = max(event.seq or 0 for event in about)
    about = [event for event in about if event.seq == seq or event.seq is None]
    return [*_capture(about), *_tiers(events, about)]


def _capture(about: Sequence[Event]) -> Iterator[str]:
    saved = next((event for event in about if event.kind == "saved"), None)
    captured = next((event for event in about if event.kind == "captured"), None)
    if any(event.kind == "skipped" for event in about):
        yield "nothing was saved: the arena was full (`on_full: skip`); a larger `arena: size` takes more saves at once"
    if saved is not None:
        yield f"`save` blocked the training for {saved.seconds or 0.0:.3f} s"
    full = sum(event.seconds or 0.0 for event in about if event.kind == "arena_full")
    if full > 0:
        yield f"the capture has waited {full:.3f} s for memory: the arena was full"
        if full > LONG:
            yield "  → a larger `arena: size`, fewer saves (`every`), or a faster tier: slabs are free once it has them"
    if captured is None:
        return
    yield f"{rough_size(captured.nbytes or 0)} were captured after {captured.seconds or 0.0:.3f} s"
    blocked, whole = (saved.seconds or 0.0) if saved is not None else 0.0, captured.seconds or 0.0
    if blocked > LONG and blocked > NEARLY * whole:
        yield "  → all of it was copied before `save` returned; `ckpt.guard(optimizer)` copies most of it during the"
        yield "    next forward and backward pass"


def _tiers(events: Sequence[Event], about: Sequence[Event]) -> Iterator[str]:
    captured = next((event for event in about if event.kind == "captured"), None)
    began = captured.time - (captured.seconds or 0.0) if captured is not None else about[0].time
    ready = captured.time if captured is not None else began
    for event in about:
        after = event.time - began
        match event.kind:
            case "committed":
                yield f"{event.tier}: there after {event.seconds or after:.3f} s{_rate(event, after)}"
                ready = event.time
            case "cascaded" | "brought":
                took = event.seconds or 0.0
                waited = max(0.0, event.time - took - ready)
                how = f"copied in {took:.3f} s" if event.kind == "cascaded" else "brought later"
                yield f"{event.tier}: there {_after(after)}; {how}{_rate(event, took)}"
                yield from _lag(events, event, waited, took)
            case "failed":
                yield f"{event.tier}: failed {_after(after)}: {event.reason}"
            case "owed":
                yield f"{event.tier}: it is brought when the tier works again"
            case "left_out":
                yield f"{event.tier}: left out: {event.reason}"


def _after(seconds: float) -> str:
    return f"after {seconds:.3f} s" if seconds >= 0 else "after a time that is not known, as the clock was set back"


def _rate(event: Event, seconds: float) -> str:
    if not event.nbytes or seconds <= 0:
        return ""
    return f" ({rough_size(event.nbytes)} written, {rough_size(event.nbytes / seconds)}/s)"


def _lag(events: Sequence[Event], event: Event, waited: float, took: float) -> Iterator[str]:
    """Why a copy has waited, if it did for longer than it took."""
    if waited <= max(took, LONG):
        return
    yield f"  → it waited {waited:.3f} s before that, for earlier versions or for the tier"
    arrivals = [one.time for one in events if one.kind == "captured" and one.time <= event.time]
    if len(arrivals) > 1 and (between := (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)) < took:
        yield f"    a copy takes {took:.3f} s, and saves come every {between:.3f} s: a larger `every` of {event.tier}, "
        yield "    `codec: auto`, or `on_lag: skip`, which leaves versions out"
