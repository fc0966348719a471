"""Seals: a message authentication code (MAC) over a stored object and its key, so that a forged object is noticed.

A sealed object is a head, then the object's own bytes::

    0    8   magic
    8    4   format number
    12   4   zero
    16   8   id of the key
    24   8   zero
    32   32  HMAC-SHA256 of what it is for, the bytes 0 to 32, the object's key with its length, and the object's bytes
    64   ...     the object's bytes

All integers are little-endian. As the key is part of what is authenticated, an object that was copied to another key is
refused like one that was changed. Keys of seals are derived from the user's secret by HKDF (RFC 5869), so that one
secret may serve several purposes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from .errors import Unauthentic
from .hkdf import expand, extract

SEAL_MAGIC = b"\x89TSS\r\n\x1a\n"


SEAL_FORMAT = 1


SEAL_BYTES = 64
"""Length of the head of a sealed object."""


KEY_ID_BYTES = 8


ENCRYPTED_MAGIC = b"\x89TSE\r\n\x1a\n"
"""With this begins the trailer of an encrypted object, which is its end (the key ``encrypt`` of a tier)."""


ENCRYPTED_TRAILER = 64
"""Length of that trailer."""


_PURPOSE = b"tierstate seal 1\0"

_FIXED = 32


def derive(secret: bytes, purpose: bytes, salt: bytes = b"") -> bytes:
    """The key for one purpose, 32 bytes."""
    return expand(extract(salt, secret), purpose)


@dataclass(frozen=True, slots=True)
class SealKey:
    """One key of seals.

    Attributes:
        id: 16 hexadecimal digits that name the key and tell nothing of it; may be shown.
        key: 32 bytes; never shown.
    """

    id: str
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Self:
        """The key of seals that belongs to a secret."""
        return cls(key_id(secret), derive(secret, b"tierstate seal"))


def key_id(secret: bytes) -> str:
    """The id of a secret: it names the secret in messages and stored objects, and cannot be turned back."""
    return derive(secret, b"tierstate key id")[:KEY_ID_BYTES].hex()


def seal(key: SealKey, name: str, data: bytes | memoryview) -> bytes:
    """An object with its seal in front.

    Args:
        key: the key.
        name: where the object lies: its key in the tier.
        data: the object's bytes.
    """
    head = _head(key)
    return b"".join([head, _mac(key, head, name, data), data])


def unseal(keys: Sequence[SealKey], name: str, sealed: memoryview, what: str) -> memoryview:
    """The bytes of a sealed object, once its seal was verified.

    Args:
        keys: the keys that are trusted.
        name: where it was found: its key in the tier.
        what: tier and key, for messages.

    Raises:
        Unauthentic: it has no seal, one of another key, or it is not what was sealed under this name.
    """
    if bytes(sealed[:8]) != SEAL_MAGIC or len(sealed) < SEAL_BYTES:
        raise Unauthentic(f"{what}: is not sealed, and the policy has a `seal` key: it is not used")
    number, id = int.from_bytes(sealed[8:12], "little"), bytes(sealed[16 : 16 + KEY_ID_BYTES]).hex()
    if number != SEAL_FORMAT:
        raise Unauthentic(f"{what}: its seal has the format number {number}; {SEAL_FORMAT} is known here")
    key = next((one for one in keys if one.id == id), None)
    if key is None:
        raise Unauthentic(f"{what}: is sealed with key {id}; trusted are {', '.join(k.id for k in keys)}", key_id=id)
    head, data = bytes(sealed[:_FIXED]), sealed[SEAL_BYTES:]
    if not hmac.compare_digest(_mac(key, head, name, data), bytes(sealed[_FIXED:SEAL_BYTES])):
        raise Unauthentic(f"{what}: is not what was sealed under this key: it was changed, or moved here")
    return data


def sealed_with(data: memoryview) -> str:
    """The id of the key with which an object says that it is sealed; empty if it has no seal. Verifies nothing."""
    return bytes(data[16 : 16 + KEY_ID_BYTES]).hex() if bytes(data[:8]) == SEAL_MAGIC else ""


def is_encrypted(data: memoryview) -> bool:
    """Whether an object says that it is encrypted. Verifies nothing."""
    return bytes(data[-ENCRYPTED_TRAILER:][:8]) == ENCRYPTED_MAGIC


def _head(key: SealKey) -> bytes:
    head = SEAL_MAGIC + SEAL_FORMAT.to_bytes(4, "little") + bytes(4) + bytes.fromhex(key.id)
    return head.ljust(_FIXED, b"\0")


def _mac(key: SealKey, head: bytes, name: str, data: bytes | memoryview) -> bytes:
    text = name.encode()
    mac = hmac.new(key.key, _PURPOSE + head + len(text).to_bytes(4, "little") + text, hashlib.sha256)
    mac.update(data)
    return mac.digest()
