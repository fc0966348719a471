"""Restore by many ranks together (reshard): one version for all ranks, and each chunk read as few times as possible.

Each rank gathers to all ranks which chunks it wants and which it can read (*reaches*). All compute the same exchange
plan. Each rank then reads its chunks and sends them to the ranks that want them. What a late rank was to send is read
by those who wait for it, if they can, and it then stops reading (`stragglers`). Chunks that did not arrive are planned
again, a few times (`ROUNDS`). Either all ranks get what they want of a version, or none takes
it, and an older version may be tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from tierstate.engine.ranks.team.team import Team
from tierstate.engine.restore.restore import (
    MAX_RESTARTS,
    PASSED_OVER,
    Restored,
    RestorePlan,
    RestoreSpec,
    VersionDropped,
    check_wanted,
    content_of,
    name_version,
    none_found,
    plan_scatter,
    raise_if_dropped,
)
from tierstate.engine.restore.scatter import ScatterTargets
from tierstate.engine.store.catalog import LOOK_FURTHER, RunCatalog, VersionCopies, VersionMoved
from tierstate.manifest.arrays import Array
from tierstate.manifest.errors import (
    Damaged,
    RankFailed,
    StateMismatch,
    TierstateError,
    Unreadable,
    format_ranks,
    untrusted,
)
from tierstate.manifest.history.tags import TaggedVersion
from tierstate.providers.tree.target import Target
from tierstate.providers.tree.unflatten import NEW, plan_restore
from tierstate.tiers.memory.arena import Arena

from .agreement import GroupQuery, VersionAgreement
from .chunk_restore import ChunkRestore
from .exchange import PeerListener
from .exchange_plan import RankRows, plan_exchange, runs_in, sets_with
from .offers import decode_offers, encode_offer

ROUNDS = 4
"""Exchanges of one restore, at most. In later ones other ranks try to read the chunks that one rank could not read."""


_USABLE, _UNUSABLE = b"+", b"-"
"""First byte of an answer: the rank can use what the version holds, or it cannot, and says why."""


log = logging.getLogger("tierstate")


class IncompleteVersion(Exception):
    """Some ranks cannot get all that they want of a version; raised on all ranks.

    Args:
        text: which ranks lack which leaves.
        ranks: those ranks.
        own: the error that this rank met; None if it met none.

    Attributes:
        begun: whether chunks were read before this was known.
        unusable: whether the version has all chunks, and a rank can make no state of them.
    """

    def __init__(
        self, text: str, ranks: Sequence[int], own: TierstateError | None, *, begun: bool, unusable: bool = False
    ) -> None:
        super().__init__(text)
        self.begun, self.unusable, self._ranks, self._own = begun, unusable, ranks, own

    def error_for(self, rank: int) -> TierstateError:
        """The error for the user of one rank."""
        if (self.begun or self.unusable) and rank not in self._ranks:
            return RankFailed(str(self), self._ranks)
        return self._own or Damaged(str(self))


class SharedReads:
    """Reads of all ranks together from one version: first what each wants ahead, then the rest.

    Args:
        query: the all-gather.
        entry: the version, and what this rank has of it.
        wanted: which version is asked for, and what this rank wants of it.
        arena: the memory that bytes pass through.

    Attributes:
        changed: whether the given state may have been changed.
    """

    def __init__(self, query: GroupQuery, entry: VersionCopies, wanted: RestoreSpec, arena: Arena) -> None:
        self._query, self._entry, self._wanted, self._arena = query, entry, wanted, arena
        self._team, self._version = query.team, entry.version
        self._chunks: ChunkRestore | None = None
        self._listener: PeerListener | None = None
        self._begun = False
        self._unusable: TierstateError | None = None
        self.changed = False

    def restore(self) -> Any:
        """What is restored. Raises: as `RestoreAttempt.restore`."""
        raise NotImplementedError

    def _targets(self, *, ahead: bool) -> ScatterTargets:
        """Where the chunks go that this rank wants ahead, or then; called within an all-gather, once for each."""
        raise NotImplementedError

    def _later(self) -> Array:
        """The rows that this rank may want after those that it wants ahead."""
        raise NotImplementedError

    def _elsewhere(self) -> Collection[int]:
        """Leaves of the version that this rank's state does not have."""
        return ()

    def _fetch(self, *, ahead: bool) -> None:
        """Load what all ranks want before, or after, the stateful objects are set."""
        hosts, nbytes = self._team.hosts, self._version.chunk_nbytes
        for number in range(ROUNDS + 1):
            with ExitStack() as opened:
                offers, later, addresses, away = self._ask(opened, ahead=ahead)
                wanted = np.flatnonzero(sets_with([offer.wants for offer in offers], len(nbytes)))
                if ahead and number == 0:
                    # Nothing is begun unless all that is wanted can be had, also what comes later.
                    plan = plan_exchange(later, hosts, nbytes, self._team.rank)
                    if plan.lacking:
                        break
                if not len(wanted):
                    return
                plan = plan_exchange(offers, hosts, nbytes, self._team.rank, apart=number > 0)
                if plan.lacking or number == ROUNDS:
                    break
                self._begun = True
                self.changed = self.changed or not ahead
                assert self._chunks is not None
                assert self._listener is not None
                others = [runs for rank, one in enumerate(offers) if rank != self._team.rank for runs in one.reach]
                elsewhere = sets_with(others, len(nbytes)) > 0
                self._chunks.exchange(plan, wanted, elsewhere, self._listener, addresses)
        lacking = plan.lacking or {rank: _rows(offer.wants) for rank, offer in enumerate(offers) if len(offer.wants)}
        incomplete = self._not_whole(lacking)
        if away[np.concatenate(list(lacking.values()))].all():
            # The version may be whole, and is not passed over: a tier that has these chunks could not be asked.
            raise Unreadable(f"cannot be read now: {incomplete}") from (
                self._chunks.unreadable if self._chunks is not None else None
            )
        raise incomplete

    def _ask(self, opened: ExitStack, *, ahead: bool) -> tuple[list[RankRows], list[RankRows], list[str], Array]:
        """Gather what all ranks still want now, and in all, with what they reach, the addresses of their listening
        sockets, and as ``(rows,)`` of bool the chunks in tiers that some rank could not ask."""
        rows, leaves = len(self._version.digests), len(self._version.leaves)
        said = decode_offers(self._usable("offer", lambda: self._offer(opened, ahead=ahead)), rows, leaves)
        self._check_wanted(np.flatnonzero(sets_with(said.elsewhere, leaves) == len(said.offers)).tolist())
        return said.offers, said.later, said.addresses, sets_with(said.away, rows) > 0

    def _offer(self, opened: ExitStack, *, ahead: bool) -> bytes:
        # Opened here, within the all-gather, so that the other ranks get an error if it fails.
        listener = self._listener = opened.enter_context(
            closing(PeerListener(len(set(self._team.hosts)), self._team.secret))
        )
        if self._chunks is None:
            self._chunks = ChunkRestore(self._query, self._entry, self._targets(ahead=ahead), self._arena)
        chunks = self._chunks
        if chunks.failure is not None:
            with untrusted(name_version(self._version), named=False):
                raise chunks.failure
        self.check_still_there(chunks.damage or chunks.unreadable)
        elsewhere = np.isin(np.arange(len(self._version.leaves)), list(self._elsewhere()))
        sets = {f"rows.{i}": mask for i, mask in enumerate([*chunks.reach, chunks.missing])}
        sets |= {"rows.all": chunks.missing | _mask(self._later(), len(chunks.missing)), "elsewhere": elsewhere}
        # A tier that has a record of this number may have any chunk, as long as the record cannot be read.
        sets["rows.away"] = chunks.away | bool(self._entry.away)
        return encode_offer(listener.address, {name: runs_in(mask) for name, mask in sets.items()})

    def _usable(self, topic: str, answer: Callable[[], bytes]) -> list[bytes]:
        """The answers of all ranks, if all of them can use what the version holds.

        Raises:
            IncompleteVersion: some cannot; raised on all ranks, which then go on to an older version, or do not.
        """

        def said() -> bytes:
            try:
                return _USABLE + answer()
            except PASSED_OVER as error:
                self._unusable = error
                return _UNUSABLE + str(error).encode(errors="replace")[:4000]

        answers = self._query.ask(topic, said)
        wrong = {r: one[1:].decode(errors="replace") for r, one in enumerate(answers) if one[:1] == _UNUSABLE}
        if wrong:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in list(wrong.items())[:8])
            text = f"{name_version(self._version)} cannot be used by {format_ranks(list(wrong))}: {told}"
            raise IncompleteVersion(text, list(wrong), self._unusable, begun=self._begun, unusable=True)
        return [one[1:] for one in answers]

    def _check_wanted(self, nowhere: Sequence[int]) -> None:
        """Raise StateMismatch, on all ranks, if no rank's state has some leaves of the version."""
        if nowhere:
            names = [self._version.leaves[i].name for i in nowhere[:20]]
            more = f"\n  and {len(nowhere) - 20} more" if len(nowhere) > 20 else ""
            raise StateMismatch(
                f"{name_version(self._version)} has leaves that are missing in the states of all ranks; "
                "name what is to be restored by `only`:\n  " + "\n  ".join(names) + more
            )

    def check_still_there(self, damage: Damaged | Unreadable | None) -> None:
        """Raise if chunks could not be read because the version has changed meanwhile.

        Raises:
            VersionMoved: its chunks were moved; or it was deleted, and the newest version was asked for. The restore
                starts again.
            VersionDropped: it was deleted by retention, and this version was asked for.
        """
        if damage is not None:
            try:
                raise_if_dropped(self._entry, damage)
            except VersionDropped as error:
                raise VersionMoved(str(error)) if self._wanted.newest else error from error

    def _not_whole(self, found: Mapping[int, Array]) -> IncompleteVersion:
        told = "; ".join(self._lacks(rank, rows) for rank, rows in list(found.items())[:8])
        more = f"; and {len(found) - 8} more ranks" if len(found) > 8 else ""
        gone = f"; {self._entry.thinned or LOOK_FURTHER}"
        name, ranks = name_version(self._version), format_ranks(list(found))
        text = f"{name} is not whole for {ranks}, in no tier of any rank: {told}"
        own = self._chunks.damage if self._chunks is not None else None
        return IncompleteVersion(text + more + gone, list(found), own, begun=self._begun)

    def _lacks(self, rank: int, rows: Array) -> str:
        leaves = np.unique(self._version.chunk_leaf[rows])
        return f"rank {rank} lacks {len(leaves)} leaves, {self._version.leaves[int(leaves[0])].name} the first"


