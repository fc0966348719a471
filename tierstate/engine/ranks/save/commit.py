"""Two-phase commit: the ranks of a team commit one version to one tier together, or not at all.

1. **Prepare.** Every rank is a *participant* and *votes*: yes, with its part (a record of what it has put into the
   tier), or no, with the reason. A part that is too long for the store is kept until the coordinator has fetched it
   over a connection; if that fails, the rank writes it to the tier and votes a second time.
2. **Merge.** The *coordinator* (rank 0) waits for all votes, merges the parts to one version, and creates the record.
   Where each host or process sees only its own objects, it broadcasts the version. The lowest rank of each of them, the
   *host leader*, creates a record there and *acknowledges*.
3. **Decision.** The coordinator posts the decision, committed or not, which all participants wait for.

A rank that fails, dies or is late fails the commit for all ranks; it never makes a smaller version. Between its vote
and the decision a participant is in doubt. If the coordinator is lost then, the participant raises `CommitUnknown` and
nothing is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tierstate.engine.packs.keys import PackKey
from tierstate.engine.ranks.team.team import Stop, Team, never
from tierstate.manifest.chunk import as_buffer
from tierstate.manifest.digest import checksum
from tierstate.manifest.errors import CommitUnknown, RankFailed, RankFull, SaveSkipped, TierError, TierFull
from tierstate.manifest.format.layout import PART
from tierstate.manifest.format.record import Record
from tierstate.manifest.history.log import Log
from tierstate.manifest.sharded.part import encode_part
from tierstate.tiers.base import Tier, layer_of
from tierstate.tiers.wrappers.encrypt import Encrypted

from .coordinator import Coordinator
from .leader import HostLeader, MergedVersions
from .messages import CommitKeys, CommitMessages, Vote, decode_error, decode_message, encode_error

log = logging.getLogger("tierstate")


PARTS_IN_STORE = 128 << 20
"""Bytes of the parts of all ranks, at most, that go through the team's store with the votes. If all ranks see the tier,
longer ones are fetched from the ranks. Where that cannot be, they go through the tier, which takes three more requests
for each rank."""


class GroupCommit:
    """Commits versions to one tier together with all other ranks. Every rank has one `GroupCommit` for each tier.

    Args:
        team: the ranks.
        name: the tier's name, the prefix of its messages.
        tier: the tier; long parts are written to it if all ranks can read them there.
        log: creates the records.
        merged: the merged versions of this process, for all its tiers.

    Attributes:
        unnamed: after a commit, the packs of this rank's part that no record names.
    """

    def __init__(self, team: Team, name: str, tier: Tier, log: Log, merged: MergedVersions) -> None:
        self._team, self._name, self._tier, self._log, self._merged = team, name, tier, log, merged
        self._messages = CommitMessages(team, name)
        self.unnamed: Sequence[str] = ()

    def commit(self, part: Record, stop: Stop = never) -> Record:
        """Vote yes with a part, and wait for the decision. If this fails before the vote, it votes no.

        Args:
            part: record of what this rank has written to the tier.
            stop: called again and again; true cancels the wait.

        Returns:
            The record that this rank created; the part if it created none.

        Raises:
            RankFailed: not committed, because of the ranks that it names.
            CommitUnknown: the version may be committed or not; nothing may be deleted.
            StateMismatch: not committed: the parts do not make one version.
            TierstateError: not committed: what `Log.commit` raised on a rank that creates a record.
        """
        keys, self.unnamed = self._messages.next(part.version.head.seq), ()
        try:
            if self._team.coordinator:
                return self._coordinate(part, keys, stop)
            return self._participate(part, keys, stop)
        finally:
            self._messages.clear()

    def withdraw(self, seq: int, error: BaseException, left_out: bool = False) -> None:
        """Vote no, and do not wait: this rank has no part of a version, so no rank may commit it.

        Args:
            seq: the version's number.
            error: why there is no part.
            left_out: this rank skips the save, which is not a failure.
        """
        self._withdraw(self._messages.next(seq), error, left_out)

    def _withdraw(
        self, keys: CommitKeys, error: BaseException, left_out: bool = False, *, second: bool = False
    ) -> None:
        rank = self._team.rank
        try:
            if self._team.coordinator:
                self._messages.decide(keys, _as_others_see(error, left_out))
            else:
                vote = Vote("left out" if left_out else "no", error=encode_error(error, rank))
                self._messages.post(keys, keys.second_vote if second else keys.vote, vote.encode())
        except RankFailed as lost:
            text = "%s: the other ranks could not be told that version %d is not saved: %s"
            log.warning(text, self._name, keys.seq, lost)

    # The coordinator

    def _coordinate(self, part: Record, keys: CommitKeys, stop: Stop) -> Record:
        coordinator = Coordinator(self._team, self._tier, self._log, self._merged, part, stop)
        try:
            record = coordinator.run(keys, self._messages)
        except BaseException as error:
            left = coordinator.undo(error)
            try:
                self._messages.decide(keys, left)
            except RankFailed as second:
                left.add_note(f"and the other ranks could not be told: {second}")
            if left is error:
                raise
            raise left from error
        try:
            self.unnamed = coordinator.unnamed.get(self._team.rank, ())
            self._messages.decide(keys, None, coordinator.unnamed)
        except RankFailed as error:
            log.warning("%s: version %d is committed, but others could not be told: %s", self._name, keys.seq, error)
        return record

    # Participants

    def _participate(self, part: Record, keys: CommitKeys, stop: Stop) -> Record:
        try:
            vote = self._vote(part, keys)
        except BaseException as error:
            self._withdraw(keys, error)
            raise
        leader = self._host_leader(stop)
        with self._in_doubt(part):
            again = self._cast(vote, keys, stop)
        if again:
            vote = self._vote_again(part, keys)
        with self._in_doubt(part):
            if again:
                self._messages.post(keys, keys.second_vote, vote.encode())
            if leader is not None:
                leader.follow(part, keys, self._messages)
            said = self._team.receive(0, keys.decision, timeout=self._team.timeouts.decision, stop=stop)
            decision, _ = decode_message(said, "the decision of rank 0")
        keys.settled = True
        if vote.object is not None:
            self._remove(str(vote.object["key"]))
        return self._carry_out(decision, part, leader)

    @contextmanager
    def _in_doubt(self, part: Record) -> Iterator[None]:
        """What fails in the block leaves it unknown whether the version is committed."""
        try:
            yield
        except Exception as error:
            head = part.version.head
            raise CommitUnknown(
                f"{self._name}: version {head.seq} of run {head.run!r} may or may not be committed, "
                f"since no decision of rank 0 was received: {error}; nothing was deleted"
            ) from error

    def _vote(self, part: Record, keys: CommitKeys) -> Vote:
        """A vote of yes with this part. If all ranks see the tier, a part that is long stays here until it is fetched.
        If that cannot be, or the tier would encrypt it, it is written there first."""
        data, hidden, relay = encode_part(part), layer_of(self._tier, Encrypted) is not None, self._merged.relay
        mac = self._messages.mac(keys, self._team.rank, data)
        if self._tier.traits.shared != "site" or (len(data) * self._team.size <= PARTS_IN_STORE and not hidden):
            return Vote("yes", part=data, mac=mac)
        held = None if hidden or relay is None else relay.offer(data)
        return self._through_tier(part, data) if held is None else Vote("yes", mac=mac, held=held)

    def _cast(self, vote: Vote, keys: CommitKeys, stop: Stop) -> bool:
        """Vote. Returns whether the part could not be fetched from here, so that it has to go through the tier."""
        try:
            self._messages.post(keys, keys.vote, vote.encode())
            if vote.held is None:
                return False
            said = self._team.receive(0, keys.fetched, timeout=self._team.timeouts.decision, stop=stop)
            missing = decode_message(said, "what rank 0 has fetched")[0].get("missing") if said else ()
            return self._team.rank in (missing or ())
        except BaseException as error:
            if vote.held is not None:
                self._withdraw(keys, error, second=True)  # the coordinator may ask for it yet
            raise
        finally:
            if vote.held is not None and self._merged.relay is not None:
                self._merged.relay.release(vote.held)

    def _vote_again(self, part: Record, keys: CommitKeys) -> Vote:
        """A vote with the part in the tier. If it cannot be written there, the version is not committed."""
        if self._merged.relay is not None:
            self._merged.relay.reachable = False
        try:
            return self._through_tier(part, encode_part(part))
        except BaseException as error:
            self._withdraw(keys, error, second=True)
            raise

    def _through_tier(self, part: Record, data: bytes) -> Vote:
        """A vote of yes with a part that it writes to the tier."""
        head = part.version.head
        key = str(PackKey.new(head.run, head.seq, self._team.rank, PART))
        self._tier.put(key, as_buffer(data))
        return Vote("yes", {"key": key, "bytes": len(data), "sum": checksum(data).hex()})

    def _host_leader(self, stop: Stop) -> HostLeader | None:
        """This rank as host leader; None if it creates no record."""
        shared = self._tier.traits.shared
        if shared == "site" or not self._team.leads(shared):
            return None
        return HostLeader(self._team, self._log, self._merged, shared, stop)

    def _carry_out(self, decision: Mapping[str, Any], part: Record, leader: HostLeader | None) -> Record:
        reason = decision.get("error")
        if reason is None:
            self.unnamed = dict(decision.get("unnamed") or ()).get(self._team.rank, ())
            return part if leader is None or leader.record is None else leader.record
        error = decode_error(reason)
        if leader is not None:
            raise leader.undo(error)
        shared = self._tier.traits.shared
        if shared != "site" and self._team.ranks_sharing(shared)[0] in (decision.get("unsettled") or ()):
            raise CommitUnknown(f"{self._name}: a version that is not whole may have a record here: {error}") from error
        raise error

    def _remove(self, key: str) -> None:
        try:
            self._tier.delete(key)
        except TierError as error:
            log.info("%s: %s is left to the sweep: %s", self._name, key, error)


def _as_others_see(error: BaseException, left_out: bool) -> RankFailed:
    """The error that the other ranks get when the coordinator has no part."""
    if left_out:
        return SaveSkipped("rank 0 left this save out", (0,))
    kind = RankFull if isinstance(error, TierFull) else RankFailed
    return kind(f"rank 0 failed: {type(error).__name__}: {error}", (0,))
