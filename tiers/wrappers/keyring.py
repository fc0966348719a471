"""The key ring of an encrypted tier: the data keys of its objects, kept in the tier, wrapped with the tier's key.

A tier that encrypts has a small object, ``keys/<number>.<copy>``, in two copies::

    {"format": 1, "key": <id of the tier's key>, "salt": <hex>, "ring": <hex>}

``ring`` is encrypted with AES-256-GCM under a key that HKDF derives from the tier's key and the random salt, and is
bound to number and copy. It lists the *data keys* of the tier, each with an id: the last one encrypts new objects. So
the tier's key can be replaced without touching a pack: the ring is wrapped again, as the next number, with one more
data key, and the older numbers are deleted.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tierstate.manifest.chunk import as_buffer, to_bytes
from tierstate.manifest.errors import AlreadyExists, MediaError, NotFound, TierUnavailable, Unauthentic
from tierstate.manifest.seal import derive
from tierstate.tiers.base import Tier, outlast_race
from tierstate.tiers.keys import SecretKey

log = logging.getLogger("tierstate")


RING_PREFIX = "keys/"
"""The prefix of the keys of all rings."""


RING_FORMAT = 1


MAX_RING_BYTES = 1 << 20


COPIES = 2
"""Copies of each ring: without it, nothing in the tier could be read."""


ID_BYTES, KEY_BYTES, SALT_BYTES = 8, 32, 32


_KEY = re.compile(r"keys/([0-9]{6})\.([0-9])")


_NONCE = bytes(12)
"""Each ring is encrypted under a key of its own, made with a random salt: one nonce is enough."""


class DataKeys(NamedTuple):
    """The data keys of a tier.

    Attributes:
        number: of the ring.
        keys: by id, 16 hexadecimal digits; the last one encrypts new objects.
    """

    number: int
    keys: Mapping[str, bytes]

    @property
    def newest(self) -> tuple[str, bytes]:
        """The id and the key with which new objects are encrypted."""
        return list(self.keys.items())[-1]

    def with_new(self) -> DataKeys:
        """The next ring, with one more key."""
        new = {secrets.token_hex(ID_BYTES): secrets.token_bytes(KEY_BYTES)}
        return DataKeys(self.number + 1, {**self.keys, **new})


def new_cipher(key: bytes) -> Any:
    """AES-256-GCM of the package ``cryptography``.

    Raises:
        ImportError: it is not installed, or too old.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ImportError(_REMEDY) from error
    if not hasattr(AESGCM, "encrypt_into"):
        raise ImportError(_REMEDY)
    return AESGCM(key)


_REMEDY = "encrypt: needs the package cryptography, 47 or newer: pip install 'tierstate[encryption]'"


def read_ring(tier: Tier, keys: Sequence[SecretKey]) -> DataKeys | None:
    """The newest ring of a tier; None if it has none.

    Args:
        tier: the tier, without its encryption.
        keys: the tier's keys; any of them may have wrapped the ring.

    Raises:
        Unauthentic: no copy of it can be opened with these keys; the message says which key is needed.
        TierError: the tier could not be read.
    """
    numbers = _numbers(tier)
    if not numbers:
        return None
    newest, failure = max(numbers), None
    for copy in numbers[newest]:
        key = _key(newest, copy)
        try:
            return DataKeys(newest, _opened(tier, key, keys))
        except (Unauthentic, NotFound, MediaError) as error:
            log.debug("%s: %s cannot be used: %s", tier.name, key, error)
            failure = error if failure is None or isinstance(error, Unauthentic) else failure
    if isinstance(failure, NotFound):
        return read_ring(tier, keys)  # replaced meanwhile, so that there is a newer one
    assert failure is not None
    raise failure


def ring_to_write_with(tier: Tier, keys: Sequence[SecretKey], known: DataKeys | None = None) -> DataKeys:
    """The ring whose newest key encrypts what is written; made if the tier has none.

    Of processes that race, one makes it: what is encrypted with a key that is in no ring is lost.

    Args:
        known: the ring that was read before.

    Raises: as `read_ring`, and TierError if it could not be written.
    """
    found = known or read_ring(tier, keys)
    made = found is None
    if found is None:
        found = DataKeys(0, {}).with_new()
        try:
            _write(tier, keys[0], found, 0)
        except AlreadyExists:
            found, made = _read_again(tier, keys), False
    if outlast_race(tier, _key(found.number, 0)):
        found = _read_again(tier, keys)
    if made:
        _write_others(tier, keys[0], found)
    return found


