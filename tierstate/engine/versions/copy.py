"""Copy a version to a tier that does not have it, outside of a save and its cascade."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from tierstate.engine.placement import Route, Routes
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.publish.tier_write import tier_write_of
from tierstate.engine.restore.fetch import Fetch
from tierstate.engine.store.catalog import VersionCopies, VersionMoved, lease_newest
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.manifest.errors import NotFound
from tierstate.manifest.format.record import Record
from tierstate.manifest.format.version import copy_stages
from tierstate.manifest.history.log import RACE_RETRIES
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy


def copy_version(
    entry: VersionCopies, tier_run: TierRun, policy: Policy, arena: Arena, progress: Progress = no_progress
) -> Record:
    """Copy a version to a tier from the tiers that have it; the policy chooses the leaves and codecs.

    Args:
        tier_run: the run in the target tier. Not one that a saver of this process uses (`TierRun.apart`).
        progress: called with the raw bytes read since the last call.

    Raises:
        NotFound: no rule sends a leaf to that tier.
        WrongTier: that tier is not the expected one; nothing was written.
        AlreadyExists: the tier has this version or another one of that number by now.
        Damaged: a chunk is damaged in every tier that has the version.
    """
    version = entry.version
    route = Routes(policy).of(version.leaves)[tier_run.name]
    if not route.leaves.any():
        raise NotFound(f"no rule of the policy sends a leaf of step {version.head.step} to {tier_run.name}")
    tier_run.identity.ensure(create=False)
    with _based(tier_run):
        return _publish(entry, tier_run, route, arena, progress)


@contextmanager
def _based(tier_run: TierRun) -> Iterator[None]:
    with ExitStack() as held:
        for left in reversed(range(RACE_RETRIES)):
            try:
                held.enter_context(lease_newest(tier_run))
                break
            except VersionMoved:
                tier_run.look_again()
                if not left:
                    raise
        yield


def _publish(entry: VersionCopies, tier_run: TierRun, route: Route, arena: Arena, progress: Progress) -> Record:
    version, stages = entry.version, partial(copy_stages, entry.version)
    write = tier_write_of(tier_run, version.head, version.leaves, version.chunk_leaf, route, stages)
    try:
        write.copy(version, Fetch(version, entry.holdings, arena, progress=progress))
        return write.commit(version)
    except BaseException as error:
        write.abort(error)
        raise
