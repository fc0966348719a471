"""Deltas: chunks stored as their difference from a base, which is read and verified before they are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from tierstate.manifest.bases import DELTA, Base
from tierstate.manifest.chunk import Buffer, empty_buffer
from tierstate.manifest.errors import Damaged, NotFound
from tierstate.manifest.layout import Place

from .base import Range
from .codecs import BLOSC, decode
from .shelf import Shelf

Digest: TypeAlias = Callable[[Buffer], bytes]

SLACK = 64
"""Bytes by which a stored chunk may be longer than its raw bytes; more is never asked for on a base's word."""


class WrongBase(Damaged):
    """What a delta was made against is missing, or is not what it was."""


def xor(data: Buffer, other: Buffer) -> Buffer:
    """``data``, changed in place to its difference from ``other``, of the same length; applied twice, it is itself.

    NumPy lets go of the interpreter's lock meanwhile.
    """
    array = data.numpy()
    np.bitwise_xor(array, other.numpy(), out=array)
    return data


def undone(shelf: Shelf, base: Base | None, stored: Buffer, nbytes: int, digest: Digest) -> Buffer:
    """The raw bytes of a delta, not yet verified; its base is.

    Raises:
        WrongBase: the base is missing or damaged, and was not mended either.
        Damaged: the stored bytes cannot be this delta.
        TierError: the tier could not be read.
    """
    if base is None:
        raise Damaged(f"{shelf.name}: a delta without a base")
    known = read_base(shelf, base, nbytes, digest)
    return xor(known, decode(BLOSC, stored, nbytes))


def read_base(shelf: Shelf, base: Base, nbytes: int, digest: Digest) -> Buffer:
    """The raw bytes of a base, verified, in memory of their own; from where it was mended if it is damaged.

    Raises:
        WrongBase: it is missing or damaged, and was not mended either.
        TierError: the tier could not be read.
    """
    try:
        return read_chunk(shelf, Place(*base[:4]), nbytes, base.digest, digest)
    except (Damaged, NotFound) as error:
        shelf.distrust(base.object)
        mended = shelf.mended(base.digest)
        if mended is None:
            raise WrongBase(f"{base.object} at byte {base.offset}, which a delta is made against: {error}") from error
    return read_chunk(shelf, mended, nbytes, base.digest, digest)


def read_chunk(shelf: Shelf, place: Place, nbytes: int, name: bytes, digest: Digest) -> Buffer:
    """The raw bytes of a chunk that is known by its digest, verified, in memory of their own.

    Raises:
        Damaged: they are not what they were.
        TierError: the tier could not be read.
    """
    if place.stored > nbytes + SLACK:
        raise Damaged(f"{place.stored} bytes stored for {nbytes}")
    out = empty_buffer(place.stored)
    shelf.tier.read(place.object, [Range(place.offset, out)])
    delta = place.codec == DELTA
    raw = undone(shelf, place.base, out, nbytes, digest) if delta else decode(place.codec, out, nbytes)
    if digest(raw) != name:
        raise Damaged("the chunk's digest is not the one it was saved under")
    return raw