def _read_again(tier: Tier, keys: Sequence[SecretKey]) -> DataKeys:
    if (found := read_ring(tier, keys)) is None:
        raise TierUnavailable(f"{tier.name}: its keys ({RING_PREFIX}*) were there, and are gone", tier=tier.name)
    return found


def replace_ring(tier: Tier, keys: Sequence[SecretKey]) -> DataKeys:
    """Wrap the ring with the first of the keys, with a new data key for what is written from now on.

    Interrupted, it leaves the old ring, or the new one beside it: then the new one is valid, and the next call deletes
    the old one.

    Raises:
        NotFound: the tier has no ring.
        AlreadyExists: another process replaces it now.
        Unauthentic, TierError: as `read_ring`.
    """
    before = read_ring(tier, keys)
    if before is None:
        raise NotFound(f"{tier.name}: is not encrypted yet: there is no key to replace", tier=tier.name)
    after = before.with_new()
    _write(tier, keys[0], after, 0)
    _write_others(tier, keys[0], after)
    for number, copies in _numbers(tier).items():
        for copy in copies if number < after.number else ():
            tier.delete(_key(number, copy))
    return after


def _write(tier: Tier, key: SecretKey, ring: DataKeys, copy: int) -> None:
    name = _key(ring.number, copy)
    tier.put(name, as_buffer(bytearray(_wrapped(name, key, ring.keys))))


def _write_others(tier: Tier, key: SecretKey, ring: DataKeys) -> None:
    """Write all copies but the first, which decides races."""
    for copy in range(1, COPIES):
        with suppress(AlreadyExists):
            _write(tier, key, ring, copy)


def _wrapped(name: str, key: SecretKey, ring: Mapping[str, bytes]) -> bytes:
    salt = secrets.token_bytes(SALT_BYTES)
    text = json.dumps({id: data.hex() for id, data in ring.items()}).encode()
    sealed = new_cipher(_wrapping_key(key, salt)).encrypt(_NONCE, text, name.encode())
    return json.dumps({"format": RING_FORMAT, "key": key.id, "salt": salt.hex(), "ring": sealed.hex()}).encode()


def _opened(tier: Tier, name: str, keys: Sequence[SecretKey]) -> dict[str, bytes]:
    what = f"{tier.name}: {name}"
    if tier.size(name) > MAX_RING_BYTES:
        raise Unauthentic(f"{what}: is too long for a ring of keys")
    salt, ring, id = _fields(to_bytes(tier.get(name)), what)
    key = next((one for one in keys if one.id == id), None)
    if key is None:
        known = ", ".join(one.id for one in keys)
        raise Unauthentic(f"{what}: is encrypted for key {id}; the policy has {known}", key_id=id)
    from cryptography.exceptions import InvalidTag

    try:
        text = new_cipher(_wrapping_key(key, salt)).decrypt(_NONCE, ring, name.encode())
    except InvalidTag:
        raise Unauthentic(f"{what}: is not what was written with key {id}") from None
    return {str(one): bytes.fromhex(data) for one, data in json.loads(text).items()}


def _fields(data: bytes, what: str) -> tuple[bytes, bytes, str]:
    try:
        found = json.loads(data)
        if found["format"] != RING_FORMAT:
            raise Unauthentic(f"{what}: has the format number {found['format']!r:.20}; {RING_FORMAT} is known here")
        salt, ring, id = bytes.fromhex(found["salt"]), bytes.fromhex(found["ring"]), found["key"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unauthentic(f"{what}: is not a ring of keys") from None
    if not isinstance(id, str) or not re.fullmatch("[0-9a-f]{16}", id):
        raise Unauthentic(f"{what}: names no key")
    return salt, ring, id


def _wrapping_key(key: SecretKey, salt: bytes) -> bytes:
    return derive(key.secret, b"tierstate key ring", salt)


def _numbers(tier: Tier) -> dict[int, list[int]]:
    """The numbers of the rings in a tier, each with its copies."""
    found: dict[int, list[int]] = {}
    for key in tier.list(RING_PREFIX):
        if (match := _KEY.fullmatch(key)) is not None:
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return found


def _key(number: int, copy: int) -> str:
    return f"{RING_PREFIX}{number:06d}.{copy}"
