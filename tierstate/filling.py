"""Filling: a version's bytes into the providers of a target, from whatever boxes were saved into theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tierstate.manifest.box import Box
from tierstate.manifest.chunk import Buffer
from tierstate.manifest.covering import check_covered
from tierstate.manifest.errors import FormatError, StateMismatch
from tierstate.manifest.leaf import Leaf
from tierstate.manifest.meeting import Want, meet
from tierstate.manifest.version import Version
from tierstate.providers.base import Provider, memory_of
from tierstate.providers.target import Target
from tierstate.providers.values import ValueProvider
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Entry
from tierstate.tiers.fetch import Fetch
from tierstate.tiers.formatted import whole
from tierstate.tiers.landing import Destination, Landing
from tierstate.tiers.leasing import reading, sources
from tierstate.tiers.mend import Mender

from .rollback import roll_back

WORKERS = max(4, min(8, os.cpu_count() or 1))
"""Reads in flight, each with a slab whose memory has to be faulted in first. Four keep a disk busy."""


def land(version: Version, target: Target) -> Landing:
    """Decide where each chunk of a version goes. Nothing is touched.

    Raises:
        StateMismatch: a provider says it holds what is no part of the saved leaf.
        FormatError: the shards do not cover what is wanted, or what is always whole was cut into shards.
    """
    to = [place for i, provider in target.wanted.items() for place in _places(version.leaves[i], i, provider)]
    landing = Landing(version, to, untouched=target.is_new)
    check_landing(version, landing)
    return landing


def check_landing(version: Version, landing: Landing) -> None:
    """Raises FormatError where a version, which may come from anybody, does not hold all of its destinations in shards
    that their takers can take.
    """
    met, to = landing.meetings, landing.destinations
    for want in np.unique(met.want[~met.same]).tolist():
        if isinstance(to[want].taker, Provider) and type(to[want].taker).scatter is Provider.scatter:
            raise _cut(version, to[want].leaf)
    check_covered(version, [Want(place.leaf, place.box) for place in to], met)


def check_whole(version: Version, leaves: Sequence[int]) -> None:
    """Raises FormatError where shards do not hold each element of these leaves once, or hold a plain value in parts."""
    unbroken = whole(version)
    for leaf in leaves:
        if version.leaves[leaf].spec.kind == ValueProvider.kind and unbroken[leaf] < 0:
            raise _cut(version, leaf)
    wants = [Want(leaf, Box.whole(version.leaves[leaf].spec.shape)) for leaf in leaves]
    check_covered(version, wants, meet(version, wants))


def _cut(version: Version, leaf: int) -> FormatError:
    """The error for what is always whole, and was not."""
    head, found = version.head, version.leaves[leaf]
    return FormatError(
        f"version {head.seq} (step {head.step}) of run {head.run!r} holds {found.name} in shards; "
        f"a {found.spec.kind} lies in one piece"
    )


def fill(entry: Entry, target: Target, landing: Landing, arena: Arena) -> Any:
    """Read what the target wants, verified, into its providers; then complete it."""
    bring(entry, landing, arena)
    return target.finish()


def bring(entry: Entry, landing: Landing, arena: Arena) -> None:
    """Read what a landing wants, verified, to its destinations."""
    version, rows = entry.version, landing.rows
    mender = Mender(version, entry.holdings)
    fetch = Fetch(version, entry.holdings, arena, workers=WORKERS, mended=mender)
    try:
        with reading(sources(entry, rows), int(version.chunk_nbytes[rows].sum(dtype="i8"))):
            fetch.fill(roll_back(entry, rows, landing), landing)
    finally:
        mender.close()


def _places(leaf: Leaf, index: int, provider: Provider) -> Iterator[Destination]:
    """The boxes of a leaf that a provider holds."""
    whole = leaf.spec.shape
    for part in provider.parts:
        # Who says nothing of boxes has the whole of whatever was saved, also where its own value is of another length.
        says = type(part).box is not Provider.box
        box = part.box if says else Box((0,) * len(whole), whole)
        if says and not box.within(whole):
            raise StateMismatch(f"{leaf.name}: {type(part).__qualname__} holds {box}, which is no part of {whole}")
        nbytes = box.volume * leaf.spec.itemsize if says else leaf.spec.nbytes
        yield Destination(index, box, part, _memory(leaf, nbytes, part))


def _memory(leaf: Leaf, nbytes: int, provider: Provider) -> Buffer | None:
    try:
        return memory_of(provider, nbytes)
    except Exception as error:
        raise StateMismatch(f"{leaf.name}: {error}") from error
