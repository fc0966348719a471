"""The exception hierarchy: every error that this package raises on purpose derives from `TierstateError`.

::

    TierstateError
    ├── PolicyError        a policy that cannot be used: file, line, value, remedy
    ├── TierError          a tier could not do what was asked (.tier, .key)
    │   ├── AlreadyExists      the key is taken; nothing was changed
    │   ├── NotFound           no such object, version, tag or tier
    │   ├── TierFull           no room left (ENOSPC, quota, capacity)
    │   ├── TierUnavailable    no answer, a broken connection, an I/O error: transient
    │   │   ├── MediaError         the storage cannot read an object's bytes (EIO)
    │   │   ├── WrongTier          the tier that is expected is not there: not mounted, or another one is in its place
    │   │   └── Unreadable         what is wanted is stored, and cannot be read now from any tier that has it
    │   │       └── NewestUnreadable   so it is with the newest version
    │   └── AccessDenied       credentials or permissions do not allow it
    ├── Damaged            bytes are not what was saved, on every tier that should have them
    ├── FormatError        bytes that tierstate did not write, truncated, or of an unknown format number
    │   └── Oversized          an object is longer than any that a program writes there; it was not read
    ├── OutOfMemory        what a version says that it holds has no room in this process's memory
    ├── StateMismatch      the given state and the version do not have the same leaves
    ├── CommitUnknown      a commit was sent and it is unknown whether it took effect
    ├── RankFailed         another rank of the job died, failed, or did not answer in time (.ranks)
    │   ├── RankFull           a rank has no room in a tier (TierFull there), so no rank has the version there
    │   └── SaveSkipped        a rank skips this save because its arena is full, so all ranks skip it
    ├── CaptureError       a state could not be copied out
    ├── StateAlarm         what was saved has NaN, stands still or jumps, and the policy says that this is raised
    ├── Reentered          a call from within another one of the same thread, as by a signal handler
    └── Unsafe             pickle (or a lossy encoding) was found where it was not allowed
        └── Unauthentic        an object that was not written with a key of the policy (also Damaged and FormatError)
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import ClassVar, Protocol

RANKS_NAMED = 16
"""Ranks that a message names."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text for a message, in ascending order: ``ranks 0, 1, 5``."""
    known = [str(r) for r in sorted(ranks) if r >= 0]
    if not known:
        return "a rank without shards"
    more = f" and {len(known) - RANKS_NAMED} more" if len(known) > RANKS_NAMED else ""
    return f"rank{'s' if len(known) > 1 else ''} {', '.join(known[:RANKS_NAMED])}{more}"


class TierstateError(Exception):
    """Base of every error that this package raises on purpose.

    ``transient`` says whether the same call may succeed later without a repair.
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


class MediaError(TierUnavailable):
    """The storage says that it cannot read the bytes of an object (EIO): a bad sector, or a dead server."""


class WrongTier(TierUnavailable):
    """A tier is not the one that is expected: its file system is not mounted, or another one lies in its place.

    What was saved there may be whole. When it is back, the same call succeeds.
    """


class Unreadable(TierUnavailable):
    """What is wanted is stored, and no tier that has it can be read now. It may be whole: it is not called damaged."""


class NewestUnreadable(Unreadable):
    """The newest version is listed and cannot be read now. An older one was not taken in its place."""


class AccessDenied(TierError):
    """Credentials, permissions or a read-only mount do not allow it."""


class Damaged(TierstateError):
    """Bytes are missing, short, or do not have the digest under which they were saved."""


class FormatError(TierstateError):
    """Bytes that cannot be parsed: not written by tierstate, truncated, or of an unknown format number."""


class Oversized(FormatError):
    """An object is longer than any that a program writes there. Nothing of it was read."""


class OutOfMemory(TierstateError, MemoryError):
    """What a version says that it holds has no room in memory: this host has too little, or the numbers are wrong."""


class StateMismatch(TierstateError):
    """The given state and the version differ in leaves, shapes or dtypes; the message lists all of them."""


class CommitUnknown(TierstateError):
    """A commit was sent, its answer was lost, and reading back failed too: it may or may not have taken effect."""


class RankFailed(TierstateError):
    """Another rank of the job died, failed, or did not answer in time, so the operation of all ranks failed.

    Args:
        message: which ranks, and what happened to them.
        ranks: their numbers, ascending; empty if the store through which ranks communicate is lost.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CaptureError(TierstateError):
    """A state could not be copied out: a value of no known type, or a value that could not be read."""


