"""The messages of a two-phase commit by many ranks: votes, decisions, acknowledgements, and their keys in the store.

A message is a JSON head and bytes. An error is encoded as the name of its class, its text and the ranks that it is
about, never as a pickle, so that no message can run code. A message stays in the store until no rank needs it any more.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tierstate.engine.ranks.team.team import Team
from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    CommitUnknown,
    Damaged,
    FormatError,
    NotFound,
    RankFailed,
    RankFull,
    SaveSkipped,
    StateMismatch,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
    Unauthentic,
)

MAX_TEXT = 4096
"""Characters of an error's text that are sent to other ranks."""


MAX_HEAD = 1 << 24
"""Bytes of a message's JSON head at most."""


_KNOWN = (
    *(AccessDenied, AlreadyExists, NotFound, TierError, TierFull, TierUnavailable),
    *(CommitUnknown, Damaged, FormatError, StateMismatch),
)


_CLASSES: Mapping[str, type[TierstateError]] = {cls.__name__: cls for cls in _KNOWN}


_OF_RANKS: Mapping[str, type[RankFailed]] = {"LeftOut": SaveSkipped, "Full": RankFull}


DECISIONS_KEPT = 8
"""Decisions that are kept in the store for late ranks. A rank that votes on a later version has read the earlier
decisions."""


class PartialCommit(RankFailed):
    """Some host leaders could not create their record of a version, so the other leaders delete theirs again.

    Attributes:
        unsettled: leaders whose record may exist or not; nothing that it may name is deleted.
    """

    # With defaults, as it is unpickled by the message alone: DCP sends the errors of a rank to all.
    def __init__(self, message: str, ranks: Sequence[int] = (), unsettled: Sequence[int] = ()) -> None:
        super().__init__(message, ranks)
        self.unsettled = tuple(unsettled)


