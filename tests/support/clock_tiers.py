"""A tier whose clock the test sets."""

from __future__ import annotations

from tierstate.manifest.chunk import Buffer
from tierstate.tiers.base import ObjectWriter, Tier
from tierstate.tiers.wrappers.base import Wrapping, WrappingWriter


class Aged(Wrapping):
    """Another tier, of which every object is as old as ``clock`` says; or of unknown age, where ``tells`` is false."""

    def __init__(self, inner: Tier, *, tells: bool = True) -> None:
        super().__init__(inner)
        self.clock, self.tells = 0.0, tells
        self.born: dict[str, float] = {}

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)
        self.born[key] = self.clock

    def writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        return _Writer(self, key, self.inner.writer(key, size_hint))

    def age(self, key: str) -> float | None:
        self.inner.size(key)
        return self.clock - self.born[key] if self.tells else None


class _Writer(WrappingWriter):
    def __init__(self, tier: Aged, key: str, inner: ObjectWriter) -> None:
        super().__init__(inner)
        self._tier, self._key = tier, key

    def close(self) -> None:
        super().close()
        self._tier.born[self._key] = self._tier.clock
