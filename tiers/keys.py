"""Secret keys of a policy (``seal``, ``encrypt``): read from variables or files, and never shown.

A key is 32 bytes or more, written in hexadecimal or base64. Its id, which is made of it and cannot be turned back, is
what messages and stored objects name it by.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from dataclasses import dataclass, field

from tierstate.manifest.errors import PolicyError
from tierstate.manifest.seal import SealKey, derive, key_id

MIN_KEY_BYTES = 32
"""Shortest key, in bytes."""


MAX_KEY_TEXT = 4096
"""Longest text of a key that is read, in characters."""


HOW_TO_MAKE = "make one with `openssl rand -hex 32`"


_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+")


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A secret of 32 bytes or more.

    Attributes:
        secret: the bytes; in no repr.
    """

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """16 hexadecimal digits that name it."""
        return key_id(self.secret)

    @property
    def for_seals(self) -> SealKey:
        """The key of seals that is derived from it."""
        return SealKey.of(self.secret)

    def for_tier(self) -> SecretKey:
        """The key that is derived from it to encrypt a tier (``encrypt: true``)."""
        return SecretKey(derive(self.secret, b"tierstate encrypt"))


def parse_key(text: str) -> SecretKey:
    """A key from its text.

    Raises:
        ValueError: it is neither hexadecimal nor base64, or too short; the message does not show it.
    """
    text = text.strip()
    try:
        secret = bytes.fromhex(text) if _HEX.fullmatch(text) else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the key, which is not shown, is neither hexadecimal nor base64; {HOW_TO_MAKE}") from None
    if len(secret) < MIN_KEY_BYTES:
        raise ValueError(f"the key, which is not shown, has {len(secret)} bytes; {MIN_KEY_BYTES} or more are one")
    return SecretKey(secret)


def read_key(path: str | os.PathLike[str]) -> SecretKey:
    """A key from a file that only its owner, the user of this process, can read.

    Raises:
        PolicyError: there is no such file, others can read or write it, or it does not hold a key.
    """
    name = os.fspath(path)
    try:
        # Opened first and then looked at, so that the file that is checked is the one that is read.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PolicyError(f"{name}: the key cannot be read ({error.strerror}); name a file, not a link") from error
    try:
        _check_private(name, os.fstat(descriptor))
        data = os.read(descriptor, MAX_KEY_TEXT)
    finally:
        os.close(descriptor)
    try:
        return parse_key(data.decode("ascii", "replace"))
    except ValueError as error:
        raise PolicyError(f"{name}: {error}") from None


def _check_private(name: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise PolicyError(f"{name}: is not a plain file, as one with a key is")
    if found.st_uid != os.geteuid():
        raise PolicyError(
            f"{name}: belongs to user {found.st_uid}; a key belongs to user {os.geteuid()}, who runs this"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PolicyError(f"{name}: others may use it (mode {mode:04o}), and a key is secret; run `chmod 600` on it")