def encode_error(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of a rank as JSON types."""
    # The nearest class that other ranks know: also for a subclass of TierUnavailable they must keep their packs.
    known = next((cls.__name__ for cls in type(error).__mro__ if _CLASSES.get(cls.__name__) is cls), None)
    found: dict[str, Any] = {"kind": known, "text": str(error)[:MAX_TEXT]}
    if isinstance(error, RankFailed):
        kind = next((name for name, cls in _OF_RANKS.items() if isinstance(error, cls)), "RankFailed")
        return found | {"kind": kind, "ranks": list(error.ranks)}
    if known is None:
        text = f"rank {rank} failed: {type(error).__name__}: {error}"
        return {"kind": "RankFailed", "text": text[:MAX_TEXT], "ranks": [rank]}
    if isinstance(error, TierError):
        found |= {"tier": error.tier, "key": error.key}
    return found


def decode_error(encoded: Mapping[str, Any]) -> TierstateError:
    """The error that `encode_error` encoded on another rank."""
    kind, text = str(encoded.get("kind")), str(encoded.get("text"))[:MAX_TEXT]
    cls = _CLASSES.get(kind)
    if cls is None:
        said = encoded.get("ranks")
        ranks = [r for r in said if isinstance(r, int)] if isinstance(said, list) else []
        return _OF_RANKS.get(kind, RankFailed)(text, ranks)
    if issubclass(cls, TierError):
        return cls(text, tier=str(encoded.get("tier", "")), key=str(encoded.get("key", "")))
    return cls(text)


@dataclass(frozen=True)
class Vote:
    """One participant's vote in the prepare phase of a commit.

    Attributes:
        said: ``yes``, ``no`` or ``left out`` (this rank skips the save, which is not a failure).
        object: key, length and checksum of the rank's part, if the part is an object in the tier.
        part: otherwise the part itself.
        error: why the vote is not yes.
        mac: proves that the part is of a process of this job; see `CommitMessages.mac`.
        held: address, length and checksum of the rank's part, if the rank keeps it until the coordinator has fetched
            it; see `VersionRelay.offer`.
    """

    said: str
    object: Mapping[str, Any] | None = None
    part: bytes = b""
    error: Mapping[str, Any] | None = None
    mac: str = ""
    held: Mapping[str, Any] | None = None

    def encode(self) -> bytes:
        """The vote as bytes."""
        head = {"said": self.said, "object": self.object, "error": self.error, "mac": self.mac, "held": self.held}
        return encode_message(head, self.part)

    @classmethod
    def decode(cls, data: bytes, rank: int) -> Vote:
        """The vote that `encode` made.

        Raises:
            FormatError: the bytes are not a vote.
        """
        head, part = decode_message(data, f"the vote of rank {rank}")
        if head.get("said") not in ("yes", "no", "left out"):
            raise FormatError(f"the vote of rank {rank} is {head.get('said')!r:.40}, which is not a vote")
        for name in ("object", "error", "held"):
            if not isinstance(value := head.get(name), dict | None):
                raise FormatError(f"the vote of rank {rank} has {value!r:.40} as its {name}; right are keys and values")
        return cls(head["said"], head.get("object"), part, head.get("error"), str(head.get("mac")), head.get("held"))


def encode_message(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A message of a JSON head and bytes."""
    text = json.dumps(dict(head)).encode()
    return len(text).to_bytes(4, "little") + text + body


def decode_message(data: bytes, what: str) -> tuple[dict[str, Any], bytes]:
    """Head and bytes of a message that `encode_message` made.

    Args:
        what: names the message in errors.

    Raises:
        FormatError: it is not such a message.
    """
    end = 4 + int.from_bytes(data[:4], "little")
    if not 4 < end <= min(len(data), MAX_HEAD):
        raise FormatError(f"{what} is truncated: {len(data)} bytes")
    try:
        head = json.loads(data[4:end])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON") from error
    if not isinstance(head, dict):
        raise FormatError(f"{what} is not a JSON object")
    return head, data[end:]


@dataclass(eq=False)
class CommitKeys:
    """The keys of the messages of one commit: of one version to one tier.

    Attributes:
        seq: the version's number.
        base: the prefix of its keys.
        settled: whether this rank has posted or received the decision.
        posted: keys under which this rank has posted a message.
    """

    seq: int
    base: str
    settled: bool = False
    posted: list[str] = field(default_factory=list)

    @property
    def vote(self) -> str:
        """Phase 1, from each participant: its `Vote`."""
        return f"{self.base}/vote"

    @property
    def fetched(self) -> str:
        """From the coordinator to participants that keep their parts for it: the ranks whose parts it could not fetch;
        empty if the commit has failed."""
        return f"{self.base}/fetched"

    @property
    def second_vote(self) -> str:
        """From each of those ranks: its `Vote`, with its part in the tier."""
        return f"{self.base}/second-vote"

    @property
    def version_id(self) -> str:
        """From the coordinator to host leaders: the id of the merged version; empty if the commit has failed."""
        return f"{self.base}/version-id"

    @property
    def version(self) -> str:
        """From the coordinator to host leaders: the merged version itself."""
        return f"{self.base}/version"

    @property
    def acknowledgement(self) -> str:
        """From each host leader: whether it has created its record."""
        return f"{self.base}/acknowledgement"

    @property
    def decision(self) -> str:
        """Phase 2, from the coordinator to all: committed, or why not."""
        return f"{self.base}/decision"


class CommitMessages:
    """Posts one rank's messages of the commits to one tier, and deletes those that no rank needs any more."""

    def __init__(self, team: Team, name: str) -> None:
        self._team, self._name = team, name
        self._open: deque[CommitKeys] = deque()
        self._lock = threading.RLock()  # one thread may withdraw from a save while another waits for a decision
        self.all_voted = -1
        """The highest number that all ranks have voted yes on. So they have received all decisions on lower numbers."""

    def next(self, seq: int) -> CommitKeys:
        """The keys of the next commit of the version number ``seq``, which may be tried again.

        All ranks have the same count of tries, since each takes part in every commit.
        """
        with self._lock:
            return self._next(seq)

    def _next(self, seq: int) -> CommitKeys:
        self.clear()
        base = f"{self._name}/{seq}"
        keys = CommitKeys(seq, f"{base}.{self._team.turn(base)}")
        self._open.append(keys)
        return keys

    def mac(self, keys: CommitKeys, rank: int, part: bytes | memoryview) -> str:
        """By what a rank's part is authenticated, since the store is not; empty if the team has no secret."""
        if not self._team.has_secret:
            return ""
        key = self._team.secret.derive("part of a version", keys.vote.encode(), str(rank).encode())
        return hmac.digest(key, part, "sha256").hex()

    def authentic(self, keys: CommitKeys, rank: int, vote: Vote, part: bytes | memoryview) -> bytes | memoryview:
        """The part of a rank: the one in its vote, or one that was fetched from the rank.

        Raises:
            Unauthentic: it is not what this rank has voted with.
        """
        if not hmac.compare_digest(vote.mac.encode(), self.mac(keys, rank, part).encode()):
            raise Unauthentic(f"the part in the vote of rank {rank} was changed, or is of another job")
        return part

    def post(self, keys: CommitKeys, key: str, data: bytes) -> None:
        """Post a message of a commit.

        Raises:
            RankFailed: the store is lost.
        """
        keys.posted.append(key)
        self._team.post(key, data)

    def decide(
        self,
        keys: CommitKeys,
        error: BaseException | None,
        unnamed: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Post the decision; only the coordinator does.

        Args:
            error: why the version is not committed; None if it is.
            unnamed: as `Coordinator.unnamed`.

        Raises:
            RankFailed: the store is lost.
        """
        unsettled = list(error.unsettled) if isinstance(error, PartialCommit) else []
        reason = None if error is None else encode_error(error, self._team.rank)
        if error is not None and keys.version_id not in keys.posted:
            self.post(keys, keys.version_id, b"")  # leaders wait for this first
        if error is not None and keys.fetched not in keys.posted:
            self.post(keys, keys.fetched, b"")  # and ranks that keep their parts for this
        decision = {"error": reason, "unsettled": unsettled, "unnamed": list(unnamed.items())}
        self.post(keys, keys.decision, encode_message(decision))
        keys.settled = True
        if error is None and keys.version in keys.posted:
            self._team.forget([keys.version_id, keys.version])  # it is long, and all leaders have received it
            keys.posted = [keys.decision]

    def clear(self) -> None:
        """Delete messages that no rank needs any more. A vote stays until the coordinator has read it."""
        with self._lock, suppress(RankFailed):  # if the store is lost, the next call raises it, too
            for later, keys in reversed(list(enumerate(reversed(self._open)))):
                if (later >= DECISIONS_KEPT and keys.seq < self.all_voted) or self._is_over(keys):
                    self._open.remove(keys)
                    self._team.forget(keys.posted)

    def _is_over(self, keys: CommitKeys) -> bool:
        """Whether all other ranks have read what this rank posted; never of a decision, which may be read late."""
        if self._team.coordinator:
            return False
        return keys.settled or self._team.has_posted(0, keys.decision)
