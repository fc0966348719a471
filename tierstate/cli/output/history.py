"""The output about the history of a run: events, statistics of leaves and layers, a bisection; as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tierstate.engine.events import Event
from tierstate.engine.versions.bisect import Bisection
from tierstate.engine.versions.leaf_history import LayerHistory, VersionHistory
from tierstate.tiers.units import rough_size

from .lines import print_json, say, table, when

_LAYERS_SHOWN = 3


def show_bisection(found: Bisection, as_json: bool) -> None:
    """What a bisection has found."""
    if as_json:
        looks = [{"step": look.version.step, "id": look.version.id, "holds": look.holds} for look in found.looks]
        ends = {name: v and {"step": v.step, "seq": v.seq, "id": v.id, "time": v.time}
                for name, v in (("first", found.first), ("before", found.before))}  # fmt: skip
        print_json({**ends, "looks": looks})
    elif found.first is None:
        say("it does not hold for the newest version")
    else:
        before = f"; not yet at step {found.before.step}" if found.before is not None else ", the oldest version"
        say(f"first at step {found.first.step} (version {found.first.id[:12]}, {when(found.first.time)}){before}")


def show_leaf_history(
    versions: Sequence[VersionHistory], drifts: Mapping[tuple[int, str], float] | None, as_json: bool
) -> None:
    """Statistics of leaves over versions; ``drifts``: by number and path, where they were asked for."""
    rows = [_leaf_row(version, name, drifts) for version in versions for name in _names_of(version)]
    if as_json:
        print_json(rows)
        return
    columns = ["step", "leaf", ">NaN", ">infinite", ">min", ">max", ">rms", ">norm", ">changed"]
    keys = ["step", "leaf", "nan", "infinite", "min", "max", "rms", "norm", "changed"]
    if drifts is not None:
        columns, keys = [*columns, ">drift"], [*keys, "drift"]
    table(columns, [[_number(row[key], share=key in ("changed", "drift")) for key in keys] for row in rows])


def _names_of(version: VersionHistory) -> Sequence[str]:
    return list(dict.fromkeys((*version.statistics, *version.changed)))


def _leaf_row(
    version: VersionHistory, name: str, drifts: Mapping[tuple[int, str], float] | None
) -> Mapping[str, object]:
    known = version.statistics.get(name)
    row: dict[str, object] = {"seq": version.seq, "step": version.step, "id": version.id, "leaf": name}
    for key in ("count", "nan", "infinite", "min", "max", "rms", "norm"):
        row[key] = getattr(known, key, None)
    row["changed"] = version.changed.get(name)
    return row if drifts is None else row | {"drift": drifts.get((version.seq, name))}


def _number(value: object, *, share: bool = False) -> object:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{100 * value:.3g}%" if share else f"{value:.5g}"
    return value


def show_layer_history(layers: LayerHistory, as_json: bool) -> None:
    """How a model has changed from version to version: a line each, with the layers that are not
    finite, or else the one whose norm has changed most."""
    rows = list(_layer_rows(layers))
    if as_json:
        print_json(rows)
        return
    keys = ["step", "changed", "nonfinite", "norm", "norm_change", "layer"]
    shares = {"changed", "norm_change"}
    columns = [">step", ">changed", ">not finite", ">norm", ">norm changed", "layer"]
    table(columns, [[_number(row[key], share=key in shares) for key in keys] for row in rows])


def _layer_rows(layers: LayerHistory) -> Iterator[Mapping[str, object]]:
    changes = layers.norm_change
    for at, (seq, step) in enumerate(zip(layers.seqs, layers.steps, strict=True)):
        nonfinite, norm, changed = layers.nonfinite[:, at], layers.norm[:, at], layers.changed[:, at]
        nbytes = layers.nbytes[:, at] * (changed == changed)
        known, moved = nonfinite >= 0, changes[:, at] == changes[:, at]
        most = int(np.nanargmax(changes[:, at])) if moved.any() else None
        bad = [layers.layers[i] for i in np.flatnonzero(nonfinite > 0).tolist()]
        yield {
            "seq": seq,
            "step": step,
            "changed": float(np.nansum(changed * nbytes) / nbytes.sum()) if nbytes.any() else None,
            "nonfinite": int(nonfinite[known].sum()) if known.any() else None,
            "norm": float(np.sqrt(np.nansum(norm**2))) if known.any() else None,
            "norm_change": None if most is None else float(changes[most, at]),
            "layer": _some(bad) if bad else "-" if most is None else layers.layers[most],
        }


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LAYERS_SHOWN
    return ", ".join(names[:_LAYERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def show_events(events: Sequence[Event], as_json: bool, *, any_kind: bool) -> None:
    """Events of a run, oldest first.

    Args:
        any_kind: there are none of another kind beside them.
    """
    if as_json:
        print_json([event.encode() for event in events])
        return
    table(["time", "event", ">step", "tier", ">seconds", ">bytes", "reason"], [_event_row(event) for event in events])
    if not events:
        logs = "no events are logged; 'metrics: {events: true}' in the policy logs them"
        say(logs if any_kind else "events are logged, and none of such a kind")


def _event_row(event: Event) -> tuple[object, ...]:
    seconds = "" if event.seconds is None else f"{event.seconds:.3f}"
    size = "" if event.nbytes is None else rough_size(event.nbytes)
    step = "" if event.step is None else event.step
    return when(event.time), event.kind, step, event.tier, seconds, size, event.reason
