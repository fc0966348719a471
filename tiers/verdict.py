"""Votes and verdicts: what ranks say of a commit, as bytes, errors among them.

An error is told as the name of its class, its text and the ranks it is about, and nothing that could run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    CommitUnknown,
    Damaged,
    FormatError,
    NotFound,
    RankFailed,
    StateMismatch,
    TierError,
    TierFull,
    TierstateError,
    TierUnavailable,
)

MAX_TEXT = 4096
"""Characters of an error's text that are told to others."""

MAX_HEAD = 1 << 24

_TOLD = (
    *(AccessDenied, AlreadyExists, NotFound, TierError, TierFull, TierUnavailable),
    *(CommitUnknown, Damaged, FormatError, StateMismatch),
)
_CLASSES: Mapping[str, type[TierstateError]] = {cls.__name__: cls for cls in _TOLD}


class LeftOut(RankFailed):
    """A rank left this save out, as `on_full: skip` has it: so it is left out by all."""


class Divided(RankFailed):
    """Some ranks could not create their record of a version, so that those of the others go again.

    Attributes:
        unsettled: leaders of whom nobody can tell whether their record exists; what it may name stays.
    """

    def __init__(self, message: str, ranks: Sequence[int], unsettled: Sequence[int]) -> None:
        super().__init__(message, ranks)
        self.unsettled = tuple(unsettled)


def told(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of a rank as JSON types."""
    # The nearest class that others know: of a kind of TierUnavailable, too, they must know that packs have to stay.
    known = next((cls.__name__ for cls in type(error).__mro__ if _CLASSES.get(cls.__name__) is cls), None)
    found: dict[str, Any] = {"kind": known, "text": str(error)[:MAX_TEXT]}
    if isinstance(error, RankFailed):
        kind = "LeftOut" if isinstance(error, LeftOut) else "RankFailed"
        return found | {"kind": kind, "ranks": list(error.ranks)}
    if known is None:
        text = f"rank {rank} failed: {type(error).__name__}: {error}"
        return {"kind": "RankFailed", "text": text[:MAX_TEXT], "ranks": [rank]}
    if isinstance(error, TierError):
        found |= {"tier": error.tier, "key": error.key}
    return found


def heard(said: Mapping[str, Any]) -> TierstateError:
    """The error that another rank told."""
    kind, text = str(said.get("kind")), str(said.get("text"))[:MAX_TEXT]
    cls = _CLASSES.get(kind)
    if cls is None:
        ranks = [r for r in said.get("ranks") or () if isinstance(r, int)]
        return (LeftOut if kind == "LeftOut" else RankFailed)(text, ranks)
    if issubclass(cls, TierError):
        return cls(text, tier=str(said.get("tier", "")), key=str(said.get("key", "")))
    return cls(text)


@dataclass(frozen=True)
class Vote:
    """What one rank says of a commit.

    Attributes:
        said: ``yes``, ``no`` or ``left out``.
        object: key, length and checksum of the part, where it lies in the tier.
        part: or else the part itself.
        error: why not.
    """

    said: str
    object: Mapping[str, Any] | None = None
    part: bytes = b""
    error: Mapping[str, Any] | None = None

    def encode(self) -> bytes:
        """As bytes."""
        return pack({"said": self.said, "object": self.object, "error": self.error}, self.part)

    @classmethod
    def decode(cls, data: bytes, rank: int) -> Vote:
        """From bytes.

        Raises:
            FormatError: they are no vote.
        """
        head, part = unpack(data, f"the vote of rank {rank}")
        if head.get("said") not in ("yes", "no", "left out"):
            raise FormatError(f"the vote of rank {rank} is {head.get('said')!r:.40}, which is none")
        return cls(head["said"], head.get("object"), part, head.get("error"))


def pack(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    """JSON and bytes as one message."""
    text = json.dumps(dict(head)).encode()
    return len(text).to_bytes(4, "little") + text + body


def unpack(data: bytes, what: str) -> tuple[dict[str, Any], bytes]:
    """The two of them again.

    Raises:
        FormatError: the message is not one of ours.
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
