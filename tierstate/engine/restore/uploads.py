"""Restore to devices from what tiers keep in memory: without slabs, and verified by the devices.

A `gpu` tier's chunks are copied within the device (`restore_on_device`). Those of a `host` tier cross the bus from
where they lie: the host reads no byte of them, and the device digests what has arrived, in a hundredth of a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from tierstate.engine.packs.slab_layout import BIG
from tierstate.engine.store.catalog import Holding, VersionCopies
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.digest import DEFAULT_DIGEST
from tierstate.manifest.format.layout import RAW, stored_as
from tierstate.providers.tensors.devices import upload_stream
from tierstate.tiers.base import Tier, layers
from tierstate.tiers.memory.cudart import relaxed_capture
from tierstate.tiers.memory.host import Host, InMemoryObject
from tierstate.tiers.memory.kernels import Kernels, fits_kernel, spare_kernels, xxh3_digests
from tierstate.tiers.trace import span
from tierstate.tiers.wrappers.measure import Measured
from tierstate.tiers.wrappers.retry import Retried
from tierstate.tiers.wrappers.seal import Sealed

from .gpu import restore_on_device
from .scatter import ScatterTargets

log = logging.getLogger("tierstate")


class _Upload(NamedTuple):
    """A chunk that crosses the bus by itself: its row, its bytes in a tier, and its destination."""

    row: int
    stored: Buffer
    there: Buffer


def restore_from_memory(entry: VersionCopies, rows: Array, targets: ScatterTargets) -> Array:
    """Copy chunks from `gpu` and `host` tiers to tensors of devices, and verify them there.

    An error of a device or of a tier is logged, and not raised: a slower way may work.

    Args:
        entry: the version.
        rows: the wanted rows.
        targets: their destinations. Those of chunks that are found damaged have any content.

    Returns:
        the remaining rows, which must be read by way of slabs: also damaged chunks.
    """
    rows = restore_on_device(entry, rows, targets)
    if entry.version.head.digest != DEFAULT_DIGEST:  # devices compute no other
        return rows
    for holding in entry.holdings:
        tier = host_in(holding.tier_run.tier)
        if tier is not None and len(rows):
            rows = np.setdiff1d(rows, _from_host(entry, holding, tier, rows, targets))
    return rows


def host_in(tier: Tier) -> Host | None:
    """The host tier that this tier is, or wraps, if chunks that are taken from there are what a read gives: they are
    not encrypted, and there is no limit to the rate."""
    *around, inner = layers(tier)
    plain = all(isinstance(layer, (Measured, Retried, Sealed)) for layer in around)
    return inner if plain and isinstance(inner, Host) else None


def _from_host(entry: VersionCopies, holding: Holding, tier: Host, rows: Array, targets: ScatterTargets) -> Array:
    """Copy and verify what of these rows a tier keeps in memory. Returns the rows that are in their destinations."""
    layout, done = holding.layout, np.zeros(0, "i8")
    here = rows[targets.there[rows] & layout.present[rows] & (entry.version.chunk_nbytes[rows] >= BIG)]
    here = here[stored_as(RAW, layout.codecs)[layout.codec[here]]]
    if not len(here):
        return here
    try:
        with relaxed_capture(), ExitStack() as held:
            keys = {number: layout.objects[number] for number in np.unique(layout.object[here]).tolist()}
            objects = {number: held.enter_context(tier.reading(key)) for number, key in keys.items()}
            uploads: dict[torch.device, list[_Upload]] = {}
            for one in _plan(holding, objects, here, targets):
                uploads.setdefault(one.there.device, []).append(one)
            able = {device: kernels for device in uploads if (kernels := spare_kernels(device)) is not None}
            with (
                _settled(able),
                span("upload", bytes=sum(one.stored.numel() for device in able for one in uploads[device])),
            ):
                for device in able:
                    for row, stored, _ in uploads[device]:
                        targets.give(row, stored)
                digests = {device: _digest(kernels, uploads[device]) for device, kernels in able.items()}
            done = np.concatenate([done, *(_sound(entry, uploads[device], found) for device, found in digests.items())])
    except Exception as error:
        # Any error, also of the device: what is not known to be copied is read through slabs, where errors name the
        # leaf.
        log.warning("%s: the rest is restored through slabs: %s", holding.tier_run.name, error)
    return done


def _plan(
    holding: Holding, objects: dict[int, InMemoryObject], rows: Array, targets: ScatterTargets
) -> Iterator[_Upload]:
    """The chunks that lie in one piece, and whose destination is memory that a kernel can digest."""
    layout = holding.layout
    columns = (rows, layout.object[rows], layout.offset[rows], layout.stored[rows])
    for row, number, offset, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        there, stored = targets.on_device(row), objects[number].whole(offset, nbytes)
        if stored is not None and there.numel() == nbytes and fits_kernel(there):
            yield _Upload(row, stored, there)


def _digest(kernels: Kernels, uploads: Sequence[_Upload]) -> torch.Tensor:
    """Queue the digests of what the copies to one device bring, behind them; `xxh3_digests` says of which form."""
    with torch.cuda.stream(upload_stream(uploads[0].there.device)):
        return xxh3_digests(kernels, [one.there for one in uploads])


@contextmanager
def _settled(devices: Iterable[torch.device]) -> Iterator[None]:
    """Wait at the end, also after an error, until these devices have done what was queued: nothing is read or written
    any more."""
    try:
        yield
    finally:
        with ExitStack() as stack:
            for device in devices:
                stack.callback(upload_stream(device).synchronize)


def _sound(entry: VersionCopies, uploads: Sequence[_Upload], digests: torch.Tensor) -> Array:
    """The rows whose digests are right."""
    rows = np.array([one.row for one in uploads], "i8")
    right = (digests.numpy().view("<u8") == entry.version.digests[rows]).all(axis=1)
    sound: Array = rows[right]
    return sound
