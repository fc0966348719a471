"""Rollback: what lies in the memory of a device is restored into tensors of that device, without the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from tierstate.manifest.chunk import Buffer, Event
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.index import Array
from tierstate.manifest.layout import RAW
from tierstate.manifest.version import Version
from tierstate.providers.tensors import TensorProvider
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Holding
from tierstate.tiers.gpu import Gpu, gpu_in
from tierstate.tiers.landing import Destination, Landing
from tierstate.tiers.sums import sound

log = logging.getLogger("tierstate")


def roll_back(entry: Entry, rows: Array, landing: Landing) -> Array:
    """Restore what can be restored so, each chunk checked in the device's memory before it is copied.

    Args:
        rows: what is wanted.

    Returns:
        the rows that are left: to be read by way of the host, as what is not sound here is.
    """
    for holding in entry.holdings:
        tier = gpu_in(holding.shelf.tier)
        if tier is not None:
            rows = np.setdiff1d(rows, _from_device(entry.version, holding, tier, rows, landing))
    return rows


def _near(landing: Landing, device: torch.device) -> Array:
    """Destinations that take bytes of this device as they are."""
    return np.array([i for i, to in enumerate(landing.destinations) if _device(to) == device], "i8")


def _device(to: Destination) -> torch.device | None:
    if to.memory is not None:
        return to.memory.device
    # Who has a load of its own was promised host memory.
    if isinstance(to.taker, TensorProvider) and type(to.taker).load is TensorProvider.load:
        return to.taker.value.device
    return None


def _take(to: Destination, start: int, data: Buffer) -> Event | None:
    """Bring bytes to a destination; what to wait for before they may be changed."""
    if to.memory is None:
        return to.taker.load(start, data)
    to.memory[start : start + data.numel()].copy_(data)
    return None


def _from_device(version: Version, holding: Holding, tier: Gpu, rows: Array, landing: Landing) -> Array:
    layout, done = holding.layout, np.zeros(0, "i8")
    try:
        near = np.isin(landing.only[rows], _near(landing, tier.line.device))
        raw = np.array([codec == RAW for codec in layout.codecs], bool)
        here = rows[near & layout.present[rows]]
        here = here[raw[layout.codec[here]]]
        for number in np.unique(layout.object[here]).tolist():
            mine = here[layout.object[here] == number]
            done = np.concatenate([done, _from_object(version, holding, tier, mine, landing)])
    except TierstateError as error:
        log.warning("%s: the rest is restored by way of the host: %s", holding.shelf.name, error)
    return done


def _from_object(version: Version, holding: Holding, tier: Gpu, rows: Array, landing: Landing) -> Array:
    """Copy the rows, all of one object, that are sound; those."""
    layout = holding.layout
    key = layout.objects[int(layout.object[rows[0]])]
    with tier.lent(key) as found:
        if found is None:
            return rows[:0]
        lent, now = found
        whole = sound(lent.sums, now, layout.offset[rows].astype("i8"), layout.stored[rows].astype("i8"))
        if not whole.all():
            text = "%s: %s: %d chunks are not what was copied there; they are read by way of the host"
            log.warning(text, holding.shelf.name, key, int((~whole).sum()))
        events: list[Event] = []
        try:
            for to, start, offset, nbytes in _runs(version, landing, layout.offset.astype("i8"), rows[whole]):
                event = _take(landing.destinations[to], start, lent.memory[offset : offset + nbytes])
                events += [event] if event is not None else []
        finally:
            # The object may be dropped once it is not lent any more.
            for event in events:
                event.synchronize()
    return rows[whole]


def _runs(version: Version, landing: Landing, offset: Array, rows: Array) -> Iterator[tuple[int, int, int, int]]:
    """Destination, start in it, offset in the object and length of chunks that follow each other in both."""
    to, start, nbytes = landing.only[rows], landing.start[rows], version.chunk_nbytes[rows].astype("i8")
    at = offset[rows]
    joins = (np.diff(to) == 0) & (start[1:] == start[:-1] + nbytes[:-1]) & (at[1:] == at[:-1] + nbytes[:-1])
    for run in np.split(np.arange(len(rows)), np.flatnonzero(~joins) + 1):
        if len(run):
            yield int(to[run[0]]), int(start[run[0]]), int(at[run[0]]), int(nbytes[run].sum())
