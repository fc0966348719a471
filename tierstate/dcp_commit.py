"""The commit of a save through DCP: the coordinator joins the parts of all ranks, and creates the record."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tierstate.manifest.errors import NotFound, StateMismatch, TierError, TierstateError
from tierstate.manifest.head import Head
from tierstate.manifest.index import Array
from tierstate.manifest.join import join
from tierstate.manifest.leaf import Path
from tierstate.manifest.log import commit_id
from tierstate.manifest.merge import merge
from tierstate.manifest.part import PartReader
from tierstate.manifest.record import Record
from tierstate.manifest.version import Version

from .dcp_engine import Engine, PartShelf
from .dcp_lists import whole_lists
from .dcp_order import arranged
from .dcp_writing import Part, Share, write

log = logging.getLogger("tierstate")


class _Given(NamedTuple):
    """What one rank has put into a tier, and the commit that it builds on."""

    base: str
    record: Record


class Whole(NamedTuple):
    """A whole version, and per rank the row in it of each chunk of its part (-1: another's copy was kept)."""

    version: Version
    rows: tuple[Array, ...]


def commit(engine: Engine, ranks: Sequence[Part], reference: Sequence[Path], metadata: Mapping[str, Any]) -> Version:
    """Create the version's record in each tier into which all ranks have put their parts.

    Args:
        ranks: what each rank has put where, by rank.
        reference: the paths of the state, in its order.
        metadata: the user's.

    Returns:
        The version.

    Raises:
        StateMismatch: the parts do not belong together, or are not the whole.
        TierstateError: the durable tier did not take the record; nothing counts as saved. Where another one fails,
            that is logged.
    """
    durable = engine.policy.durable
    reader = PartReader()  # of many ranks' parts, which are much alike
    parts = [_read(rank.shares, reader) for rank in ranks]
    names = [tier.name for tier in engine.policy.tiers if all(tier.name in there for there in parts)]
    parts += _lists(engine, names, ranks, [there[durable].record.version for there in parts], reader)
    names = [name for name in names if name in parts[-1]]
    records = [there[durable].record for there in parts]
    whole = _whole(engine, records, len(ranks), reference, metadata)
    # The durable one first: a version that is not there is nowhere.
    for name in sorted(names, key=lambda name: name != durable):
        shelf = engine.shelf(name)
        try:
            _create(shelf, whole, [there[name] for there in parts])
        except TierstateError as error:
            if name == durable:
                raise
            log.error("step %d was not saved to %s: %s", whole.version.head.step, name, error)
            continue
        _retire(shelf)
    return whole.version


def _read(shares: Sequence[Share], reader: PartReader) -> dict[str, _Given]:
    return {share.tier: _Given(share.base, reader.decode(share.record)) for share in shares}


def _lists(
    engine: Engine, names: Sequence[str], ranks: Sequence[Part], versions: Sequence[Version], reader: PartReader
) -> list[dict[str, _Given]]:
    """Write the values in lists, of all ranks, as one more part, if there are any. A tier may not take it."""
    listed = {path: value for rank in ranks for path, value in rank.listed.items()}
    if not listed:
        return []
    leaves = {id(version.catalog): version.leaves for version in versions}
    others = (leaf.path for those in leaves.values() for leaf in those if leaf.spec.has_bytes)
    shelves = [engine.shelf(name) for name in names]
    return [_read(write(engine, whole_lists(listed, others), versions[0].head, 0, shelves), reader)]


def _whole(
    engine: Engine, parts: Sequence[Record], world: int, reference: Sequence[Path], metadata: Mapping[str, Any]
) -> Whole:
    heads = [part.version.head for part in parts]
    steps = sorted({head.step for head in heads})
    if len(steps) > 1:
        raise StateMismatch(
            f"ranks save different steps: {', '.join(map(str, steps))}; give all the same checkpoint_id"
        )
    newest = engine.shelf(engine.policy.durable).newest()
    head = dataclasses.replace(
        heads[0],
        seq=max(head.seq for head in heads),
        parent=newest.version.id if newest else "",
        metadata=metadata,
    )
    owners = [*range(world), 0]  # the coordinator may have given a second one, of the values in lists
    merged = merge([_with_head(part.version, head) for part in parts], parent=head.parent, ranks=owners[: len(parts)])
    version, moved = arranged(_with_head(merged.version, dataclasses.replace(head, world=world)), reference)
    rows = tuple(_after(there, moved) for there in merged.rows)
    return Whole(version, rows)


def _after(rows: Array, moved: Array) -> Array:
    found = rows.copy()
    found[rows >= 0] = moved[rows[rows >= 0]]
    return found


def _with_head(version: Version, head: Head) -> Version:
    return version.again(head, version.digests)


def _create(shelf: PartShelf, whole: Whole, parts: Sequence[_Given]) -> None:
    if {part.base for part in parts} != {shelf.base}:
        raise NotFound(
            f"{shelf.name}: another process saved run {shelf.run!r} meanwhile, so that ranks build on different "
            "versions; save again",
            tier=shelf.name,
        )
    rows = zip(whole.rows, parts, strict=True)
    layout = join(whole.version, [(there, part.record.layout) for there, part in rows])
    if shelf.tier.traits.shared != "site":
        for rank, part in enumerate(parts):
            _check_seen(shelf, rank, part.record)
    said = {"id": commit_id(), "tier": shelf.name, "host": socket.gethostname(), "pid": os.getpid()}
    shelf.publish(Record(whole.version, layout, said))


def _check_seen(shelf: PartShelf, rank: int, part: Record) -> None:
    """The packs that a rank has written are seen from here: it writes to the same place."""
    own = f"packs/{shelf.run}/{part.version.head.seq:012d}-"
    for key, size in zip(part.layout.objects, part.layout.object_sizes.tolist(), strict=True):
        if not key.startswith(own):
            continue  # it is what all ranks build on
        try:
            found = shelf.tier.size(key)
        except NotFound:
            found = -1
        if found != size:
            raise TierError(
                f"{shelf.name}: {key}, which rank {rank} wrote on {part.commit.get('host')}, is not seen by the "
                "coordinator; through DCP all ranks must write to a place that all of them see",
                tier=shelf.name,
                key=key,
            )


def _retire(shelf: PartShelf) -> None:
    try:
        shelf.retire()
    except TierstateError as error:
        log.warning("%s: old versions could not be dropped, which is tried again: %s", shelf.name, error)
