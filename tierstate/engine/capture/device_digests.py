"""Digests of chunks that lie in a device's memory, computed there: while the chunks cross the bus, or before.

The host reads what has arrived from memory again to digest it, at 5 to 10 GB/s for each core, while a bus of PCIe 5
brings 55 GB/s (docs/benchmarks-gpu.md); a device digests its chunks side by side, in a hundredth of a second. What a
digest is of is the memory before it crossed the bus, so that an error on the way is found when the chunk is read.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch

from tierstate.engine.packs.slab_layout import BIG
from tierstate.manifest.arrays import Array
from tierstate.manifest.chunk import DeviceChunk
from tierstate.manifest.digest import DEFAULT_DIGEST, DigestFunction, digest_function
from tierstate.tiers.memory.cuda import CopyStream
from tierstate.tiers.memory.cudart import relaxed_capture
from tierstate.tiers.memory.kernels import fits_kernel, spare_kernels, xxh3_digests
from tierstate.tiers.trace import span

from .plan import HOST, CapturePlan
from .streamed import checked_chunks, wait_for_all

log = logging.getLogger("tierstate")


Streams = dict[torch.device, CopyStream]
"""Where each device computes digests: beside its copies."""


SIDE_BY_SIDE = 4
"""How many times the longest chunk there must be, for a device to digest them sooner than threads of the host: one
chunk takes it as long as many."""


class _Batch(NamedTuple):
    """The chunks of one device.

    Attributes:
        stream: where they are digested.
        digests: ``(n, 2)`` of int64 in pinned host memory: filled once all work that is queued on the stream is done.
    """

    stream: CopyStream
    digests: torch.Tensor


class DeviceDigests:
    """Digests that devices compute; empty where they cannot. Made by `queue`, with copies on side streams beside it.

    Attributes:
        nbytes: bytes of the chunks.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._batches: list[_Batch] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._done: list[Array] | None = None

    @classmethod
    def queue(
        cls, plan: CapturePlan, sources: Array, first: Array, size: int, digest: DigestFunction, streams: Streams
    ) -> DeviceDigests:
        """Begin to digest the chunks of these sources that lie in devices' memory, if they are of `BIG` bytes or more,
        and enough (`SIDE_BY_SIDE`).

        Called by the thread that copies from the devices, after its side streams wait for the state. What is queued
        here waits for the same, and for nothing that is queued there later.

        Args:
            sources: indices of sources of the plan.
            first: ``(sources of the plan,)``: the first row of each source.
            size: chunk length in bytes.
            digest: the digest function; devices compute no other than xxh3-128.
            streams: the streams for this, kept by the caller from save to save.

        Raises:
            CaptureError: a provider failed or broke its contract; the message names the leaf.
        """
        made = cls()
        if digest is not digest_function(DEFAULT_DIGEST):
            return made
        found: dict[torch.device, list[tuple[int, DeviceChunk]]] = {}
        long = sources[(plan.nbytes[sources] >= BIG) & (plan.device[sources] != HOST)]
        for source in long.tolist():
            for i, chunk in enumerate(checked_chunks(plan, source, size)):
                if isinstance(chunk, DeviceChunk) and chunk.nbytes >= BIG and fits_kernel(chunk.data):
                    found.setdefault(chunk.data.device, []).append((int(first[source]) + i, chunk))
        for device, chunks in found.items():
            lengths = [chunk.nbytes for _, chunk in chunks]
            if sum(lengths) < SIDE_BY_SIDE * max(lengths):
                continue
            try:
                made._add(device, chunks, streams)
            except Exception as error:
                # Any error, such as a lack of memory: then the host digests them.
                log.debug("%s computes no digests: %s", device, error)
        return made

    def _add(self, device: torch.device, chunks: list[tuple[int, DeviceChunk]], streams: Streams) -> None:
        kernels = spare_kernels(device)
        if kernels is None:
            return
        if device not in streams:
            streams[device] = CopyStream(device)
        stream = streams[device]
        stream.follow()
        with stream.taken():
            wait_for_all(chunk.after for _, chunk in chunks)
            try:
                digests = xxh3_digests(kernels, [chunk.data for _, chunk in chunks])
            except BaseException:
                stream.settle()  # nothing reads the state or writes here any more
                raise
        self._places.update({row: (len(self._batches), i) for i, (row, _) in enumerate(chunks)})
        self._batches.append(_Batch(stream, digests))
        self.nbytes += sum(chunk.nbytes for _, chunk in chunks)

    def join(self) -> None:
        """Make what is queued later on this thread's current streams of the devices wait until all is digested."""
        for batch in self._batches:
            batch.stream.mark().wait()

    def settle(self) -> None:
        """Wait until no device reads the state any more for this."""
        for batch in self._batches:
            try:
                batch.stream.settle()
            except Exception as error:
                log.debug("a device did not finish digests that nobody waits for: %s", error)

    def wait(self) -> None:
        """Wait for all digests. Raises what torch raises for a device that has failed."""
        if self._done is None:
            with span("wait for digests"), relaxed_capture():
                for batch in self._batches:
                    batch.stream.settle()
            self._done = [batch.digests.numpy().view("<u8") for batch in self._batches]

    def of(self, row: int) -> Array | None:
        """The digest of a chunk, ``(2,)`` of uint64; None if no device computes it. Waits for all digests."""
        place = self._places.get(row)
        if place is None:
            return None
        self.wait()
        assert self._done is not None
        found: Array = self._done[place[0]][place[1]]
        return found

    def rows(self) -> Array:
        """``(n,)``: the rows of the chunks."""
        return np.fromiter(self._places, "i8", len(self._places))
