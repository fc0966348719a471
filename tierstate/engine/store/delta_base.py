"""Decoding of delta chunks, which are stored as the XOR with a base chunk; the base is read and verified first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from tierstate.engine.codecs.codecs import BLOSC, decompress
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.errors import Damaged, NotFound
from tierstate.manifest.format.layout import DELTA, ChunkPlace, DeltaBase
from tierstate.tiers.base import read_range

from .run_in_tier import TierRun

Digest: TypeAlias = Callable[[Buffer], bytes]


SLACK = 64
"""A stored base may be at most this many bytes longer than its raw bytes; a layout that claims more is not believed."""


class WrongBase(Damaged):
    """The base of a delta is missing or damaged."""


def xor(data: Buffer, other: Buffer) -> Buffer:
    """XOR ``other``, of the same length, into ``data`` in place, and return ``data``. Twice gives the data back.

    NumPy releases the GIL meanwhile.
    """
    array = data.numpy()
    np.bitwise_xor(array, other.numpy(), out=array)
    return data


def undo_delta(tier_run: TierRun, base: DeltaBase | None, stored: Buffer, nbytes: int, digest: Digest) -> Buffer:
    """Decode a delta to its raw bytes. The base is verified; the result is not yet.

    Raises:
        WrongBase: the base is missing or damaged, and was not repaired.
        Damaged: the stored bytes cannot be this delta.
        TierError: the tier could not be read.
    """
    if base is None:
        raise Damaged(f"{tier_run.name}: a delta without a base")
    known = read_base(tier_run, base, nbytes, digest)
    return xor(known, decompress(BLOSC, stored, nbytes))


def read_base(tier_run: TierRun, base: DeltaBase, nbytes: int, digest: Digest) -> Buffer:
    """The verified raw bytes of a base, in a new buffer; if it is damaged, its repaired copy is read.

    Raises:
        WrongBase: it is missing or damaged, and was not repaired.
        TierError: the tier could not be read.
    """
    try:
        return read_chunk(tier_run, ChunkPlace(*base[:4]), nbytes, base.digest, digest)
    except (Damaged, NotFound) as error:
        tier_run.distrust(base.object)
        mended = tier_run.mended(base.digest)
        if mended is None:
            raise WrongBase(f"{base.object} at byte {base.offset}, which a delta is made against: {error}") from error
    return read_chunk(tier_run, mended, nbytes, base.digest, digest)


def read_chunk(tier_run: TierRun, place: ChunkPlace, nbytes: int, name: bytes, digest: Digest) -> Buffer:
    """The raw bytes of a chunk, verified against its digest, in a new buffer.

    Raises:
        Damaged: they do not match the digest.
        TierError: the tier could not be read.
    """
    if place.stored > nbytes + SLACK:
        raise Damaged(f"{place.stored} bytes stored for {nbytes}")
    out = read_range(tier_run.tier, place.object, place.offset, place.stored)
    delta = place.codec == DELTA
    raw = undo_delta(tier_run, place.base, out, nbytes, digest) if delta else decompress(place.codec, out, nbytes)
    if digest(raw) != name:
        raise Damaged("the chunk's digest is not the one it was saved under")
    return raw
