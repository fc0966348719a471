"""Restoring by many ranks together: one version for all, and each chunk of it read as seldom as can be."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierstate.providers.target import NEW
from tierstate.tiers.arena import Arena
from tierstate.tiers.catalog import Catalog
from tierstate.tiers.leasing import Moved
from tierstate.tiers.team import Team

from .agreement import Accord, Agreement
from .attempt import Attempt, NotWhole
from .filling import WORKERS
from .finding import RUNS_AFTER, Restored, Wanted, name_of, no_version
from .tagging import Tagged

log = logging.getLogger("tierstate")


def restore_together(
    team: Team, catalog: Catalog, arena: Arena, wanted: Wanted, tag: str | None, resolve: Callable[[str], Tagged | None]
) -> Restored:
    """Restore the newest version that fits the states of all ranks, and of which they reach all that they want.

    All ranks call this together; each gets what its own state wants, or an error.

    Args:
        team: the ranks.
        catalog: what this rank sees of the run.
        wanted: which version, and what this rank wants of it.
        tag: the name of the version.
        resolve: finds the version that has a name.

    Raises:
        ValueError: the ranks ask for different versions.
        RankFailed: something failed on another rank, which is named, or it is dead or late.
        NotFound, StateMismatch, Damaged, Unsafe: as for one rank.
    """
    accord = Accord(team)
    for _ in range(RUNS_AFTER):
        try:
            return _restore(accord, Agreement(accord, catalog, wanted, tag, resolve), arena)
        except Moved as error:
            log.info("%s", error)
    return _restore(accord, Agreement(accord, catalog, wanted, tag, resolve), arena)


def _restore(accord: Accord, agreement: Agreement, arena: Arena) -> Restored:
    wanted, catalog = agreement.wanted, agreement.catalog
    # Beside the talking: the first touch of memory costs more than what is done with it.
    arena.prepare(WORKERS * arena.slab_size)
    agreement.compare_arguments()
    begun = False
    try:
        for entry in agreement.candidates(agreement.look()):
            attempt = Attempt(accord, entry, wanted, arena)
            try:
                return Restored(attempt.restore(), entry)
            except NotWhole as error:
                if wanted.on_damage == "raise" and (error.begun or not agreement.newest):
                    raise error.told(accord.team.rank) from None
                agreement.pass_over(name_of(entry), error)
            finally:
                begun = begun or attempt.begun
        raise no_version(catalog.shelves[0].run, wanted, catalog, agreement.passed)
    except BaseException as error:
        if begun and wanted.into is not NEW:
            error.add_note("the given state may be overwritten in part: do not train on from it")
        raise