class StateAlarm(TierstateError):
    """A version was saved whose statistics are alarming, and the policy says ``alarms: {action: raise}``."""


class Reentered(TierstateError):
    """A thread that is inside a call of a `Checkpointer` has made another one, of this one or of another: from a signal
    handler, or from code that the call runs. It would wait there for locks of the interrupted call for ever.

    Inside `Save.wait` and `Save.wait_captured`, and between calls, a handler may make every call. What a `Save` tells
    without waiting (`done`, `errors`, `seconds`) works everywhere. So a handler that may come at any moment sets a
    flag, or tries to save and sets the flag where it gets this error. It must catch the error, or else the interrupted
    call raises it. What is saved is the state at that moment, also in the middle of an optimizer's step.
    """


class Unsafe(TierstateError):
    """Pickle, or a lossy encoding, was found where the caller had not allowed it."""


class Unauthentic(Unsafe, Damaged, FormatError):
    """An object that was not written with a key of the policy: it has no seal, one of another key, was changed, or was
    moved from another place. It is treated as damage is, and never used.

    Args:
        message: what was found.
        key_id: the id of the key that it names, if the policy does not have that key.
    """

    def __init__(self, message: str, *, key_id: str = "") -> None:
        super().__init__(message)
        self.key_id = key_id


class RankFull(RankFailed):
    """A tier has no room for the part of another rank, so no rank has the version there."""


class SaveSkipped(RankFailed):
    """A rank skips this save because its arena is full (`on_full: skip`), so all ranks skip it."""


def cannot_be_asked(error: BaseException) -> bool:
    """Whether an error says that a tier cannot be asked now. Then what it has may be sound: it is neither damaged (a
    digest or a format is wrong) nor absent (`NotFound`)."""
    return isinstance(error, TierError) and not isinstance(error, NotFound)


_NAMED: tuple[type[TierstateError], ...] = (OutOfMemory, StateMismatch, Unsafe, FormatError)
"""The errors to which `untrusted` adds the name of what was read; their classes take a message and no more."""


_NO_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""By these words of torch's RuntimeErrors it is known that memory was refused."""


_DEVICE_FAILURE = "AcceleratorError"
"""torch's class for a device that has failed, by its name, as torch is not imported here. It says nothing of what is
read: as an error of the version it would make a restore go on to an older one, which would fail in the same way."""


class Named(Protocol):
    """What has a name for messages, which is made only if it is needed: a leaf."""

    @property
    def name(self) -> str: ...


# A class and no generator, and a name is made only for a message: it is entered for every leaf of a restore.
class untrusted(ContextDecorator):
    """Read, or use, what lies in a tier or in another program's file, and may have been made up to do harm.

    Whatever the block raises becomes an error of this package that begins with ``what``, so that a caller that goes on
    to the next version meets nothing else. Libraries raise almost anything for numbers and names that no sane file has:
    OverflowError, RecursionError, NumPy's own subclasses of MemoryError, whose constructors take no text.

    Args:
        what: what is read: a leaf, a version, a file.
        named: also errors of this package get the name, where their classes allow it.

    Raises:
        OutOfMemory: memory was asked for that this host or its device does not give.
        torch.AcceleratorError: a device has failed.
        FormatError: any other error that is none of this package's.
        TierstateError: errors of this package stay what they are.
    """

    __slots__ = ("_named", "_what")

    def __init__(self, what: str | Named, *, named: bool = True) -> None:
        self._what, self._named = what, named

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and (other := self._translated(error)) is not None:
            raise other from error

    def _translated(self, error: Exception) -> TierstateError | None:
        """The error to raise in place of another one; None if that one stays."""
        what = self._what if isinstance(self._what, str) else self._what.name
        if isinstance(error, _NAMED) and self._named:
            return next(kind for kind in _NAMED if isinstance(error, kind))(f"{what}: {error}")
        if isinstance(error, TierstateError):
            return None
        text = f"{type(error).__name__}: {error}"[:500]
        refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if refused or any(words in text for words in _NO_MEMORY):
            return OutOfMemory(f"{what}: {error}"[:500])
        return None if type(error).__name__ == _DEVICE_FAILURE else FormatError(f"{what}: {text}")


def tier_text(name: str, error: object) -> str:
    """What an error of a tier says, with the tier's name in front, which most errors have there already."""
    text = str(error)
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"


def error_text(error: BaseException) -> str:
    """Type and message of an error, for messages; also of one of a program's own type that cannot say what it is."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
