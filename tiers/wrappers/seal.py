"""The seal wrapper: a tier around a tier whose small objects carry a MAC (the policy key ``seal``).

Records, tags, leases, marks and indexes are sealed when they are written, and verified whenever they are read. Packs of
chunks are not: their chunks are verified against the digests in a sealed record, which nobody can forge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierstate.manifest.chunk import Buffer, as_buffer, empty_buffer, view
from tierstate.manifest.errors import NotFound
from tierstate.manifest.seal import SEAL_BYTES, SealKey, seal, sealed_with, unseal
from tierstate.tiers.base import BufferingWriter, ObjectWriter, Range, Tier, check_key, check_ranges

from .base import Wrapping


class Sealed(Wrapping):
    """Another tier, whose objects are sealed: an object that was not written with one of the keys raises `Unauthentic`.

    Args:
        inner: the tier.
        keys: the first one seals; all are trusted.
        bare: whether the object under a key is not sealed.
    """

    def __init__(self, inner: Tier, keys: Sequence[SealKey], bare: Callable[[str], bool] = lambda _key: False) -> None:
        super().__init__(inner)
        self._keys, self._bare = tuple(keys), bare

    @property
    def key_id(self) -> str:
        """The id of the key that seals."""
        return self._keys[0].id

    def is_stale(self, key: str) -> bool:
        """Whether an object that is there has another seal than that of the key that seals now, or none. Verifies
        nothing.

        Raises:
            TierError: the tier could not be read.
        """
        if self._bare(key):
            return False
        try:
            head = empty_buffer(min(SEAL_BYTES, self.inner.size(key)))
            self.inner.read(key, [Range(0, head)])
        except NotFound:
            return False
        return sealed_with(view(head)) != self.key_id

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data if self._bare(key) else as_buffer(bytearray(self.seal(key, view(data)))))

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return self.inner.writer(key, size_hint) if self._bare(key) else BufferingWriter(self, check_key(key))

    def size(self, key: str) -> int:
        size = self.inner.size(key)
        # One that is too short for a seal is refused when it is read.
        return size if self._bare(key) else max(0, size - SEAL_BYTES)

    def get(self, key: str) -> Buffer:
        data = self.inner.get(key)
        if self._bare(key):
            return data
        self.unseal(key, view(data))
        return data[SEAL_BYTES:]

    def get_within(self, key: str, most: int, what: str) -> Buffer:
        if self._bare(key):
            return self.inner.get_within(key, most, what)
        data = self.inner.get_within(key, most + SEAL_BYTES, what)
        self.unseal(key, view(data))
        return data[SEAL_BYTES:]

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        if self._bare(key):
            return self.inner.read(key, ranges)
        data = self.get(key)
        check_ranges(f"{self.name}: {key}", len(data), ranges)
        for offset, out in ranges:
            out.copy_(data[offset : offset + len(out)])
        return None

    def seal(self, name: str, data: bytes | memoryview) -> bytes:
        """Bytes with a seal in front that is valid under this name only."""
        return seal(self._keys[0], name, data)

    def unseal(self, name: str, sealed: memoryview) -> memoryview:
        """The bytes that `seal` was given.

        Raises:
            Unauthentic: they were not sealed with a trusted key under this name.
        """
        return unseal(self._keys, name, sealed, f"{self.name}: {name}")
