"""Doctor: what is lost of a run over all of its tiers, what is not, and how to repair it; for ``tierstate doctor``.

`verify` follows records. The doctor also looks at chunks that no record leads to: packs whose record is lost or cannot
be read, packs of other tiers, repaired copies, and what is still legible of a damaged record. So a version counts as
lost only if some chunk of it is undamaged in no pack of any tier.

A repair writes the missing chunks of a version and then a record of it, and deletes nothing but records that this one
replaces. An interruption therefore leaves unused packs and never less than there was; the next run goes on from there.
What only another run has is written again, since that run may drop it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress

from tierstate.engine.packs.pack import related_runs
from tierstate.engine.progress import Progress, no_progress
from tierstate.engine.store.catalog import release_lease
from tierstate.engine.store.identity import learn_newest
from tierstate.engine.store.run_in_tier import TierRun
from tierstate.engine.versions.tags import Tags
from tierstate.manifest.errors import TierstateError
from tierstate.manifest.history.leases import WHOLE_RUN, Leases, pinned_runs
from tierstate.tiers.memory.arena import Arena
from tierstate.tiers.policy.policy import Policy

from .diagnosis import Diagnosis, tag_steps
from .health import DoctorReport
from .tier_view import TierView
from .treatment import Treatment


def doctor(
    tier_runs: Sequence[TierRun],
    policy: Policy,
    arena: Arena,
    *,
    apply: bool = False,
    progress: Progress = no_progress,
) -> DoctorReport:
    """Find out what is lost of a run, and what can be repaired from what; with ``apply`` also repair it.

    Every chunk in every tier is read. A repair is right only while no other process saves, prunes or repairs this run.
    Calling it again, also after it was killed, does what is left to do.

    Args:
        tier_runs: the run in each tier, nearest first.
        policy: its rules say which leaves a tier should have, `every` which versions are due, `keep` which are wanted.
        apply: carry out the repairs; otherwise nothing is changed.
        progress: called with the bytes read since the last call.
    """
    report, views = DoctorReport(apply), []
    related = related_runs(list(_pins(tier_runs)), tier_runs[0].run, forks=True)
    learn_newest([tier_run.identity for tier_run in tier_runs])
    with ExitStack() as held:
        for tier_run in tier_runs:
            try:
                # What is missing in the mount point of a file system that is not mounted is not lost.
                tier_run.identity.ensure(create=False)
            except TierstateError as error:
                report.unreachable[tier_run.name] = str(error)
                continue
            try:
                # A lease on no version: no sweep deletes packs meanwhile.
                if apply and tier_run.tier.traits.persistent:
                    leases = Leases(tier_run.tier, tier_run.run)
                    held.callback(release_lease, leases, leases.take(WHOLE_RUN, "doctor"))
            except TierstateError as error:
                report.notes.append(f"{tier_run.name}: repairs of it cannot be kept from a sweep: {error}")
            try:
                views.append(TierView(tier_run, related))
            except TierstateError as error:
                report.unreachable[tier_run.name] = str(error)
        if apply:
            _level_tags([view.tier_run for view in views if view.lasts], report)
        found = Diagnosis(views, policy, report, progress)
        steps = found.run()
        if apply:
            Treatment(tier_runs, policy, arena, found.search, progress).run(steps, report)
        else:
            report.repairs = [step.repair for step in steps]
    return report


def _level_tags(lasting: Sequence[TierRun], report: DoctorReport) -> None:
    """Repair tags before all else: while one cannot be read, it is not known which versions `keep` wants."""
    steps = tag_steps(Tags(lasting).flaws() if lasting else {})
    with suppress(TierstateError):  # then it is tried again with the other repairs, and told
        if steps:
            Tags(lasting).level()
            report.repairs += [dataclasses.replace(step.repair, done=True) for step in steps]


def _pins(tier_runs: Sequence[TierRun]) -> Iterator[Mapping[str, set[str]]]:
    """The pins of forks in each tier that can be listed; one may have a fork without them, which was saved there."""
    for tier_run in tier_runs:
        try:
            yield pinned_runs(tier_run.tier)
        except TierstateError:
            continue  # it is told where the rest of the tier is read
