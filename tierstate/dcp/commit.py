"""The commit of a DCP save: the coordinator merges the parts of all ranks into one version, and creates its record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tierstate.engine.packs.keys import seq_prefix
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import NotFound, StateMismatch, TierError, TierstateError
from tierstate.manifest.format.leaf import Path
from tierstate.manifest.format.marker import check_same_tier
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import Head, Version
from tierstate.manifest.sharded.merge import join_layouts, merge_parts
from tierstate.manifest.sharded.part import PartReader

from .engine import DcpEngine, PartTierRun
from .leaves import in_state_order, plan_lists
from .write import RankPart, TierPart, write_part

log = logging.getLogger("tierstate")


class _Given(NamedTuple):
    """One rank's part in a tier: the id of the commit whose packs it may reuse, and the part as a decoded record."""

    base: str
    record: Record


class MergedParts(NamedTuple):
    """The merged version, and by rank the version's row of each chunk of its part (-1: another rank's copy is used)."""

    version: Version
    rows: tuple[Array, ...]


def commit_parts(
    engine: DcpEngine, ranks: Sequence[RankPart], reference: Sequence[Path], metadata: Mapping[str, Any]
) -> Version:
    """Create the version's record in each tier that has the parts of all ranks; called on the coordinator.

    Args:
        engine: the run in its tiers.
        ranks: by rank, its part.
        reference: the paths of the state's leaves, in the state's order.
        metadata: the user's metadata.

    Returns:
        The version.

    Raises:
        StateMismatch: the parts are not of one version, or do not cover the state.
        TierstateError: the record could not be created in the durable tier, so nothing is saved. Errors of other
            tiers are only logged.
    """
    durable = engine.policy.durable
    reader = PartReader()  # one reader for all parts, which are much alike
    parts = [_read(rank.shares, reader) for rank in ranks]
    names = [tier.name for tier in engine.policy.tiers if all(tier.name in there for there in parts)]
    parts += _lists(engine, names, ranks, [there[durable].record.version for there in parts], reader)
    names = [name for name in names if name in parts[-1]]
    records = [there[durable].record for there in parts]
    whole = _whole(engine, records, len(ranks), reference, metadata)
    # The durable tier first: a version that is not in it must be in no tier.
    for name in sorted(names, key=lambda name: name != durable):
        tier_run = engine.tier_run(name)
        try:
            _create(tier_run, whole, [there[name] for there in parts])
        except TierstateError as error:
            if name == durable:
                raise
            log.error("step %d was not saved to %s: %s", whole.version.head.step, name, error)
            continue
        _retire(tier_run)
    return whole.version


def _read(shares: Sequence[TierPart], reader: PartReader) -> dict[str, _Given]:
    return {share.tier: _Given(share.base, reader.decode(share.record)) for share in shares}


def _lists(
    engine: DcpEngine, names: Sequence[str], ranks: Sequence[RankPart], versions: Sequence[Version], reader: PartReader
) -> list[dict[str, _Given]]:
    """Write the list values of all ranks as one more part, if there are any.

    Returns:
        That part by tier; a tier that failed is missing. Empty if there are no such values.
    """
    listed = {path: value for rank in ranks for path, value in rank.listed.items()}
    if not listed:
        return []
    leaves = {id(version.catalog): version.leaves for version in versions}
    others = (leaf.path for those in leaves.values() for leaf in those if leaf.spec.has_bytes)
    tier_runs = [engine.tier_run(name) for name in names]
    return [_read(write_part(engine, plan_lists(listed, others), versions[0].head, 0, tier_runs), reader)]


def _whole(
    engine: DcpEngine, parts: Sequence[Record], world: int, reference: Sequence[Path], metadata: Mapping[str, Any]
) -> MergedParts:
    heads = [part.version.head for part in parts]
    steps = sorted({head.step for head in heads})
    if len(steps) > 1:
        raise StateMismatch(
            f"ranks save different steps: {', '.join(map(str, steps))}; give all the same checkpoint_id"
        )
    newest = engine.tier_run(engine.policy.durable).newest()
    head = dataclasses.replace(
        heads[0],
        seq=max(head.seq for head in heads),
        parent=newest.version.id if newest else "",
        metadata=metadata,
    )
    owners = [*range(world), 0]  # the coordinator may have written a second part, with the list values
    merged = merge_parts(
        [_with_head(part.version, head) for part in parts], parent=head.parent, ranks=owners[: len(parts)]
    )
    version, moved = in_state_order(_with_head(merged.version, dataclasses.replace(head, world=world)), reference)
    rows = tuple(_after(there, moved) for there in merged.rows)
    return MergedParts(version, rows)


def _after(rows: Array, moved: Array) -> Array:
    found = rows.copy()
    found[rows >= 0] = moved[rows[rows >= 0]]
    return found


def _with_head(version: Version, head: Head) -> Version:
    return version.again(head, version.digests)


def _create(tier_run: PartTierRun, whole: MergedParts, parts: Sequence[_Given]) -> None:
    if {part.base for part in parts} != {tier_run.base}:
        raise NotFound(
            f"{tier_run.name}: another process saved run {tier_run.run!r} meanwhile, so that ranks build on different "
            "versions; save again",
            tier=tier_run.name,
        )
    rows = zip(whole.rows, parts, strict=True)
    layout = join_layouts(whole.version, [(there, part.record.layout) for there, part in rows])
    if tier_run.tier.traits.shared != "site":
        for rank, part in enumerate(parts):
            _check_seen(tier_run, rank, part.record)
    signature = tier_run.signature()
    for rank, part in enumerate(parts):
        check_same_tier(tier_run.name, signature, part.record.commit, rank)
    tier_run.publish(Record(whole.version, layout, signature))


def _check_seen(tier_run: PartTierRun, rank: int, part: Record) -> None:
    """Check that the coordinator sees the packs that a rank has written: both must use the same directory or bucket."""
    own = seq_prefix(tier_run.run, part.version.head.seq)
    for key, size in zip(part.layout.objects, part.layout.object_sizes.tolist(), strict=True):
        if not key.startswith(own):
            continue  # a reused pack of the base version, the same for all ranks
        try:
            found = tier_run.tier.size(key)
        except NotFound:
            found = -1
        if found != size:
            raise TierError(
                f"{tier_run.name}: {key}, which rank {rank} wrote on {part.commit.get('host')}, is not seen by the "
                "coordinator; through DCP all ranks must write to a place that all of them see",
                tier=tier_run.name,
                key=key,
            )


def _retire(tier_run: PartTierRun) -> None:
    try:
        tier_run.retire()
    except TierstateError as error:
        log.warning("%s: old versions could not be dropped, which is tried again: %s", tier_run.name, error)