class RestoreAttempt(SharedReads):
    """One attempt of all ranks to restore one version."""

    def __init__(self, query: GroupQuery, entry: VersionCopies, wanted: RestoreSpec, arena: Arena) -> None:
        super().__init__(query, entry, wanted, arena)
        self._target: Target | None = None
        self._plan: RestorePlan | None = None

    def restore(self) -> Any:
        """The restored state.

        Raises:
            IncompleteVersion: some ranks cannot get all chunks that they want, or cannot use them.
            Unreadable: so it is, and each of these chunks is in a tier that some rank cannot ask now.
            StateMismatch: the version does not fit some state.
            RankFailed: another rank failed.
        """
        try:
            self._fetch(ahead=True)
            self._settle()
            self._chunks = None
            self._fetch(ahead=False)
            return self._finish()
        except BaseException:
            if self._target is not None:
                self._target.undo()
                self.changed = self.changed or self._target.changed
            raise

    def _targets(self, *, ahead: bool) -> ScatterTargets:
        plan = self._plan = self._plan or self._plan_restore()
        return plan.ahead if ahead else plan.wanted

    def _later(self) -> Array:
        assert self._plan is not None
        return self._plan.wanted.rows

    def _elsewhere(self) -> Collection[int]:
        assert self._target is not None
        return self._target.elsewhere

    def _plan_restore(self) -> RestorePlan:
        """Plan what this rank restores; done once per attempt."""
        wanted = self._wanted
        self._target = plan_restore(
            self._version.leaves,
            into=wanted.into,
            only=wanted.only,
            device=wanted.place,
            allow_pickle=wanted.allow_pickle,
            allow_lossy=wanted.allow_lossy,
            elsewhere=True,
            rank=self._team.rank,
            content=content_of(self._version),
            rename=wanted.rename,
        )
        return plan_scatter(self._version, self._target)

    def _settle(self) -> None:
        """Set the stateful objects of all ranks; if one of them refuses, no rank's state is changed."""

        def settle() -> bytes:
            assert self._target is not None
            self._target.settle()
            return b""

        self._usable("settle", settle)

    def _finish(self) -> Any:
        found = []

        def finish() -> bytes:
            assert self._target is not None
            found.append(self._target.finish())
            return b""

        self._usable("finish", finish)
        return found[0]


