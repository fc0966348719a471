"""The encryption wrapper: a tier around a tier whose objects are encrypted and authenticated (the key ``encrypt``).

An object of ``n`` bytes is stored as::

    0       n    the bytes, block by block of 256 KiB (the last one shorter), each encrypted with AES-256-GCM
    n       16 * blocks   the tag of each block
    ...     64   trailer: magic (8), format number (4), length of a block (4), id of the data key (8), salt (16),
                 n (8), and the tag of the 48 bytes before it (16)

All integers are little-endian. Encrypted bytes have the offsets of the plain ones, so that ranges stay aligned for
direct I/O, and only the blocks that a range touches are read. Every object has a key of its own: HKDF makes it of a
data key of the tier, the object's random salt, and the key under which it is stored. Under that key each nonce is used
once: a block's nonce is its number, the trailer's is all ones, and objects never change. So neither blocks nor whole
objects can be exchanged, and equal bytes are never encrypted to equal ones.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, spans, view
from tierstate.manifest.errors import Damaged, Unauthentic
from tierstate.manifest.seal import ENCRYPTED_MAGIC, derive
from tierstate.tiers.base import AtomicWriter, ObjectWriter, Range, Release, Tier, check_key, check_ranges, read_range
from tierstate.tiers.keys import SecretKey
from tierstate.tiers.memory.pages import map_pages

from .base import Wrapping
from .keyring import RING_PREFIX, DataKeys, new_cipher, read_ring, replace_ring, ring_to_write_with

BLOCK = 256 << 10
"""Bytes that are encrypted, and can be read, by themselves."""


STAGE = 16 * BLOCK
"""Encrypted bytes that are handed on in one piece, in bytes: aligned for direct I/O."""


STAGES_KEPT = 16
"""Buffers of `STAGE` bytes that are kept for later writes."""


MAX_OBJECT = 1 << 40
"""Longest object that is read, in bytes: its tags are read at once."""


OBJECTS_KEPT = 64
"""Objects whose tags are kept in memory."""


RANGES_AT_ONCE = 16
"""Ranges whose first and last blocks are in memory at once."""


_FORMAT, _TAG, _SALT = 1, 16, 16

_TRAILER = struct.Struct("<8sII8s16sQ16s")

_TRAILER_NONCE = b"\xff" * 12

_PURPOSE = b"tierstate object\0"


class ObjectCipher:
    """Encrypts and decrypts the blocks of one object.

    Args:
        data_key: a data key of the tier.
        name: the key under which the object is stored.
        salt: random; no other object with this data key and name has it.
    """

    def __init__(self, data_key: bytes, name: str, salt: bytes) -> None:
        self._aes = new_cipher(derive(data_key, _PURPOSE + name.encode(), salt))

    def encrypt(self, block: int, plain: memoryview, out: memoryview) -> None:
        """Encrypt a block; ``out`` gets its bytes, then its tag."""
        self._aes.encrypt_into(_nonce(block), plain, None, out)

    def decrypt(self, block: int, sealed: memoryview, out: memoryview) -> bool:
        """Decrypt a block with its tag; whether it is authentic."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aes.decrypt_into(_nonce(block), sealed, None, out)
        except InvalidTag:
            return False
        return True

    def trailer(self, key_id: str, salt: bytes, nbytes: int) -> bytes:
        """The trailer of the object."""
        fields = (ENCRYPTED_MAGIC, _FORMAT, BLOCK, bytes.fromhex(key_id), salt, nbytes, bytes(_TAG))
        told = _TRAILER.pack(*fields)[:-_TAG]
        return told + bytes(self._aes.encrypt(_TRAILER_NONCE, b"", told))

    def knows(self, trailer: bytes) -> bool:
        """Whether a trailer is authentic."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aes.decrypt(_TRAILER_NONCE, trailer[-_TAG:], trailer[:-_TAG])
        except InvalidTag:
            return False
        return True


class _Stored(NamedTuple):
    """An object whose trailer was verified."""

    cipher: ObjectCipher
    nbytes: int
    tags: memoryview


class Encrypted(Wrapping):
    """Another tier, in which every object is encrypted; what is not authentic raises `Unauthentic`.

    Args:
        inner: the tier.
        keys: the keys of the tier. The first one wraps the data keys when they are made or replaced; any of them may
            have wrapped those that are there.
    """

    def __init__(self, inner: Tier, keys: Sequence[SecretKey]) -> None:
        super().__init__(inner)
        self._keys = tuple(keys)
        self._ring: DataKeys | None = None
        self._writes = False  # whether the ring may be written with
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Stored] = OrderedDict()
        self._local = threading.local()
        self.stages: deque[Buffer] = deque(maxlen=STAGES_KEPT)

    def put(self, key: str, data: Buffer) -> None:
        cipher, key_id, salt = self.new_cipher(key)
        nbytes, tags = len(data), bytearray()
        out = empty_buffer(stored_length(nbytes))
        plain, target = view(data), view(out)
        for block, (start, length) in enumerate(spans(nbytes, BLOCK)):
            end = start + length
            cipher.encrypt(block, plain[start:end], target[start : end + _TAG])  # the next block overwrites the tag
            tags += target[end : end + _TAG]
        target[nbytes:] = tags + cipher.trailer(key_id, salt, nbytes)
        self.inner.put(key, out)

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        cipher, key_id, salt = self.new_cipher(key)
        hint = None if size_hint is None else stored_length(size_hint)
        return _EncryptingWriter(self, key, self.inner.writer(key, hint), cipher, (key_id, salt))

    def new_cipher(self, key: str) -> tuple[ObjectCipher, str, bytes]:
        """A cipher for a new object, the id of its data key, and its salt."""
        if check_key(key).startswith(RING_PREFIX):
            raise ValueError(f"{key}: the keys of an encrypted tier lie there")
        with self._lock:
            if self._ring is None or not self._writes:
                self._ring, self._writes = ring_to_write_with(self.inner, self._keys, self._ring), True
            key_id, data_key = self._ring.newest
        salt = secrets.token_bytes(_SALT)
        return ObjectCipher(data_key, key, salt), key_id, salt

    def size(self, key: str) -> int:
        return plain_length(self.inner.size(key)) or 0

    def get(self, key: str) -> Buffer:
        return self._decrypted(key, self.inner.get(key))

    def get_within(self, key: str, most: int, what: str) -> Buffer:
        return self._decrypted(key, self.inner.get_within(key, stored_length(most), what))

    def _decrypted(self, key: str, data: Buffer) -> Buffer:
        """Decrypt an object that was read whole, in its memory."""
        nbytes = self._plain_length(key, len(data))
        stored = self._verified(key, nbytes, view(data)[nbytes:])
        self._decrypt(key, stored, _Part(0, data[:nbytes]))
        return data[:nbytes]

    def _plain_length(self, key: str, size: int) -> int:
        if (nbytes := plain_length(size)) is None or nbytes > MAX_OBJECT:
            raise Unauthentic(f"{self.name}: {key}: is not encrypted, or was cut: it has {size} bytes")
        return nbytes

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        with self._lock:
            stored = self._known.get(key)
        if stored is not None:
            try:
                return self._read(key, stored, ranges)
            except Damaged:
                self._forget([key])  # the object may have been deleted, and another one made, also a longer one
        size = self.inner.size(key)
        nbytes = self._plain_length(key, size)
        if nbytes <= BLOCK:
            return self._read_small(key, size, ranges)
        end = empty_buffer(size - nbytes)
        self.inner.read(key, [Range(nbytes, end)])
        stored = self._verified(key, nbytes, view(end))
        with self._lock:
            self._known[key] = stored
            while len(self._known) > OBJECTS_KEPT:
                self._known.popitem(last=False)
        return self._read(key, stored, ranges)

    def _read_small(self, key: str, size: int, ranges: Sequence[Range]) -> None:
        """Read ranges of an object of one block: all of it at once."""
        plain = self._decrypted(key, read_range(self.inner, key, 0, size))
        check_ranges(f"{self.name}: {key}", len(plain), ranges)
        for offset, out in ranges:
            out.copy_(plain[offset : offset + len(out)])

    def _verified(self, key: str, nbytes: int, end: memoryview) -> _Stored:
        """The object that ends with these tags and this trailer."""
        tags, trailer = end[: -_TRAILER.size], bytes(end[-_TRAILER.size :])
        magic, number, block, key_id, salt, length, _ = _TRAILER.unpack(trailer)
        if (magic, number, block) != (ENCRYPTED_MAGIC, _FORMAT, BLOCK):
            raise Unauthentic(f"{self.name}: {key}: is not encrypted, or in a way that is not known here")
        cipher = ObjectCipher(self._data_key(key, key_id.hex()), key, salt)
        if length != nbytes or not cipher.knows(trailer):
            raise Unauthentic(f"{self.name}: {key}: is not what was written there: it was changed, or moved here")
        return _Stored(cipher, nbytes, tags)

    def _data_key(self, key: str, key_id: str) -> bytes:
        with self._lock:
            known = self._ring
            if known is None or key_id not in known.keys:
                found = read_ring(self.inner, self._keys)  # another process may have replaced it
                if found is not None and (known is None or found.number >= known.number):
                    self._ring = known = found
        if known is None or key_id not in known.keys:
            lost = f"no key {RING_PREFIX}* of the tier has it" if known else f"the keys ({RING_PREFIX}*) are gone"
            raise Unauthentic(f"{self.name}: {key}: is encrypted with data key {key_id}, and {lost}", key_id=key_id)
        return known.keys[key_id]

    def _read(self, key: str, stored: _Stored, ranges: Sequence[Range]) -> None:
        check_ranges(f"{self.name}: {key}", stored.nbytes, ranges)
        left = (one for one in ranges if len(one.out))
        while some := list(islice(left, RANGES_AT_ONCE)):
            parts = [part for offset, out in some for part in _parts(stored.nbytes, offset, out)]
            self.inner.read(key, [Range(part.first * BLOCK, part.memory) for part in parts])
            for part in parts:
                self._decrypt(key, stored, part)

    def _decrypt(self, key: str, stored: _Stored, part: _Part) -> None:
        """Decrypt what was read of a part, block by block by way of a small buffer that stays in the cache."""
        memory, scratch = view(part.memory), self._scratch()
        for start, length in spans(len(memory), BLOCK):
            block, end = part.first + start // BLOCK, start + length
            scratch[:length] = memory[start:end]
            scratch[length : length + _TAG] = stored.tags[block * _TAG : (block + 1) * _TAG]
            if not stored.cipher.decrypt(block, scratch[: length + _TAG], memory[start:end]):
                raise self._altered(key, block)
        if part.out is not None:
            part.out.copy_(part.memory[part.skip : part.skip + len(part.out)])

    def _scratch(self) -> memoryview:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(bytearray(BLOCK + _TAG))
        found: memoryview = self._local.scratch
        return found

    def _altered(self, key: str, block: int) -> Unauthentic:
        return Unauthentic(f"{self.name}: {key}: its bytes from {block * BLOCK} on are not what was written there")

    def list(self, prefix: str) -> Iterator[str]:
        return (key for key in self.inner.list(prefix) if not key.startswith(RING_PREFIX))

    def delete(self, key: str) -> None:
        self._forget([key])
        self.inner.delete(key)

    def discard(self, keys: Iterable[str]) -> None:
        some = [*keys]
        self._forget(some)
        self.inner.discard(some)

    def _forget(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    @property
    def key_id(self) -> str:
        """The id of the key that wraps data keys."""
        return self._keys[0].id

    def replace_key(self) -> DataKeys:
        """Wrap the data keys with the first of the tier's keys, and use a new data key from now on.

        Raises: as `replace_ring`.
        """
        ring = replace_ring(self.inner, self._keys)
        with self._lock:
            self._ring = ring
        return ring


class _Part(NamedTuple):
    """Blocks of an object that are read together.

    Attributes:
        first: number of the first block.
        memory: where they are read and decrypted: a part of the caller's range, or memory of its own.
        out: the part of the caller's range to copy them to; None if ``memory`` is that.
        skip: bytes of ``memory`` before that.
    """

    first: int
    memory: Buffer
    out: Buffer | None = None
    skip: int = 0


def _parts(nbytes: int, offset: int, out: Buffer) -> Iterator[_Part]:
    """Cut a range at its first and last whole block; these are read in place, and the blocks at its ends beside it."""
    end = offset + len(out)
    first, last = -(-offset // BLOCK), end // BLOCK if end < nbytes else -(-nbytes // BLOCK)
    if first > last:  # within one block
        yield _edge(nbytes, last, offset, out)
        return
    if head := min(first * BLOCK, end) - offset:
        yield _edge(nbytes, first - 1, offset, out[:head])
    if first < last:
        yield _Part(first, out[head : min(last * BLOCK, end) - offset])
    if last * BLOCK < end:
        yield _edge(nbytes, last, last * BLOCK, out[last * BLOCK - offset :])


def _edge(nbytes: int, block: int, offset: int, out: Buffer) -> _Part:
    memory = empty_buffer(min(BLOCK, nbytes - block * BLOCK))
    return _Part(block, memory, out, offset - block * BLOCK)


class _EncryptingWriter(AtomicWriter):
    """Encrypts what is appended, and hands it on in pieces of `STAGE` bytes; the lease ends when it is encrypted."""

    def __init__(
        self, tier: Encrypted, key: str, inner: ObjectWriter, cipher: ObjectCipher, made: tuple[str, bytes]
    ) -> None:
        super().__init__(f"{tier.name}: {key}")
        self._inner, self._cipher, self._made, self._stages = inner, cipher, made, tier.stages
        self._rest = memoryview(bytearray(BLOCK))  # plain bytes of a block that is not whole yet
        self._have = self._blocks = self._filled = self._nbytes = 0
        self._stage: Buffer | None = None
        self._tags = bytearray()

    def _add(self, buffer: Buffer, release: Release | None) -> bool:
        data, at = view(buffer), 0
        self._nbytes += len(data)
        while at < len(data):
            if not self._have and len(data) - at >= BLOCK:
                self._encrypt(data[at : at + BLOCK])
                at += BLOCK
                continue
            taken = min(BLOCK - self._have, len(data) - at)
            self._rest[self._have : self._have + taken] = data[at : at + taken]
            at, self._have = at + taken, self._have + taken
            if self._have == BLOCK:
                self._encrypt(self._rest)
                self._have = 0
        return False

    def _encrypt(self, plain: memoryview) -> None:
        if self._stage is None:
            # Memory that the inner writer has released, if there is any: it bounds by itself how much it keeps.
            self._stage = self._stages.pop() if self._stages else map_pages(STAGE + _TAG)
        target, end = view(self._stage), self._filled + len(plain)
        self._cipher.encrypt(self._blocks, plain, target[self._filled : end + _TAG])
        self._tags += target[end : end + _TAG]
        self._blocks, self._filled = self._blocks + 1, end
        if end == STAGE:
            self._hand_on()

    def _hand_on(self) -> None:
        stage, nbytes = self._stage, self._filled
        if stage is not None:
            self._stage, self._filled = None, 0
            self._inner.append(stage[:nbytes], partial(self._stages.append, stage))

    def _publish(self) -> None:
        if self._have:
            self._encrypt(self._rest[: self._have])
        self._hand_on()
        key_id, salt = self._made
        self._inner.append(as_buffer(self._tags + self._cipher.trailer(key_id, salt, self._nbytes)))
        self._inner.close()

    def _discard(self) -> None:
        self._inner.abort()


def _nonce(block: int) -> bytes:
    return block.to_bytes(12, "big")


def stored_length(nbytes: int) -> int:
    """How long an object of ``nbytes`` bytes is when it is encrypted."""
    return nbytes + _TAG * -(-nbytes // BLOCK) + _TRAILER.size


def plain_length(stored: int) -> int | None:
    """How long the object is that has this length when it is encrypted; None if no object has."""
    blocks = -(-(stored - _TRAILER.size) // (BLOCK + _TAG))
    nbytes = stored - _TRAILER.size - _TAG * blocks
    return nbytes if nbytes >= 0 and stored_length(nbytes) == stored else None
