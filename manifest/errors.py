"""The one tree of errors.

::

    TierstateError
    ├── PolicyError        a policy that cannot be used: file, line, value, remedy
    ├── TierError          a tier could not do what was asked (.tier, .key)
    │   ├── AlreadyExists      the key is taken; nothing was changed
    │   ├── NotFound           no such object, version, tag or tier
    │   ├── TierFull           no room left (ENOSPC, quota, capacity)
    │   ├── TierUnavailable    no answer, a broken connection, an I/O error: transient
    │   └── AccessDenied       credentials or permissions do not allow it
    ├── Damaged            bytes are not what was saved, in every place that should have them
    ├── FormatError        not a record of ours, truncated, or of a format this program does not know
    ├── StateMismatch      the given state and the version do not have the same leaves
    ├── CommitUnknown      a commit was sent and nobody can tell whether it took effect
    ├── RankFailed         another rank of the job died, failed, or did not answer in time (.ranks)
    ├── CaptureError       a state could not be copied out
    └── Unsafe             pickle (or a lossy encoding) met where it was not allowed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class TierstateError(Exception):
    """Base of every error that this package raises on purpose.

    ``transient`` says whether the same call may succeed later without anybody mending anything.
    """

    transient: ClassVar[bool] = False


class PolicyError(TierstateError, ValueError):
    """A policy that cannot be used; the message has one line per error found, each with its place and remedy."""


class TierError(TierstateError):
    """A tier could not do what was asked.

    Args:
        message: what was found and what would be right.
        tier: the tier's name, where known.
        key: the object's key, where the error is about one object.
    """

    def __init__(self, message: str, *, tier: str = "", key: str = "") -> None:
        super().__init__(message)
        self.tier = tier
        self.key = key


class AlreadyExists(TierError):
    """The key is taken. Objects are immutable, so nothing was changed."""


class NotFound(TierError):
    """There is no such object, version, tag or tier."""


class TierFull(TierError):
    """No room is left: ENOSPC, a quota, or the capacity the policy gave."""


class TierUnavailable(TierError):
    """The tier did not answer, or answered with an I/O error. Trying again may help."""

    transient: ClassVar[bool] = True


class AccessDenied(TierError):
    """Credentials, permissions or a read-only mount do not allow it."""


class Damaged(TierstateError):
    """Bytes are missing, short, or do not have the digest under which they were saved."""


class FormatError(TierstateError):
    """Bytes that are not a record of ours: foreign, truncated, or of a format number not known here."""


class StateMismatch(TierstateError):
    """The given state and the version differ in leaves, shapes or dtypes; the message lists all of them."""


class CommitUnknown(TierstateError):
    """A commit was sent, its answer was lost, and reading back failed too: it may or may not have taken effect."""


class RankFailed(TierstateError):
    """Another rank of the job died, failed, or did not answer in time, so that what all do together came to nothing.

    Args:
        message: which ranks, and what became of them.
        ranks: their numbers, rising; empty where the store itself, by which ranks speak, is lost.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CaptureError(TierstateError):
    """A state could not be copied out: a value of no known type, or one that failed while it was read."""


class Unsafe(TierstateError):
    """Pickle, or a lossy encoding, was met where the caller had not allowed it."""