def _mask(rows: Array, count: int) -> Array:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def _rows(runs: Array) -> Array:
    return np.concatenate([np.arange(start, stop) for start, stop in runs.tolist()])


def restore_together(
    team: Team,
    catalog: RunCatalog,
    arena: Arena,
    wanted: RestoreSpec,
    tag: str | None,
    resolve: Callable[[str], TaggedVersion | None],
    attempt: type[SharedReads] = RestoreAttempt,
) -> Restored | None:
    """Restore the asked version, by default the newest that all ranks can get completely.

    All ranks call this together. Each gets what its own state wants, or an error.

    Args:
        team: the ranks.
        catalog: the versions of the run that this rank sees.
        wanted: which version, and what this rank wants of it.
        tag: the version's tag; None if it is not asked for by tag.
        resolve: finds the version that has a tag.
        attempt: restores one version.

    Raises:
        ValueError: the ranks ask for different versions.
        ValueError, TypeError: as `check_wanted`.
        RankFailed: another rank, which is named, failed, is dead or is late.
        NotFound, StateMismatch, Damaged, Unsafe: as for one rank.
    """
    query = GroupQuery(team, "restore")
    try:
        wanted = check_wanted(wanted)  # in here, so that the other ranks are told what is wrong with it
        for _ in range(MAX_RESTARTS):
            try:
                return _restore(query, VersionAgreement(query, catalog, wanted, tag, resolve), arena, attempt)
            except VersionMoved as error:
                log.info("%s", error)
        return _restore(query, VersionAgreement(query, catalog, wanted, tag, resolve), arena, attempt)
    except BaseException as error:  # of this rank alone, as an interrupt at any moment: the others wait for it
        query.leave(error)
        raise


def _restore(
    query: GroupQuery, agreement: VersionAgreement, arena: Arena, attempt: type[SharedReads]
) -> Restored | None:
    wanted, catalog = agreement.wanted, agreement.catalog
    agreement.compare_arguments()
    changed = False
    try:
        for entry in agreement.candidates(agreement.look()):
            reads = attempt(query, entry, wanted, arena)
            try:
                return Restored(reads.restore(), entry)
            except IncompleteVersion as error:
                if wanted.on_damage == "raise" and (error.begun or error.unusable or not agreement.newest):
                    raise error.error_for(query.team.rank) from None
                agreement.pass_over(name_version(entry.version), error)
            finally:
                changed = changed or reads.changed
        agreement.check_missing()
        none_found(catalog.tier_runs[0].run, wanted, catalog, agreement.passed)
        return None
    except BaseException as error:
        if changed and wanted.into is not NEW:
            error.add_note("the given state may be overwritten in part: do not train on from it")
        raise
