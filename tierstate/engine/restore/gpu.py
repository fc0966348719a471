"""Restore within a device: copy chunks from a `gpu` tier into tensors of the same device, without the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch

from tierstate.engine.store.catalog import Holding, VersionCopies
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer, Event
from tierstate.manifest.format.layout import RAW, stored_as
from tierstate.manifest.format.version import Version
from tierstate.providers.tensors.tensors import TensorProvider
from tierstate.tiers.memory.block_sums import unchanged_runs
from tierstate.tiers.memory.gpu import Gpu

from .scatter import Destination, ScatterTargets

log = logging.getLogger("tierstate")


def restore_on_device(entry: VersionCopies, rows: Array, targets: ScatterTargets) -> Array:
    """Copy chunks from `gpu` tiers to tensors of the same device. Checks each chunk's checksums before it is copied.

    An error of a device or of a tier is logged, and not raised: a slower tier may have the bytes.

    Args:
        entry: the version.
        rows: the wanted rows.
        targets: their destinations.

    Returns:
        the remaining rows, which must be read by way of the host: also chunks that have changed, and all those of which
        it is not certain, after a failure, that they were copied.
    """
    for holding in entry.holdings:
        tier = holding.tier_run.gpu
        if tier is not None:
            rows = np.setdiff1d(rows, _from_device(entry.version, holding, tier, rows, targets))
    return rows


def _near(targets: ScatterTargets, device: torch.device) -> Array:
    """Indices of the destinations that accept bytes in the memory of this device."""
    return np.array([i for i, to in enumerate(targets.destinations) if _device(to) == device], "i8")


def _device(to: Destination) -> torch.device | None:
    if to.memory is not None:
        return to.memory.device
    # A provider with its own `load` may rely on host memory.
    if isinstance(to.taker, TensorProvider) and type(to.taker).load is TensorProvider.load:
        return to.taker.value.device
    return None


def _take(to: Destination, start: int, data: Buffer) -> Event | None:
    """Copy bytes to a destination. Returns the event to wait for before the bytes may change, or None."""
    if to.memory is None:
        return to.taker.load(start, data)
    to.memory[start : start + data.numel()].copy_(data)
    return None


def _from_device(version: Version, holding: Holding, tier: Gpu, rows: Array, targets: ScatterTargets) -> Array:
    layout, done = holding.layout, np.zeros(0, "i8")
    try:
        near = np.isin(targets.only[rows], _near(targets, tier.line.device))
        here = rows[near & layout.present[rows]]
        here = here[stored_as(RAW, layout.codecs)[layout.codec[here]]]
        for number in np.unique(layout.object[here]).tolist():
            mine = here[layout.object[here] == number]
            done = np.concatenate([done, _from_object(version, holding, tier, mine, targets)])
    except Exception as error:
        # Any error, also of the device: what is not known to be copied is read by way of the host, where errors name
        # the leaf.
        log.warning("%s: the rest is restored by way of the host: %s", holding.tier_run.name, error)
    return done


def _from_object(version: Version, holding: Holding, tier: Gpu, rows: Array, targets: ScatterTargets) -> Array:
    """Copy the unchanged ones of these rows, all of one object. Returns the copied rows.

    After an error any of the destinations may have been overwritten in part.
    """
    layout = holding.layout
    key = layout.objects[int(layout.object[rows[0]])]
    with tier.lent(key) as found:
        if found is None:
            return rows[:0]
        lent, now = found
        whole = unchanged_runs(lent.sums, now, layout.offset[rows].astype("i8"), layout.stored[rows].astype("i8"))
        if not whole.all():
            text = "%s: %s: %d chunks are not what was copied there; they are read by way of the host"
            log.warning(text, holding.tier_run.name, key, int((~whole).sum()))
        events: list[Event] = []
        try:
            for to, start, offset, nbytes in _runs(version, targets, layout.offset.astype("i8"), rows[whole]):
                event = _take(targets.destinations[to], start, lent.memory[offset : offset + nbytes])
                events += [event] if event is not None else []
        finally:
            # The object may be deleted after the `with` block: wait for the copies first.
            _wait(events)
    return rows[whole]


def _wait(events: list[Event]) -> None:
    """Wait for all these events, also if one of them fails."""
    with ExitStack() as stack:
        for event in events:
            stack.callback(event.synchronize)


def _runs(version: Version, targets: ScatterTargets, offset: Array, rows: Array) -> Iterator[tuple[int, int, int, int]]:
    """Merge chunks that are contiguous in the object and in their destination.

    Yields index of the destination, byte offset in it, byte offset in the object, and length.
    """
    to, start, nbytes = targets.only[rows], targets.start[rows], version.chunk_nbytes[rows].astype("i8")
    at = offset[rows]
    joins = (np.diff(to) == 0) & (start[1:] == start[:-1] + nbytes[:-1]) & (at[1:] == at[:-1] + nbytes[:-1])
    for run in np.split(np.arange(len(rows)), np.flatnonzero(~joins) + 1):
        if len(run):
            yield int(to[run[0]]), int(start[run[0]]), int(at[run[0]]), int(nbytes[run].sum())
