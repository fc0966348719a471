"""What the operating system says about files, as errors of ours."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierstate.manifest.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    TierError,
    TierFull,
    TierUnavailable,
)


def _numbers(names: str) -> frozenset[int]:
    return frozenset(getattr(errno, name) for name in names.split() if hasattr(errno, name))


_KINDS: tuple[tuple[frozenset[int], type[TierError]], ...] = (
    (_numbers("EEXIST"), AlreadyExists),
    (_numbers("ENOENT EISDIR"), NotFound),
    (_numbers("ENOSPC EDQUOT EFBIG"), TierFull),
    (_numbers("EACCES EPERM EROFS ELOOP"), AccessDenied),
    (
        _numbers(
            "EIO ESTALE ETIMEDOUT EAGAIN EBUSY EINTR ENXIO ENODEV ENOMEM EMFILE ENFILE ENOLCK EREMOTEIO EREMCHG "
            "EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ENETRESET ENOTCONN ENOLINK ECOMM EPROTO "
            "ECONNABORTED ECONNREFUSED ECONNRESET EPIPE ESHUTDOWN EREMOTE ENODATA ECANCELED"
        ),
        TierUnavailable,
    ),
)


_REMEDIES: dict[type[TierError], str] = {
    AlreadyExists: "nothing was changed",
    TierFull: "free some space, raise the quota, or keep fewer versions",
    AccessDenied: "check the owner and mode of the path, the options it is mounted with, and that no part is a link",
}


def kind_of(number: int | None) -> type[TierError]:
    """The class of ours for an errno; TierError itself for those that say nothing about a tier."""
    return next((kind for numbers, kind in _KINDS if number in numbers), TierError)


def explain(error: OSError, doing: str, tier: str, key: str, path: Path) -> TierError:
    """The error of ours that says what failed, where, with which errno, and what would mend it."""
    kind = kind_of(error.errno)
    if error.errno == errno.ENOTDIR:
        # A part of the key is an object. For a reader nothing is there; for a writer the place is taken.
        kind = NotFound if doing == "read" else AlreadyExists
    name = errno.errorcode.get(error.errno or 0, "no errno")
    where = ": ".join(filter(None, (tier, key)))
    text = f"{where}: cannot {doing} {path}: {error.strerror or error} ({name})"
    remedy = _REMEDIES.get(kind)
    return kind(f"{text}; {remedy}" if remedy else text, tier=tier, key=key)


@contextmanager
def explained(doing: str, tier: str, key: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into one of ours, raised from it."""
    try:
        yield
    except OSError as error:
        raise explain(error, doing, tier, key, path) from error
