"""Secret keys of a policy (``seal``, ``encrypt``): read from variables or files, and never shown.

A key is 32 bytes or more, written in hexadecimal or base64. Its id, which is made of it and cannot be turned back, is
what messages and stored objects name it by.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from tierstate.manifest.errors import PolicyError
from tierstate.manifest.seal import SealKey, derive, key_id

from .private_file import read_private_file

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
    """A key from a private file, as `tierstate.tiers.private_file` says what that is.

    Raises:
        PolicyError: the file is not there or not private, it is longer than `MAX_KEY_TEXT`, or it does not hold a key.
    """
    data = read_private_file(Path(path), MAX_KEY_TEXT, "a key", PolicyError)
    try:
        return parse_key(data.decode("ascii", "replace"))
    except ValueError as error:
        raise PolicyError(f"{os.fspath(path)}: {error}") from None
