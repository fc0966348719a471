"""HKDF with SHA-256 (RFC 5869): keys that are derived from one secret, a different one for each purpose."""

from __future__ import annotations

import hmac

HASH = 32
"""Bytes of a SHA-256 hash, and so of a pseudorandom key."""


MAX_LENGTH = 255 * HASH
"""Bytes that can be expanded from one key, at most."""


def extract(salt: bytes, secret: bytes) -> bytes:
    """The pseudorandom key of a secret, `HASH` bytes.

    Args:
        salt: not secret; empty for none.
        secret: what is hard to guess, of any length.
    """
    return hmac.digest(salt or bytes(HASH), secret, "sha256")


def expand(key: bytes, info: bytes, length: int = HASH) -> bytes:
    """The bytes for one purpose, from a pseudorandom key.

    Args:
        key: from `extract`, or `HASH` random bytes.
        info: the purpose; two purposes give two keys.
        length: of the result, in bytes.

    Raises:
        ValueError: the length is below 1 or above `MAX_LENGTH`.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"a key of {length} bytes; 1 to {MAX_LENGTH} can be derived")
    block = derived = b""
    while len(derived) < length:
        block = hmac.digest(key, block + info + bytes([len(derived) // HASH + 1]), "sha256")
        derived += block
    return derived[:length]
